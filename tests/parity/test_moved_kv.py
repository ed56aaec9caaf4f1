"""Sequences whose KV cache moves to stages of another split: the very same bits as without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import make_decoder
from support.models.family_cases import GEMMA4
from support.needs import needs_library
from support.rings.changing_ring import pull
from support.rings.stage_chain import even_split, random_prompt
from support.rings.torch_rings import TorchStages
from support.soak import cases

from shardnet.errors import UsageError
from shardnet.runtime.loading.loaded_stage import JoinedCompute
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import OpenSequence
from shardnet.stage.moves.slot_moves import JoinedMoves
from shardnet.types import KvDType, LayerRange, SequenceId, SlotId, WireDType

CONTEXT = 1280
CASES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "head_dim": 32,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gemma4_text": GEMMA4
    | {
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "deepseek_v2": {"num_hidden_layers": 3},
    "qwen2_moe": {"num_hidden_layers": 3},
    "qwen3_next": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    },
    "falcon_h1": {"num_hidden_layers": 3},
}
OLD = SequenceId(0)
PENALISED = SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.3, n_logprobs=1)
"""What is drawn depends on every token before it, those of the prompt too."""


@pytest.mark.parametrize(
    "family",
    cases(["llama", "gemma3_text", "gemma4_text", "qwen3_next", "falcon_h1"], ["deepseek_v2"]),
)
def test_a_sequence_goes_on_with_the_same_bits(family: str, tmp_path: Path) -> None:
    """The middle layer changes its stage: its rows come over, in two rounds, all others are kept.

    A state is moved when no more rows follow.
    """
    folder = make_decoder(tmp_path, family, max_position_embeddings=CONTEXT, **CASES[family])
    kv_dtype = KvDType.INT8 if family == "gemma3_text" else KvDType.AUTO
    splits = [[LayerRange(0, 2), LayerRange(2, 3)], [LayerRange(0, 1), LayerRange(1, 3)]]
    old, new = (TorchStages(folder, s, context=CONTEXT, kv_dtype=kv_dtype) for s in splits)
    prompt = random_prompt(700, 300, seed=1)
    old.open(PENALISED, n_prompt=len(prompt))
    [sources, targets] = [[compute.moves for compute in stages.computes] for stages in (old, new)]
    for start in range(0, 600, 200):
        old.step(start, prompt[start : start + 200], 0)
    if old.room_states is None:
        targets[1].begin(OLD, prompt[:600])
        assert pull(sources[0], targets[1], LayerRange(1, 2), 600, OLD, SlotId(0)) > 0
    old.step(600, prompt[600:], 1)
    with pytest.raises(UsageError, match="does not own slot 1"):
        sources[0].held(OLD, SlotId(1), 0, 0, 700)
    for target in targets:
        target.begin(OLD, prompt)
    targets[0].take_own(OLD, sources[0], SlotId(0), 0, 700)
    targets[1].take_own(OLD, sources[1], SlotId(0), 2, 700)
    assert [target.is_whole(OLD, 700) for target in targets] == [True, False]
    held = sources[0].held(OLD, SlotId(0), 1, targets[1].next_wanted(OLD, 1), 700)
    wrong = replace(held, n_bytes=held.n_bytes - 1)
    with pytest.raises(UsageError, match=f"comes as {held.n_bytes - 1} bytes"):
        targets[1].expect(OLD, 1, wrong, 700)
    pull(sources[0], targets[1], LayerRange(1, 2), 700, OLD, SlotId(0))
    for compute in new.computes:
        compute.operate(
            OpenSequence(
                sequence_id=OLD,
                slot=SlotId(0),
                sampling=PENALISED,
                n_kept=700,
                n_prompt=700,
                is_restored=True,
            )
        )
    assert not targets[1].has(OLD)
    moved = [state for cache in new.caches for state in cache.contents(SlotId(0)).states.values()]
    assert {state.end for state in moved} <= {700}
    whole = TorchStages(folder, even_split(3, 1), context=CONTEXT, kv_dtype=kv_dtype)
    whole.open(PENALISED, n_prompt=len(prompt))
    for start in range(0, 600, 200):
        whole.step(start, prompt[start : start + 200], 0)
    whole.step(600, prompt[600:], 1)
    for position in range(700, 708):
        assert new.step(position, [position % 300], 1) == whole.step(position, [position % 300], 1)


@needs_library  # which gives a replayed row its bits
@pytest.mark.parametrize("family", cases(["gemma3_text", "qwen2_moe"], ["llama", "deepseek_v2"]))
def test_a_standby_goes_on_with_the_same_bits(family: str, tmp_path: Path) -> None:
    """The middle stage is lost; what it had has followed to the first one, up to some position.

    Both others have gone on since, and the layers that follow each other in one node now were
    loaded one by one. One row is rewound too far for a window.
    """
    folder = make_decoder(tmp_path, family, max_position_embeddings=CONTEXT, **CASES[family])
    kv_dtype = KvDType.INT8 if family == "gemma3_text" else KvDType.AUTO
    old, spare = (
        TorchStages(folder, even_split(3, 3), context=CONTEXT, kv_dtype=kv_dtype) for _ in range(2)
    )
    prompt = random_prompt(620, 300, seed=1)
    old.open(PENALISED, n_prompt=600)
    first, middle, last = old.computes
    standby = JoinedCompute([first, spare.computes[1]], WireDType.FLOAT32)
    standby.use_wire(WireDType.FLOAT32, WireDType.FLOAT32)
    moves = JoinedMoves([first.moves, spare.computes[1].moves])
    for begin, end in [(0, 256), (256, 512), (512, 600), (600, 620)]:
        old.step(begin, prompt[begin:end], 1)
        if end in (512, 600):
            moves.begin(OLD, prompt[:end])
            pull(middle.moves, moves, LayerRange(1, 2), end, OLD, SlotId(0))
    for each in (moves, last.moves):
        each.begin(OLD, prompt[:590])
        assert not each.is_whole(OLD, 590)
    if family == "gemma3_text":
        with pytest.raises(UsageError, match="was to go on from 100 with a window of 6"):
            moves.part_of(0).take_own(OLD, moves, SlotId(0), 0, 100)
    moves.part_of(0).take_own(OLD, moves, SlotId(0), 0, 590)
    last.moves.take_own(OLD, last.moves, SlotId(0), 2, 590)
    assert moves.is_whole(OLD, 590)
    assert not moves.is_whole(OLD, 601)
    for compute in (first, last):
        compute.reset()
    old.computes = [standby, last]  # type: ignore[list-item]
    old.open(PENALISED, n_prompt=600, n_kept=590, is_restored=True)
    assert not moves.is_whole(OLD, 590)
    whole = TorchStages(folder, even_split(3, 1), context=CONTEXT, kv_dtype=kv_dtype)
    whole.open(PENALISED, n_prompt=600)
    for begin, end in [(0, 256), (256, 512), (512, 600)]:
        whole.step(begin, prompt[begin:end], 1)
    old.step(590, prompt[590:600], 1)
    for position in range(600, 608):
        ids = [prompt[position]]
        assert old.step(position, ids, 1) == whole.step(position, ids, 1)
    standby.reset()
    assert standby.used_blocks == spare.computes[1].used_blocks == 0
