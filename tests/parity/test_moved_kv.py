"""Sequences whose KV cache moves to stages of another split: the very same bits as without."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES as FAMILY_CASES
from support.models.family_cases import GEMMA4
from support.needs import needs_library
from support.rings.changing_ring import pull
from support.rings.stage_chain import even_split, random_prompt
from support.rings.torch_rings import TorchStages
from support.soak import cases

from shardnet.errors import UsageError
from shardnet.runtime.loading.loaded_stage import JoinedCompute
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import DropStates, KeepState, OpenSequence
from shardnet.stage.moves.slot_moves import HeldLayer, JoinedMoves
from shardnet.types import KvDType, LayerRange, SequenceId, SlotId, StateId, WireDType

CONTEXT = 1280
DEEPSEEK_V4 = FAMILY_CASES["deepseek_v4"]
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
    "deepseek_v4": DEEPSEEK_V4
    | {
        "num_hidden_layers": 3,
        "layer_types": DEEPSEEK_V4["layer_types"][:3],
        "mlp_layer_types": DEEPSEEK_V4["mlp_layer_types"][:3],
    },
    "deepseek_v41_text": {"num_hidden_layers": 3},
    "qwen4_exp_text": FAMILY_CASES["qwen4_exp_text"]
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
        "ple_layer_ids": [2],
    },
    "glm5_next_text": FAMILY_CASES["glm5_next_text"]
    | {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
    },
    "hy_v4": FAMILY_CASES["hy_v4"]
    | {
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"],
    },
}
OLD = SequenceId(0)
PENALISED = SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.3, n_logprobs=1)
"""What is drawn depends on every token before it, those of the prompt too."""


@pytest.mark.parametrize(
    "family",
    cases(
        [
            *("llama", "gemma3_text", "gemma4_text", "qwen3_next", "falcon_h1", "deepseek_v4"),
            "deepseek_v41_text",
        ],
        ["deepseek_v2", "qwen4_exp_text", "glm5_next_text", "hy_v4"],
    ),
)
def test_a_sequence_goes_on_with_the_same_bits(family: str, tmp_path: Path) -> None:
    """The middle layer changes its stage: it comes over in two rounds, all others are kept.

    A state that is kept comes while rows follow, the last one when none do.
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
    state = None if old.room_states is None else StateId(0)
    if state is not None:
        for compute in old.computes:
            compute.operate(KeepState(slot=SlotId(0), n_positions=600, state=state))
    old.step(600, prompt[600:], 1)
    targets[1].begin(OLD, prompt[:600])
    n_ahead = pull(sources[0].look(OLD, SlotId(0), 600, state), targets[1], [1], OLD)
    assert targets[1].next_wanted(OLD, 1) == 600
    with pytest.raises(UsageError, match="does not own slot 1"):
        sources[0].look(OLD, SlotId(1), 700)
    found = [source.look(OLD, SlotId(0), 700) for source in sources]
    for target in targets:
        target.begin(OLD, prompt)
    targets[0].take_own(OLD, 0, found[0][0])
    targets[1].take_own(OLD, 2, found[1][2])
    assert [target.is_whole(OLD, 700) for target in targets] == [True, False]
    held = found[0][1].held(targets[1].next_wanted(OLD, 1))
    wrong = replace(held, n_bytes=held.n_bytes - 1)
    with pytest.raises(UsageError, match=f"comes as {held.n_bytes - 1} bytes"):
        targets[1].expect(OLD, 1, wrong, 700)
    assert pull(found[0], targets[1], [1], OLD) <= n_ahead
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
            pull(middle.moves.look(OLD, SlotId(0), end), moves, [1], OLD)
    for each in (moves, last.moves):
        each.begin(OLD, prompt[:590])
        assert not each.is_whole(OLD, 590)
    if family == "gemma3_text":
        with pytest.raises(UsageError, match="was to go on from 100 with a window of 6"):
            moves.part_of(0).take_own(OLD, 0, first.moves.look(OLD, SlotId(0), 100)[0])
    moves.part_of(0).take_own(OLD, 0, first.moves.look(OLD, SlotId(0), 590)[0])
    last.moves.take_own(OLD, 2, last.moves.look(OLD, SlotId(0), 590)[2])
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


@needs_library  # which gives a replayed row its bits, and shares blocks
@pytest.mark.parametrize(
    "family",
    cases(["gemma3_text", "qwen3_next", "deepseek_v4"], ["falcon_h1", "deepseek_v41_text"]),
)
def test_a_standby_goes_on_from_a_kept_state(family: str, tmp_path: Path) -> None:
    """The middle stage is lost while it is followed for the third time: the round before counts.

    All stages are so far behind it by then that their slots cannot be rewound to there.
    """
    folder = make_decoder(tmp_path, family, max_position_embeddings=CONTEXT, **CASES[family])
    old, new = (TorchStages(folder, even_split(3, 3), context=CONTEXT) for _ in range(2))
    whole = TorchStages(folder, even_split(3, 1), context=CONTEXT)
    prompt = random_prompt(1100, 300, seed=1)
    for stages in (old, whole):
        stages.open(PENALISED, n_prompt=len(prompt))
    middle, target = old.computes[1].moves, new.computes[1].moves
    n_bytes = []
    for number, (begin, end) in enumerate([(0, 256), (256, 512), (512, 768), (768, 1024)]):
        for stages in (old, whole):
            stages.step(begin, prompt[begin:end], 1)
        for compute in old.computes:
            compute.operate(KeepState(slot=SlotId(0), n_positions=end, state=StateId(number)))
        target.begin(OLD, prompt[:end])
        found = middle.look(OLD, SlotId(0), end, StateId(number))
        if end < 768:
            n_bytes.append(pull(found, target, [1], OLD))
            continue
        held = found[1].held(target.next_wanted(OLD, 1))
        target.expect(OLD, 1, held, end)
        data = bytearray(found[1].read(held.first, end))
        target.write(OLD, 1, held.first, end, data)
        assert not target.is_whole(OLD, end)
    assert n_bytes[1] <= n_bytes[0], "rows that have come were fetched again"

    def rewind() -> None:
        live = old.computes[0].moves.look(OLD, SlotId(0), 512)[0]
        new.computes[0].moves.take_own(OLD, 0, live)

    with pytest.raises(UsageError):
        rewind()
    for rank in (0, 2):
        moves = new.computes[rank].moves
        moves.begin(OLD, prompt[:512])
        found = old.computes[rank].moves.look(OLD, SlotId(0), 512, StateId(1))
        moves.take_own(OLD, rank, found[rank])
    assert all(compute.moves.is_whole(OLD, 512) for compute in new.computes)
    new.open(PENALISED, n_prompt=len(prompt), n_kept=512, is_restored=True)
    for begin, end in [(512, 768), (768, 1024)]:
        new.step(begin, prompt[begin:end], 1)
    for compute in old.computes:
        compute.operate(DropStates(states=(StateId(1),)))
    with pytest.raises(UsageError, match="the state 1 after 512 positions is not kept here"):
        middle.look(OLD, SlotId(0), 512, StateId(1))
    for position in range(1024, 1032):
        ids = [prompt[position]]
        assert new.step(position, ids, 1) == whole.step(position, ids, 1)


@pytest.mark.parametrize(
    "family",
    cases(["llama", "gemma3_text"], ["falcon_h1", "deepseek_v4", "deepseek_v41_text"]),
)
def test_what_is_read_beside_steps_is_what_was_there(family: str, tmp_path: Path) -> None:
    """The slot grows meanwhile, forgets what no window reaches, and shares what it has."""
    folder = make_decoder(tmp_path, family, max_position_embeddings=CONTEXT, **CASES[family])
    stages = TorchStages(folder, even_split(3, 1), context=CONTEXT)
    [compute] = stages.computes
    prompt = random_prompt(CONTEXT, 300, seed=1)
    stages.open(SamplingParams(), n_prompt=CONTEXT)

    def read(found: Mapping[int, HeldLayer]) -> list[bytes]:
        spans = [(held, held.held(0).first, held.end) for held in found.values()]
        return [bytes(held.read(first, end)) for held, first, end in spans]

    def go_on(begin: int) -> None:
        for position in range(begin, begin + 128, 32):
            stages.step(position, prompt[position : position + 32], 0)
        if begin == 512:
            opened = {"n_kept": 512, "source": SlotId(0)}
            state = None if stages.room_states is None else StateId(512)
            stages.open(SamplingParams(), slot=1, n_prompt=CONTEXT, state=state, **opened)

    with ThreadPoolExecutor(1) as thread:
        go_on(0)
        for end in range(128, CONTEXT, 128):
            state = None
            if stages.room_states is not None:
                state = StateId(end)
                compute.operate(KeepState(slot=SlotId(0), n_positions=end, state=state))
            found = compute.moves.look(OLD, SlotId(0), end, state)
            expected = read(found)
            reading = [thread.submit(read, found) for _ in range(8)]
            go_on(end)
            assert all(each.result() == expected for each in reading)
            assert read(found) == expected
