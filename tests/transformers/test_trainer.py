"""transformers' Trainer with our attention: the losses are those with PyTorch's, on the device that it chooses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")


def losses(attention: str, folder: str) -> list[float]:
    """Of two steps, from the same weights and over the same rows."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

    import flashxla.transformers
    from tests.generate.checkpoints import COMMON

    flashxla.transformers.enable()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**COMMON), attn_implementation=attention)
    rows = torch.randint(0, 256, (4, 12))
    arguments = TrainingArguments(
        folder,
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


def test_trainer(tmp_path: Path) -> None:
    """In a process of its own: Trainer chooses PyTorch/XLA's device where that is installed, and autograd asks once
    which devices there are, in a process's first backward pass."""
    names = ("sdpa", "flashxla")
    command = [sys.executable, "-m", "tests.transformers.test_trainer", str(tmp_path), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    expected, got = json.loads(done.stdout.splitlines()[-1])
    assert len(got) == 2 and got == pytest.approx(expected, abs=2e-3)


if __name__ == "__main__":
    print(json.dumps([losses(name, sys.argv[1]) for name in sys.argv[2:]]))
