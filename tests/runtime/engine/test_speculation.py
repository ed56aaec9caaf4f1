"""Speculation changes no token: with real stages, whoever guesses and however wrongly."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_llama
from support.rings.real_ring import Said, ask, guessing, real_ring, say, say_all
from support.rings.rings import running_ring
from support.rings.stage_chain import CPU, StageChain, probed, random_prompt
from support.soak import cases, is_soak

from shardnet.errors import CheckpointError, UsageError
from shardnet.model.sampling.sampler import Sampler, SampleRow
from shardnet.runtime.engine.draft_model import DraftModel, load_draft_model
from shardnet.runtime.engine.requests import GenerationRequest, Speculation, TokenGenerated
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter, DraftSource, NgramDrafts
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.step_cost import RingLimits, StepLimits
from shardnet.runtime.stage.compute import Activations, Samples
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import OpenSequence, SlotOperation
from shardnet.types import DType, Epoch, LayerRange, MicroBatch

NGRAM = Speculation(make_draft_source=lambda wake: NgramDrafts())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("big"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    """The tokens of `requests`, each alone and without drafts."""
    return [said.tokens for said in run(folder, requests(), together=False)]


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("small"), num_hidden_layers=1, seed=5)


def draft_model(path: Path, vocab_size: int = 320, memory_bytes: int = 1 << 30) -> DraftModel:
    return load_draft_model(
        path,
        vocab_size=vocab_size,
        device="cpu",
        context=512,
        memory_bytes=memory_bytes,
        threads=1,
    )


class WildGuesser:
    """Guesses at random, as often right as wrong: half of the vocabulary is never said."""

    kinds = range(31)
    flies = True

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        return [self._random.randrange(8) for _ in range(self._random.randint(0, limit))]

    def close(self) -> None: ...


def requests(*, deterministic: bool = False) -> list[GenerationRequest]:
    """Prompts that repeat themselves, greedy and sampled."""
    return [
        ask(
            random_prompt(9, 300, seed=n) * 3,
            16,
            temperature=0.0 if n % 2 else 0.3,
            seed=n,
            deterministic=deterministic,
        )
        for n in range(6)
    ]


def run(
    folder: Path,
    asked: Sequence[GenerationRequest],
    *,
    dtype: DType = DType.FLOAT32,
    n_stages: int = 2,
    room_blocks: int = 64,
    together: bool = True,
    draft: DraftModel | None = None,
) -> list[Said]:
    async def scenario() -> list[Said]:
        choice = probed(CPU, dtype, None)
        async with real_ring(folder, choice, n_stages=n_stages, room_blocks=room_blocks) as engine:
            if together:
                said = await say_all(engine, asked)
            else:
                said = [await say(engine, request) for request in asked]
        if draft is not None:
            await draft.executor.run(lambda: None)  # the slots are given back before this
        return said

    return asyncio.run(scenario())


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize("n_stages", cases([1, 3], [2]))
def test_look_up_changes_no_token(folder: Path, plain: list[list[int]], n_stages: int) -> None:
    guessed = run(folder, [guessing(r, NGRAM) for r in requests()], n_stages=n_stages)
    assert [said.tokens for said in guessed] == plain
    assert sum(said.n_drafted for said in guessed) > 0


class Knowing(WildGuesser):
    """Knows the text, and errs on every fifth token."""

    def __init__(self, text: Sequence[int]) -> None:
        self._drafts = [token ^ (place % 5 == 0) for place, token in enumerate(text)]

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        start = len(tokens) + len(ahead)
        return self._drafts[start : start + limit]


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize("knows", [True, False])
def test_drafts_in_flight_change_no_token(
    folder: Path, plain: list[list[int]], knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request after the other, as many frames in flight as may be, right and wrong ones."""
    monkeypatch.setattr(AdaptiveDrafter, "_most_frames", 9)
    monkeypatch.setattr(AdaptiveDrafter, "_pays_behind", lambda *_: True)

    def drafted(asked: GenerationRequest, tokens: list[int]) -> GenerationRequest:
        source = Knowing([*asked.prompt, *tokens]) if knows else WildGuesser(3)
        return guessing(asked, Speculation(make_draft_source=lambda wake: source, most=3))

    async def scenario() -> None:
        choice = probed(CPU, DType.FLOAT32, None)
        async with real_ring(folder, choice, n_stages=3, room_blocks=64) as engine:
            asked = [drafted(*pair) for pair in zip(requests(), plain, strict=True)]
            said = [await say(engine, request) for request in asked]
            assert [one.tokens for one in said] == plain
            assert engine.totals.n_wasted > 0
            assert engine.totals.n_flown > engine.totals.n_wasted or not knows

    asyncio.run(scenario())


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize("which", ["small", "itself"])
def test_a_draft_model_changes_no_token(
    folder: Path, small_folder: Path, plain: list[list[int]], which: str
) -> None:
    draft = draft_model(small_folder if which == "small" else folder)
    guessed = run(
        folder,
        [guessing(r, Speculation(make_draft_source=draft.draft_source)) for r in requests()],
        draft=draft,
    )
    draft.executor.join()
    assert [said.tokens for said in guessed] == plain
    assert sum(said.n_drafted for said in guessed) > 0
    greedy = [
        said
        for said, request in zip(guessed, requests(), strict=True)
        if request.sampling.temperature == 0
    ]
    if which == "itself":
        assert all(said.n_accepted == said.n_drafted for said in greedy)
    assert draft.model.kv.blocks_used == 0


@pytest.mark.usefixtures("drafts_always_pay")
def test_more_sequences_than_a_draft_model_has_slots_for_go_without(folder: Path) -> None:
    """Which of the eight that have a slot get a guess in time is up to the draft's thread."""
    draft = draft_model(folder)
    speculation = Speculation(make_draft_source=draft.draft_source)
    asked = [ask(random_prompt(5, 300, seed=n), 12, speculation=speculation) for n in range(12)]
    said = run(folder, asked)
    draft.executor.join()
    assert 1 <= sum(bool(one.n_drafted) for one in said) <= 8
    plain = run(folder, [replace(one, speculation=None) for one in asked])
    assert [one.tokens for one in said] == [one.tokens for one in plain]


def test_a_ninth_guesser_has_nothing_to_say_and_holds_nobody_up(folder: Path) -> None:
    draft = draft_model(folder)

    async def scenario() -> None:
        guessers = [draft.draft_source(lambda: None) for _ in range(9)]
        assert [draft_source.prepare([1, 2, 3], 2) for draft_source in guessers] == [False] * 8 + [
            True
        ]
        assert guessers[8].draft([1, 2, 3], 2) == []
        await asyncio.gather(*(g._job.answer for g in guessers if g._job is not None))
        assert all(len(draft_source.draft([1, 2, 3], 2)) == 2 for draft_source in guessers[:8])
        for draft_source in guessers:
            draft_source.close()

    asyncio.run(scenario())
    draft.executor.join()


def test_drafts_that_wait_for_a_draft_model_that_is_closed_hold_nobody_up(folder: Path) -> None:
    draft, may_end = draft_model(folder), threading.Event()

    async def scenario() -> None:
        woken = asyncio.Event()
        draft_source = draft.draft_source(woken.set)
        draft.executor.submit(may_end.wait)
        assert not draft_source.prepare([1, 2, 3], 2)
        draft.close()
        await woken.wait()
        for each in (draft_source, draft.draft_source(woken.set)):
            assert each.prepare([1, 2, 3], 2)
            assert each.draft([1, 2, 3], 2) == []
            each.close()
        may_end.set()

    asyncio.run(scenario())
    draft.executor.join()


def test_a_long_text_that_a_draft_model_has_to_read_holds_nobody_up(folder: Path) -> None:
    draft, may_read = draft_model(folder), threading.Event()

    async def scenario() -> None:
        long, short = (draft.draft_source(lambda: None) for _ in range(2))
        draft.executor.submit(may_read.wait)
        text = [*range(300)]
        assert long.prepare(text, 2)
        assert short.prepare([1, 2, 3], 2)
        assert long.draft(text, 2) == short.draft([1, 2, 3], 2) == []
        may_read.set()
        await draft.executor.run(lambda: None)
        for each, tokens in ((long, [*text, 5]), (short, [1, 2, 3, 4])):
            assert not each.prepare(tokens, 2), "it is one token behind"
            await draft.executor.run(lambda: None)
            assert len(each.draft(tokens, 2)) == 2
            each.close()

    asyncio.run(scenario())
    draft.executor.join()


@pytest.mark.usefixtures("drafts_always_pay")
def test_a_text_goes_on_without_the_draft_model_once_it_is_closed(
    folder: Path, plain: list[list[int]]
) -> None:
    """As where the next request names another one."""
    draft = draft_model(folder)
    speculation = Speculation(make_draft_source=draft.draft_source)

    async def scenario() -> list[int]:
        said: list[int] = []
        async with real_ring(folder, probed(CPU, DType.FLOAT32, None), n_stages=2) as engine:
            async for event in engine.generate(guessing(requests()[1], speculation)):
                if isinstance(event, TokenGenerated):
                    said.append(event.token_id)
                if len(said) == 5:
                    draft.close()
            assert engine.n_active == 0
        return said

    assert asyncio.run(scenario()) == plain[1]
    draft.executor.join()


def test_a_draft_model_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", vocab_size=330)
    with pytest.raises(
        CheckpointError, match="the draft model has 330 token ids, the model of the ring 320"
    ):
        draft_model(other)


def exact_choice(folder: Path) -> DType:
    [stage] = StageChain.load(folder, [LayerRange(0, 4)], probed(CPU, DType.BFLOAT16, None)).stages
    if stage.exact_rows > 1:
        return DType.BFLOAT16
    pytest.skip("this machine computes single rows exactly only: speculation is refused")


def test_deterministic_tokens_are_the_same_bit_for_bit_whatever_goes_on(folder: Path) -> None:
    """In company, with guesses right and wrong, and paused for want of room."""
    dtype = exact_choice(folder)
    plain = run(folder, requests(deterministic=True), dtype=dtype, together=False)
    wild = Speculation(make_draft_source=lambda wake: WildGuesser(1))
    for speculation in (NGRAM, wild):
        asked = [guessing(r, speculation) for r in requests(deterministic=True)]
        asked += [ask(random_prompt(200, 300, seed=50), 30)]  # company that is not deterministic
        said = run(folder, asked, dtype=dtype, room_blocks=4)
        assert [one.tokens for one in said[:-1]] == [one.tokens for one in plain]


def test_where_rows_change_each_others_bits_the_two_are_not_for_one_request(
    folder: Path,
) -> None:
    if probed(CPU, DType.FLOAT32, None).exact_rows > 1:
        pytest.skip("rows leave each other alone on this machine")
    with pytest.raises(UsageError, match="--deterministic and --speculate exclude each other"):
        run(folder, [ask([1], 5, deterministic=True, speculation=NGRAM)])


# --- the distribution ---------------------------------------------------------------------------

N_DRAWN = 20 if is_soak() else 4
N_TOKENS = 400 if is_soak() else 120
WEIGHTS = (0.4, 0.2, 0.15, 0.1, 0.06, 0.04, 0.03, 0.02)


class EightTokens:
    """A tail whose logits are the same everywhere."""

    def __init__(self) -> None:
        self._sampler = Sampler(len(WEIGHTS))
        self._logits = torch.tensor(WEIGHTS).log()
        self._params: dict[int, SamplingParams] = {}

    def operate(self, operation: SlotOperation) -> None:
        if isinstance(operation, OpenSequence):
            self._params[operation.slot] = operation.sampling

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Samples:
        rows = [
            SampleRow(params=self._params[group.slot], position=position)
            for group in batch.groups
            for position in range(
                group.position + group.n_rows - group.n_sampled, group.position + group.n_rows
            )
        ]
        result = self._sampler.sample(self._logits.expand(len(rows), -1).contiguous(), rows)
        return Samples(token_ids=result.token_ids, logprobs=result.logprobs)

    def reset(self) -> None: ...


GUESSERS: dict[str, Callable[[], DraftSource]] = {
    "look-up": NgramDrafts,
    "wild": lambda: WildGuesser(3),
}


@functools.cache
def draws(draft_source: str) -> list[list[int]]:
    """N_TOKENS tokens in each of N_DRAWN sequences."""
    make = GUESSERS.get(draft_source)
    speculation = Speculation(make_draft_source=lambda wake: make()) if make else None

    async def scenario() -> list[list[int]]:
        scheduler = Scheduler(
            RingLimits(
                epoch=Epoch(1),
                n_stages=1,
                room_blocks=200,
                context=1000,
                max_slots=20,
                limits=StepLimits(cheap_rows=100),
            )
        )
        async with running_ring([EightTokens()], scheduler, vocab_size=8, over="memory") as (
            engine,
            _,
        ):
            asked = [
                ask([0], N_TOKENS, temperature=1.0, seed=seed, speculation=speculation)
                for seed in range(N_DRAWN)
            ]
            return [said.tokens for said in await say_all(engine, asked)]

    return asyncio.run(scenario())


def test_what_is_drawn_follows_the_models_distribution() -> None:
    """Without drafts; with them it is the same, as below."""
    tokens = [token for text in draws("none") for token in text]
    assert len(tokens) == N_TOKENS * N_DRAWN
    counts = Counter(tokens)
    chi_square = sum(
        (counts[token] - share * len(tokens)) ** 2 / (share * len(tokens))
        for token, share in enumerate(WEIGHTS)
    )
    assert chi_square < 24.3  # 7 degrees of freedom: exceeded by chance once in 1000 seeds


@pytest.mark.parametrize("draft_source", GUESSERS)
def test_guesses_change_no_draw(draft_source: str) -> None:
    assert draws(draft_source) == draws("none")
