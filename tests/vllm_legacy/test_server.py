"""`vllm serve`, asked by the openai client. The engine is a process of its own."""

import openai
import pytest

from tests.vllm.checkpoints import PROMPTS, words
from tests.vllm.server import MAX_MODEL_LEN, start, stop


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    running = start(checkpoint("qwen3"), tmp_path_factory.mktemp("server") / "log")
    try:
        running.wait()
        yield running
    finally:
        code = stop(running)
    assert code == 0


@pytest.fixture
def expected(hf_tokens):
    return [words(row).split() for row in hf_tokens("qwen3")]


def test_completions(server, expected):
    answer = server.complete(PROMPTS)
    assert [choice.text.split() for choice in answer.choices] == expected
    assert answer.usage.completion_tokens == 12 * len(PROMPTS)


def test_streaming(server, expected):
    pieces = [chunk.choices[0].text for chunk in server.complete(PROMPTS[3], stream=True) if chunk.choices]
    assert len(pieces) > 3
    assert "".join(pieces).split() == expected[3]


def test_chat(server, expected):
    ask = {
        "model": "tiny",
        "messages": [{"role": "user", "content": words(PROMPTS[4])}],
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "add_special_tokens": False},
    }
    assert server.client.chat.completions.create(**ask).choices[0].message.content.split() == expected[4]
    stream = server.client.chat.completions.create(**ask, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices).split() == expected[4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [5] * (MAX_MODEL_LEN + 1)}, "maximum context length"),
        ({"prompt": [5], "presence_penalty": 1.0}, "presence_penalty"),
        ({"prompt": [5], "seed": 3, "temperature": 1.0}, "seed"),
    ],
    ids=["too long", "presence_penalty", "seed"],
)
def test_refused_with_400_and_alive(options, message, server, expected):
    with pytest.raises(openai.BadRequestError, match=message):
        server.client.completions.create(model="tiny", max_tokens=4, **options)
    assert server.complete(PROMPTS[2]).choices[0].text.split() == expected[2]


def test_abort_in_mid_stream(server, expected):
    """The blocks of a client that has gone come back, and another's tokens stay."""
    streams = [server.complete(PROMPTS[3], 180, stream=True) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    for stream in streams:
        stream.close()
    assert server.complete(PROMPTS[3]).choices[0].text.split() == expected[3]
    server.wait_until_idle()
