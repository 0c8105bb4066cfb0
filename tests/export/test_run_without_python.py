"""`flashxla export`, then a C++ program: the tokens of `flashxla generate`, in place, and errors that help."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flashxla import native
from flashxla.cli import main
from flashxla.generate.prompts import DEFAULT_PROMPTS
from tests.export.conftest import Export, Program
from tests.generate.checkpoints import save
from tests.generate.command_line import run_json
from tests.pjrt.conftest import build_stub

# Longer than a step of 256 tokens.
LONG = "An iterator is an object that represents a stream of data. " * 6
PROMPTS = (*DEFAULT_PROMPTS, LONG)


def ids(text: str) -> list[list[int]]:
    return [[int(token) for token in line.split(",")] for line in text.splitlines()]


def generated(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    _, report = run_json(capsys, "--frontend", "torch", *options)
    return report["prompts"]


def test_tokens_of_the_default_model(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    expected = generated(capsys, "--max-new-tokens", "60", "--prompt", *PROMPTS)
    prompts = [text for prompt in PROMPTS for text in ("--prompt", prompt)]
    done = program.run("--max-new-tokens", "60", "--ids", *prompts)
    assert done.returncode == 0, done.stderr
    assert ids(done.stdout) == [prompt["tokens"] for prompt in expected]
    assert "caches in place" in done.stderr


def test_it_links_no_python(program: Program) -> None:
    for file in (program.path, program.options["plugin"], program.options["library"]):
        done = subprocess.run(["ldd", str(file)], capture_output=True, text=True)
        assert "libc.so" in done.stdout
        assert "python" not in done.stdout.replace(str(file), "")


def test_text(program: Program, capsys: pytest.CaptureFixture[str]) -> None:
    (expected,) = generated(capsys, "--max-new-tokens", "20", "--prompt", PROMPTS[0])
    done = program.run("--prompt", PROMPTS[0], "--max-new-tokens", "20")
    assert done.stdout == f"--- prompt 1\n{PROMPTS[0]}{expected['text']}\n"


def test_a_model_of_another_family(
    program: Program, export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts, sinks and sliding windows. Their tokens are given and printed as numbers."""
    folder = save("gpt_oss", tmp_path / "model")
    exported = export("--model", str(folder), "--block-size", "8", "--num-blocks", "24", "--max-seqs", "2")
    options = "--model", str(folder), "--max-new-tokens", "24", "--ignore-eos"
    expected = generated(capsys, *options, "--prompt", *PROMPTS[:2])
    prompts = [text for p in PROMPTS[:2] for text in ("--prompt-ids", ",".join(map(str, [256, *p.encode()])))]
    done = program.run(*prompts, "--max-new-tokens", "24", "--ignore-eos", "--ids", program=str(exported))
    assert done.returncode == 0, done.stderr
    assert ids(done.stdout) == [prompt["tokens"] for prompt in expected]


def test_no_cache_is_copied(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what XLA has compiled: every cache is an alias of its result, and nothing copies one."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
    assert program.run("--prompt", "A", "--max-new-tokens", "1").returncode == 0
    dumps = sorted(tmp_path.glob("*after_optimizations.txt"))
    assert len(dumps) == 2
    for dump in dumps:
        text = dump.read_text()
        caches = text.count("may-alias") + text.count("must-alias")
        assert caches == 8
        assert text.count('custom_call_target="flashxla_attention"') == 4
        assert not re.search(r"= f32\[256,16,2,32\]\S* (copy|fusion)\(", text)


def test_the_manifest_describes_the_programs(default_model: Path) -> None:
    from jax.extend.mlir.dialects import stablehlo
    from jax.interpreters import mlir

    manifest = json.loads((default_model / "manifest.json").read_text())
    assert manifest["custom_calls"] == ["flashxla_attention"]
    assert [p["tokens"] for p in manifest["programs"]] == [8, 256]
    types = {"F32": "f32", "I32": "i32", "I64": "i64"}
    for entry in manifest["programs"]:
        code = (default_model / entry["file"]).read_bytes()
        with mlir.make_ir_context() as context:
            text = str(stablehlo.deserialize_portable_artifact(context, code))
        (signature,) = re.findall(r"@main\((.*)\{\n", text)
        arguments, results = signature.split("->")
        for tensors, found in ((entry["arguments"], arguments), (entry["results"], results)):
            wanted = ["x".join([*map(str, t["shape"]), types[t["dtype"]]]) for t in tensors]
            assert re.findall(r"tensor<([^>]+)>", found) == wanted
        caches = [t["name"] for t in entry["arguments"] if t["kind"] == "cache"]
        assert [t["name"] for t in entry["results"]] == ["logits", *caches]


@pytest.mark.parametrize(
    ("changed", "more", "message"),
    [
        ({"plugin": "/none.so"}, (), r"/none\.so: cannot open shared object file"),
        ({"plugin": "LIBRARY"}, (), "it has no function GetPjrtApi: it is no PJRT plugin"),
        ({"library": "/none.so"}, (), r"/none\.so: cannot open shared object file"),
        ({"library": "PLUGIN"}, (), "it has no function flashxla_ffi_target_name"),
        ({"program": "/none"}, (), r"/none/manifest\.json: cannot be read"),
        ({}, ("--prompt", "x" * 512), "got a prompt of 513 tokens; accepted: 1 to 511"),
        ({}, ("--prompt", "x") * 8, "got 9 prompts; accepted: at most 8"),
        ({}, ("--prompt-ids", "1,a"), "--prompt-ids: got 'a'; accepted: a whole number >= 0"),
        ({}, ("--prompt-ids", "1,259"), "got token 259; accepted: tokens below 259"),
        ({}, ("--max-new-tokens", "0"), "--max-new-tokens: got '0'; accepted: a whole number >= 1"),
        ({}, ("--unknown", "1"), "--unknown: unknown"),
    ],
)
def test_errors(program: Program, changed: dict[str, str], more: tuple[str, ...], message: str) -> None:
    named = {"LIBRARY": program.options["library"], "PLUGIN": program.options["plugin"]}
    done = program.run("--prompt", "A", *more, **{k: named.get(v, v) for k, v in changed.items()})
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("STUB_FFI", "none", "it has no FFI extension that registers custom calls"),
        ("STUB_FFI", "short", "it has no FFI extension that registers custom calls"),
        ("STUB_VERSION", "0.75", r"it has version 0\.75 of the PJRT C API; accepted: 0\.76 to 0\.117"),
        ("STUB_TABLE", "none", "its GetPjrtApi gives no table"),
    ],
)
def test_plugins_that_do_not_fit(
    program: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(variable, value)
    done = program.run("--prompt", "A", plugin=str(build_stub(tmp_path)))
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"platform": "cuda"}, "--plugin: got one for cpu; accepted: one for cuda"),
        ({"custom_calls": ["flashxla_none"]}, "--library: it has no flashxla_none"),
        ({"format": 2}, "got format 2; accepted: 1"),
        ({"bytes_prefix": None}, "--prompt: got text with a model whose tokens are not bytes"),
        ({"num_blocks": 2}, "need 5 blocks of the cache; accepted: at most 2"),
    ],
)
def test_manifests_that_do_not_fit(
    program: Program, default_model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    for path in default_model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    manifest = json.loads((default_model / "manifest.json").read_text())
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | change))
    done = program.run("--prompt", "A", program=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr), done.stderr


def test_damaged_weights(program: Program, default_model: Path, tmp_path: Path) -> None:
    for path in default_model.iterdir():
        if path.name != "weights.safetensors":
            (tmp_path / path.name).symlink_to(path)
    weights = (default_model / "weights.safetensors").read_bytes()
    for data, message in (
        (weights[:-100], r"weights\.safetensors: the weight .* cannot be read"),
        (weights[:8000] + b"\xff" * (len(weights) - 8000), "got NaN or infinite logits for prompt 1"),
    ):
        (tmp_path / "weights.safetensors").write_bytes(data)
        done = program.run("--prompt", "A", program=str(tmp_path))
        assert done.returncode == 2
        assert re.search(message, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "/none"), "--model: got /none; accepted: a folder that holds a checkpoint"),
        pytest.param(
            ("--platform", "cuda"),
            r"--platform: libflashxla_cuda\.so not found .*make cuda",
            marks=pytest.mark.skipif(native.is_installed("cuda"), reason="the library is there"),
        ),
        (("--max-batch-tokens", "4"), "--max-batch-tokens: got 4; accepted: at least --max-seqs 8"),
        (("--output", "/dev/null/folder"), "--output: got /dev/null/folder: Not a directory"),
    ],
)
def test_what_cannot_be_exported(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--output", str(tmp_path / "folder"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flashxla export: error: ")
    assert re.search(message, error), error
    assert not (tmp_path / "folder").exists()
