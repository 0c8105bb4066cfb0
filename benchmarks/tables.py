"""The tables of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks import llama, plan, ways
from benchmarks.figures import Row, Run, number, time

_MIB = 2**20
_STRATEGIES = {
    "direct, .data": "direct custom call, `.data`",
    "existing function": "existing function",
    "TPU style": "TPU style: functional, `copy_`",
    "TPU style + donor": "TPU style + donor calls",
    "clone and return": "clone and return",
    "aliased op": "**flashxla's aliased op**",
}


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(row)} |" for row in (head, *lines)]
    return "\n".join([rows[0], "|---" * len(head) + "|", *rows[1:]])


def strategies(run: Run) -> str:
    """Times of a write by the size of the cache."""
    sizes = sorted({row["bytes"] for row in run.where(works=True)})
    names = [
        f"{size // _MIB} MiB" if size < 1024 * _MIB else f"{size // (1024 * _MIB)} GiB" for size in sizes
    ]
    last = names[-1]
    head = ["strategy", "mode", *names, f"{last} / {names[0]}", f"extra memory at {last}", "same buffer"]
    lines = []
    for strategy, title in _STRATEGIES.items():
        for mode in run.names("mode"):
            rows = run.where(strategy=strategy, mode=mode)
            cells = [title if mode == run.names("mode")[0] else "", mode]
            if not rows[0]["works"]:
                lines.append([*cells, "fails", *[""] * (len(head) - 3)])
                continue
            growth, extra = rows[-1]["growth"], rows[-1]["extra_bytes"] / sizes[-1]
            memory = {0: "none", 1: "a cache"}.get(round(extra, 2), f"{extra:.2f} caches")
            ratio = f"{growth:.2f}" if growth < 10 else number(growth)
            buffer = "yes" if rows[-1]["pointer_stays"] else "no"
            lines.append([*cells, *(time(row["seconds"]) for row in rows), ratio, memory, buffer])
    return _table(head, lines)


def attention(float32: Run, bfloat16: Run) -> str:
    """Prefill or decode on a CPU: flashxla, and each peer."""
    head = ["case", "peer", "float32: flashxla", "peer", "ratio", "bfloat16: flashxla", "peer", "ratio"]
    lines = []
    for case in float32.names("case"):
        title = case
        for name in float32.names("contender"):
            if name != "flashxla" and float32.find(case=case, contender=name):
                cells = [title, name + _layout(case, name)]
                for run in (float32, bfloat16):
                    cells += _against(
                        run.row(case=case, contender="flashxla"), run.row(case=case, contender=name)
                    )
                lines.append(cells)
                title = ""
    return _table(head, lines)


# How the peers can be called, where they can take a case.
_GRADIENT_PEERS = {
    "cuDNN": ("sdpa cuDNN, KV heads repeated", "sdpa cuDNN", "sdpa, a call a sequence"),
    "FA2": ("sdpa FA2", "FA2 varlen"),
}


def gradients(run: Run) -> str:
    """The backward pass on a GPU: rates, the share of the ceiling, and the fastest way to call each peer."""
    head = ["case", "flashxla, TFLOP/s", "of the ceiling"]
    head += [cell for peer in _GRADIENT_PEERS for cell in (peer, "ratio")]
    lines = []
    for case in run.names("case"):
        ours = run.row(case=case, contender="flashxla")
        cells = [case, f"{ours['rate']:.0f}", f"{ours['of_ceiling']:.0%}"]
        for names in _GRADIENT_PEERS.values():
            rows = [row for name in names if (row := run.find(case=case, contender=name))]
            best = max(rows, key=lambda row: row["rate"], default=None)
            cells += [f"{best['rate']:.0f}", _ratio(best["ours_is_faster"])] if best else ["-", "-"]
        lines.append(cells)
    return _table(head, lines)


def train_steps(cases: Mapping[str, Row]) -> str:
    """Training steps in JAX: flashxla, and jax.nn with cuDNN."""
    head = ["documents", "flashxla", "jax.nn, cuDNN", "ratio"]
    lines = []
    for name, row in cases.items():
        ours, theirs = (row[contender]["seconds"] for contender in ("flashxla", "cudnn"))
        lines.append([name, time(ours), time(theirs), _ratio(theirs / ours)])
    return _table(head, lines)


def _layout(case: str, peer: str) -> str:
    """What a peer gets in place of the case's pages and lengths."""
    padded = ", padded" if case.startswith("ragged") and "a call a sequence" not in peer else ""
    return padded + (", dense" if "pages" in case else "")


def _against(ours: Row, peer: Row) -> list[str]:
    return [time(ours["seconds"]), time(peer["seconds"]), _ratio(peer["ours_is_faster"])]


def _ratio(ratio: float) -> str:
    """Of a peer's time by flashxla's; bold where the peer is faster."""
    if ratio < 1:
        return f"**{ratio:.2f}**"
    return f"{ratio:.2f}" if ratio < 10 else number(ratio)


def writes(run: Run) -> str:
    """Cache writes on a CPU."""
    peers = [name for name in run.names("contender") if name != "flashxla"]
    head = ["case", "flashxla", *(cell for peer in peers for cell in (peer, "ratio"))]
    lines = []
    for case in run.names("case"):
        for dtype in run.names("dtype"):
            found = [run.row(case=case, dtype=dtype, contender=name) for name in ("flashxla", *peers)]
            cells = [f"{case}, {dtype}", time(found[0]["seconds"])]
            for row in found[1:]:
                cells += [time(row["seconds"]), _ratio(row["ours_is_faster"])]
            lines.append(cells)
    return _table(head, lines)


def growth(run: Run) -> str:
    """The smallest size of each series, the largest, and the one between: time, and the limit's share of it."""
    head = ["what grows", "smallest", "between", "largest"]
    lines = []
    for series in run.names("series"):
        rows = run.where(series=series)
        lines.append([series, *(_grown(row) for row in (rows[0], rows[len(rows) // 2], rows[-1]))])
    return _table(head, lines)


def _grown(row: Row) -> str:
    return f"{row['size']}: {time(row['seconds'])} ({row['limit_seconds'] / row['seconds']:.0%})"


def gpu(run: Run, titles: Mapping[str, str], rate_form: str = "", best: bool = False) -> str:
    """Microseconds, and the rates. titles: of the contenders that are shown; best: beside the fastest peer."""
    lines = []
    for case in run.names("case"):
        cells = [case]
        for name in titles:
            row = run.find(case=case, contender=name)
            if row is None or "us" not in row:  # it failed
                cells.append("-")
                continue
            rate = f" ({row['rate']:{rate_form}})" if rate_form else ""
            cells.append(_us(row["us"]) + rate)
        if best:
            ratios = [row["ours_is_faster"] for row in run.where(case=case, ours=False) if "us" in row]
            cells.append(_ratio(min(ratios)) if ratios else "-")
        lines.append(cells)
    return _table(["case", *titles.values(), *(["best peer / flashxla"] if best else [])], lines)


def _us(us: float) -> str:
    return f"{us:.1f} us" if us < 100 else f"{us:.0f} us"


def plans(run: Run) -> str:
    """One plan for all layers, and one each."""
    lines = []
    for case in run.names("case"):
        shared, each = (run.row(case=case, contender=name)["us"] for name in (plan.SHARED, plan.EACH))
        lines.append([case, f"{shared:.1f} us", f"{each:.1f} us", f"{each / shared:.2f}"])
    return _table(["case", plan.SHARED, plan.EACH, "ratio"], lines)


def programs(run: Run) -> str:
    """A list of the section overhead."""
    return "\n".join(f"- {row['contender']}: {row['us']:.1f} us" for row in run.rows)


def steps(run: Run) -> str:
    """A decode step through each front end."""
    head = [
        "batch",
        "JAX",
        "openxla",
        "lazy",
        "openxla : JAX",
        "of the copy rate: JAX, openxla",
        "host time: JAX, openxla, lazy",
        "largest gap: JAX, openxla",
    ]
    lines = []
    for case in run.names("case"):
        names = (ways.OURS.name, llama.OPENXLA, llama.LAZY)
        jax, openxla, lazy = (run.row(case=case, contender=name) for name in names)
        gaps = [run.row(case=case, contender=f"kernels of {name}")["largest_gap"] for name in names[:2]]
        hosts = [row["host_us"] / 1e3 for row in (jax, openxla, lazy)]
        lines.append(
            [
                batch(case),
                f"{jax['us'] / 1e3:.2f} ms",
                f"{openxla['us'] / 1e3:.2f} ms",
                f"{lazy['us'] / 1e3:.1f} ms",
                f"{openxla['us'] / jax['us']:.2f}",
                f"{jax['of_ceiling']:.0%}, {openxla['of_ceiling']:.0%}",
                f"{hosts[0]:.2f}, {hosts[1]:.2f}, {hosts[2]:.1f} ms",
                f"{gaps[0]:.1%}, {gaps[1]:.1%}",
            ]
        )
    return _table(head, lines)


def steps_of_today(run: Run) -> str:
    """A decode step through TorchTPU and torchax."""
    head = [
        "batch",
        "JAX",
        "TorchTPU, compiled",
        "torchax, jit",
        "TorchTPU : JAX",
        "torchax : JAX",
        "host time: JAX, TorchTPU, torchax",
        "to compile: JAX, TorchTPU, torchax",
        "an eager operation: PyTorch's, flashxla's in TorchTPU; in torchax",
    ]
    lines = []
    for case in run.names("case"):
        names = (ways.OURS.name, *llama.OF_TODAY)
        jax, *others = rows = [run.row(case=case, contender=name) for name in names]
        hosts = ", ".join(f"{row['host_us'] / 1e3:.2f}" for row in rows)
        compiling = ", ".join(f"{row['compile_seconds']:.1f}" for row in rows)
        eager = "; ".join(", ".join(f"{us:.0f}" for us in row["eager_us"].values()) for row in others)
        lines.append(
            [
                batch(case),
                *(f"{row['us'] / 1e3:.2f} ms" for row in rows),
                *(f"{row['us'] / jax['us']:.2f}" for row in others),
                f"{hosts} ms",
                f"{compiling} s",
                f"{eager} us",
            ]
        )
    return _table(head, lines)


def train_llama(results: Mapping[str, Row]) -> str:
    """Training steps of a Llama of transformers: PyTorch's own device, and TorchTPU."""
    head = ["dtype", "", "step", "ratio", "first step", "largest difference of a loss"]
    lines = []
    for dtype, found in results.items():
        for name, row in found["rows"].items():
            cells = [time(row["seconds"]), f"{row['ratio']:.2f}", f"{row['first_step_seconds']:.1f} s"]
            lines.append([dtype, name, *cells, f"{row['difference']:.1e}"])
    return _table(head, lines)


def steps_in_jax(run: Run) -> str:
    """A decode step in JAX with each way to do the attention."""
    lines = []
    for case in run.names("case"):
        names = (ways.OURS.name, ways.PALLAS.name, ways.NOTHING.name)
        ours, pallas, nothing = (run.row(case=case, contender=name)["us"] / 1e3 for name in names)
        lines.append(
            [batch(case), f"{ours:.2f} ms", f"{pallas:.2f} ms", f"{pallas / ours:.2f}", f"{nothing:.2f} ms"]
        )
    return _table(["batch", "flashxla", ways.PALLAS.name, "ratio", ways.NOTHING.name], lines)


def steps_in_jax_today(run: Run) -> str:
    """A decode step in JAX, and a layer's share of it."""
    lines = []
    for case in run.names("case"):
        ours, nothing = (run.row(case=case, contender=way.name)["us"] for way in (ways.OURS, ways.NOTHING))
        layer = run.row(case=case, contender=ways.share_of_layer(ways.OURS.name))
        kernels = run.row(case=case, contender=ways.KERNELS)
        lines.append(
            [
                batch(case),
                f"{ours / 1e3:.2f} ms",
                f"{nothing / 1e3:.2f} ms",
                f"{layer['us']:.1f} us",
                f"{kernels['us']:.1f} us",
            ]
        )
    head = [
        "batch",
        "flashxla",
        ways.NOTHING.name,
        "write + attention, a layer",
        "their kernels from PyTorch",
    ]
    return _table(head, lines)


def batch(case: str) -> str:
    """Of a case of the section step, "batch 16, 2048 keys"."""
    return case.split(",")[0].removeprefix("batch ")
