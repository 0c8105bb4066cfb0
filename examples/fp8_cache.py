"""A cache in 8 bits: a quarter of float32's memory, and what it costs in exactness.

    python examples/fp8_cache.py
    python examples/fp8_cache.py --format fp8_e5m2 --device cuda

The cache holds x / scale in float8, one scale for all keys and one for all values, or one for each KV head. The write
quantises, attention multiplies by the scales again. fp8_e4m3 has more digits, fp8_e5m2 a wider range.
"""

from __future__ import annotations

import argparse

import torch

import flashxla.torch as fx

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16
LENGTHS = (900, 37, 512)
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


def main() -> None:
    """Write the same keys and values into caches of both kinds, attend, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=tuple(LARGEST), default="fp8_e4m3")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    device, tokens = args.device, sum(LENGTHS)
    key, value = (torch.randn(tokens, KV_HEADS, DIM, device=device) for _ in "kv")
    value[:, 1] *= 1000  # a head whose values are too large for float8, without a scale
    query = torch.randn(len(LENGTHS), HEADS, DIM, device=device)

    pages_each = [-(-length // PAGE) for length in LENGTHS]
    ends = torch.tensor(pages_each).cumsum(0)
    tables = torch.zeros(len(LENGTHS), max(pages_each), dtype=torch.int32)
    for row, end, count in zip(tables, ends.tolist(), pages_each, strict=True):
        row[:count] = torch.arange(end - count, end)
    slots = torch.cat(
        [int(table[0]) * PAGE + torch.arange(length) for table, length in zip(tables, LENGTHS, strict=True)]
    ).to(device)
    index = (
        torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        tables.to(device),
        torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=device),
        torch.tensor([len(LENGTHS)], dtype=torch.int32, device=device),
    )

    shape = (int(ends[-1]), PAGE, KV_HEADS, DIM)
    exact = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    fx.reshape_and_cache_flash(key, value, *exact, slots)
    expected = fx.paged_attention(query, exact, *index, DIM**-0.5)
    print(f"float32: {nbytes(exact)} bytes")

    largest = LARGEST[args.format]
    of_heads = [x.abs().amax((0, 2)) / largest for x in (key, value)]
    for name, k_scale, v_scale in (("no scales", None, None), ("a scale for each head", *of_heads)):
        keys, values = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in "kv")
        small = keys, values
        fx.reshape_and_cache_flash(key, value, *small, slots, args.format, k_scale, v_scale)
        out = fx.paged_attention(
            query,
            small,
            *index,
            DIM**-0.5,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_cache_dtype=args.format,
        )
        error = (out - expected).norm() / expected.norm()
        print(f"{args.format}, {name}: {nbytes(small)} bytes, error {error:.2%}")


def nbytes(caches: tuple[torch.Tensor, ...]) -> int:
    """Of all of them."""
    return sum(cache.nbytes for cache in caches)


if __name__ == "__main__":
    main()
