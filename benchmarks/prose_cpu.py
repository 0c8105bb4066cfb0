"""What the part of docs/benchmarks.md on CPUs says, by the names that page.md has for it."""

from __future__ import annotations

from benchmarks import tables
from benchmarks.figures import Run, between, claim, number, spread, time
from flashxla.bench import prefill

_MIB = 2**20
_MODES = ("lazy", "openxla")
_SIMD = {"avx2": "AVX2", "avx512f": "AVX-512"}


def values() -> dict[str, str]:
    """All of them."""
    prefills = Run("cpu-prefill-float32"), Run("cpu-prefill-bfloat16")
    decodes = Run("cpu-decode-float32"), Run("cpu-decode-bfloat16")
    writes, strategies = Run("cpu-kv_write"), Run("cpu-strategies")
    topics = (*prefills, *decodes, writes)
    return {
        **_machine(topics, strategies),
        **_method(topics, strategies),
        **_strategies(strategies),
        **_prefill(*prefills),
        **_decode(*decodes),
        **_writes(writes),
    }


def _machine(topics: tuple[Run, ...], strategies: Run) -> dict[str, str]:
    content = topics[0].content
    machine, versions = content["machine"], content["versions"]
    plain = set(machine["simd"]) <= set(_SIMD)
    return {
        "cpu": machine["cpu"],
        "simd": " and ".join(_SIMD[name] for name in machine["simd"]),
        "no_bfloat16": claim(plain, "no bfloat16 instructions"),
        "cores": str(machine["cores"]),
        "threads": str(content["options"]["threads"]),
        "memory": number(machine["memory_bytes"] / 2**30),
        "software": ", ".join(f"{name} {versions[name]}" for name in ("torch", "torch_xla", "jax", "jaxlib")),
        "python": versions["python"],
        "version": versions["flashxla"],
        "commit": content["commit"],
        "strategies_commit": strategies.content["commit"],
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
        "aliased_not_fastest": claim(max(theirs) < min(ours), "is not the fastest"),
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
    slower = [
        row["seconds"] / float32.row(case=row["case"], contender="sdpa")["seconds"]
        for row in bfloat16.where(contender="sdpa")
    ]
    by_heads = {"contender": "sdpa, heads as queries"}
    grouped = [*float32.all("ours_is_faster", **by_heads), *bfloat16.all("ours_is_faster", **by_heads)]
    looped = float32.row(contender="sdpa, a call a sequence")["ours_is_faster"]
    return {
        "copy": float32.rows[0]["ceiling"],
        "decode_table": tables.attention(float32, bfloat16),
        "decode_float32": between(float32.all("of_ceiling", contender="flashxla"), ".0%"),
        "decode_bfloat16": between(bfloat16.all("of_ceiling", contender="flashxla"), ".0%"),
        "sdpa_slower": between(slower, ".1f"),
        "grouped_ratios": between(grouped),
        "looped": claim(0.95 < looped < 1.05, "as fast as flashxla on pages"),
    }


def _writes(run: Run) -> dict[str, str]:
    faster = [
        row["contender"] for row in run.where(case="64 tokens", dtype="float32") if row["ours_is_faster"] < 1
    ]
    scatter, wide_scatter = (
        run.row(case="64 tokens", dtype=dtype, contender="jax donated scatter")["seconds"]
        for dtype in ("bfloat16", "float32")
    )
    earlier = run.content["earlier_run"]
    now = run.all("ours_is_faster", case=earlier["case"], dtype=earlier["dtype"])
    return {
        "writes_table": tables.writes(run),
        "faster_writes": " and ".join(faster) + claim(len(faster) > 1, " are"),
        "leads": claim(min(now) >= 1, "flashxla leads on a quiet machine"),
        "earlier_case": f"{earlier['case']} in {earlier['dtype']}",
        "earlier_rounds": str(earlier["rounds"]),
        "earlier_load": str(earlier["load_average"]),
        "earlier_ratio": f"{earlier['ours_is_faster']:.2f}",
        "scatter": time(scatter),
        "scatter_ratio": number(scatter / wide_scatter, 2),
    }
