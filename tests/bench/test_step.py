"""A decode step through each front end of XLA, its timeline, and the GPU's bench where PyTorch has no CUDA."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("rich")

from benchmarks import device, llama, llama_torch, profile, results, sections, supervisor, timeline, timers
from benchmarks.sections import Job
from benchmarks.settings import Settings
from benchmarks.timeline import Event
from flashxla.bench import cli

QUICK = Settings(device="cpu", quick=True, rounds=1)
# Of a machine whose PyTorch has no CUDA; JAX's device is this one's.
ONLY_XLA_HAS_CUDA = dataclasses.replace(QUICK, device="cuda")


# TorchTPU's environment has no PyTorch/XLA (make test-torchtpu).
FRONTENDS = llama.OF_TODAY if importlib.util.find_spec("torch_tpu") else llama.FRONTENDS


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever flashxla is installed."""
    monkeypatch.setattr(cli, "checkout", lambda: Path(__file__).parents[2])


def test_front_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    if FRONTENDS == llama.FRONTENDS:
        pytest.importorskip("torch_xla")
    file = tmp_path / "step.json"
    words = ["step", "--device", "cpu", "--quick", "--rounds", "1", "--profile", "--json", str(file)]
    words += ["--only", "batch 3"]  # one: a process of PyTorch/XLA takes long to start
    if importlib.util.find_spec("matplotlib"):
        words += ["--plot", str(tmp_path / "step.svg")]
    assert cli.run(arguments(words)) == 0

    content = json.loads(file.read_text())
    assert "--only 'batch 3'" in content["command"]
    assert {row["case"] for row in content["results"]["step"]} == {llama.cases(QUICK)[1]}
    rows = {row["contender"]: row for row in content["results"]["step"]}
    names = ["flashxla in JAX", *FRONTENDS]
    for name in names:
        row = rows[name]
        assert row["ours"] and row["us"] > 0 and 0 < row["error"] < 3e-2 and row["of_ceiling"] > 0
        assert row["host_us"] > 0 and row["host_cpu_us"] > 0 and row["tokens_per_second"] > 0
        # Under TorchTPU a program makes sure that no clone shares the caches.
        programs = 2 if name == llama.TORCHTPU else 1
        assert row["programs_per_step"] == programs and row["compiled_programs"] == 1
        assert (
            all(us > 0 for us in row["eager_us"].values())
            if name in llama.OF_TODAY
            else "eager_us" not in row
        )
        assert math.isclose(row["ours_is_faster"], row["us"] / rows["flashxla in JAX"]["us"])
        # There is no GPU, nor a plugin for one, whose profiler TorchTPU's steps need.
        problem = "plugin's version" if name == llama.TORCHTPU else "no kernel in the profile"
        assert problem in rows[f"kernels of {name}"]["failed"]
    assert rows["write + attention by flashxla in JAX, 1 layer of the step"]["derived"]
    printed = capsys.readouterr().out
    assert "host, us" in printed and "programs a step" in printed
    if "--plot" in words:
        assert all(name in (tmp_path / "step.svg").read_text() for name in names)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["step", "--quick", "--only", "batch 2"],
            "--only: got 'batch 2'; accepted: a part of batch 1, 40 keys;",
        ),
        (["decode", "--only", "decode"], "--only: got 'decode'; accepted: with the study of GPUs"),
    ],
)
def test_cases_that_are_not_there(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]):
    assert cli.run(arguments([*words, "--device", "cpu"])) == 2
    assert problem in capsys.readouterr().err


def test_the_torch_model_is_the_jax_model():
    import jax
    import jax.numpy as jnp

    from benchmarks import llama_jax, ways

    config = llama.Config(layers=2, hidden=64, heads=(4, 2), dim=32, mlp=96, vocab=50)
    params = llama_jax.init(config, "float32")
    batch = {name: jnp.asarray(x) for name, x in llama.batch(3, 40).items()}
    pages = batch["tables"].size
    caches = [ways.OURS.cache(config, pages, "float32") for _ in range(config.layers)]
    tokens = jnp.array([3, 1, 4], jnp.int32)
    in_torch: Any = functools.partial(jax.tree.map, lambda x: torch.from_numpy(np.array(x)))
    expected, expected_caches = jax.jit(functools.partial(llama_jax.step, config, ways.OURS.attend))(
        params, caches, tokens, batch
    )
    for attend in (llama_torch.ours, llama_torch.gather):
        own = [torch.stack(pair) for pair in in_torch(caches)]
        got = llama_torch.step(config, attend, in_torch(params), own, in_torch(tokens), in_torch(batch))
        assert (got - in_torch(expected)).abs().max() < 1e-4
        for cache, right in zip(own, in_torch(expected_caches), strict=True):
            assert all((a - b).abs().max() < 1e-5 for a, b in zip(cache, right, strict=True))


def test_the_torch_models_weights():
    import jax

    from benchmarks import llama_jax

    config = llama.config(QUICK)
    synced: list[None] = []
    made = llama_torch.init(config, torch.bfloat16, "cpu", lambda: synced.append(None))
    shapes = jax.tree.map(lambda x: tuple(x.shape), made)
    assert shapes == jax.tree.map(lambda x: tuple(x.shape), llama_jax.init(config, "bfloat16"))
    assert len(synced) == config.layers


def test_the_process_of_pytorch_xla_has_the_device():
    parent = {"PATH": "/bin", "JAX_PLATFORMS": "cuda", "PJRT_DEVICE": "CPU", "PYTHONPATH": "/mine"}
    found = supervisor.environment(parent, Settings(device="cuda"), llama.LAZY)
    root = str(Path(__file__).parents[2])
    assert found == {
        "PATH": "/bin",
        "PJRT_DEVICE": "CUDA",
        "JAX_PLATFORMS": "cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
        "MALLOC_TOP_PAD_": str(2**28),
        "PYTHONPATH": f"{root}:/mine",
    }
    own = supervisor.environment({**parent, "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, QUICK, llama.TORCHTPU)
    assert own["PJRT_DEVICE"] == "CPU" and own["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    for name in ("", llama.TORCHAX):
        jax = supervisor.environment(parent, Settings(device="cuda"), name)
        assert jax["JAX_PLATFORMS"] == "cuda" and jax["PJRT_DEVICE"] == "CPU"


def test_a_front_end_has_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torch_xla" or None)
    case = llama.cases(QUICK)[0]
    monkeypatch.setattr(sections, "cases", lambda section, settings: [case])
    in_jax, *others = sections.processes(["step", "decode"], QUICK)
    assert in_jax == [Job("step", case), Job("decode", case)]
    assert others == [[Job("step", case, llama.LAZY)], [Job("step", case, llama.OPENXLA)]]

    measured = json.dumps({"row": {"contender": llama.LAZY, "us": 1.0}})
    script = tmp_path / "python"
    script.write_text(
        f"""#!/bin/sh
echo '{{"begin": [null, false]}}'
case "$*" in
    *lazy*) echo '{measured}'; echo '{{"begin": ["kernels of it", false]}}';;
esac
kill -9 $$
"""
    )
    script.chmod(0o755)
    monkeypatch.setattr(supervisor.sys, "executable", str(script))
    *_, timed, profiled, lost = supervisor.run(["step"], QUICK, lambda findings: None).rows["step"]
    assert timed["contender"] == llama.LAZY and timed["us"] == 1 and timed["ours"]
    assert profiled["contender"] == "kernels of it" and not profiled["ours"]
    assert lost["contender"] == llama.OPENXLA and lost["ours"] and "ended with -9" in lost["failed"]


def test_ceilings_and_facts_without_torchs_cuda():
    if torch.cuda.is_available():
        pytest.skip("PyTorch has CUDA")
    found = device.ceilings(ONLY_XLA_HAS_CUDA)
    assert all(one["rate"] > 0 and one["method"].startswith("jitted") for one in found.values())
    assert {name: one["unit"] for name, one in found.items()} == {"copy": "TB/s", "matmul": "TFLOP/s"}
    assert device.facts(ONLY_XLA_HAS_CUDA)["name"]
    assert not device.is_lost(ONLY_XLA_HAS_CUDA)


def test_host_time_does_not_hold_the_wait():
    waited: list[Any] = []
    found = timers.host_time(lambda: 7, waited.append)
    assert set(waited) == {7} and len(waited) > 1
    assert 0 <= found["host_us"] < 1000 and 0 <= found["host_cpu_us"] < 1000


def steps(count: int, kernels: list[tuple[float, float]], every: float) -> list[Event]:
    """Kernels (start, end) in microseconds, again after `every`."""
    return [
        Event((i * every + start) * 1e3, (i * every + end) * 1e3, f"kernel {n}")
        for i in range(count)
        for n, (start, end) in enumerate(kernels)
    ]


def test_timeline():
    # Busy 0-10, 12-30 (two that overlap), 35-40; the next step begins at 43.
    found = timeline.of_steps(steps(5, [(0, 10), (12, 25), (20, 30), (35, 40)], 43), 5)
    assert math.isclose(found.us, 43) and math.isclose(found.busy, 33 / 43) and found.launches == 4
    assert math.isclose(found.largest_gap_us, 5) and math.isclose(found.gap_between_us, 3)
    assert math.isclose(found.facts["largest_gap"], 5 / 43)

    waits = timeline.of_steps(steps(5, [(0, 10), (12, 25)], 100), 5)
    assert math.isclose(waits.largest_gap_us, 75) and math.isclose(waits.gap_between_us, 75)
    full = timeline.of_steps(steps(4, [(0, 10)], 10), 4)
    assert full.busy == 1 and full.largest_gap_us == 0 and math.isclose(full.us, 10)

    # What is not in every step is in none.
    copied = timeline.of_steps([*steps(5, [(0, 10), (12, 20)], 25), Event(500e3, 510e3, "copy")], 5)
    assert math.isclose(copied.largest_gap_us, 5) and copied.launches == 2

    # A kernel too many: no telling where a step begins.
    uneven = timeline.of_steps([*steps(5, [(0, 10), (12, 20)], 20), Event(100e3, 110e3, "kernel 0")], 5)
    assert math.isclose(uneven.us, 22) and math.isclose(uneven.busy, 100 / 110) and uneven.launches == 2.2
    assert math.isclose(uneven.largest_gap_us, 2)

    longest, other = timeline.kernels(steps(5, [(0, 10), (12, 20)], 20), 5)
    assert longest == {"name": "kernel 0", "us": 10, "launches": 1} and other["us"] == 8


XSPACE = """
planes {{ name: "/host:CPU" lines {{ name: "python" events {{ metadata_id: 1 duration_ps: 9000000 }} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "call" }} }} }}
planes {{ name: "/device:GPU:0"
  lines {{ name: "XLA Modules" events {{ metadata_id: 1 offset_ps: 0 duration_ps: 99000000 }} }}
  lines {{ name: "Stream #13(Compute)" timestamp_ns: 1000 {events} }}
  event_metadata {{ key: 1 value {{ id: 1 name: "gemm" }} }} }}
"""


def test_timeline_of_a_profile(tmp_path: Path):
    from jax.profiler import ProfileData

    events = " ".join(
        f"events {{ metadata_id: 1 offset_ps: {i * 5000000} duration_ps: 4000000 }}" for i in range(4)
    )
    text = XSPACE.format(events=events)
    folder = tmp_path / "plugins" / "profile"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    found = timeline.read(str(tmp_path))
    assert [(event.start_ns, event.end_ns, event.name) for event in found[:2]] == [
        (1000, 5000, "gemm"),
        (6000, 10000, "gemm"),
    ]
    assert len(found) == 4 and math.isclose(timeline.of_steps(found, 4).busy, 0.8)
    with pytest.raises(RuntimeError, match="wrote no profile"):
        timeline.read(str(tmp_path / "nothing"))


def test_profiles_of_this_jax_can_be_read(monkeypatch: pytest.MonkeyPatch):
    import jax
    import jax.numpy as jnp

    program, x = jax.jit(lambda x: (x @ x).sum()), jnp.ones((64, 64))
    row = profile.row("case", QUICK, "it", lambda: program(x))
    assert "no kernel in the profile; it has" in row["failed"] and "/host:CPU" in row["failed"]

    # The host's threads in place of the GPU's streams.
    monkeypatch.setattr(timeline, "_DEVICE_PLANE", "/host:CPU")
    monkeypatch.setattr(timeline, "_STREAM", "")
    row = profile.row("case", QUICK, "it", lambda: program(x))
    assert "failed" not in row and row["us"] > 0 and row["kernels"]
    assert 0 <= row["largest_gap"] <= 1 and row["timeline"]["busy"] > 0
    json.dumps(results.judged([row], {}), allow_nan=False)


def test_a_tracer_that_fails_gives_way(monkeypatch: pytest.MonkeyPatch):
    import contextlib

    @contextlib.contextmanager
    def broken(folder: str) -> Any:
        raise RuntimeError("no profiler")
        yield

    events = steps(8, [(0, 10), (12, 20)], 20)
    monkeypatch.setattr(timeline, "read", lambda folder: events)
    row = profile.row("case", QUICK, "it", lambda: 1, 1, lambda x: None, (broken, contextlib.nullcontext))
    assert row["launches"] == 2 and math.isclose(row["timeline"]["us"], 20)
    row = profile.row("case", QUICK, "it", lambda: 1, 1, lambda x: None, (broken,))
    assert row["failed"] == "RuntimeError: RuntimeError: no profiler"


def test_pytorch_xla_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert sections.processes(["step"], QUICK) == [[Job("step", case) for case in llama.cases(QUICK)]]
