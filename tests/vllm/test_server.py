"""`vllm serve`, asked by the openai client. The engine is a process of its own."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import time
import urllib.error
import urllib.request

import openai
import pytest

from tests.vllm import checkpoints
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


def test_sampling_parameters(server):
    """Each reaches the engine; test_sampling_parameters.py has what they do."""
    plain = server.complete(PROMPTS[2]).choices[0].text.split()
    assert server.complete(PROMPTS[2], logit_bias={"77": 100.0}).choices[0].text.split() == ["t77"] * 12
    only = {"allowed_token_ids": [50, 60]}
    assert set(server.complete(PROMPTS[2], extra_body=only).choices[0].text.split()) <= {"t50", "t60"}
    without = server.complete(PROMPTS[2], extra_body={"bad_words": [plain[0]]}).choices[0].text.split()
    assert plain[0] not in without
    assert (
        server.complete(PROMPTS[2], presence_penalty=-2.0, frequency_penalty=-2.0).choices[0].text.split()
        != plain
    )
    ask = {"model": "tiny", "prompt": PROMPTS[2], "max_tokens": 12, "temperature": 1.0}
    texts = [server.client.completions.create(**ask, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


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
        ({"prompt": [5], "extra_body": {"thinking_token_budget": 3}}, "thinking_token_budget"),
        ({"prompt": [5], "logit_bias": {"5000": 1.0}}, "logit_bias"),
        ({"prompt": [5], "extra_body": {"allowed_token_ids": [5000]}}, "allowed_token_ids"),
    ],
    ids=["too long", "thinking_token_budget", "logit_bias out of range", "allowed_token_ids out of range"],
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


def test_dev_mode(checkpoint, tmp_path):
    """Requests go on, with the same tokens, behind a pause and a reset of the cache; sleep is refused with 400."""
    running = start(checkpoint("llama"), tmp_path / "log", VLLM_SERVER_DEV_MODE="1")

    def post(path):
        urllib.request.urlopen(
            urllib.request.Request(running.url + path, b"", method="POST"), timeout=30
        ).close()

    def pause():
        post("/pause?mode=keep")
        post("/resume")

    def texts(meanwhile):
        with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = [pool.submit(running.complete, prompt, 150) for prompt in PROMPTS]
            for delay in range(10):
                time.sleep(0.004 * delay)
                meanwhile()
            return [answer.result().choices[0].text for answer in answers]

    try:
        running.wait()
        expected = texts(lambda: None)
        for _ in range(3):
            assert texts(pause) == expected
            assert texts(lambda: post("/reset_prefix_cache?reset_running_requests=true")) == expected
        running.wait_until_idle()
        with pytest.raises(urllib.error.HTTPError, match="400") as raised:
            post("/sleep?level=1")
        assert "flashxla-vllm does not support sleep level 1" in raised.value.read().decode()
        assert texts(lambda: None) == expected
    finally:
        stop(running)


def test_spawned_engine_and_defaults_of_the_checkpoint(checkpoint, hf_tokens, tmp_path):
    """The engine's process may be spawned instead of forked, and the server ends when asked to.

    generation_config.json sets a penalty, as Qwen2.5-Instruct's does: requests that do not mention it have it.
    """
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoint("gemma2"), path)
    config = path / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"repetition_penalty": 1.3}))
    expected = checkpoints.greedy_tokens(path, [PROMPTS[3]], repetition_penalty=1.3)[0]
    assert expected != hf_tokens("gemma2")[3]
    options = ("--generation-config", "auto")
    running = start(path, tmp_path / "log", *options, VLLM_WORKER_MULTIPROC_METHOD="spawn")
    try:
        running.wait()
        assert running.complete(PROMPTS[3]).choices[0].text.split() == words(expected).split()
        plain = running.complete(PROMPTS[3], extra_body={"repetition_penalty": 1.0})
        assert plain.choices[0].text.split() == words(hf_tokens("gemma2")[3]).split()
    finally:
        code = stop(running)
    assert code == 0
