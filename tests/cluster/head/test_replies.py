"""A head's traces: the moments of every stage, moved to the head's clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.cluster.scripted_node import ScriptedNode, serving
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_llama

from shardnet.api.client import connect
from shardnet.cluster.head.replies import trace_pieces
from shardnet.cluster.node.node import listening
from shardnet.cluster.peers import peer_links
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.cluster.peers.peer_links import ClockOffset, compare_clock
from shardnet.cluster.ring.stage_port import LocalPort
from shardnet.errors import LinkError, ShardnetError
from shardnet.runtime.engine.requests import StepTrace
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.activity import MAX_PIECE_STEPS, ClockRead, ReadClock, TracedStep
from shardnet.wire.messages.extras import StageTiming
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice

MESSAGE = Generate(request=3, choice=ModelChoice(model="m"), sampling=SamplingParams())
STEP = TracedStep(
    1, 0, 1, 1, 1, 5000, 6000, [StageTiming(0, 9, 0, 5000), StageTiming(1, 9, 0, 905_500)]
)


def offset(at_us: int, ahead_us: float, within_us: float = 0) -> ClockOffset:
    return ClockOffset(at_us=at_us, ahead_us=ahead_us, within_us=within_us)


def test_a_clock_that_runs_fast_is_followed() -> None:
    """It is 900 000 us ahead at first and 1000 us more at the end: half way there, by half."""
    before = [offset(0, 0), offset(0, 900_000, 20)]
    after = [offset(10_000, 0), offset(10_000, 901_000, 70)]
    trace = StepTrace(submitted_us=4000, steps=[STEP], n_left_out=2)
    [piece] = trace_pieces(MESSAGE, trace, ["anna", "bert"], before, after)
    assert [timing.arrived_us for timing in piece.steps[0].timings] == [5000, 5000]
    assert (piece.request, piece.submitted_us, piece.n_left_out) == (3, 4000, 2)
    assert piece.clocks_within_us == [0, 70]


@pytest.mark.parametrize("n_steps", [0, 1, MAX_PIECE_STEPS, MAX_PIECE_STEPS + 1])
def test_a_long_trace_travels_in_pieces(n_steps: int) -> None:
    same = [offset(0, 0)] * 2
    steps = [replace(STEP, step=step) for step in range(n_steps)]
    trace = StepTrace(submitted_us=0, steps=steps)
    pieces = list(trace_pieces(MESSAGE, trace, ["anna", "bert"], same, same))
    assert [step for piece in pieces for step in piece.steps] == steps
    assert len(pieces) == max(1, -(-n_steps // MAX_PIECE_STEPS))


def test_a_clock_is_compared_over_a_link_that_is_slow_at_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several readings the quickest counts: a delay one way only would look like an offset."""
    now_us = 0
    delays_us = iter([(700, 10), (10, 10), (10, 400), (5, 900), (300, 0)])
    monkeypatch.setattr(peer_links, "now_us", lambda: now_us)

    class Peer(ScriptedNode):
        async def handle(self, control: ControlLink, message: Incoming) -> None:
            nonlocal now_us
            assert isinstance(message, ReadClock)
            there_us, back_us = next(delays_us)
            now_us += there_us
            theirs_us = now_us + 5_000_000
            control.send(
                ClockRead(request=message.request, received_us=theirs_us, sent_us=theirs_us)
            )
            now_us += back_us

    async def refuse(control: ControlLink, message: Incoming) -> None:
        raise ShardnetError("it only asks")

    async def main() -> ClockOffset:
        async with serving(Peer()) as link, asyncio.TaskGroup() as tasks:
            control = ControlLink(link, refuse)
            reading = tasks.create_task(control.serve_to_the_end())
            found = await compare_clock(control)
            reading.cancel()
            return found

    found = asyncio.run(main())
    assert (found.ahead_us, found.within_us) == (5_000_000, 10)


def test_a_node_that_goes_while_clocks_are_compared_costs_no_traced_request(
    tmp_path: Path, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ring is replaced, and what was made is the client's; one comparison will do."""
    model = make_llama(tmp_path / "model")
    choice, compare, gone = ModelChoice(model=str(model)), LocalPort.compare_clock, [True, False]

    async def compare_or_go(port: LocalPort) -> ClockOffset:
        if gone.pop(0):
            raise LinkError("anna is gone")
        return await compare(port)

    monkeypatch.setattr(LocalPort, "compare_clock", compare_or_go)

    async def main() -> None:
        async with (
            asyncio.timeout(60),
            listening(small_settings(tmp_path), "127.0.0.1", 0) as node,
            connect(node.address) as client,
        ):
            for _ in range(2):
                asked = client.complete([[5, 6]], model=choice, max_tokens=2, trace=True)
                [result] = await asked
                assert result.trace is not None
                assert len(result.trace.clocks_within_us) == 1
                gone.extend([False, True])
            assert gone == [False, True]

    asyncio.run(main())
