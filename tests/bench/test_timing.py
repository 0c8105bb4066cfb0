from __future__ import annotations

from flashxla.bench import timing


def test_runs_take_turns():
    order: list[str] = []
    counts = {"a": 0, "b": 0}

    def run(name: str) -> None:
        counts[name] += 1
        if not order or order[-1] != name:
            order.append(name)

    samples = timing.interleave({name: lambda name=name: run(name) for name in counts}, 4, min_seconds=1e-4)
    assert {name: len(times) for name, times in samples.items()} == {"a": 4, "b": 4}
    assert all(seconds > 0 for times in samples.values() for seconds in times)
    assert min(counts.values()) > 4  # an empty function needs many calls for a sample
    # Each round starts at another run.
    assert order == ["a", "b", "a", "b", "a"]


def test_ratio_pairs_samples_of_one_round():
    # Twice as slow in every round, while the machine's own speed drifts.
    assert timing.paired_ratio([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == 2.0
