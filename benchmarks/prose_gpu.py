"""What the part of docs/benchmarks.md on GPUs says, by the names that page.md has for it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable

from benchmarks import figures, llama, plan, tables, ways
from benchmarks.figures import Run, between, claim

_PREFILL = {
    "flashxla": "flashxla, paged",
    "flashxla, dense": "flashxla, dense",
    "flashxla in JAX": "flashxla in JAX, paged",
    "torch SDPA cuDNN": "SDPA cuDNN, dense",
    "torch SDPA FA2": "SDPA FA2, dense",
    "torch FA2 varlen, dense": "FA2 varlen, dense",
    "torch FlexAttention": "FlexAttention, dense",
    "jax.nn cuDNN": "jax.nn cuDNN, dense",
}
_DECODE = {
    "flashxla": "flashxla",
    "flashxla in JAX": "flashxla in JAX",
    "JAX Pallas paged_attention": "Pallas paged_attention",
    "torch SDPA cuDNN": "SDPA cuDNN, dense",
    "torch SDPA FA2": "SDPA FA2, dense",
    "torch FA2 varlen, dense": "FA2 varlen, dense",
    "torch FlexAttention": "FlexAttention, dense",
}
_MIXED = {
    "flashxla": "flashxla",
    "flashxla in JAX": "flashxla in JAX",
    "2 calls": "two calls",
    "decode rows alone": "decode rows alone",
    "prompt alone": "prompt alone",
    "torch FA2 varlen, dense": "FA2 varlen, dense",
}
_WRITES = (
    "flashxla, 1 GiB cache",
    "flashxla, 64 GiB cache",
    "flashxla in JAX",
    "JAX donated scatter",
    "torch index_put_",
)

STEPS_OF_TODAY = "h200-step-today"


def values() -> dict[str, str]:
    """All of them."""
    sections = {name: Run(f"h200-{name}") for name in ("prefill", "decode", "mixed", "kv_write", "overhead")}
    content = sections["prefill"].content
    return {
        **_card("gpu", sections.values()),
        "gpu_torch": content["versions"]["torch"],
        "gpu_jax": content["versions"]["jax"],
        "gpu_month": datetime.datetime.fromisoformat(content["date"]).strftime("%B %Y"),
        "gpu_prefill_table": tables.gpu(sections["prefill"], _PREFILL, ".0f", best=True),
        "gpu_mixed_table": tables.gpu(sections["mixed"], _MIXED),
        "gpu_writes_table": tables.gpu(sections["kv_write"], {name: name for name in _WRITES}, ".2f"),
        "programs_list": tables.programs(sections["overhead"]),
        "grown_gpu": content["device"]["name"],
        "gpu_growth_table": tables.growth(Run("h200-growth")),
        **_decode(sections["decode"]),
        **_other(Run("h100-prefill"), Run("h100-decode")),
        **_plan(Run("h200-plan")),
        **_step(Run("h200-step")),
        "steps_in_jax_today_table": tables.steps_in_jax_today(Run("h200-step-jax")),
        "steps_of_today": _steps_of_today(),
    }


def _steps_of_today() -> str:
    """A section of the page, once there is a run."""
    if not figures.is_measured(STEPS_OF_TODAY):
        return ""
    run = Run(STEPS_OF_TODAY)
    versions = run.content["versions"]
    return f"""

### The same step in TorchTPU and torchax

    flashxla bench step --device cuda --profile --json F --plot F     # in their environment: torchtpu.md

torch {versions["torch"]}, jax {versions["jax"]}, {run.content["device"]["name"]}, all in one run. The last column is
the host's time for one operation that is called by itself: `x + 1`, and the write and attention of a layer.

{tables.steps_of_today(run)}

![Step](benchmarks/{STEPS_OF_TODAY}.svg)"""


def _card(name: str, runs: Iterable[Run]) -> dict[str, str]:
    """The card of some runs, and its ceilings in them."""
    contents = [run.content for run in runs]
    copies, products = (
        [content["ceilings"][what]["rate"] for content in contents] for what in ("copy", "matmul")
    )
    return {
        name: contents[0]["device"]["name"],
        f"{name}_copy": between(copies),
        f"{name}_matmul": between(products, ".0f"),
    }


def _decode(run: Run) -> dict[str, str]:
    fp8 = [
        row["us"] / run.row(case=row["case"].removesuffix(", fp8 cache"), contender="flashxla")["us"]
        for row in run.rows
        if row["case"].endswith(", fp8 cache")
    ]
    return {
        "gpu_decode_table": tables.gpu(run, _DECODE, ".2f", best=True),
        "fp8_ratios": between(fp8),
        "fp8_saves": claim(max(fp8) < 0.75, "it saves memory, and time"),
    }


def _other(prefill: Run, decode: Run) -> dict[str, str]:
    return {
        **_card("other_gpu", (prefill, decode)),
        "other_prefill_table": tables.gpu(prefill, _PREFILL, ".0f", best=True),
        "other_decode_table": tables.gpu(decode, _DECODE, ".2f", best=True),
    }


def _plan(run: Run) -> dict[str, str]:
    pairs = [
        [run.row(case=case, contender=name)["us"] for name in (plan.SHARED, plan.EACH)]
        for case in run.names("case")
    ]
    pays = all(shared < each for shared, each in pairs)
    return {
        "plan_gpu": run.content["device"]["name"],
        "plan_table": tables.plans(run),
        "plan_note": f" {run.content['note']}" if "note" in run.content else "",
        "plan_us": between((each - shared for shared, each in pairs), ".1f"),
        "plan_ratios": between(each / shared for shared, each in pairs),
        "plan_pays": claim(pays, "The shared plan pays in every case, and is kept"),
    }


def _step(run: Run) -> dict[str, str]:
    cases = run.names("case")
    rows = [
        [run.row(case=case, contender=name) for name in (ways.OURS.name, *llama.FRONTENDS)] for case in cases
    ]
    hidden = all(jax["host_us"] < openxla["host_us"] < openxla["us"] for jax, _, openxla in rows)
    bound = all(lazy["host_us"] > 0.75 * lazy["us"] for _, lazy, _ in rows)
    first = run.row(case=cases[0], contender=ways.PALLAS.name)["ours_is_faster"]
    return {
        "step_is_one_program": claim(
            set(run.all("programs_per_step")) == {1.0}, "Each step is one device program"
        ),
        "steps_table": tables.steps(run),
        "openxla_is_hidden": claim(
            hidden, "openxla's host needs more time than JAX's, but the device hides it"
        ),
        "lazy_is_bound": claim(bound, "is bound by that"),
        "steps_in_jax_table": tables.steps_in_jax(run),
        "first_batch": tables.batch(cases[0]),
        "pallas_is_faster": claim(0.9 < first < 1, "the Pallas kernel is a little faster"),
    }
