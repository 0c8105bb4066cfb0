"""The folder that LOCAL_KERNELS takes, loaded as the package `kernels` does it.

The test environment has no `kernels`: a folder of its layout is metadata.json, and __init__.py that is imported under
the metadata's id.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, modeling_flash_attention_utils
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import initialization
from transformers.integrations import hub_kernels

from tests import reference
from tests.transformers.conftest import Make, drawn

NAME = "somebody/flashxla"
# What transformers replaces any other name by in models that list the kernels they know.
KNOWN = "kernels-community/vllm-flash-attn3"
REQUIRED = ("id", "name", "version", "license", "python-depends", "backend")  # by kernels 0.17


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    """The kernel in the folder that the command prints."""
    command = [sys.executable, "-m", "flashxla.hub_kernel"]
    folder = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    metadata = json.loads((folder / "metadata.json").read_text())
    assert set(REQUIRED) <= set(metadata)
    assert metadata["id"] not in sys.modules, "it would take another module's place"
    spec = importlib.util.spec_from_file_location(metadata["id"], folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def chosen(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of an attention implementation for which transformers finds the kernel."""
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: {NAME: kernel, KNOWN: kernel}[name])
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    return NAME


def calls(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often transformers calls each function from now on."""
    counts: dict[str, int] = {}

    def counted(name: str) -> Any:
        function = getattr(kernel, name)

        # Transformers looks at the names of the arguments.
        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        count.__signature__ = inspect.signature(function)
        return count

    for name in kernel.__all__:
        monkeypatch.setattr(kernel, name, counted(name))
    return counts


FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss")  # windows, softcap, sinks


@pytest.mark.parametrize("family", FAMILIES)
def test_generate(
    make_model: Make, kernel: ModuleType, chosen: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = calls(kernel, monkeypatch)
    model = make_model(family)
    ids = drawn(torch.randint, 1, 0, 250, (3, 21))
    masks = [torch.ones_like(ids), torch.tensor([[0] * 6 + [1] * 15, [1] * 21, [0] * 13 + [1] * 8])]
    tokens = {}
    chosen = KNOWN if family == "gpt_oss" else chosen
    for name in ("eager", chosen):
        model.set_attn_implementation(name)
        tokens[name] = [
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=258,
            )
            for mask in masks
        ]
    assert counts["flash_attn_func"] > 0 and counts["flash_attn_varlen_func"] > 0
    for got, expected in zip(tokens[chosen], tokens["eager"], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("blocks", [0, 8], ids=["ragged", "pages"])
def test_continuous_batching(
    make_model: Make, kernel: ModuleType, chosen: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pages decoding takes flash_attn_with_kvcache, which writes into transformers' cache."""
    counts = calls(kernel, monkeypatch)
    # It asks for a GPU.
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_, **__: None)
    model = make_model("llama")
    prompts = [[17, 4, 99, 23, 5], [8] * 3, list(range(40))]
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=258)
    model.set_attn_implementation("eager")
    expected = [
        model.generate(torch.tensor([p]), generation_config=config)[0, len(p) :].tolist() for p in prompts
    ]
    model.set_attn_implementation(chosen)
    outputs = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=64, page_size=16, max_batch_tokens=64, max_blocks_per_request=blocks
        ),
        progress_bar=False,
    )
    assert sorted(output.generated_tokens for output in outputs.values()) == sorted(expected)
    assert counts["flash_attn_varlen_func"] > 0
    assert ("flash_attn_with_kvcache" in counts) == (blocks > 0)


def _batch() -> tuple[dict[str, torch.Tensor], Any]:
    q = drawn(torch.randn, 3, 2, 7, 4, 16)
    k, v = (drawn(torch.randn, seed, 2, 9, 2, 16) for seed in (4, 5))
    sinks = drawn(torch.randn, 6, 4)
    arrays = [x.cpu().numpy() for x in (q, k, v)]
    expected = [
        reference.flash_attn_varlen_func(
            *(x[b] for x in arrays),
            max_seqlen_q=7,
            cu_seqlens_q=np.array([0, 7]),
            max_seqlen_k=9,
            cu_seqlens_k=np.array([0, 9]),
            causal=True,
            s_aux=sinks.cpu().numpy(),
        )
        for b in range(2)
    ]
    return {"q": q, "k": k, "v": v, "s_aux": sinks}, expected


def test_dense(kernel: ModuleType) -> None:
    given, expected = _batch()
    out, lse, _ = kernel.flash_attn_func(**given, causal=True, return_attn_probs=True)
    for b, (want, want_lse) in enumerate(expected):
        np.testing.assert_allclose(out[b].cpu(), want, atol=2e-5, rtol=1e-4)
        np.testing.assert_allclose(lse[b].cpu(), want_lse, atol=1e-4, rtol=1e-5)


def test_ragged_and_paged(kernel: ModuleType) -> None:
    """flash-attention's order of arguments; lengths as tensors, as transformers may give them."""
    given, expected = _batch()
    q, k, v, sinks = given.values()
    offsets_q, offsets_k = (torch.arange(3, dtype=torch.int32) * n for n in (7, 9))
    lengths = torch.tensor(7), torch.tensor(9)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    dense = kernel.flash_attn_varlen_func(*flat, offsets_q, offsets_k, *lengths, causal=True, s_aux=sinks)
    table = torch.tensor([[1], [0]], dtype=torch.int32)  # a page is a row
    paged = kernel.flash_attn_varlen_func(
        flat[0],
        k.flip(0),
        v.flip(0),
        offsets_q,
        offsets_k,
        *lengths,
        causal=True,
        s_aux=sinks,
        block_table=table,
    )
    for out in (dense, paged):
        np.testing.assert_allclose(out.cpu(), np.concatenate([o for o, _ in expected]), atol=2e-5, rtol=1e-4)


def test_gradients(kernel: ModuleType) -> None:
    given, _ = _batch()
    q, k, v, sinks = sources = [x.requires_grad_() for x in given.values()]
    out = kernel.flash_attn_func(q, k, v, causal=True, s_aux=sinks)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in heads[1:])
    scores = (heads[0] @ keys.mT / 4).masked_fill(torch.ones(7, 9).tril(2) == 0, -torch.inf)
    with_sinks = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 7, 1)], -1)
    same = with_sinks.softmax(-1)[..., :-1] @ values
    weights = drawn(torch.randn, 7, out.shape)
    got, expected = (torch.autograd.grad((x * weights).sum(), sources) for x in (out, same.transpose(1, 2)))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_errors(kernel: ModuleType) -> None:
    given, _ = _batch()
    with pytest.raises(ValueError, match=r"^flash_attn_func: dropout_p: got 0.1; accepted: 0.0"):
        kernel.flash_attn_func(**given, dropout_p=0.1)
    with pytest.raises(
        ValueError, match=r"^flash_attn_func: k: got shape \[9, 2, 16\]; accepted: \[2, Sk, Hk, D\]"
    ):
        kernel.flash_attn_func(**{**given, "k": given["k"][0]})
    with pytest.raises(TypeError, match=r"^flash_attn_func: v: got dtype float32; accepted: float16"):
        kernel.flash_attn_func(**{**given, "k": given["k"].half()})


def test_loaded_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is installed, by itself."""
    kernels = pytest.importorskip("kernels")
    from flashxla.hub_kernel import FOLDER

    monkeypatch.setenv("LOCAL_KERNELS", f"{NAME}={FOLDER}")
    module = kernels.get_kernel(NAME, version=1)
    assert {"flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"} <= set(dir(module))
