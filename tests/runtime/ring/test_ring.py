"""Rings of workers and links: in order, complete, and never waiting on themselves."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from support.rings.fake_ring import expected_tokens, fake_ring
from support.rings.rings import NoText
from support.soak import cases

from shardnet.errors import CapacityError, SamplingError, ShardnetError, UsageError
from shardnet.runtime.engine.requests import GenerationRequest, TokenGenerated
from shardnet.sampling_params import SamplingParams

DEADLINE_S = 60.0


def prompt(number: int, n_tokens: int) -> list[int]:
    return [(number * 7 + place * 3) % 50 for place in range(n_tokens)]


@pytest.mark.parametrize("over", ["memory", "tcp"])
@pytest.mark.parametrize(
    ("n_stages", "n_sequences"),
    [(stages, n) for stages in cases([1, 3], [2, 4]) for n in range(1, stages + 2)],
)
def test_the_ring_never_waits_on_itself(n_stages: int, n_sequences: int, over: str) -> None:
    """Queues of one frame, the smallest buffers, frames larger than both; first and later steps."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(n_stages, over=over) as ring:
            prompts = [prompt(number, 9 + number) for number in range(n_sequences)]
            texts = await asyncio.gather(*(ring.generate(ids, 5) for ids in prompts))
            assert texts == [expected_tokens(ids, 5) for ids in prompts]
            again = await ring.generate(prompts[0], 3)
            assert again == expected_tokens(prompts[0], 3)

    asyncio.run(main())


def test_timings_of_every_stage_come_with_the_tokens() -> None:
    async def main() -> None:
        async with fake_ring(3, over="memory") as ring:
            await ring.generate([1, 2, 3], 4)
            assert [stage.rank for stage in ring.timing.per_stage] == [0, 1, 2]
            assert all(stage.compute_ms > 0 for stage in ring.timing.per_stage)

    asyncio.run(main())


def test_a_step_that_a_stage_cannot_compute_fails_its_request_alone() -> None:
    async def main() -> None:
        async with fake_ring(3, over="memory") as ring:
            ring.computes[1].fail_at = 49
            good, bad = await asyncio.gather(
                ring.generate([1, 2, 3], 4), ring.generate([1, 49], 4), return_exceptions=True
            )
            assert isinstance(bad, ShardnetError)
            assert "rank 1 met token 49" in str(bad)
            tokens = expected_tokens([1, 2, 3], 4)
            assert good == tokens or 49 in tokens
            ring.computes[1].fail_at = None
            assert await ring.generate([1, 49], 2) == expected_tokens([1, 49], 2)

    asyncio.run(main())


def test_giving_up_early_frees_the_slot_on_every_stage() -> None:
    async def main() -> None:
        async with fake_ring(3, over="memory") as ring:
            request = GenerationRequest(
                prompt=(1, 2, 3),
                sampling=SamplingParams(),
                max_tokens=500,
                stop_ids=frozenset(),
                text=NoText(),
            )
            async with aclosing(ring.engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, TokenGenerated):
                        break
            assert ring.engine.n_active == 0
            await ring.generate([5, 6], 2)
            assert all(len(compute.owners) <= 1 for compute in ring.computes)

    asyncio.run(main())


def test_bad_requests_take_no_slot() -> None:
    async def main() -> None:
        async with fake_ring(2, over="memory") as ring:
            with pytest.raises(UsageError):
                await ring.generate([], 2)
            with pytest.raises(CapacityError):
                await ring.generate(prompt(0, 1024), 2)
            bad = GenerationRequest(
                prompt=(1,),
                sampling=SamplingParams(temperature=-1),
                max_tokens=1,
                stop_ids=frozenset(),
                text=NoText(),
            )
            with pytest.raises(SamplingError, match="temperature"):
                await anext(ring.engine.generate(bad))
            assert ring.engine.n_active == 0
            assert not any(compute.owners for compute in ring.computes)

    asyncio.run(main())


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_link_ends_every_request_with_its_cause(lost: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(3, over="tcp") as ring:
            running = [asyncio.create_task(ring.generate([n], 900)) for n in (1, 2)]
            await ring.generate([3], 2)
            ring.links[2 * lost].abort("pulled out")
            ends = await asyncio.gather(*running, return_exceptions=True)
            assert all(isinstance(end, ShardnetError) for end in ends)
            with pytest.raises(ShardnetError, match="broken"):
                await ring.generate([4], 1)

    asyncio.run(main())


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_link_that_is_lost_while_a_prompt_is_read_ends_the_request(lost: int) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), fake_ring(3, over="tcp") as ring:
            reading = asyncio.create_task(ring.generate(prompt(0, 700), 2))
            await asyncio.sleep(0)
            assert (ring.engine.counters.running, ring.engine.totals.n_steps) == (1, 0)
            ring.links[2 * lost].abort("pulled out")
            with pytest.raises(ShardnetError, match=r"pulled out|closed|broke"):
                await reading

    asyncio.run(main())
