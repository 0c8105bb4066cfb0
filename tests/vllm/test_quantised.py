"""Checkpoints with quantised weights, dequantised when they are loaded: tokens of transformers' dequantised model."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from flashxla_vllm.quantised import dequantise_mxfp4
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.vllm import checkpoints
from tests.vllm.checkpoints import PROMPTS
from tests.vllm.engine import engine

KEPT = ["self_attn", "mlp.router", "embed_tokens", "lm_head"]


@pytest.fixture(scope="module")
def quantised(checkpoint, tmp_path_factory):
    """GPT-OSS with random MXFP4 experts, and the same as ordinary weights."""
    packed_path, plain_path = (tmp_path_factory.mktemp(name) for name in ("mxfp4", "plain"))
    for path in (packed_path, plain_path):
        checkpoints.save(checkpoints.FAMILIES["gpt_oss"], path)
    weights = load_file(packed_path / "model.safetensors")
    packed, plain = dict(weights), dict(weights)
    random = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if "experts" in name and name.endswith("_bias"):
            packed[name] = plain[name] = (
                (torch.randn(weight.shape, generator=random) * 0.1).bfloat16().float()
            )
        elif "experts" in name:
            experts, inner, outer = weight.shape
            blocks = torch.randint(
                256, (experts, outer, inner // 32, 16), dtype=torch.uint8, generator=random
            )
            scales = torch.randint(
                121, 126, (experts, outer, inner // 32), dtype=torch.uint8, generator=random
            )
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(packed, packed_path / "model.safetensors", {"format": "pt"})
    save_file(plain, plain_path / "model.safetensors", {"format": "pt"})
    config = json.loads((packed_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
    (packed_path / "config.json").write_text(json.dumps(config))
    return packed_path, plain_path


@pytest.mark.parametrize("devices", [1, 2])
def test_mxfp4_of_gpt_oss(devices, quantised, hf_tokens):
    packed_path, plain_path = quantised
    expected = checkpoints.greedy_tokens(plain_path, PROMPTS)
    assert expected != hf_tokens("gpt_oss")
    with engine(packed_path, tensor_parallel_size=devices) as running:
        assert running.greedy() == expected


def test_every_code_and_scale_of_mxfp4():
    """By the formula of the OCP's specification, for all 256 pairs of codes and the scales of ordinary weights."""
    packed = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 256).repeat(1, 200, 1)
    scales = torch.arange(27, 227, dtype=torch.uint8).reshape(1, 200, 1).repeat(1, 1, 16)
    found = dequantise_mxfp4(packed, scales, torch.float32)[0].double().numpy()
    codes = np.stack((np.arange(256) & 15, np.arange(256) >> 4), -1).reshape(-1)
    sign, exponent, mantissa = codes >> 3, codes >> 1 & 3, codes & 1
    value = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
    expected = np.where(sign, -value, value) * 2.0 ** (np.arange(27, 227)[:, None] - 127.0)
    np.testing.assert_array_equal(found, expected)
