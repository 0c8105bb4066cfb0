"""The sections prefill, decode and mixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from flashxla.bench.gpu import batch as batches
from flashxla.bench.gpu import ceilings, compare, contenders, peers, shapes
from flashxla.bench.gpu.batch import Batch
from flashxla.bench.gpu.compare import Contender, Row, Work
from flashxla.bench.gpu.settings import Settings
from flashxla.bench.gpu.shapes import Shape


def prefill_work(shape: Shape) -> Work:
    """The two products over the pairs that the mask leaves."""
    return Work(shapes.flops(shape), "TFLOP/s", ceilings.MATMUL)


def decode_work(shape: Shape) -> Work:
    """Keys and values, read once."""
    return Work(shapes.kv_bytes(shape), "TB/s", ceilings.COPY)


def cases(section: str, settings: Settings) -> list[str]:
    """Their names."""
    return [shape.name for shape in shapes.of_section(section, settings)]


def run(section: str, case: str, settings: Settings) -> Iterator[Row]:
    """A case's rows."""
    shape = next(shape for shape in shapes.of_section(section, settings) if shape.name == case)
    batch = batches.build(shape, settings.device)
    if section == "mixed":
        yield from compare.run(case, shape.dtype, _mixed(batch, settings), settings)
        return
    main = shape.plain and shape.dtype == settings.dtype
    found = [contenders.paged(batch)]
    if section == "prefill" and shape.layout == "NHD" and shape.page == 16:
        found.append(contenders.dense(batch))
    if main:
        found.append(contenders.in_jax(batch))
    if settings.peers:
        found += peers.of_attention(batch)
    work = prefill_work(shape) if section == "prefill" else decode_work(shape)
    yield from compare.run(case, shape.dtype, found, settings, work)


def _mixed(batch: Batch, settings: Settings) -> list[Contender]:
    """All rows in one call, then the decode rows and the prompt in a call each."""
    found = [contenders.paged(batch)]
    if batch.shape.plain:
        found.append(contenders.in_jax(batch))
    count = len(batch.shape.lens) - 1
    decode, prompt = batches.part(batch, 0, count), batches.part(batch, count, count + 1)
    found.append(contenders.in_parts(batch, [decode, prompt]))
    for name, one in (("decode rows alone", decode), ("prompt alone", prompt)):
        found.append(dataclasses.replace(contenders.paged(one), name=name))
    if settings.peers and batch.shape.plain:
        found.append(peers.flash_varlen(batch))
    return found
