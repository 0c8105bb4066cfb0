"""transformers' Trainer with our attention: the losses are those with PyTorch's, on the device that it chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.transformers.conftest import Make, drawn

pytest.importorskip("accelerate")


def losses(make_model: Make, attention: str, folder: Path) -> list[float]:
    """Of two steps, from the same weights and over the same rows."""
    model = make_model("llama")
    model.set_attn_implementation(attention)
    rows = drawn(torch.randint, 0, 0, 256, (4, 12))
    arguments = TrainingArguments(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        optim="adamw_torch",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


def test_trainer(make_model: Make, tmp_path: Path) -> None:
    expected, got = (losses(make_model, name, tmp_path) for name in ("sdpa", "flashxla"))
    assert len(got) == 2 and got == pytest.approx(expected, abs=2e-3)
