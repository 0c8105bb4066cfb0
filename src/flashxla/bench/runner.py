"""Runs a topic: checks that all contenders compute the same, then times them in turn."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

from flashxla.bench import timing
from flashxla.bench.frameworks import FRAMEWORKS, Framework
from flashxla.bench.topic import Options, Run, Topic, Unavailable

_CEILING = "ceiling"
# Absolute and relative. 16 bits: contenders may round softmax weights and partial results to their dtype.
TOLERANCE = {"float32": (1e-4, 1e-4), "float16": (4e-3, 4e-3), "bfloat16": (3e-2, 2e-2)}

Row = dict[str, Any]


def run(topic: Topic, options: Options) -> list[Row]:
    """One row for each (case, dtype, contender), as the JSON report holds it."""
    framework = FRAMEWORKS[options.frontend](options)
    rows: list[Row] = []
    for case in topic.cases["quick" if options.quick else options.device]:
        for dtype in options.dtypes:
            print(f"{topic.name}: {case.name}, {dtype}", file=sys.stderr)
            rows += _run_case(topic, case, dtype, options, framework)
    return rows


def _run_case(
    topic: Topic, case: Any, dtype_name: str, options: Options, framework: Framework
) -> Iterator[Row]:
    framework.seed()
    dtype = framework.dtype(dtype_name)
    problem = topic.problem(case, dtype, framework.device(options.device))
    ours = topic.ours.build(problem)
    runs = _peers(topic, case, problem, options)
    errors = {
        name: _check(f"{topic.name} {case.name}: {name}", ours, run, dtype_name, topic.roundings, framework)
        for name, run in runs.items()
    }

    ceiling = topic.ceiling(dtype, options)
    timed = {topic.ours.name: ours, **(runs if options.peers else {})}
    calls = {name: run.call for name, run in timed.items()}
    min_seconds = 0.001 if options.quick else timing.MIN_SAMPLE_SECONDS
    samples = timing.interleave(
        {**calls, _CEILING: ceiling.call}, options.rounds, min_seconds, framework.sample
    )
    work = topic.work(case, dtype)
    for name in timed:
        times = samples[name]
        yield {
            "case": case.name,
            "dtype": dtype_name,
            "contender": name,
            "seconds": statistics.median(times),
            "fastest_seconds": min(times),
            "samples": len(times),
            "rate": statistics.median(work / t / topic.scale for t in times),
            "unit": topic.unit,
            "ceiling": ceiling.name,
            "ceiling_rate": statistics.median(ceiling.work / t / topic.scale for t in samples[_CEILING]),
            "of_ceiling": timing.paired_ratio(samples[_CEILING], times) * work / ceiling.work,
            # How many times our speed is its speed.
            "ours_is_faster": timing.paired_ratio(times, samples[topic.ours.name]),
            "max_difference": errors.get(name, 0.0),
        }


def _peers(topic: Topic, case: Any, problem: Any, options: Options) -> dict[str, Run]:
    """Those that serve a case. Without --peers one, which still says whether our results are right."""
    runs: dict[str, Run] = {}
    for peer in topic.peers:
        if (runs and not options.peers) or not peer.serves(case, options.device):
            continue
        try:
            runs[peer.name] = peer.build(problem)
        except Unavailable as error:
            print(f"{topic.name}: {case.name}: {peer.name} not measured: {error}", file=sys.stderr)
    return runs


def _check(what: str, ours: Run, peer: Run, dtype: str, roundings: float, framework: Framework) -> float:
    """The largest difference between two runs' results. Raises RuntimeError if they do not agree."""
    atol, rtol = (roundings * tolerance for tolerance in TOLERANCE[dtype])
    largest = 0.0
    for a, b in zip(ours.results(ours.call()), peer.results(peer.call()), strict=True):
        try:
            largest = max(largest, framework.difference(a, b, atol, rtol))
        except AssertionError as error:
            raise RuntimeError(f"{what} and flashxla disagree: {error}") from None
    return largest
