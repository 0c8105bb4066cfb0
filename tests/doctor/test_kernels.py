"""flashxla doctor runs every kind of kernel, and says which is wrong."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from flashxla.doctor import cli, kernels

CALLS = len(kernels.DTYPES) * len(kernels.BATCHES)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_every_kind_is_right(framework: str) -> None:
    pytest.importorskip(framework)
    rows = kernels.run(framework, "cpu")
    assert len({row.call for row in rows}) == len(rows) == CALLS
    assert all(row.ok and row.error > 0 for row in rows), rows


class Broken(kernels.Torch):
    """A library that leaves its results for one kind of call as they were."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.module, self.fx = self.fx, self

    def paged_attention(self, query: Any, *arguments: Any) -> Any:
        out = self.module.paged_attention(query, *arguments)
        return out if out.dtype == self._torch.float32 else out.fill_(float("nan"))


Broken.paged_attention.__module__ = "flashxla.torch"


def test_a_result_that_was_not_written_is_found() -> None:
    pytest.importorskip("torch")
    rows = list(kernels.check(Broken(), "cpu"))
    assert {row.call for row in rows if row.ok} == {
        f"{batch}, {dtypes}"
        for batch in kernels.BATCHES
        for dtypes in ("float32", "float32 on float8_e4m3fn keys")
    }


@pytest.mark.parametrize("error", [1.5, float("nan")])
def test_the_report_names_it(
    error: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        kernels.Kernel("decode, float32", "split", 0.1),
        kernels.Kernel("prefill, bfloat16", "wide", error),
    ]
    monkeypatch.setattr(kernels, "run", lambda framework, device: rows)
    monkeypatch.setattr(cli, "_torch_xla", lambda: iter(()))
    monkeypatch.setattr(cli, "_in_place", lambda frontend: (True, "skipped here"))
    assert cli.run(argparse.Namespace(json=None)) == 1
    report = capsys.readouterr().out
    assert "FAIL  kernels: jax on cpu" in report
    assert "1 of 2 kinds of call right, by split; wide" in report
    assert "WRONG: prefill, bfloat16:" in report
    assert "Not working: kernels: jax on cpu" in report


def test_a_report_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is found out before the work."""
    monkeypatch.setattr(cli, "_findings", lambda: pytest.fail("the work was done"))
    assert cli.run(argparse.Namespace(json="/nowhere/report.json")) == 2
    message = (
        "--json: got '/nowhere/report.json': No such file or directory; accepted: a file that can be written"
    )
    assert f"flashxla doctor: error: {message}" in capsys.readouterr().err


def test_the_reference_is_attention() -> None:
    """Against PyTorch's, in float64."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    batch = ((5, 20), (3, 3))
    query = rng.standard_normal((8, kernels.HEADS, kernels.HEAD_SIZE))
    keys, values = rng.standard_normal((2, 3, kernels.PAGE, kernels.KV_HEADS, kernels.HEAD_SIZE))
    table = np.array([[2, 0], [1, 1]])
    out = kernels._reference(query, keys, values, table, batch)
    group, start = kernels.HEADS // kernels.KV_HEADS, 0
    for pages, (len_q, len_k) in zip(table, batch, strict=True):
        k, v = (
            torch.from_numpy(x[pages].reshape(-1, kernels.KV_HEADS, kernels.HEAD_SIZE)[:len_k])
            .transpose(0, 1)
            .repeat_interleave(group, 0)
            for x in (keys, values)
        )
        q = torch.from_numpy(query[start : start + len_q]).transpose(0, 1)
        mask = torch.ones(len_q, len_k, dtype=torch.bool).tril(len_k - len_q)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        np.testing.assert_allclose(out[start : start + len_q], wanted.transpose(0, 1), atol=1e-12)
        start += len_q
