"""What the part of docs/benchmarks.md on CPUs says, by the names that page.md has for it."""

from __future__ import annotations

from benchmarks import tables
from benchmarks.figures import Run, between, claim, number, spread, time
from flashxla.bench import prefill

_MIB = 2**20
_MODES = ("lazy", "openxla")
_SIMD = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "its bfloat16 instructions"}


def values() -> dict[str, str]:
    """All of them."""
    prefills = Run("cpu-prefill-float32"), Run("cpu-prefill-bfloat16")
    decodes = Run("cpu-decode-float32"), Run("cpu-decode-bfloat16")
    writes, strategies, growth = Run("cpu-kv_write"), Run("cpu-strategies"), Run("cpu-growth")
    topics = (*prefills, *decodes, writes)
    return {
        **_machine(topics, strategies),
        **_method(topics, strategies),
        **_strategies(strategies),
        **_prefill(*prefills),
        **_decode(*decodes),
        **_writes(writes),
        **_growth(growth),
    }


def _machine(topics: tuple[Run, ...], strategies: Run) -> dict[str, str]:
    content = topics[0].content
    machine, versions = content["machine"], content["versions"]
    commits = {run.content["commit"] for run in (*topics, strategies)}
    pairs = "avx512_bf16" in machine["simd"] and machine["cpu"].startswith("AMD")
    return {
        "cpu": machine["cpu"],
        "simd": ", ".join(_SIMD[name] for name in machine["simd"]),
        "in_pairs": claim(
            pairs, "AVX-512's instructions for pairs of bfloat16 multiply it on this processor"
        ),
        "cores": str(machine["cores"]),
        "threads": str(content["options"]["threads"]),
        "memory": number(machine["memory_bytes"] / 2**30),
        "software": ", ".join(f"{name} {versions[name]}" for name in ("torch", "torch_xla", "jax", "jaxlib")),
        "python": versions["python"],
        "version": versions["flashxla"],
        "commit": " and ".join(sorted(commits)),
        "load": between((run.content["machine"]["load_average"] for run in topics), ".1f"),
    }


def _method(topics: tuple[Run, ...], strategies: Run) -> dict[str, str]:
    rows = [row for run in topics for row in run.rows]
    above = [row["seconds"] / row["fastest_seconds"] - 1 for row in rows]
    by_unit = {
        unit: [row["ceiling_rate"] for row in rows if row["unit"] == unit] for unit in ("GB/s", "TFLOP/s")
    }
    return {
        "rounds": str(topics[0].content["options"]["rounds"]),
        "strategies_rounds": str(strategies.content["options"]["rounds"]),
        "rows": str(len(rows)),
        "unsteady_rows": str(sum(one > 0.1 for one in above)),
        "most_unsteady": f"{max(above):.0%}",
        "copy_rates": between(by_unit["GB/s"], ".0f"),
        "matmul_rates": between(by_unit["TFLOP/s"]),
    }


def _strategies(run: Run) -> dict[str, str]:
    works = run.where(works=True)
    fails = [(row["strategy"], row["mode"]) for row in run.where(works=False)]
    sizes = sorted({row["bytes"] for row in works})
    copying = [row["samples"] for row in works if not row["pointer_stays"] and row["bytes"] > sizes[0]]
    flat = {row["strategy"] for row in works if row["pointer_stays"] and row["mode"] == "openxla"}
    ours, theirs = (run.all("seconds", strategy=name, mode="lazy") for name in ("aliased op", "TPU style"))
    growths = [run.all("growth", strategy="aliased op", mode=mode)[-1] for mode in _MODES]
    spreads = [spread(run.all("seconds", strategy="aliased op", mode=mode)) for mode in _MODES]
    return {
        "smallest_cache": f"{sizes[0] // _MIB} MiB",
        "largest_cache": f"{sizes[-1] // 2**30} GiB",
        "second_cache": f"{sizes[1] // _MIB} MiB",
        "strategies_table": tables.strategies(run),
        "aliased_is_flat": claim(max(growths) < 1.1, "does not grow with the cache"),
        **{f"spread_{mode}": f"{one:.0%}" for mode, one in zip(_MODES, spreads, strict=True)},
        **{f"growth_{mode}": f"{one:.2f}" for mode, one in zip(_MODES, growths, strict=True)},
        "aliased_is_fast": claim(max(ours) < 1.25 * max(theirs), "is as fast as the functional op"),
        "functional_ms": between(theirs, ".3f", 1e-3),
        "aliased_ms": between(ours, ".3f", 1e-3),
        "flat_in_openxla": claim(
            flat == {"TPU style + donor", "aliased op"},
            "only the aliased op and hand-written donor calls avoid the copy",
        ),
        "failing": claim(fails == [("direct, .data", "openxla")], "direct call"),
        "failure": run.row(works=False)["error"].partition(":")[0],
        "copying_samples": between(copying, ".0f"),
        "flat_samples": between(run.all("samples", pointer_stays=True), ".0f"),
    }


def _prefill(float32: Run, bfloat16: Run) -> dict[str, str]:
    ours = [row for run in (float32, bfloat16) for row in run.where(contender="flashxla")]
    ragged = next(case for case in prefill.CASES["cpu"] if case.ragged)
    return {
        "matmul": float32.rows[0]["ceiling"],
        "prefill_table": tables.attention(float32, bfloat16),
        "prefill_of_ceiling": between((row["of_ceiling"] for row in ours), ".0%"),
        "prefill_rates": between(row["rate"] for row in ours),
        "ragged_lengths": between((keys for _, keys in ragged.lens), ".0f"),
    }


def _decode(float32: Run, bfloat16: Run) -> dict[str, str]:
    by_heads = {"contender": "sdpa, heads as queries"}
    names = [name for name in float32.names("case") if "batch_invariant" not in name]
    runs = (float32, bfloat16)
    grouped = [
        ratio for run in runs for name in names for ratio in run.all("ours_is_faster", case=name, **by_heads)
    ]
    looped = [run.row(contender="sdpa, a call a sequence")["ours_is_faster"] for run in runs]
    shares = [
        [
            row["of_ceiling"]
            for row in run.where(contender="flashxla")
            if row["case"] in names and "8 x" in row["case"]
        ]
        for run in runs
    ]
    return {
        "copy": float32.rows[0]["ceiling"],
        "decode_table": tables.attention(float32, bfloat16),
        "decode_float32": between(shares[0], ".0%"),
        "decode_bfloat16": between(shares[1], ".0%"),
        "grouped_ratios": between(grouped),
        "looped": between(looped),
    }


def _writes(run: Run) -> dict[str, str]:
    scatter, wide_scatter = (
        run.row(case="64 tokens", dtype=dtype, contender="jax donated scatter")["seconds"]
        for dtype in ("bfloat16", "float32")
    )
    return {
        "writes_table": tables.writes(run),
        "fastest_writes": claim(min(run.all("ours_is_faster")) >= 1, "flashxla is the fastest in every case"),
        "scatter": time(scatter),
        "scatter_ratio": number(scatter / wide_scatter, 2),
    }


def _growth(run: Run) -> dict[str, str]:
    padded = [
        run.all("seconds", series=name) for name in run.names("series") if name.endswith(("rows", "table"))
    ]
    return {
        "growth_table": tables.growth(run),
        "padding_is_free": claim(
            len(padded) == 2 and all(one[-1] < 1.1 * one[0] for one in padded),
            "rows and columns that nobody uses cost nothing",
        ),
        "padding_growth": between(one[-1] / one[0] for one in padded),
        "padding_spread": f"{max(map(spread, padded)):.0%}",
    }
