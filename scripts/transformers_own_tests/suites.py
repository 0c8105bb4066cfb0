"""Which of transformers' tests are run, and how."""

from __future__ import annotations

from typing import NamedTuple


class Suite(NamedTuple):
    """files: below the checkout, with ::Class where it is one class of a file. without: see plugin.pytest_addoption."""

    name: str
    files: tuple[str, ...]
    without: tuple[str, ...] = ("require_torch_accelerator", "require_flash_attn")


def _model(name: str) -> Suite:
    return Suite(name, (f"tests/models/{name}/test_modeling_{name}.py",))


_GENERATION = ("tests/generation/test_continuous_batching.py", "tests/generation/test_paged_attention.py")

SUITES = {
    suite.name: suite
    for suite in (
        _model("llama"),
        _model("qwen3"),
        _model("mistral"),
        Suite("gemma3", ("tests/models/gemma3/test_modeling_gemma3.py::Gemma3TextModelTest",)),
        Suite("continuous_batching", _GENERATION),
    )
}
