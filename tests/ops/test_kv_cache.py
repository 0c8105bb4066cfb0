"""reshape_and_cache_flash and reshape_and_cache: writing keys and values into a paged cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests import reference
from tests.batches import empty_caches, normal
from tests.checks import DTYPES, assert_same_bits
from tests.frontends import Frontend, TorchFrontend

PAIR = ("NHD", "HND")
ONE_TENSOR = ("interleaved", "packed_HND", "packed_NHD", "stacked")
FORMATS = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}


@dataclasses.dataclass(frozen=True)
class Write:
    """One call.

    dtype: of key and value; fp8 is copied. cache: "same" as dtype, "e4m3", "e5m2", or with "u8:" before it: as raw
    bytes.
    """

    dtype: str = "f32"
    cache: str = "same"
    layout: str = "NHD"
    tokens: int = 42
    slots: int | None = None  # None: as many as tokens
    heads: int = 8
    dim: int = 64
    page: int = 16
    blocks: int = 8
    scale: str | None = None  # the shape: "()", "1" or "H"
    padding: float = 0.25  # the part of the slots that is negative
    slot_dtype: str = "i64"
    v_dim: int | None = None  # of values, where it is another

    def __str__(self) -> str:
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "default"


def arguments_of(rng: np.random.Generator, case: Write) -> dict[str, Any]:
    shape = (case.tokens, case.heads)
    dtype = DTYPES[case.dtype]
    cache_dtype = dtype if case.cache == "same" else DTYPES[case.cache.split(":")[0]]
    caches = empty_caches(case.layout, case.blocks, case.page, case.heads, case.dim, cache_dtype, case.v_dim)
    slots = rng.permutation(case.blocks * case.page)[: case.tokens if case.slots is None else case.slots]
    slots[rng.random(len(slots)) < case.padding] = -1
    names = ("key_cache", "value_cache") if len(caches) == 2 else ("kv_cache",)
    arguments: dict[str, Any] = {
        "key": normal(rng, (*shape, case.dim), dtype),
        "value": normal(rng, (*shape, case.v_dim or case.dim), dtype),
        **dict(zip(names, caches, strict=True)),
        "slot_mapping": slots.astype({"i32": np.int32, "i64": np.int64}[case.slot_dtype]),
        "layout": case.layout,
    }
    if case.cache != "same":
        arguments["kv_cache_dtype"] = FORMATS[case.cache.split(":")[-1]]
    if case.scale:
        sizes = {"()": (), "1": (1,), "H": (case.heads,)}[case.scale]
        for name in ("k_scale", "v_scale"):
            arguments[name] = np.float32(rng.uniform(0.02, 2.0, sizes))
            arguments[name] = np.asarray(arguments[name], np.float32)
    return arguments


def check_write(frontend: Frontend, arguments: dict[str, Any]) -> None:
    """The whole cache has the reference's bits: written slots and all others."""
    if "kv_cache" in arguments:
        actual = frontend.reshape_and_cache(**arguments)
        assert_same_bits(actual, reference.reshape_and_cache(**arguments), "kv_cache")
        return
    caches = frontend.reshape_and_cache_flash(**arguments)
    expected = reference.reshape_and_cache_flash(**arguments)
    for name, cache, wanted in zip(("key_cache", "value_cache"), caches, expected, strict=True):
        assert_same_bits(cache, wanted, name)


CASES = [
    Write("f32", slot_dtype="i32"),
    Write("bf16"),
    Write("f16", layout="HND"),
    Write("bf16", "e4m3", scale="1"),
    Write("f16", "e5m2", scale="H", layout="HND"),
    Write("f32", "u8:e4m3", scale="H", slot_dtype="i32"),
    Write("bf16", "u8:e5m2"),
    Write("f32", "e4m3", scale="()"),
    Write("bf16", layout="interleaved"),
    Write("f32", layout="packed_HND"),
    Write("f16", layout="packed_NHD"),
    Write("bf16", layout="stacked"),
    Write("f32", "u8:e4m3", layout="interleaved", scale="H"),
    Write("bf16", "e5m2", layout="packed_HND", scale="1"),
    Write("f16", "u8:e5m2", layout="packed_NHD", scale="H"),
    Write("f32", "e4m3", layout="stacked", scale="H"),
    Write("f32", slots=17),
    Write("bf16", tokens=1, padding=0.0),
    Write("f32", tokens=5, padding=1.0),
    Write("f32", slots=0),
    Write("f32", tokens=0),
    Write("bf16", heads=13, dim=46),
    Write("f32", "u8:e4m3", heads=13, dim=46, scale="H"),
    Write("f16", heads=1, dim=1, page=1, blocks=64),
    Write("f32", heads=3, dim=7, page=17),
    # fp8 keys are copied, whatever the scale is
    Write("e4m3"),
    Write("e5m2", "e5m2", scale="1", layout="HND"),
    Write("e4m3", "u8:e4m3", scale="H", layout="interleaved"),
    Write("e5m2", "u8:e5m2", layout="packed_HND", dim=7),
    # head sizes of keys and values
    Write("bf16", heads=2, dim=576, v_dim=512),
    Write("f16", "u8:e5m2", scale="H", layout="HND", dim=192, v_dim=128),
    Write("f32", "e4m3", scale="()", dim=1, v_dim=3),
    Write("e4m3", "u8:e4m3", dim=40, v_dim=72),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_write(frontend: Frontend, rng: np.random.Generator, case: Write) -> None:
    check_write(frontend, arguments_of(rng, case))


# The grid of vLLM's tests/kernels/attention/test_cache.py, but 16 and 128 blocks in place of 1024 and 10000:
# what depends on the number is the arithmetic of offsets, and test_last_slot_of_a_large_cache has more.
@pytest.mark.frontends("torch")
@pytest.mark.parametrize("heads_dim", [(8, 64), (8, 80), (8, 256), (13, 46)], ids=str)
@pytest.mark.parametrize("page", [8, 16, 32])
@pytest.mark.parametrize("blocks", [16, 128])
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("layout", PAIR)
@pytest.mark.parametrize("cache_scale", [("same", None), ("u8:e4m3", "1"), ("u8:e4m3", "H")], ids=str)
def test_public_grid(
    frontend: Frontend,
    rng: np.random.Generator,
    heads_dim: tuple[int, int],
    page: int,
    blocks: int,
    dtype: str,
    layout: str,
    cache_scale: tuple[str, str | None],
) -> None:
    (heads, dim), (cache, scale) = heads_dim, cache_scale
    case = Write(dtype, cache, layout, 42, None, heads, dim, page, blocks, scale, 0.0)
    check_write(frontend, arguments_of(rng, case))


@pytest.mark.frontends("torch")
@pytest.mark.parametrize("layout", (*PAIR, *ONE_TENSOR))
@pytest.mark.parametrize("cache", ["same", "e4m3", "e5m2", "u8:e4m3", "u8:e5m2"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("dim", [1, 2, 3, 8, 40, 72, 128, 255])
@pytest.mark.parametrize("page", [1, 8, 17])
def test_every_layout_and_format(
    frontend: Frontend, rng: np.random.Generator, layout: str, cache: str, dtype: str, dim: int, page: int
) -> None:
    scale = None if cache == "same" else str(rng.choice(["()", "1", "H"]))
    v_dim = int(rng.choice([dim, dim, 1, 40, 130])) if layout in PAIR else None
    blocks = -(-24 // page) + 2
    heads, tokens = int(rng.integers(1, 6)), int(rng.integers(1, 20))
    slot_dtype = str(rng.choice(["i32", "i64"]))
    case = Write(
        *(dtype, cache, layout, tokens, None, heads, dim, page, blocks, scale),
        slot_dtype=slot_dtype,
        v_dim=v_dim,
    )
    check_write(frontend, arguments_of(rng, case))


@pytest.mark.frontends("inductor")
@pytest.mark.parametrize("layout", ["NHD", "packed_HND"])
def test_write_inductor(frontend: Frontend, rng: np.random.Generator, layout: str) -> None:
    check_write(frontend, arguments_of(rng, Write("bf16", "u8:e4m3", layout, scale="H")))


@pytest.mark.parametrize("cache", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_quantization_edges(frontend: Frontend, dtype: str, cache: str) -> None:
    """Every fp8 number, the middles between them, subnormals, zeros of both signs, overflow and infinity."""
    numbers = np.sort(np.arange(256, dtype=np.uint8).view(DTYPES[cache]).astype(np.float32))
    numbers = numbers[np.isfinite(numbers)]
    middles = (numbers[1:] + numbers[:-1]) / 2
    around = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    large = np.float32([449, 463, 464, 465, 480, 57344, 60000, 61440, 65504, np.inf])
    x = np.concatenate([numbers, middles, *around, large, -large, np.float32([0.0, -0.0, 1e-7, -1e-7])])
    x = np.pad(x, (0, -len(x) % 64)).reshape(-1, 1, 64).astype(DTYPES[dtype])
    caches = empty_caches("NHD", len(x), 1, 1, 64, DTYPES[cache])
    arguments = {
        "key": x,
        "value": -x,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": np.arange(len(x), dtype=np.int32),
        "kv_cache_dtype": FORMATS[cache],
    }
    check_write(frontend, arguments)


@pytest.mark.parametrize("cache", ["same", "e4m3", "e5m2"])
def test_nan_stays_nan(frontend: Frontend, cache: str) -> None:
    key = np.full((2, 1, 40), np.nan, np.float32)
    shape = (2, 1, 1, 40)
    dtype = DTYPES["f32" if cache == "same" else cache]
    arguments = {
        "key": key,
        "value": key,
        "key_cache": np.zeros(shape, dtype),
        "value_cache": np.zeros(shape, dtype),
        "slot_mapping": np.array([1, 0], np.int64),
        "kv_cache_dtype": "auto" if cache == "same" else FORMATS[cache],
    }
    for written in frontend.reshape_and_cache_flash(**arguments):
        assert np.isnan(written.astype(np.float32)).all()


def test_fp8_is_e4m3(frontend: Frontend, rng: np.random.Generator) -> None:
    arguments = arguments_of(rng, Write("bf16", "u8:e4m3", scale="1"))
    check_write(frontend, arguments | {"kv_cache_dtype": "fp8"})


@pytest.mark.parametrize("cache", ["same", "u8:e4m3"])
def test_scales_may_be_numbers(frontend: Frontend, rng: np.random.Generator, cache: str) -> None:
    """As vLLM passes them; without an fp8 cache they do nothing."""
    arguments = arguments_of(rng, Write("f32", cache))
    check_write(frontend, arguments | {"k_scale": 0.5, "v_scale": 2.0})


def test_scales_of_one_argument_only(frontend: Frontend, rng: np.random.Generator) -> None:
    arguments = arguments_of(rng, Write("f32", "e4m3", scale="H"))
    del arguments["k_scale"]
    check_write(frontend, arguments)


def test_tokens_beyond_the_slots_are_not_read(frontend: Frontend, rng: np.random.Generator) -> None:
    arguments = arguments_of(rng, Write("f32", slots=5, padding=0.0))
    arguments["key"][5:] = np.nan
    check_write(frontend, arguments)


@pytest.mark.frontends("torch")
def test_last_slot_of_a_large_cache(frontend: TorchFrontend, rng: np.random.Generator) -> None:
    """Offsets beyond 2**31. The host's zeros take no memory until they are written."""
    shape = (2**15 + 1, 64, 2 * 4, 128)
    if frontend.device == "cpu":
        cache = frontend.torch.from_numpy(np.zeros(shape, np.uint8))
    else:
        cache = frontend.torch.zeros(shape, dtype=frontend.torch.uint8, device=frontend.target_device())
    key, value = (normal(rng, (2, 4, 128), DTYPES["bf16"]) for _ in "kv")
    slots = np.array([0, shape[0] * shape[1] - 1], np.int32)
    frontend.fx.reshape_and_cache(
        *(frontend.tensor(x) for x in (key, value)), cache, frontend.tensor(slots), "interleaved", "fp8_e5m2"
    )
    for token, slot in enumerate([cache[0, 0], cache[-1, -1]]):
        for first, tokens in enumerate((key, value)):
            expected = reference.quantize(tokens[token], np.float32(1), DTYPES["e5m2"]).view(np.uint8)
            assert_same_bits(frontend.array(slot[first::2]), expected, f"token {token}")
    assert not cache[0, 1].any() and not cache[-1, -2].any()
