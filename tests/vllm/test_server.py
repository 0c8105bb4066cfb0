"""`vllm serve`, asked by the openai client. The engine is a process of its own."""

from __future__ import annotations

import concurrent.futures
import json
import urllib.error
import urllib.request

import openai
import pytest

from tests.vllm.checkpoints import PROMPTS, words
from tests.vllm.server import MAX_MODEL_LEN, start, stop


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    running = start(checkpoint("llama"), tmp_path_factory.mktemp("server") / "log")
    try:
        running.wait()
        yield running
    finally:
        stop(running)


def test_completions(server, hf_tokens):
    answer = server.complete(PROMPTS)
    assert [choice.text.split() for choice in answer.choices] == [
        words(row).split() for row in hf_tokens("llama")
    ]
    assert answer.usage.completion_tokens == 12 * len(PROMPTS)


def test_streaming(server, hf_tokens):
    pieces = [chunk.choices[0].text for chunk in server.complete(PROMPTS[3], stream=True) if chunk.choices]
    assert len(pieces) > 3
    assert "".join(pieces).split() == words(hf_tokens("llama")[3]).split()


def test_chat(server, hf_tokens):
    prompt = [*PROMPTS[4]]
    ask = {
        "model": "tiny",
        "messages": [{"role": "user", "content": words(prompt)}],
        "max_tokens": 12,
        "temperature": 0,
    }
    ask["extra_body"] = {"ignore_eos": True, "add_special_tokens": False}
    expected = words(hf_tokens("llama")[4]).split()
    assert server.client.chat.completions.create(**ask).choices[0].message.content.split() == expected
    stream = server.client.chat.completions.create(**ask, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices).split() == expected


def test_logprobs(server, hf_tokens):
    choice = server.complete(PROMPTS[2], 4, logprobs=3).choices[0]
    assert choice.logprobs.tokens == [f"t{t}" for t in hf_tokens("llama")[2][:4]]
    for logprob, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert len(top) >= 3
        assert logprob == pytest.approx(max(top.values()))


def test_stop_strings(server, hf_tokens):
    tokens = hf_tokens("llama")[3]
    choice = server.complete(PROMPTS[3], stop=[f"t{tokens[5]}"]).choices[0]
    assert choice.text.split() == words(tokens[:5]).split()
    assert choice.finish_reason == "stop"


def test_several_choices(server):
    answer = server.client.completions.create(
        model="tiny", prompt=PROMPTS[2], max_tokens=6, n=4, temperature=1.0
    )
    assert len(answer.choices) == 4
    assert len({choice.text for choice in answer.choices}) > 1


def test_structured_output(server):
    choices = ["t17 t18", "t21"]
    answer = server.complete(
        PROMPTS[2], 8, extra_body={"structured_outputs": {"choice": choices}, "ignore_eos": False}
    )
    assert answer.choices[0].text.strip() in choices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": [5] * (MAX_MODEL_LEN + 1)}, "maximum context length"),
        ({"prompt": [5], "presence_penalty": 1.0}, "presence_penalty"),
        ({"prompt": [5], "logit_bias": {"7": 1.0}}, "logit_bias"),
        ({"prompt": [5], "seed": 3, "temperature": 1.0}, "seed"),
    ],
    ids=["too long", "presence_penalty", "logit_bias", "seed"],
)
def test_refused_with_400_and_alive(options, message, server, hf_tokens):
    with pytest.raises(openai.BadRequestError, match=message):
        server.client.completions.create(model="tiny", max_tokens=4, **options)
    assert server.complete(PROMPTS[2]).choices[0].text.split() == words(hf_tokens("llama")[2]).split()


def test_abort_in_mid_stream(server, hf_tokens):
    """The blocks of a client that has gone come back, and another's tokens stay."""
    streams = [server.complete(PROMPTS[3], 180, stream=True) for _ in range(4)]
    for stream in streams:
        next(iter(stream))
    for stream in streams:
        stream.close()
    assert server.complete(PROMPTS[3]).choices[0].text.split() == words(hf_tokens("llama")[3]).split()
    server.wait_until_idle()


def test_64_requests_at_once(server, hf_tokens):
    expected = [words(row).split() for row in hf_tokens("llama")]
    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        asked = [i % len(PROMPTS) for i in range(64)]
        answers = list(pool.map(lambda i: server.complete(PROMPTS[i]).choices[0].text.split(), asked))
    assert answers == [expected[i] for i in asked]
    server.wait_until_idle()


def test_models_and_health(server):
    (model,) = server.client.models.list().data
    assert model.id == "tiny"
    assert model.model_dump()["max_model_len"] == MAX_MODEL_LEN
    with urllib.request.urlopen(f"{server.url}/version", timeout=10) as answer:
        assert json.load(answer)["version"].startswith("0.33.0")


def test_spawned_engine(checkpoint, hf_tokens, tmp_path):
    """The engine's process may be spawned instead of forked, and the server ends when asked to."""
    running = start(checkpoint("gemma2"), tmp_path / "log", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    try:
        running.wait()
        text = running.complete(PROMPTS[3]).choices[0].text
        assert text.split() == words(hf_tokens("gemma2")[3]).split()
    finally:
        code = stop(running)
    assert code == 0
