"""scaled_dot_product_attention on TorchTPU against float64 on the CPU, forward and backward, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashxla.xla import torch_tpu_calls
from tests.torchtpu import device

device.start()

# Batch, heads of queries and of keys, lengths of both, size of heads of queries and of values, arguments, and whether
# flash_attn_varlen and its backward compute it.
CASES = {
    "plain": (2, 4, 4, 9, 9, 16, 16, {}, True),
    "causal": (2, 4, 4, 9, 9, 16, 16, {"is_causal": True}, True),
    "causal_more_keys": (1, 2, 2, 5, 9, 64, 64, {"is_causal": True}, True),
    "causal_more_queries": (1, 2, 2, 9, 5, 8, 8, {"is_causal": True}, False),
    "one_query": (3, 4, 2, 1, 17, 80, 80, {"enable_gqa": True}, True),
    "groups": (2, 6, 2, 7, 7, 32, 32, {"enable_gqa": True, "is_causal": True}, True),
    "groups_and_mask": (2, 6, 2, 7, 7, 32, 32, {"enable_gqa": True, "attn_mask": "bool"}, False),
    "other_values": (2, 2, 2, 8, 8, 24, 40, {}, True),
    "scale": (1, 2, 2, 6, 6, 16, 16, {"scale": 0.7}, True),
    "bool_mask": (2, 4, 4, 9, 11, 16, 16, {"attn_mask": "bool"}, False),
    "bias": (2, 4, 4, 9, 11, 16, 16, {"attn_mask": "bias"}, False),
}


@pytest.fixture
def own_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The operations of flashxla that run, and their arguments."""
    seen: list[tuple[str, dict[str, Any]]] = []
    run = torch_tpu_calls.Program.run

    def watched(self: torch_tpu_calls.Program, values: Any) -> Any:
        op = self.call.op
        seen.append((op.name, dict(zip(op.names, values, strict=True))))
        return run(self, values)

    monkeypatch.setattr(torch_tpu_calls.Program, "run", watched)
    return seen


def inputs(
    case: tuple[Any, ...], dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    batch, heads, kv_heads, len_q, len_k, size, value_size, arguments, _ = case
    shapes = ((heads, len_q, size), (kv_heads, len_k, size), (kv_heads, len_k, value_size))
    tensors = [torch.randn(batch, *shape).to(dtype) for shape in shapes]
    arguments = dict(arguments)
    if arguments.get("attn_mask") == "bool":
        arguments["attn_mask"] = torch.rand(batch, 1, len_q, len_k) < 0.7
        arguments["attn_mask"][..., 0] = True
    elif arguments.get("attn_mask") == "bias":
        arguments["attn_mask"] = torch.randn(1, heads, len_q, len_k)
    return tensors, arguments


def results(tensors: list[torch.Tensor], arguments: dict[str, Any], attend: Any) -> list[torch.Tensor]:
    """The output and the gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    bias = arguments.get("attn_mask")
    if bias is not None and bias.is_floating_point():
        arguments = {**arguments, "attn_mask": bias.detach().requires_grad_()}
        leaves.append(arguments["attn_mask"])
    out = attend(*leaves[:3], **arguments)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).to(out.device)
    return [x.detach().cpu().double() for x in (out, *torch.autograd.grad(out, leaves, weights))]


def attention(compiled: bool) -> Any:
    torch._dynamo.reset()
    if compiled:
        return torch.compile(scaled_dot_product_attention, backend="tpu")
    return scaled_dot_product_attention


def on_tpu(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: x.to("tpu") if isinstance(x, torch.Tensor) else x for k, x in arguments.items()}


def doubles(arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for k, x in arguments.items()
    }


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(
    name: str, compiled: bool, own_calls: list[tuple[str, dict[str, Any]]]
) -> None:
    tensors, arguments = inputs(CASES[name])
    expected = results([x.double() for x in tensors], doubles(arguments), scaled_dot_product_attention)
    attend = attention(compiled)
    got = results([x.to("tpu") for x in tensors], on_tpu(arguments), attend)
    for x, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(x, reference, atol=2e-5, rtol=2e-5)
    called = [op for op, _ in own_calls]
    assert called == ["flash_attn_varlen", "flash_attn_varlen_backward"] * CASES[name][-1]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms(
    deterministic: bool, compiled: bool, own_calls: list[tuple[str, dict[str, Any]]]
) -> None:
    tensors, arguments = inputs(CASES["causal"])
    torch.use_deterministic_algorithms(deterministic)
    try:
        results([x.to("tpu") for x in tensors], arguments, attention(compiled))
    finally:
        torch.use_deterministic_algorithms(False)
    _, given = own_calls[-1]
    assert given["deterministic"] is deterministic


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    tensors, arguments = inputs(CASES["groups"], dtype)
    expected = results([x.double() for x in tensors], arguments, scaled_dot_product_attention)
    got = results([x.to("tpu") for x in tensors], arguments, scaled_dot_product_attention)
    for x, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(x, reference, atol=0.03, rtol=0.03)


def test_rows_that_see_nothing_are_zero() -> None:
    tensors, _ = inputs(CASES["bool_mask"])
    mask = torch.ones(9, 11, dtype=torch.bool)
    mask[3] = False
    got = results([x.to("tpu") for x in tensors], {"attn_mask": mask.to("tpu")}, scaled_dot_product_attention)
    expected = results([x.double() for x in tensors], {"attn_mask": mask}, scaled_dot_product_attention)
    for x, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(x, reference, atol=2e-5, rtol=2e-5)
    assert not got[0][:, :, 3].any()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_dropout(compiled: bool) -> None:
    """With values that are unit vectors the output is the dropped weights; its gradient's mask is the output's."""
    attend = attention(compiled)
    query, key = (torch.randn(2, 3, 64, 16).to("tpu") for _ in range(2))
    value = torch.eye(64).expand(2, 3, 64, 64).contiguous().to("tpu").requires_grad_()
    plain = scaled_dot_product_attention(query, key, value).detach().cpu()
    outs = [attend(query, key, value, dropout_p=0.3) for _ in range(2)]
    outs[0].sum().backward()
    dropped, other = (x.detach().cpu() for x in outs)
    kept = dropped != 0
    assert abs(kept.float().mean().item() - 0.7) < 0.02
    torch.testing.assert_close(dropped[kept], (plain / 0.7)[kept])
    assert (kept != (other != 0)).any()
    torch.testing.assert_close(value.grad.cpu()[..., 0], dropped.sum(2))
