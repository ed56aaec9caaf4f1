"""Parts of a ring that fail: each failure ends one request by name, and the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from support.rings import fake_ring as rings
from support.rings.fake_ring import FakeRing, expected_tokens, fake_ring, request_of

from shardnet.errors import CapacityError, ShardnetError
from shardnet.runtime.engine.requests import GenerationFinished, GenerationRequest
from shardnet.runtime.stage.compute import Activations, Samples
from shardnet.types import MicroBatch, SequenceId

DEADLINE_S = 60.0


class Panic(BaseException):
    """What a Rust library raises when it panics: no Exception."""


@dataclass
class FailingText:
    """A TextAssembler that fails at its n-th token, or at the end."""

    error: BaseException
    left: int

    def push(self, token_id: int) -> tuple[str, bool]:
        self.left -= 1
        if not self.left:
            raise self.error
        return "", False

    def finish(self) -> str:
        raise self.error


async def everything(ring: FakeRing, request: GenerationRequest) -> None:
    async for event in ring.engine.generate(request):
        assert not isinstance(event, GenerationFinished)


@asynccontextmanager
async def ring_of(n_stages: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeRing]:
    monkeypatch.setattr(rings, "WIDTH", 4)
    async with (
        asyncio.timeout(DEADLINE_S),
        fake_ring(n_stages, over="memory", chunk_rows=64, max_slots=4, room_blocks=64) as ring,
    ):
        yield ring


@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("left", [1, 3, 99], ids=["at the first", "later", "at the end"])
@pytest.mark.parametrize("error", [Panic("byte index 1"), MemoryError()])
def test_a_text_that_fails_ends_its_request_alone(
    error: BaseException, left: int, n_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with ring_of(n_stages, monkeypatch) as ring:
            other = asyncio.create_task(ring.generate([1, 2, 3], 30))
            broken = replace(request_of([4, 5], 8), text=FailingText(error, left))
            with pytest.raises(ShardnetError, match=rf"text .*{type(error).__name__}.*report it"):
                await everything(ring, broken)
            assert await other == expected_tokens([1, 2, 3], 30)
            assert await ring.generate([6], 5) == expected_tokens([6], 5)
            assert ring.engine.n_active == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("a bug"), r"step 1 at rank 0: .*report it"),
        (MemoryError(), r"no memory is left for step 1 at rank 0; start that node with less"),
    ],
)
def test_a_step_that_fails_ends_its_requests_alone(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with ring_of(1, monkeypatch) as ring:
            [compute] = ring.computes

            def fail(batch: object, activations: object) -> Samples:
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(compute, "compute", fail)
                with pytest.raises(ShardnetError, match=words):
                    await ring.generate([1, 2], 3)
            assert await ring.generate([6], 5) == expected_tokens([6], 5)

    asyncio.run(main())


@pytest.mark.parametrize("n_stages", [1, 2])
def test_one_request_fails_where_memory_is_short_and_the_others_start_anew(
    n_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage has none for the third beside others. Their steps in flight say nothing."""
    prompts = [[1, 2, 3], [5] * 150, [9, 8] * 70]

    async def main() -> None:
        async with ring_of(n_stages, monkeypatch) as ring:
            compute, n_failed = ring.computes[-1], 0
            computed = compute.compute

            def short(batch: MicroBatch, activations: Activations | None) -> Activations | Samples:
                nonlocal n_failed
                if {group.sequence_id for group in batch.groups} > {SequenceId(3)}:
                    n_failed += 1
                    raise MemoryError
                return computed(batch, activations)

            monkeypatch.setattr(compute, "compute", short)
            done = await asyncio.gather(
                *(ring.generate(prompt, 40) for prompt in prompts), return_exceptions=True
            )
            assert n_failed
            assert done[:2] == [expected_tokens(prompt, 40) for prompt in prompts[:2]]
            assert isinstance(done[2], CapacityError)
            assert ring.engine.n_active == 0
            counters = ring.engine.counters
            assert counters.used_blocks == counters.warm_blocks

    asyncio.run(main())
