"""What tests of whole nodes in one process share."""

from __future__ import annotations

import pytest

from shardnet.cluster.measuring.measurement import Measured
from shardnet.cluster.measuring.measurement_service import MeasurementService


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have plans made without measuring nodes and links."""

    async def measured(*_: object, **__: object) -> Measured:
        return Measured()

    monkeypatch.setattr(MeasurementService, "measured", measured)
