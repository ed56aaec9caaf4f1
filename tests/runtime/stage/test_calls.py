"""How much Python a decode step takes: counted, as counts do not depend on the machine's load."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.rings import fake_ring

import shardnet
from shardnet.runtime.engine.requests import GenerationRequest
from shardnet.sampling_params import SamplingParams
from shardnet.transport.link import LinkOptions

PACKAGE = str(Path(shardnet.__file__).parent)
N_STAGES = 3
N_STEPS = 30
MOST_CALLS = 90
"""Calls of our own functions per step and stage; 88 when this was written. Threads of our own
count here, where those of the standard library took more calls that did not."""


class CallCount:
    """Counts calls of the package's functions, on every thread, while it `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[str] = Counter()

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and code.co_filename.startswith(PACKAGE):
            self.calls[f"{Path(code.co_filename).name}:{code.co_qualname}"] += 1


@contextmanager
def counting() -> Iterator[CallCount]:
    """Count on this thread and on those that begin meanwhile."""
    count = CallCount()
    threading.setprofile(count.profile)
    sys.setprofile(count.profile)
    try:
        yield count
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as its documentation says


def test_a_decode_step_takes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_ring, "WIDTH", 64)  # a row that comes with one read

    async def main(count: CallCount) -> None:
        options = LinkOptions(heartbeat_s=1e6, silence_s=1e7)  # they come by the clock
        async with fake_ring.fake_ring(N_STAGES, over="tcp", options=options) as ring:
            request = GenerationRequest(
                prompt=(1, 2, 3),
                sampling=SamplingParams(),
                max_tokens=N_STEPS + 10,
                stop_ids=frozenset(),
                text=fake_ring.NoText(),
            )
            n_events = 0
            async for _ in ring.engine.generate(request):
                n_events += 1
                count.is_on = 5 <= n_events < 5 + N_STEPS

    with counting() as count:
        asyncio.run(main(count))
    per_stage = sum(count.calls.values()) / (N_STEPS * N_STAGES)
    assert per_stage < MOST_CALLS, count.calls.most_common(30)
    assert per_stage > 20, "nothing was counted"
