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
from support.soak import cases

from shardnet.errors import CapacityError, UnsupportedModelError, UsageError
from shardnet.output_params import OutputParams
from shardnet.runtime.engine.draft_model import load_draft_model
from shardnet.runtime.engine.requests import RequestEvent, RequestMoved
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter, NgramDrafts
from shardnet.runtime.scheduling.scheduler import Scheduler
from shardnet.runtime.scheduling.sequences import SequenceRequest
from shardnet.runtime.scheduling.step_cost import RingLimits, StepCost
from shardnet.sampling_params import SamplingParams
from shardnet.stage.runs import Run
from shardnet.types import Epoch, LayerRange, LiveState, SequenceId


@pytest.fixture(
    scope="module",
    params=cases(["qwen3_5_text", "lfm2", "falcon_h1"], ["nemotron_h", "kimi_linear"]),
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
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


def test_drafts_are_refused_by_name(folder: Path) -> None:
    scheduler = Scheduler(
        RingLimits(
            epoch=Epoch(1), n_stages=1, room_blocks=4, context=512, max_slots=4, room_states=24
        )
    )
    drafter = AdaptiveDrafter(draft_source=NgramDrafts(), cost=StepCost(), most=8)
    asked = SequenceRequest(sequence_id=SequenceId(1), prompt=(1, 2), max_tokens=4, drafter=drafter)
    with pytest.raises(UsageError, match="--speculate: layers of this model keep a state"):
        scheduler.submit(asked)
    with pytest.raises(UnsupportedModelError, match="its layers keep a state"):
        load_draft_model(
            folder, vocab_size=320, device="cpu", context=64, memory_bytes=1 << 30, threads=1
        )


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
