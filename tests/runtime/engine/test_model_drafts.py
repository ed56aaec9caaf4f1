"""Drafters of hidden states: what a ring gives them, and that they change no token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models.checkpoints import make_llama
from support.oracles.oracle import load_reference
from support.rings.real_ring import ask, guessing, real_ring, say, say_all
from support.rings.stage_chain import CPU, probed, random_prompt
from torch import Tensor

from shardnet.errors import RemoteProtocolError
from shardnet.output_params import OutputKind
from shardnet.runtime.engine.draft_model import DraftModel
from shardnet.runtime.engine.model_drafts import Ask, DraftHost, _States
from shardnet.runtime.engine.requests import GenerationRequest, Speculation
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter
from shardnet.runtime.stage.executor import Executor
from shardnet.types import DType, SequenceId, SlotId
from shardnet.wire.payloads.rows import RowBlock

LAYERS = (0, 2, 4)


class Reader:
    """Reads states, notes them, and drafts from texts that it knows, with an error now and then."""

    layers, context, most = LAYERS, 512, 9

    def __init__(self, texts: Sequence[Sequence[int]], every: int) -> None:
        self._texts, self._every = texts, every
        self.read: dict[SlotId, list[tuple[int, list[int], Tensor]]] = {}
        self.begun: list[list[tuple[int, list[int], Tensor]]] = []

    def draft(
        self, slot: SlotId, token_ids: Sequence[int], position: int, states: Tensor, limit: int
    ) -> list[int]:
        assert len(token_ids) == len(states) > 0
        if slot not in self.read:
            self.read[slot] = []
            self.begun.append(self.read[slot])
        elif self.read[slot]:
            first, before, _ = self.read[slot][-1]
            assert position == first + len(before), "every right row comes once, in order"
        self.read[slot].append((position, [*token_ids], states))
        end = position + len(token_ids) + 1
        known = next(t for t in self._texts if [*t[position + 1 : end]] == [*token_ids])
        drafts = known[end : end + limit]
        return [token ^ ((end + n) % self._every == 0) for n, token in enumerate(drafts)]

    def free(self, slot: SlotId) -> None:
        self.read.pop(slot, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("big"))


def requests() -> list[GenerationRequest]:
    return [
        ask(random_prompt(90, 300, seed=n), 24, temperature=0.0 if n % 2 else 0.5, seed=n)
        for n in range(4)
    ]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    async def scenario() -> list[list[int]]:
        async with real_ring(folder, probed(CPU, DType.FLOAT32, None)) as engine:
            return [(await say(engine, request)).tokens for request in requests()]

    return asyncio.run(scenario())


def texts(plain: list[list[int]]) -> list[list[int]]:
    return [[*r.prompt, *tokens] for r, tokens in zip(requests(), plain, strict=True)]


def states_of(folder: Path, text: Sequence[int]) -> dict[int, Tensor]:
    """The hidden states [T, E] after so many layers, in front of the final norm."""
    model, found = load_reference(folder).model, {}
    modules = [model.embed_tokens, *model.layers]
    for number, module in enumerate(modules):
        module.register_forward_hook(lambda _, __, out, n=number: found.update({n: out[0]}))
    with torch.inference_mode():
        model(torch.tensor([text]))
    return found


def speculation(host: DraftHost) -> Speculation:
    return Speculation(make_draft_source=host.draft_source, layers=host.layers, most=4)


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize(("n_stages", "every"), [(1, 5), (3, 5), (3, 1000), (2, 1)])
def test_a_drafter_reads_the_states_of_right_rows_once_and_changes_no_token(
    folder: Path,
    plain: list[list[int]],
    n_stages: int,
    every: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is in flight: right drafts behind right ones, and wrong ones."""
    monkeypatch.setattr(AdaptiveDrafter, "_most_frames", 9)
    monkeypatch.setattr(AdaptiveDrafter, "_pays_behind", lambda *_: True)
    reader = Reader(texts(plain), every)

    async def scenario() -> None:
        host = DraftModel(reader, Executor("draft"))
        async with real_ring(
            folder, probed(CPU, DType.FLOAT32, None), n_stages=n_stages, room_blocks=64
        ) as engine:
            asked = [guessing(r, speculation(host)) for r in requests()]
            alone = [await say(engine, asked[0])]
            together = await say_all(engine, asked[1:])
            said = [*alone, *together]
            await host.executor.run(lambda: None)
        host.close()
        assert [one.tokens for one in said] == plain
        assert sum(one.n_drafted for one in said) > 20
        if every == 1000:
            assert sum(one.n_accepted for one in said) == sum(one.n_drafted for one in said)

    asyncio.run(scenario())
    assert len(reader.begun) == 4
    for read in reader.begun:
        text = next(t for t in texts(plain) if t[1 : len(read[0][1]) + 1] == read[0][1])
        states = torch.cat([states for _, _, states in read])
        expected, width = states_of(folder, text), states.shape[1] // len(LAYERS)
        for place, number in enumerate(LAYERS):
            ours = states[:, width * place : width * (place + 1)].float()
            theirs = expected[number][: len(states)]
            assert read[0][0] == 0
            assert (ours - theirs).abs().max() < 0.01 * theirs.abs().max()


@pytest.mark.usefixtures("drafts_always_pay")
def test_a_drafter_begins_behind_rows_that_were_kept_and_with_a_replay_goes_on(
    folder: Path, plain: list[list[int]]
) -> None:
    """The second request finds its prompt in a slot; little room makes some pause."""
    reader = Reader(texts(plain), 5)

    async def scenario() -> None:
        host = DraftModel(reader, Executor("draft"))
        async with real_ring(
            folder, probed(CPU, DType.FLOAT32, None), n_stages=2, room_blocks=2
        ) as engine:
            asked = [guessing(r, speculation(host)) for r in requests()]
            for _ in range(2):
                assert (await say(engine, asked[0])).tokens == plain[0]
            assert [one.tokens for one in await say_all(engine, asked)] == plain
            await host.executor.run(lambda: None)
        host.close()

    asyncio.run(scenario())
    assert [read[0][0] == 0 for read in reader.begun][:2] == [True, False]


class Silent(DraftHost):
    """Has never answered."""

    def ask(self, ask: Ask) -> asyncio.Future[list[int]]:
        return asyncio.get_running_loop().create_future()

    def free(self, slot: SlotId) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


@pytest.mark.usefixtures("drafts_always_pay")
def test_a_silent_drafter_is_waited_for_once(folder: Path, plain: list[list[int]]) -> None:
    async def scenario() -> None:
        host = Silent()
        async with real_ring(folder, probed(CPU, DType.FLOAT32, None)) as engine:
            asked = [guessing(r, speculation(host)) for r in requests()]
            assert (await say(engine, asked[0])).tokens == plain[0]
            assert host.is_late
            assert [one.tokens for one in await say_all(engine, asked)] == plain

    asyncio.run(scenario())


class Noting(DraftHost):
    """Notes what it is asked, and drafts the tokens that follow in the order of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Ask] = []

    def ask(self, ask: Ask) -> asyncio.Future[list[int]]:
        self.asked.append(ask)
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        answer.set_result([ask.token_ids[-1] + n + 1 for n in range(ask.draft.limit)])
        return answer


def test_a_model_drafts_behind_its_drafts_and_reads_nothing_twice() -> None:
    async def scenario() -> None:
        host = Noting()
        source = host.draft_source(lambda: None)
        text = [*range(5000)]
        assert source.prepare(text, 3), "nobody waits for a long text"
        await settled(host)
        parts = [(ask.draft.position, len(ask.token_ids)) for ask in host.asked[:5]]
        assert parts == [(0, 1024), (1024, 1024), (2048, 1024), (3072, 1928), (5002, 1)]
        assert source.draft(text, 31) == [*range(5000, 5008)]
        assert source.draft(text, 31, [5000, 5001]) == [*range(5002, 5008)]
        await settled(host)
        assert source.draft(text, 31, [5000, 5001]) == [*range(5002, 5010)]
        assert source.draft(text, 31, [5000, 7]) == []
        n_before = len(host.asked)
        text += [5000, 5001, 5002]
        assert source.prepare(text, 3), "what was right is there already"
        assert source.draft(text, 2) == [5003, 5004]
        await settled(host)
        text += [5003, 77]
        assert not source.prepare(text, 3)
        await settled(host)
        assert source.draft(text, 31) == [78, 79, 80], "no more than asked for behind a wrong one"
        assert host.asked[-1].draft.position == 5004
        assert host.asked[-1].token_ids == [77]
        assert len(host.asked) > n_before
        assert max(ask.draft.n_drafts for ask in host.asked) > 0
        assert source.draft([*text, 78], 31) == [79, 80], "none are asked for that none wants"
        n_before = len(host.asked)
        await settled(host)
        assert len(host.asked) == n_before
        source._slot = None

    asyncio.run(scenario())


class Dumb(Noting):
    """Answers without drafts, as a peer may."""

    def ask(self, ask: Ask) -> asyncio.Future[list[int]]:
        answer = super().ask(ask)
        answer.result().clear()
        return answer

    def free(self, slot: SlotId) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


def test_a_drafter_that_makes_no_drafts_is_not_asked_again() -> None:
    """Else its text would never go on: each answer would be the next question."""

    async def scenario() -> None:
        host, woken = Dumb(), []
        source = host.draft_source(lambda: woken.append(source.prepare([1, 2], 3)))
        assert not source.prepare([1, 2], 3)
        await settled(host)
        assert woken == [True]
        assert len(host.asked) == 1
        assert source.draft([1, 2], 3) == []

    asyncio.run(scenario())


def states(position: int, n_rows: int, layer: int, value: int = 0) -> RowBlock:
    return RowBlock(
        sequence_id=SequenceId(1),
        kind=OutputKind.STATES,
        position=position,
        width=2,
        payload=np.full((n_rows, 2), value, "<u2").tobytes(),
        layer=layer,
    )


def test_states_are_joined_replaced_and_forgotten_where_nobody_reads_them() -> None:
    kept = _States((1, 2))
    kept.take([states(0, 3, 1, 10), states(3, 2, 1, 10), states(0, 5, 2, 20)])
    kept.take([states(4, 2, 1, 11), states(4, 2, 2, 21)])
    position, rows = kept.read(6) or (-1, np.empty(0))
    assert position == 0
    assert rows.tolist() == [[10, 10, 20, 20]] * 4 + [[11, 11, 21, 21]] * 2
    kept.take([states(6, 1, 1), states(6, 1, 2)])
    for start in range(7, 12007, 1000):
        kept.take([states(start, 1000, 1), states(start, 1000, 2)])
    position, rows = kept.read(12007) or (-1, np.empty(0))
    assert position + len(rows) == 12007, "all but the last 4096 or so are forgotten"
    assert 4096 <= len(rows) <= 6000
    with pytest.raises(RemoteProtocolError, match="different rows"):
        kept.take([states(0, 2, 1), states(0, 3, 2)])


async def settled(host: Noting) -> None:
    n_asked = -1
    while n_asked < len(host.asked):
        n_asked = len(host.asked)
        for _ in range(3):
            await asyncio.sleep(0)
