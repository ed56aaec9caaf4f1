"""Layers that keep a state, on whole rings: nothing that would rewind one changes the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.rings.stage_chain import Rows, StageChain, batch_of, even_split, random_prompt
from support.rings.torch_rings import TorchStages, request, run, tokens_of
from support.soak import cases, is_soak

from shardnet.errors import CapacityError, UsageError
from shardnet.output_params import OutputParams
from shardnet.runtime.engine import model_drafts
from shardnet.runtime.engine.draft_model import load_draft_model
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    RequestEvent,
    RequestMoved,
    Speculation,
    TokenGenerated,
)
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter, NgramDrafts
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import SequenceRequest
from shardnet.runtime.scheduling.step_cost import RingLimits, StepCost
from shardnet.sampling_params import SamplingParams, TokenLogprobs
from shardnet.stage.runs import Run
from shardnet.types import Epoch, LayerRange, LiveState, SequenceId


@pytest.fixture(
    scope="module",
    params=cases(
        ["qwen3_5_text", "lfm2", "falcon_h1", "deepseek_v4"],
        ["nemotron_h", "kimi_linear", "qwen4_exp_text", "glm5_next_text", "deepseek_v41_text"],
    ),
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {} if family == "nemotron_h" else CASES[family] | {"num_hidden_layers": 4}
    return make_decoder(tmp_path_factory.mktemp(family), family, **config)


@pytest.fixture(scope="module")
def stages(folder: Path) -> TorchStages:
    return TorchStages(folder, even_split(4, 2))


def n_kept(events: Sequence[RequestEvent]) -> int:
    """How much of the prompt was there already."""
    return max(event.n_kept for event in events if isinstance(event, RequestMoved))


def test_prefixes_are_continued_from_their_end_or_not_at_all(stages: TorchStages) -> None:
    prompt = random_prompt(90, 300, seed=2)
    first = request(prompt, 8)
    turn = [*prompt, *tokens_of(run(stages, first)[0]), 5, 6, 7]
    branch = [*prompt[:60], *random_prompt(9, 300, seed=3)]
    cold = [run(stages, request(ids, 6))[0] for ids in (turn, branch)]
    warm = run(stages, first, *(request(ids, 6) for ids in (turn, branch)), at_once=False)[1:]
    assert [tokens_of(events) for events in warm] == [tokens_of(events) for events in cold]
    assert [n_kept(events) for events in warm] == [97, 0]


def test_prompts_that_part_anywhere_go_on_from_the_last_state_before(stages: TorchStages) -> None:
    """The next turn of a chat, an edit, sub-agents that share a beginning, and the way back."""
    prompt = random_prompt(440, 300, seed=7)
    parted = {430: 420, 410: 256, 300: 256, 250: 0}
    turns = [[*prompt[:n], *random_prompt(60, 300, seed=n)] for n in parted]
    back = [*prompt, *random_prompt(3, 300, seed=1)]
    cold = [run(stages, request(ids, 6), chunk_rows=256)[0] for ids in (*turns, back)]
    asked = (request(ids, 6) for ids in (prompt, *turns, back))
    warm = run(stages, *asked, at_once=False, chunk_rows=256)[1:]
    assert [tokens_of(events) for events in warm] == [tokens_of(events) for events in cold]
    assert [n_kept(events) for events in warm] == [*parted.values(), 420]


def test_a_whole_prompt_is_kept_for_the_next(stages: TorchStages) -> None:
    """Also where one token was asked for, whose row is never sent."""
    prompt = random_prompt(40, 300, seed=4)
    asked = [request(prompt, 1), request([*prompt, 9, 8], 6)]
    warm = run(stages, *asked, at_once=False)[1]
    assert n_kept(warm) == 40
    assert tokens_of(warm) == tokens_of(run(stages, asked[1])[0])


def test_pauses_and_whole_prompts_change_no_token(stages: TorchStages) -> None:
    """Two sequences outgrow the room, and the younger one is replayed."""
    asked = [request(random_prompt(n, 300, seed=n), 10) for n in (250, 248)]
    alone = run(stages, *asked, at_once=False, chunk_rows=256)
    paused = run(stages, *asked, room_blocks=3, chunk_rows=256)
    assert [tokens_of(events) for events in paused] == [tokens_of(events) for events in alone]
    moves = [event for event in paused[1] if isinstance(event, RequestMoved)]
    assert LiveState.PAUSED in [move.state for move in moves]
    whole = replace(asked[0], outputs=OutputParams(n_prompt_logprobs=0))
    [again] = run(stages, whole, chunk_rows=256)
    assert tokens_of(again) == tokens_of(alone[0])


def test_more_sequences_than_slots_take_turns(stages: TorchStages) -> None:
    asked = [request(random_prompt(20, 300, seed=n), 3) for n in range(12)]
    alone = [tokens_of(run(stages, one)[0]) for one in asked[::5]]
    together = run(stages, *asked)
    assert [tokens_of(events) for events in together[::5]] == alone


class Knowing:
    """Knows what is said, and errs on one of `every` so many tokens."""

    kinds = range(31)
    flies = True

    def __init__(self, text: Sequence[int], every: int) -> None:
        self._drafts = [token ^ (place % every == 0) for place, token in enumerate(text)]

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        start = len(tokens) + len(ahead)
        return self._drafts[start : start + limit]

    def close(self) -> None: ...


def said(events: Sequence[RequestEvent]) -> list[tuple[int, TokenLogprobs | None]]:
    """The new tokens with their log-probabilities, to the bit."""
    found = [each for each in events if isinstance(each, TokenGenerated)]
    return [(each.token_id, each.logprobs) for each in found]


def drafted(
    asked: GenerationRequest, events: Sequence[RequestEvent], every: int, most: int
) -> GenerationRequest:
    """The same request, drafted at most so many tokens a frame by who knows the `events`."""
    source = Knowing([*asked.prompt, *tokens_of(events)], every)
    speculation = Speculation(make_draft_source=lambda wake: source, most=most)
    return replace(asked, speculation=speculation)


ASKED = [
    request(random_prompt(n, 300, seed=n), 24, SamplingParams(n_logprobs=2, **kind))
    for n, kind in (
        (40, {}),
        (17, {"temperature": 0.7, "seed": 3}),
        (90, {"temperature": 0.5, "seed": 1, "repetition_penalty": 1.3}),
        (33, {"presence_penalty": 0.5}),
    )
]


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize("n_stages", cases([1, 3], [2]))
def test_drafts_change_no_bit(
    family: str, folder: Path, n_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked up or known, right and wrong, in company, paused, and behind drafts in flight."""
    if (n_stages == 1) == (family == "qwen3_5_text") and not is_soak():
        pytest.skip("scripts/soak runs it")
    stages = TorchStages(folder, even_split(4, n_stages))
    plain = [run(stages, asked)[0] for asked in ASKED]
    ngram = Speculation(make_draft_source=lambda wake: NgramDrafts())
    pairs = [*zip(ASKED, plain, strict=True)]
    forms = [
        [replace(asked, speculation=ngram) for asked in ASKED],
        *([drafted(*pair, every, most) for pair in pairs] for every, most in ((5, 8), (40, 31))),
    ]
    for asked in forms:
        events = run(stages, *asked)
        assert [*map(said, events)] == [*map(said, plain)]
    ends = [one[-1] for one in events]
    assert all(isinstance(end, GenerationFinished) and end.timing.n_drafted for end in ends)
    monkeypatch.setattr(AdaptiveDrafter, "_most_frames", 9)
    monkeypatch.setattr(AdaptiveDrafter, "_pays_behind", lambda *_: True)
    for every, most in ((4, 3), (100, 1), (7, 6)):  # the second are all right
        flying = [drafted(*pair, every, most) for pair in pairs]
        events = run(stages, *flying, at_once=False)
        assert [*map(said, events)] == [*map(said, plain)]


@pytest.mark.usefixtures("drafts_always_pay")
def test_the_next_turn_goes_on_behind_drafts(stages: TorchStages) -> None:
    """From the state after the last token that counts, though more was written behind it."""
    [first] = run(stages, ASKED[0])
    turn = request([*ASKED[0].prompt, *tokens_of(first), 5, 6, 7], 12, SamplingParams(n_logprobs=2))
    [plain] = run(stages, turn)
    for every in (3, 50):
        asked = drafted(ASKED[0], [*first], every, 9)
        warm = run(stages, asked, drafted(turn, plain, every, 9), at_once=False)
        assert [*map(said, warm)] == [said(first), said(plain)]
        assert n_kept(warm[1]) == len(turn.prompt) - 4


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize("most", cases([3], [1]))
def test_a_request_that_is_given_up_amid_flights_leaves_what_was_answered(
    stages: TorchStages, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one goes on from it, whichever rows were in flight."""
    monkeypatch.setattr(AdaptiveDrafter, "_most_frames", 9)
    monkeypatch.setattr(AdaptiveDrafter, "_pays_behind", lambda *_: True)
    [plain] = run(stages, ASKED[0])
    turn = request([*ASKED[0].prompt, *tokens_of(plain)], 6, SamplingParams(n_logprobs=2))
    [cold] = run(stages, turn)
    kept = []
    for n_events in range(6, 16):
        asked = drafted(ASKED[0], plain, 100, most)
        events = run(stages, asked, turn, at_once=False, most_events=[n_events])
        assert said(events[1]) == said(cold)
        kept.append(n_kept(events[1]))
    assert max(kept) > len(ASKED[0].prompt)


@pytest.mark.usefixtures("drafts_always_pay")
def test_it_may_be_a_draft_model(
    family: str, folder: Path, stages: TorchStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy texts are drafted without an error, by the same model; others part from its own."""
    if family == "falcon_h1" and not is_soak():
        pytest.skip("scripts/soak runs it")
    for bound in ("_LEAST_PATIENCE_S", "_MOST_PATIENCE_S"):
        monkeypatch.setattr(model_drafts, bound, 60.0)
    vocab_size, memory_bytes = stages.vocab_size, 1 << 30
    draft = load_draft_model(
        folder,
        vocab_size=vocab_size,
        device="cpu",
        context=512,
        memory_bytes=memory_bytes,
        threads=1,
    )
    speculation = Speculation(make_draft_source=draft.draft_source)
    plain = run(stages, *ASKED)
    events = run(stages, *(replace(asked, speculation=speculation) for asked in ASKED))
    draft.executor.join()
    assert [*map(said, events)] == [*map(said, plain)]
    timings = [one[-1].timing for one in events if isinstance(one[-1], GenerationFinished)]
    assert [timing.n_drafted > timing.n_accepted for timing in timings[:2]] == [False, True]
    assert all(timing.n_drafted for timing in timings)


@pytest.mark.usefixtures("drafts_always_pay")
def test_a_pause_amid_drafts_changes_no_token(stages: TorchStages) -> None:
    """Two sequences outgrow the room, and the younger one is replayed."""
    asked = [request(random_prompt(n, 300, seed=n), 10) for n in (250, 248)]
    alone = run(stages, *asked, at_once=False, chunk_rows=256)
    pairs = zip(asked, alone, strict=True)
    paused = run(stages, *(drafted(*pair, 4, 5) for pair in pairs), room_blocks=3, chunk_rows=256)
    assert [tokens_of(events) for events in paused] == [tokens_of(events) for events in alone]
    moves = [event for event in paused[1] if isinstance(event, RequestMoved)]
    assert LiveState.PAUSED in [move.state for move in moves]


def test_drafts_are_refused_by_name_where_states_are_in_modules() -> None:
    scheduler = Scheduler(
        RingLimits(
            epoch=Epoch(1),
            n_stages=1,
            room_blocks=4,
            context=512,
            max_slots=4,
            room_states=24,
            rewinds=False,
        )
    )
    drafter = AdaptiveDrafter(draft_source=NgramDrafts(), cost=StepCost(), most=8)
    asked = SequenceRequest(sequence_id=SequenceId(1), prompt=(1, 2), max_tokens=4, drafter=drafter)
    with pytest.raises(UsageError, match="--speculate: this model is computed by modules of tr"):
        scheduler.submit(asked)


def test_a_rewind_is_an_error(stages: TorchStages) -> None:
    stages.open(SamplingParams(), slot=3)
    stages.step(0, [1, 2, 3], 0, slot=3)
    with pytest.raises(CapacityError, match="holds the state after 3 positions"):
        stages.step(2, [4], 1, slot=3)


def test_steps_that_wait_together_are_computed_in_order(folder: Path) -> None:
    """As where layers are streamed: two steps of one sequence, one behind the other."""
    ids = random_prompt(9, 300, seed=5)
    pieces = [
        batch_of([Rows(slot=0, position=start, ids=ids[start:end], n_sampled=1)])
        for start, end in ((0, 6), (6, 9))
    ]
    [one], [other] = (StageChain.load(folder, [LayerRange(0, 4)]).stages for _ in range(2))
    expected = [one.run(batch, None) for batch in pieces]
    together = other.run_together([Run(batch=batch, hidden=None) for batch in pieces])
    for rows, alone in zip(together, expected, strict=True):
        assert isinstance(rows, torch.Tensor)
        assert torch.equal(rows, alone)
