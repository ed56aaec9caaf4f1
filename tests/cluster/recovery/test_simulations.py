"""Simulated schedules of faults; scripts/soak runs 100 000 of them."""

from __future__ import annotations

import asyncio

import pytest
from support.chaos.simulate import SIMULATIONS, run_schedules
from support.chaos.virtual_time import NothingLeftError, run_virtually
from support.soak import is_soak

SCHEDULES = {"engine": 100, "peers": 6, "policy": 300}
LONG_SCHEDULES = {"engine": 60_000, "peers": 2_000, "policy": 38_000}
SEED = 18


@pytest.mark.timeout(7200 if is_soak() else 600)
@pytest.mark.parametrize("what", SIMULATIONS)
def test_every_schedule_ends_as_it_should(what: str) -> None:
    n = (LONG_SCHEDULES if is_soak() else SCHEDULES)[what]
    [(_, ends, failures)] = run_schedules(n, SEED, only=what)
    print(f"{what}: {dict(ends)}")
    assert not failures, "\n".join(map(str, failures[:5]))


@pytest.mark.parametrize("what", SIMULATIONS)
def test_a_seed_is_one_schedule(what: str) -> None:
    assert SIMULATIONS[what](SEED) == SIMULATIONS[what](SEED)


def test_virtual_time_costs_nothing_and_a_hang_is_found() -> None:
    async def wait_for_hours() -> float:
        await asyncio.sleep(36_000)
        return asyncio.get_running_loop().time()

    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    assert run_virtually(wait_for_hours()) == 36_000
    with pytest.raises(NothingLeftError, match="wait_for_ever"):
        run_virtually(wait_for_ever())
