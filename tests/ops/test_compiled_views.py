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


@pytest.mark.parametrize("where", ["arguments", "inside"])
@pytest.mark.parametrize("case", TABLE)
def test_views(frontend: TorchFrontend, case: str, where: str) -> None:
    torch, fx = frontend.torch, frontend.fx
    torch._dynamo.reset()
    shape, views = TABLE[case]
    device = frontend.target_device()
    base = torch.randn(shape, device=device)
    key, value = (torch.randn(3, H, D, device=device) for _ in "kv")
    slots = torch.tensor([1, 9, -1], device=device)
    want = base.clone()
    fx.reshape_and_cache_flash(key, value, *views(want), slots)

    def write(caches: Any) -> None:
        key_cache, value_cache = caches if where == "arguments" else views(caches)
        fx.reshape_and_cache_flash(key, value, key_cache, value_cache, slots)

    compiled: Callable = torch.compile(write)
    for _ in range(2):
        compiled(views(base) if where == "arguments" else base)
        torch.testing.assert_close(base, want, atol=0, rtol=0)
