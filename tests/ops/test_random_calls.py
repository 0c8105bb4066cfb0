"""Random calls of every operation with every argument, against float64, each twice for equal bits.

Each kind of call gets a share of --random-seconds, and says how many it made. A failure names the call; to repeat it:

    pytest tests/ops/test_random_calls.py --seed SEED --random-only NUMBER -k KIND
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.batches import (
    Arguments,
    Case,
    caches_of,
    empty_caches,
    flash_attn_arguments,
    normal,
    qkvpacked,
    ragged_paged_attention_arguments,
    tokens_with_copies,
)
from tests.checks import (
    DTYPES,
    LSE_TOLERANCE,
    TOLERANCE,
    assert_attention,
    assert_close,
    assert_gradients,
    assert_same_bits,
)
from tests.expanded import expanded
from tests.frontends import TorchFrontend
from tests.gradients import SOURCES, cotangents, gradients_from
from tests.ops.engines import ONE_TENSOR, call_of, differentiated_by, rounding_of_weights, served_by

Rng = np.random.Generator
Lens = tuple[tuple[int, int], ...]
PAIRS = ("NHD", "HND")
LAYOUTS = (*PAIRS, *ONE_TENSOR)
FP8 = ("e4m3", "e5m2", "u8:e4m3", "u8:e5m2")
SIXTEEN = ("bf16", "f16")


def pick(rng: Rng, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def lens_of(rng: Rng, queries: np.ndarray, most_keys: int) -> Lens:
    """Most sequences have their queries' keys and more; some have none, or fewer."""
    more = rng.integers(-3, most_keys, len(queries), endpoint=True)
    keys = np.where(rng.random(len(queries)) < 0.05, 0, np.maximum(queries + more, 0))
    return tuple(zip(queries.tolist(), keys.tolist(), strict=True))


def values_dim(rng: Rng, step: int = 1) -> int | None:
    """The values' head size: most often that of the keys."""
    return pick(rng, None, None, None, step * int(rng.integers(1, 256 // step + 1)))  # type: ignore[no-any-return]


def few(rng: Rng) -> dict[str, Any]:
    """Decoding, and a few queries: swap, or split where TMA does not take the keys."""
    group = pick(rng, 1, 2, 3, 4, 5, 7, 8, 16, 64, 100)
    count = min(int(pick(rng, 1, 3, 9, 40, 400)), 400 // group)  # the reference takes a head at a time
    longest = pick(rng, 1, 1, max(64 // group, 1))
    return {
        "lens": lens_of(
            rng, rng.integers(0, longest, count, endpoint=True), pick(rng, 20, 300, 2000) // count + 9
        ),
        "group": group,
        "dtype": pick(rng, *SIXTEEN),
        "dim": pick(rng, 64, 128, 256, rng.integers(1, 257)),
        "v_dim": values_dim(rng),
    }


def chunks(rng: Rng) -> dict[str, Any]:
    """More queries than few that see many keys: swap, or wide in parts. With decode rows and prefills."""
    lens = [
        *((q, q + rng.integers(500, 1500)) for q in rng.integers(17, 48, pick(rng, 1, 3))),
        *((q, 4050 + rng.integers(0, 300)) for q in rng.integers(48, 129, pick(rng, 0, 1, 1))),
        *((1, rng.integers(1, 900)) for _ in range(pick(rng, 0, 4))),
        *((q, q + rng.integers(0, 60)) for q in rng.integers(48, 300, pick(rng, 0, 1))),
    ]
    return {
        "lens": tuple((int(q), int(k)) for q, k in rng.permutation(lens)),
        "group": pick(rng, 4, 5, 8),
        "dtype": pick(rng, *SIXTEEN),
        "dim": pick(rng, 64, 128, 256, 16 * rng.integers(1, 17)),
        "page": pick(rng, None, 8, 16, 24, 64),
        "window": pick(rng, (-1, -1), (-1, -1), (int(rng.integers(500, 5000)), -1)),
    }


def wide(rng: Rng) -> dict[str, Any]:
    """Many queries, as wide takes them; of every page size, and with keys of 16 bits or fp8."""
    queries = rng.permutation(
        [*rng.integers(48, pick(rng, 64, 130, 130, 300), pick(rng, 1, 1, 2)), *pick(rng, [], [1, 0, 3])]
    )
    return {
        "lens": lens_of(rng, queries.astype(int), pick(rng, 20, 20, 300)),
        "group": pick(rng, 1, 1, 2, 4),
        "dtype": pick(rng, *SIXTEEN),
        "dim": pick(rng, 64, 128, 256, 8 * rng.integers(1, 33)),
        "v_dim": values_dim(rng, 8),
        "page": pick(rng, None, 8, 16, 24, 64, int(rng.integers(1, 21))),
        "cache": pick(rng, "same", "same", *FP8),
    }


def tile(rng: Rng) -> dict[str, Any]:
    """Many queries, as wide does not take them: by the head size, or fewer queries."""
    why = pick(rng, {"dim": 46}, {"dim": 2 * int(rng.integers(0, 64)) + 1}, {})
    queries = rng.integers(17, 48, 3) if not why else rng.integers(48, pick(rng, 64, 200), pick(rng, 1, 3))
    return {
        "lens": lens_of(rng, queries, 200),
        "group": pick(rng, 4, 5, 6),
        "dtype": pick(rng, *SIXTEEN),
        "dim": pick(rng, 64, 128, 256, rng.integers(1, 257)),
        "v_dim": values_dim(rng),
        **why,
    }


def fp8(rng: Rng) -> dict[str, Any]:
    """Queries, keys and values of 8 bits, few or many."""
    base = pick(rng, few, tile, wide, wide)(rng)
    return {
        **base,
        "dtype": pick(rng, "e4m3", "e4m3", "e5m2"),
        "cache": pick(rng, *FP8),
        "descale": pick(rng, "1", "H", "SH"),
    }


def float32(rng: Rng) -> dict[str, Any]:
    """split32 and tile32."""
    base = pick(rng, few, tile)(rng)
    return {**base, "dtype": "f32", "cache": pick(rng, "same", "same", *FP8)}


def apart(rng: Rng) -> dict[str, Any]:
    """Head sizes of keys and values apart, or above 256: large and general."""
    dims = pick(rng, (576, 512), (192, 128), (1, 3), (40, 72), (512, 512), tuple(rng.integers(1, 513, 2)))
    base = pick(rng, few, tile, fp8, float32)(rng)
    group = min(base["group"], 8)
    return {**base, "group": group, "lens": base["lens"][:8], "dim": dims[0], "v_dim": int(dims[1])}


def copies(rng: Rng) -> dict[str, Any]:
    """Prompts so large that wide and large copy keys that are fp8, in small pages or in odd heads: see key_copies.h."""
    dims = pick(rng, (128, 128), (256, 256), (192, 128), (576, 512), tuple(rng.integers(40, 513, 2)))
    group = int(pick(rng, 8, 16))
    least = tokens_with_copies(group, dims)
    queries = [least + int(rng.integers(1, 200)), *pick(rng, [], [], [least // 2, 1, 0])]
    return {
        "lens": lens_of(rng, np.array(queries), 300),
        "group": group,
        "dtype": pick(rng, *SIXTEEN),
        "dim": dims[0],
        "v_dim": int(dims[1]),
        "page": pick(rng, None, 1, 3, 4, 16, 17, 64),
        "cache": pick(rng, "same", *FP8),
    }


def anything(rng: Rng) -> dict[str, Any]:
    """Any sizes at all."""
    return {
        "lens": lens_of(rng, rng.integers(0, pick(rng, 40, 80), rng.integers(1, 6)), 40),
        "group": int(rng.integers(1, 5)),
        "dtype": pick(rng, "f32", *SIXTEEN),
        "dim": rng.integers(1, 257),
        "v_dim": pick(rng, None, None, None, int(rng.integers(1, 257))),
    }


def case_of(rng: Rng, sizes: dict[str, Any]) -> Case:
    """Sizes, and every other argument as it comes."""
    given = dict(sizes)
    kv_heads = int(pick(rng, 1, 1, 2, 3))
    group = int(given.pop("group"))
    page = given.setdefault("page", pick(rng, None, 1, 2, 8, 16, 17, 32))
    v_dim = given.get("v_dim")
    pair = page is None or (v_dim is not None and v_dim != given["dim"])
    layout = pick(rng, *PAIRS, *(() if pair else ONE_TENSOR)) if page else "NHD"
    dtype = given["dtype"]
    common = {
        "heads": (kv_heads * group, kv_heads),
        "cache": pick(rng, "same", "same", *FP8),
        "layout": layout,
        "window": (int(pick(rng, -1, -1, rng.integers(0, 200))), int(pick(rng, -1, -1, rng.integers(0, 20)))),
        "softcap": pick(rng, 0.0, 0.0, 3.0),
        "descale": pick(rng, None, "1", "H", "SH"),
        "scale": pick(rng, None, None, 1.5 * given["dim"] ** -0.5, -(given["dim"] ** -0.5)),
        "pad_tokens": pick(rng, 0, 3),
        "pad_seqs": pick(rng, None, 0, 2),
        "causal": pick(rng, True, False),
        "alibi": pick(rng, None, None, "H", "SH"),
        "sinks": pick(rng, None, "f32", dtype if dtype in TOLERANCE else "bf16"),
        "lse": pick(rng, True, True, False),
    }
    if layout not in ONE_TENSOR:  # what flash_attn_varlen_func alone has
        common |= {"leftpad": pick(rng, True, False, False), "used": pick(rng, True, False)}
    given = {**common, **given}
    given["dim"] = int(given["dim"])
    return Case(**given)


def attend(frontend: TorchFrontend, rng: Rng, sizes: Callable[[Rng], dict[str, Any]]) -> str:
    """A random call of attention; returns the engines that served it."""
    case = case_of(rng, sizes(rng))
    function, arguments = call_of(rng, case)
    arguments["batch_invariant"] = bool(rng.random() < 0.1)
    note(f"{case} batch_invariant={arguments['batch_invariant']}")
    poison(frontend, case)
    first = run(frontend, function, arguments)
    second = run(frontend, function, arguments)
    expected = getattr(reference, function)(**arguments)
    queries = arguments["query" if function == "paged_attention" else "q"]
    rounding = rounding_of_weights(frontend, function, arguments)
    assert_attention(first[0], first[1], expected, queries.dtype, rounding)
    same(first, second)
    return " ".join(sorted(set(served_by(frontend, function, arguments) or ("unknown",))))


def differentiate(frontend: TorchFrontend, rng: Rng) -> str:
    """The gradients of a random call of flash_attn_varlen_func; returns the engine that computed them."""
    sizes = pick(rng, wide, tile, float32, apart, anything)(rng)
    dtype = pick(rng, "f32", *SIXTEEN)
    lens = tuple(sizes["lens"])[:6]
    case = case_of(rng, {**sizes, "lens": lens, "page": None, "cache": "same", "dtype": dtype})
    case = dataclasses.replace(case, descale=None)
    arguments = flash_attn_arguments(rng, case) | {"deterministic": pick(rng, True, False)}
    once = pick(rng, None, None, None, "k", "v")
    if once is not None:
        arguments[once] = expanded(arguments[once])
    note(f"gradients {case} deterministic={arguments['deterministic']} expanded={once}")
    grads = cotangents(rng, arguments)
    wanted = tuple(name for name in SOURCES if name in arguments)
    first, second = (frontend.gradients("flash_attn_varlen_func", arguments, wanted, grads) for _ in range(2))
    out, _ = frontend.flash_attn_varlen_func(**arguments)
    expected = gradients_from(arguments, out, *grads)
    for name in wanted:
        assert_gradients(first[name], expected[name], arguments["q"].dtype, name, frontend.device)
    if arguments["deterministic"] or frontend.device == "cpu":
        same(tuple(first.values()), tuple(second.values()))
    return differentiated_by(frontend, arguments) or "unknown"


def write_and_attend(frontend: TorchFrontend, rng: Rng) -> str:
    """A random call of ragged_paged_attention; returns the engines that served it."""
    sizes = pick(rng, few, wide, tile, fp8, float32, apart, anything)(rng)
    case = case_of(rng, {**sizes, "page": sizes.get("page") or pick(rng, 1, 8, 16, 17)})
    case = dataclasses.replace(case, leftpad=False, used=False, descale=pick(rng, None, "1", "H"))
    quantized = case.cache != "same" or case.dtype in ("e4m3", "e5m2")
    new = pick(rng, "same", "f32", *SIXTEEN) if quantized else "same"
    slots = pick(rng, None, None, "i32", "i64", "short")
    note(f"{case} new={new} slots={slots}")
    arguments = ragged_paged_attention_arguments(rng, case, new, slots)
    poison(frontend, case)
    op, given = "ragged_paged_attention", arguments
    packed = qkvpacked(arguments)
    if packed and rng.random() < 0.5:
        op, given = "ragged_paged_attention_qkvpacked", packed
    first, second = (run(frontend, op, given) for _ in range(2))
    out, lse, cache = reference.ragged_paged_attention(**arguments)
    rounding = rounding_of_weights(frontend, "ragged_paged_attention", arguments)
    assert_attention(first[0], first[1], (out, lse), arguments["query"].dtype, rounding)
    caches = [caches_of({"kv_cache": x}) for x in (first[2], second[2], cache)]
    same(caches[0], caches[2])
    same((*first[:2], *caches[0]), (*second[:2], *caches[1]))
    return " ".join(sorted(set(served_by(frontend, op, given) or ("unknown",))))


def write(frontend: TorchFrontend, rng: Rng) -> str:
    layout, dtype = pick(rng, *LAYOUTS), pick(rng, "f32", *SIXTEEN, "fp8")
    kv_cache_dtype = pick(rng, "auto", "auto", "fp8", "fp8_e4m3", "fp8_e5m2")
    heads, dim = int(rng.integers(1, 6)), int(pick(rng, 64, 128, rng.integers(1, 257)))
    blocks, page = int(rng.integers(1, 9)), int(pick(rng, 1, 8, 16, 17))
    tokens = int(rng.integers(0, min(blocks * page, 40), endpoint=True))
    v_dim = int(rng.integers(1, 257)) if layout in PAIRS and pick(rng, True, False) else dim
    fp8 = {"fp8_e5m2": "e5m2"}.get(kv_cache_dtype, "e4m3")
    dtype = fp8 if dtype == "fp8" else dtype  # copied
    stored = dtype if kv_cache_dtype == "auto" else pick(rng, fp8, "u8")
    caches = empty_caches(layout, blocks, page, heads, dim, DTYPES[stored], v_dim)
    slots = rng.permutation(blocks * page)[:tokens].astype(pick(rng, np.int32, np.int64))
    slots[rng.random(tokens) < 0.1] = pick(rng, -1, blocks * page, np.iinfo(slots.dtype).max)
    names = ("key_cache", "value_cache") if len(caches) == 2 else ("kv_cache",)
    rows = tokens + int(pick(rng, 0, 2))
    arguments: Arguments = {
        "key": normal(rng, (rows, heads, dim), DTYPES[dtype]),
        "value": normal(rng, (rows, heads, v_dim), DTYPES[dtype]),
        **dict(zip(names, caches, strict=True)),
        "slot_mapping": slots,
        "kv_cache_dtype": kv_cache_dtype,
        "layout": layout,
    }
    if kv_cache_dtype != "auto" and pick(rng, True, False):
        for name in ("k_scale", "v_scale"):
            shape = pick(rng, (1,), (heads,))
            arguments[name] = pick(
                rng, rng.uniform(0.1, 2, shape).astype(np.float32), float(rng.uniform(0.1, 2))
            )
    function = "reshape_and_cache_flash" if len(caches) == 2 else "reshape_and_cache"
    note(f"{function} {layout} {dtype} {kv_cache_dtype} {caches[0].shape} {slots.shape}")
    expected = getattr(reference, function)(**arguments)
    for _ in range(2):
        same(run(frontend, function, arguments), expected if isinstance(expected, tuple) else (expected,))
    return function


def merge(frontend: TorchFrontend, rng: Rng) -> str:
    dtype = pick(rng, "f32", *SIXTEEN)
    tokens, heads, dim = int(rng.integers(0, 40)), int(rng.integers(1, 9)), int(rng.integers(1, 257))
    arguments: Arguments = {}
    for part in "ab":
        out, lse = (
            normal(rng, (tokens, heads, dim), DTYPES[dtype]),
            rng.normal(0, pick(rng, 1, 30), (heads, tokens)),
        )
        lse += pick(rng, 0, 0, 1e4, -1e5)
        empty = rng.random(lse.shape) < 0.1
        lse[empty], out[empty.T] = pick(rng, -np.inf, np.inf), np.nan
        arguments |= {f"out_{part}": out, f"lse_{part}": lse.astype(np.float32)}
    note(f"merge_attn_states {dtype} {tokens} {heads} {dim}")
    first = run(frontend, "merge_attn_states", arguments)
    expected_out, expected_lse = reference.merge_attn_states(**arguments)
    assert_close(first[0], expected_out, TOLERANCE[dtype])
    assert_close(first[1], expected_lse, LSE_TOLERANCE, "lse")
    same(first, run(frontend, "merge_attn_states", arguments))
    return "merge_attn_states"


# name: (a call, the engines of which each must have served one)
KINDS: dict[str, tuple[Callable[[TorchFrontend, Rng], str], tuple[str, ...]]] = {
    "few": (lambda f, rng: attend(f, rng, few), ("swap", "split")),
    "chunks": (lambda f, rng: attend(f, rng, chunks), ("swap",)),
    "wide": (lambda f, rng: attend(f, rng, wide), ("swap", "wide")),
    "tile": (lambda f, rng: attend(f, rng, tile), ("swap", "split", "tile")),
    "fp8": (lambda f, rng: attend(f, rng, fp8), ("swap", "split", "wide", "tile")),
    "float32": (lambda f, rng: attend(f, rng, float32), ("split32", "tile32")),
    "anything": (lambda f, rng: attend(f, rng, anything), ("tile32", "swap", "split", "wide", "tile")),
    "apart": (lambda f, rng: attend(f, rng, apart), ("large_split", "large", "general")),
    "copies": (lambda f, rng: attend(f, rng, copies), ("wide", "large")),
    "differentiate": (differentiate, ("wide", "tile", "tile32", "general")),
    "write_and_attend": (write_and_attend, ("tile32", "swap", "split", "wide", "tile", "general")),
    "write": (write, ("reshape_and_cache", "reshape_and_cache_flash")),
    "merge": (merge, ("merge_attn_states",)),
}
_LAST = [""]


def note(call: str) -> None:
    """Remember what is being called, for the message of a failure."""
    _LAST[0] = call


def run(frontend: TorchFrontend, function: str, arguments: Arguments) -> tuple[Any, ...]:
    result = getattr(frontend, function)(**arguments)
    return result if isinstance(result, tuple) else (result,)


def same(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    for x, y in zip(first, second, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert_same_bits(np.asarray(y), np.asarray(x), "a second run")


def poison(frontend: TorchFrontend, case: Case) -> None:
    """Leave NaNs in the memory that the allocator is likely to give to the result."""
    dtype = {"f32": "float32", "f16": "float16"}.get(case.dtype, "bfloat16")
    tokens = sum(len_q for len_q, _ in case.lens) + case.pad_tokens
    out = frontend.torch.empty(
        (tokens, case.heads[0], case.dims[1]),
        dtype=getattr(frontend.torch, dtype),
        device=frontend.target_device(),
    )
    out.fill_(float("nan"))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls(request: pytest.FixtureRequest, frontend: TorchFrontend, kind: str) -> None:
    option = request.config.option
    seconds = option.random_seconds / len(KINDS)
    call, engines = KINDS[kind]
    served: collections.Counter[str] = collections.Counter()
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline or number < 5:
        if option.random_only in (None, number):
            rng = np.random.default_rng([option.seed, sorted(KINDS).index(kind), number])
            try:
                served[call(frontend, rng)] += 1
            except Exception as error:
                raise AssertionError(f"call {number} of seed {option.seed}: {kind}: {_LAST[0]}") from error
        elif number > option.random_only:
            return
        number += 1
    print(f"{kind}: {number} calls of seed {option.seed}: {dict(served)}")
    if option.device == "cuda":
        met = {engine for names in served for engine in names.split()}
        assert set(engines) <= met, f"{served}: too few calls to meet {engines}"
