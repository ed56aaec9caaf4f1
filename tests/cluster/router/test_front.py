"""Requests for one of several rings end when those are left, or are lost one after the other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from shardnet.cluster.peers.supervision import SupervisedJobs
from shardnet.cluster.router import routed_request
from shardnet.cluster.router.front import Front
from shardnet.cluster.router.kept_ring import KeptRing
from shardnet.cluster.router.routed_request import RoutedRequest
from shardnet.errors import DeadlineError, PeerFailedError, ShardnetError, SupersededError
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.generation import Finished, Generate, Timing
from shardnet.wire.messages.plans import ModelChoice


def unreached(jobs: SupervisedJobs) -> Front:
    """Two rings whose heads never answer."""
    choice = ModelChoice(model="m")
    rings = [
        SimpleNamespace(nodes=[SimpleNamespace(name=name)], choice=choice)
        for name in ("anna", "bert")
    ]

    async def reach(plan: Any) -> Any:
        await asyncio.Event().wait()

    plan: Any = SimpleNamespace(rings=rings)
    return Front(choice, plan, reach, jobs, lambda line: None)


@pytest.mark.parametrize("is_superseded", [True, False])
def test_whoever_waits_for_a_ring_learns_that_none_is_kept(is_superseded: bool) -> None:
    async def main() -> None:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            front = unreached(SupervisedJobs(tasks, lambda line: None))
            waiting = [
                asyncio.ensure_future(front.ring_for(b"")),
                asyncio.ensure_future(front.opened(lambda told: None)),
            ]
            await asyncio.sleep(0)
            error: ShardnetError = SupersededError("bert leads")
            if is_superseded:
                front.abandon(error)
            await front.close()
            for one in waiting:
                with pytest.raises(SupersededError if is_superseded else PeerFailedError):
                    await one

    asyncio.run(main())


class Breaking(RoutedRequest):
    """A request that breaks each ring that it is given to; the ring is whole again at once."""

    n_broken = 0

    async def _on(self, ring: Any, front: Front) -> None:
        self.n_broken += 1
        ring.n_times += 1
        self._made += [7] * (self.n_broken == 2)
        raise PeerFailedError("the ring broke")


def test_a_request_that_breaks_ring_after_ring_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_request, "IN_VAIN_S", 0.0)
    ring = Mock(n_times=1, n_taken_over=0)
    message = Generate(
        request=1, choice=ModelChoice(model="m"), sampling=SamplingParams(), token_ids=[1]
    )
    request = Breaking(Mock(), message, prompt=b"", made=[], n_sent=0, copy=None)
    with pytest.raises(PeerFailedError, match=r"the ring broke \(and 3 rings before it"):
        asyncio.run(request.run(Mock(ring_for=AsyncMock(return_value=ring))))
    assert request.n_broken == 5, "the second made a token"


def test_a_deadline_passes_while_no_ring_is_there() -> None:
    message = Generate(
        request=1,
        choice=ModelChoice(model="m"),
        sampling=SamplingParams(),
        token_ids=[1],
        deadline_s=0.01,
    )

    async def main() -> None:
        request = RoutedRequest(Mock(), message, prompt=b"", made=[], n_sent=0, copy=None)
        async with asyncio.timeout(10):
            with pytest.raises(DeadlineError, match=r"deadline of 0\.01 s, after 0 tokens"):
                await request.run(Mock(ring_for=lambda *_: asyncio.Event().wait()))

    asyncio.run(main())


def test_tokens_that_were_made_before_count_for_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is resumed begins with what another head had made of it."""
    monkeypatch.setattr(routed_request, "time", Mock(monotonic=Mock(side_effect=[10.0, 12.0])))
    message = Generate(
        request=1, choice=ModelChoice(model="m"), sampling=SamplingParams(), token_ids=[1]
    )
    request = RoutedRequest(Mock(), message, prompt=b"", made=[7] * 500, n_sent=500, copy=None)
    request._n_rings, request._first_s = 2, 11.0
    request._made += [7, 7, 7]
    timing = Timing(ttft_s=0, total_s=0, decode_tok_s=0, load_s=0, per_stage=[])
    answer = Finished(
        request=1, finish_reason="length", prompt_token_ids=[], text="", timing=timing
    )
    assert request._finished(answer).timing.decode_tok_s == 2.0


def test_what_is_asked_of_a_ring_waits_for_the_pictures_before_it() -> None:
    """A control link on which too much waits is ended."""

    async def main() -> None:
        sent: list[bool] = []

        async def drain(*, shared: bool) -> None:
            link.is_full = False

        link: Any = Mock(is_full=True, drain=drain)
        control: Any = Mock(link=link, begin=lambda message, take: sent.append(link.is_full))
        plan: Any = Mock(nodes=[SimpleNamespace(name="anna")])
        plan.choice.asked_as = lambda choice: choice
        ring = KeptRing(plan, AsyncMock(), Mock(), Mock())
        ring._control = control
        message = Generate(
            request=1, choice=ModelChoice(model="m"), sampling=SamplingParams(), token_ids=[1]
        )
        async with ring.asking(message):
            assert sent == [False]

    asyncio.run(main())
