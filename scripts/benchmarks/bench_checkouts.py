"""Benchmark this checkout beside another one, an older commit for example, in turns.

    git clone . ../before && git -C ../before checkout 31fcfce
    python scripts/benchmarks/bench_checkouts.py ../before
    python scripts/benchmarks/bench_checkouts.py ../before --random-1b --rounds 2

Each round runs `scripts/bench` in both, with the bundled model, whose steps are mostly overhead, or
with the 1.1B shape, whose steps are mostly weights; the machine's drift meets both alike. Printed
are the medians of every figure and their ratio, this checkout's by the other's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]


def figures_of(checkout: Path, *arguments: str) -> dict[str, float]:
    """Run `scripts/bench` of a checkout and return its numbers by their path in the JSON."""
    command = [str(checkout / "scripts" / "bench"), *arguments, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=checkout)
    return dict(numbers(json.loads(done.stdout)))


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number in parsed JSON with its keys, joined by dots."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from numbers(inner, f"{path}.{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def main() -> None:
    """Run both checkouts in turns and print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n    ")[0])
    parser.add_argument("other", type=Path, help="a checkout with scripts/bench")
    parser.add_argument("--random-1b", action="store_true", help="the 1.1B shape, not the bundled")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    arguments = ["--random-1b"] if options.random_1b else []
    pair = (HERE, options.other.resolve())
    runs: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in pair}
    for turn in range(options.rounds):
        for checkout in pair if turn % 2 == 0 else pair[::-1]:
            print(f"round {turn + 1}: {checkout}", file=sys.stderr)
            runs[checkout].append(figures_of(checkout, *arguments))
    print(f"{'figure':50} {'here':>10} {'other':>10} {'ratio':>6}")
    for figure in runs[HERE][0]:
        ours, theirs = (
            statistics.median(run[figure] for run in runs[checkout] if figure in run)
            for checkout in pair
        )
        ratio = f"{ours / theirs:6.2f}" if theirs else "     -"
        print(f"{figure:50} {ours:10.4g} {theirs:10.4g} {ratio}")


if __name__ == "__main__":
    main()
