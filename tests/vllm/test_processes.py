"""Engines in several processes: data parallel ranks on one machine, and on two, which are processes here."""

from __future__ import annotations

import concurrent.futures
import re
import types
import urllib.request

import jax
import pytest
from flashxla_vllm import processes
from flashxla_vllm.channel import Receiver, Sender
from jax._src import xla_bridge

from tests.ports import free_port
from tests.vllm.checkpoints import PROMPTS, words
from tests.vllm.server import Server, start, stop

# One program for each number of tokens: few of them start sooner.
FEW_PROGRAMS = ("--max-num-batched-tokens", "16", "--max-num-seqs", "8")


def served_by(server: Server) -> dict[str, float]:
    """The requests that each engine has finished."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        found = re.findall(
            r'^vllm:request_success_total\{engine="(\d+)",finished_reason="length".*\} (\S+)$',
            answer.read().decode(),
            re.MULTILINE,
        )
    return {engine: float(count) for engine, count in found}


def check_tokens(server: Server, expected: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert server.complete(prompt).choices[0].text.split() == words(tokens).split()
    counts = served_by(server)
    assert set(counts) == {"0", "1"}
    assert min(counts.values()) >= 1
    assert sum(counts.values()) == len(PROMPTS)


def test_data_parallel_server_on_one_machine(checkpoint, hf_tokens, tmp_path):
    """Two engine processes, each with two devices."""
    expected = hf_tokens("llama")
    options = [*FEW_PROGRAMS, "--data-parallel-size", "2", "--tensor-parallel-size", "2"]
    running = start(checkpoint("llama"), tmp_path / "log", *options)
    try:
        running.wait()
        check_tokens(running, expected)
    finally:
        assert stop(running) == 0


def test_data_parallel_server_on_two_machines(checkpoint, hf_tokens, tmp_path):
    """The first has the API server and an engine, the second an engine. Mixtral's run in step with each other."""
    expected, path = hf_tokens("mixtral"), checkpoint("mixtral")
    options = [*FEW_PROGRAMS, "--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    options += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port())]
    first = start(path, tmp_path / "first", *options, "--api-server-count", "1")
    second = start(path, tmp_path / "second", *options, "--headless", "--data-parallel-start-rank", "1")
    try:
        first.wait()
        check_tokens(first, expected)
    finally:
        codes = stop(first), stop(second)
    assert codes == (0, 0)


def test_one_model_on_two_machines(checkpoint, hf_tokens, tmp_path):
    """Each has half of the heads, and ends with the first."""
    expected, path = hf_tokens("llama"), checkpoint("llama")
    options = [*FEW_PROGRAMS, "--tensor-parallel-size", "2", "--nnodes", "2"]
    options += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    first = start(path, tmp_path / "first", *options, "--node-rank", "0")
    second = start(path, tmp_path / "second", *options, "--node-rank", "1", "--headless")
    try:
        first.wait()
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert first.complete(prompt).choices[0].text.split() == words(tokens).split()
        answer = first.complete(PROMPTS)
        assert [choice.text.split() for choice in answer.choices] == [words(row).split() for row in expected]
        assert second.process.poll() is None
    finally:
        try:
            assert stop(first) == 0
            second.process.wait(30)
        finally:
            stop(second)


def test_messages_arrive_whole_and_in_order():
    port, messages = free_port(), [b"", b"a" * 3_000_000, b"end"]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        others = [pool.submit(Receiver, "127.0.0.1", port, machine, 20) for machine in (2, 1)]
        first = Sender("127.0.0.1", port, 2, 20)
        sending = pool.submit(lambda: [first.send(message) for message in messages])
        for other in others:
            assert [other.result().receive() for _ in messages] == messages
        sending.result()
        first.close()
        assert [other.result().receive() for other in others] == [None, None]


def test_a_machine_that_does_not_come():
    port = free_port()
    with pytest.raises(TimeoutError, match=r"machines \[1\] did not connect"):
        Sender("127.0.0.1", port, 1, 0.2)
    with pytest.raises(TimeoutError, match="nothing answers"):
        Receiver("127.0.0.1", port, 1, 0.2)


@pytest.mark.parametrize(
    ("own", "differs"),
    [
        (True, {"_api_process_rank": -1}),
        (True, {"data_parallel_size_local": 1}),
        (True, {"data_parallel_external_lb": True}),
        (True, {"data_parallel_hybrid_lb": True}),
        (False, {}),  # a program's own engine
        (False, {"data_parallel_size": 1, "_api_process_rank": -1}),
    ],
)
def test_which_ranks_have_their_own_process(own, differs):
    parallel = types.SimpleNamespace(
        **{
            "data_parallel_size": 2,
            "data_parallel_size_local": 2,
            "data_parallel_external_lb": False,
            "data_parallel_hybrid_lb": False,
            "_api_process_rank": 0,
        }
        | differs
    )
    assert processes.data_parallel_has_its_own(parallel) == own


def test_each_process_sees_its_own_gpus():
    """What vLLM assigns to the second rank of two with two devices each."""
    before = xla_bridge.CUDA_VISIBLE_DEVICES.value
    parallel = types.SimpleNamespace(assigned_physical_gpu_ids=[2, 3])
    try:
        processes.choose_devices(types.SimpleNamespace(parallel_config=parallel))
        assert xla_bridge.CUDA_VISIBLE_DEVICES.value == "2,3"
    finally:
        jax.config.update("jax_cuda_visible_devices", before)


def test_too_few_devices(checkpoint):
    from tests.vllm.engine import engine

    with (
        pytest.raises(ValueError, match=r"needs 4 devices and has 2 .*device_count=4"),
        engine(checkpoint("llama"), tensor_parallel_size=4),
    ):
        pass
