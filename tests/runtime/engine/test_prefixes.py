"""Which prompts are read from disk: what all stages have, where that is faster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from shardnet.errors import LinkClosedError
from shardnet.runtime.engine import prefixes
from shardnet.runtime.engine.prefixes import FoundPrefix, Prefixes
from shardnet.types import SequenceId

PROMPT = [*range(1025)]


class Stages:
    """Stages that have some blocks, and fail or hang when told to."""

    def __init__(self, *restorable: int, rate: float = 0.0) -> None:
        self.found = [
            FoundPrefix(restorable=bits, block_bytes=1000, bytes_per_s=rate) for bits in restorable
        ]
        self.failing: Exception | None = None
        self.hangs = False
        self.is_whole = True
        self.forgets_nothing = False
        self.forgotten: list[int] = []

    async def find(self, keys: Sequence[bytes]) -> list[FoundPrefix]:
        if self.hangs:
            await asyncio.Event().wait()
        if self.failing:
            raise self.failing
        return self.found

    async def restore(
        self, sequence_id: SequenceId, keys: Sequence[bytes], token_ids: bytes
    ) -> bool:
        if self.failing:
            raise self.failing
        assert len(token_ids) == 1024 * len(keys)
        return self.is_whole

    async def forget(self, sequence_id: SequenceId) -> None:
        if self.forgets_nothing:
            raise LinkClosedError("gone")
        self.forgotten.append(sequence_id)


def found(stages: Stages, n_held: int = 0, prompt: Sequence[int] = PROMPT, **rest: Any) -> int:
    return asyncio.run(Prefixes(stages, b"ring", **rest).find(prompt, n_held))


def test_all_stages_must_have_the_same_beginning() -> None:
    """With windows a stage may lack a shorter one: bit n - 1 is for the first n blocks."""
    assert found(Stages(0b1111, 0b1111)) == 1024
    assert found(Stages(0b1111, 0b0110)) == 768
    assert found(Stages(0b1100, 0b0011)) == 0
    assert found(Stages(0b11111111, 0b11111111)) == 1024


def test_the_last_token_and_what_is_in_a_slot_do_not_count() -> None:
    assert found(Stages(0b1111), prompt=PROMPT[:1024]) == 768
    assert found(Stages(0b11), prompt=PROMPT[:512]) == 0
    assert found(Stages(0b1111), n_held=768) == 1024
    assert found(Stages(0b1111), n_held=769) == 0


def test_reading_must_be_faster_than_computing_on_the_slowest_stage() -> None:
    fast, slow = Stages(0b1111, rate=1e6).found[0], Stages(0b1111, rate=1e3).found[0]
    stages = Stages()
    stages.found = [fast, slow]  # 4 ms and 4 s
    assert found(stages, row_s=0.01) == 1024
    assert found(stages, row_s=0.001) == 0
    assert found(stages) == 1024
    assert found(Stages(0b1111), row_s=1e-9) == 1024, "it was never measured: it is now"


def test_what_prompts_cost_is_learned_from_their_steps() -> None:
    prefixes = Prefixes(Stages(0b1111, rate=1e3), b"ring", row_s=0.01)  # 4 s
    assert asyncio.run(prefixes.find(PROMPT, 0)) == 1024
    prefixes.learn(8, 8)
    assert asyncio.run(prefixes.find(PROMPT, 0)) == 1024
    for _ in range(8):
        prefixes.learn(256, 256 * 1000)
    assert asyncio.run(prefixes.find(PROMPT, 0)) == 0


def test_stages_that_fail_or_hang_have_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "FIND_S", 0.01)
    failing, hanging = Stages(0b1111), Stages(0b1111)
    failing.failing, hanging.hangs = LinkClosedError("gone"), True
    assert (found(failing), found(hanging)) == (0, 0)


def test_a_prefix_that_one_stage_could_not_read_is_forgotten_by_all() -> None:
    async def restored(stages: Stages) -> tuple[int, int]:
        prefixes = Prefixes(stages, b"ring")
        n_positions = await prefixes.restore(SequenceId(3), PROMPT, 1024)
        return n_positions, prefixes.restored_positions

    whole, partly, failing, full = Stages(), Stages(), Stages(), Stages()
    partly.is_whole, failing.failing = False, LinkClosedError("gone")
    full.failing = RuntimeError("not enough memory: you tried to allocate 8 GB")
    assert asyncio.run(restored(whole)) == (1024, 1024)
    assert {asyncio.run(restored(stages)) for stages in (partly, failing, full)} == {(0, 0)}
    assert [stages.forgotten for stages in (whole, partly, failing, full)] == [[], [3], [3], [3]]


def test_what_could_not_be_forgotten_is_before_the_next_prefix_is_read() -> None:
    """A stage holds a few prefixes at most: what nobody begins with would be in the way."""

    async def scenario(stages: Stages) -> None:
        prefixes = Prefixes(stages, b"ring")
        stages.forgets_nothing = True
        await prefixes.forget(SequenceId(3))
        stages.forgets_nothing = False
        for number in (4, 5):
            assert await prefixes.restore(SequenceId(number), PROMPT, 1024) == 1024
        assert stages.forgotten == [3]

    asyncio.run(scenario(Stages()))
