"""Simulated schedules in any number, each by its seed; what fails says how to run it again."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from support.chaos import simulated_engine, simulated_peers, simulated_policy

SIMULATIONS: dict[str, Callable[[int], Counter[str]]] = {
    "engine": simulated_engine.simulate,
    "peers": simulated_peers.simulate,
    "policy": simulated_policy.simulate,
}
SHARES = {"engine": 60, "peers": 2, "policy": 38}
"""Of 100 schedules, how many are of which: some cost more than others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A schedule that did not end as it should."""

    what: str
    seed: int
    error: str

    def __str__(self) -> str:
        return (
            f"{self.what}, seed {self.seed}: {self.error}\n"
            f"again: scripts/chaos --simulate 1 --what {self.what} --seed {self.seed}"
        )


def run_schedules(
    n: int, seed: int, *, only: str = ""
) -> Iterator[tuple[str, Counter[str], list[Failure]]]:
    """Run `n` schedules, from seed `seed` on; yield kind, how they ended, and what failed."""
    for what, simulate in SIMULATIONS.items():
        if only not in ("", what):
            continue
        many = n if only else max(1, n * SHARES[what] // 100)
        ends: Counter[str] = Counter(schedules=many)
        failures = []
        for number in range(seed, seed + many):
            try:
                ends += simulate(number)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failures.append(Failure(what=what, seed=number, error=_words(error)))
        yield what, ends, failures


def _words(error: BaseException) -> str:
    """Name the first cause, and where it was raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
