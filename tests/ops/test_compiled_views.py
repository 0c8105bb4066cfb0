"""Caches that are views, under torch.compile with inductor: every element of the base is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.frontends import TorchFrontend

pytestmark = pytest.mark.frontends("torch")

P, B, H, D = 4, 4, 2, 8
TABLE = {
    "views of one tensor": ((2, P, B, H, D), lambda base: (base[0], base[1])),
    "views behind the start": ((3, P, B, H, D), lambda base: (base[1], base[2])),
    "packed": ((P, B, H, 2 * D), lambda base: (base[..., :D], base[..., D:])),
    "transposed": ((2, P, H, B, D), lambda base: (base[0].transpose(1, 2), base[1].transpose(1, 2))),
}


def write(fx: Any, tensors: list[Any], caches: Any, index: list[Any]) -> Any:
    key, value, _ = tensors
    return fx.reshape_and_cache_flash(key, value, *caches, index[0])


def write_and_attend(fx: Any, tensors: list[Any], caches: Any, index: list[Any]) -> Any:
    key, value, query = tensors
    return fx.ragged_paged_attention(query, key, value, tuple(caches), *index[1:], D**-0.5)


@pytest.mark.parametrize("where", ["arguments", "inside"])
@pytest.mark.parametrize("case", TABLE)
@pytest.mark.parametrize("call", [write, write_and_attend])
def test_views(frontend: TorchFrontend, call: Callable[..., Any], case: str, where: str) -> None:
    torch, fx = frontend.torch, frontend.fx
    torch._dynamo.reset()
    shape, views = TABLE[case]
    device = frontend.target_device()
    base = torch.randn(shape, device=device)
    tensors = [torch.randn(3, heads, D, device=device) for heads in (H, H, 2 * H)]
    lists = ([1, 9, -1], [2, 6], [[3, 0], [2, 1]], [0, 1, 2], [2])
    index = [torch.tensor(values, device=device, dtype=torch.int32) for values in lists]
    want = base.clone()
    expected = call(fx, tensors, views(want), index)

    def function(caches: Any) -> Any:
        return call(fx, tensors, caches if where == "arguments" else views(caches), index)

    compiled: Callable = torch.compile(function)
    for _ in range(2):
        got = compiled(views(base) if where == "arguments" else base)
        torch.testing.assert_close(base, want, atol=0, rtol=0)
        assert got is expected is None or torch.equal(got, expected)
