"""What tests of whole nodes in one process share."""

from __future__ import annotations

import asyncio

import pytest

from shardnet.cluster.measuring.measurement import Measured
from shardnet.cluster.measuring.measurement_service import MeasurementService
from shardnet.runtime.engine.engine import Engine

STEP_S = 0.02
"""How long a step takes at least where rings are in no hurry."""


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have plans made without measuring nodes and links."""

    async def measured(*_: object, **__: object) -> Measured:
        return Measured()

    monkeypatch.setattr(MeasurementService, "measured", measured)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rings rest between steps: one that only has to go on meanwhile takes no core."""
    pump = Engine._pump
    resting: set[Engine] = set()

    def end_rest(engine: Engine) -> None:
        resting.discard(engine)
        pump(engine)

    def rest(engine: Engine) -> None:
        if engine not in resting:
            resting.add(engine)
            asyncio.get_running_loop().call_later(STEP_S, end_rest, engine)

    monkeypatch.setattr(Engine, "_pump", rest)
