"""Drafts by the layer that predicts further tokens: those of the published module, no text changed.

The oracle has transformers' layers in plain code around them; it computes every draft from scratch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from support.models.mtp_checkpoints import N_LAYERS, PlainMtp, make_mtp, write_mtp_gguf
from support.rings.stage_chain import even_split, random_prompt
from support.rings.stage_forms import form_of, with_form
from support.rings.torch_rings import LoadedStages, TorchStages, request, run, tokens_of
from support.soak import cases
from test_moved_kv import pull
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError, UsageError
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    RequestEvent,
    Speculation,
)
from shardnet.runtime.loading.loaded_stage import LoadedStage, computes_by_device, load_by_device
from shardnet.runtime.loading.loading import load
from shardnet.runtime.loading.model_facts import stamp
from shardnet.runtime.scheduling.drafting import AdaptiveDrafter
from shardnet.runtime.stage import mtp_drafts
from shardnet.runtime.stage.mtp_drafts import MtpDrafts
from shardnet.runtime.stage.stage_order import StageDevice, StageOrder, StagePart
from shardnet.sampling_params import SamplingParams
from shardnet.types import LEAST_STATES, LayerRange, MicroBatch, SequenceId, SlotId, WireDType
from shardnet.wire.messages.extras import Drafts

STREAMING = ["deepseek_v4", "hy_v4", "glm5_next_text", "qwen4_exp_text"]
"""Families with several residual streams."""
SAID_IN_A_GGUF = {
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    },
    "glm5_next_text": {"linear_num_heads": 6},
    "glm_moe_dsa": {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "qwen4_exp_text": {"output_gate_type": "sigmoid"},
}
"""More of a config: what llama.cpp's files can say."""
MTP = Speculation(make_draft_source=None, most=9, most_by_ring=3)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def stages(folder: Path) -> TorchStages:
    return TorchStages(folder, even_split(N_LAYERS, 2), has_mtp=True)


@pytest.mark.parametrize(
    "folder",
    cases(
        ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe_text", *STREAMING],
        ["glm4_moe_lite", "qwen3_5_text", "glm_moe_dsa"],
    ),
    indirect=True,
)
def test_drafts_are_those_of_the_published_module(folder: Path, stages: TorchStages) -> None:
    """Behind a prompt in chunks, a row alone, and rows of which some are rejected."""
    oracle = PlainMtp(folder)
    tokens = random_prompt(45, 300)
    stages.open(SamplingParams(), n_prompt=len(tokens), n_drafts=3)
    for start in (0, 20):
        assert not stages.step(start, tokens[start : start + 20], 0).drafts
    samples = stages.step(40, tokens[40:], 1)
    n_drafted = []
    for n_right in (0, 2, 1, 3):
        tokens.append(samples.token_ids[n_drafted[-1][0] if n_drafted else 0])
        (drafts,) = samples.drafts
        assert drafts.position == len(tokens)
        assert [*drafts.token_ids] == oracle.drafts(tokens, len(drafts.token_ids))
        right = oracle.tokens(tokens, n_right)
        wrong = [319 - right[-1]] if n_right == 2 else []
        rows = [tokens[-1], *right, *wrong]
        samples = stages.step(len(tokens) - 1, rows, len(rows))
        assert [*samples.token_ids[:n_right]] == right
        tokens += right
        n_drafted.append((n_right, len(drafts.token_ids)))
    assert [n for _, n in n_drafted] == [1, 1, 3, 2]


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize(
    "folder",
    cases(
        ["qwen3_next", "deepseek_v4", "hy_v4"],
        ["qwen3_5_text", "glm5_next_text", "qwen4_exp_text", "deepseek_v3", "glm4_moe"],
    ),
    indirect=True,
)
def test_drafts_change_no_token(stages: TorchStages) -> None:
    """Greedy and sampled, at once and one behind the other, which begins with what the first said.

    Nearly all drafts of random layers are rejected: rows are written over, states rewound.
    """
    prompts = [random_prompt(n, 300, seed=n) for n in (40, 17, 30)]
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.4, seed=3),
        SamplingParams(temperature=0.3, seed=1, repetition_penalty=1.3),
    ]
    asked = [request(ids, 14, kind) for ids, kind in zip(prompts, kinds, strict=True)]
    plain = [tokens_of(events) for events in run(stages, *asked, at_once=False)]
    asked.append(request([*prompts[0], *plain[0], 5, 6], 8))
    plain.append(tokens_of(run(stages, asked[3])[0]))
    drafted = [replace(one, speculation=MTP) for one in asked]
    for at_once in (True, False):
        events = run(stages, *drafted, at_once=at_once)
        assert [tokens_of(one) for one in events] == plain
        ends = [one[-1] for one in events]
        assert all(isinstance(end, GenerationFinished) and end.timing.n_drafted for end in ends)


@pytest.mark.parametrize(
    "folder",
    cases(
        ["glm4_moe", "glm5_next_text", "qwen4_exp_text"],
        ["qwen3_next", "deepseek_v4", "hy_v4", "deepseek_v3", "qwen3_5_text"],
    ),
    indirect=True,
)
def test_frames_behind_a_wrong_draft_leave_no_trace_in_later_drafts(
    folder: Path, stages: TorchStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right frames behind drafts in flight, one that is wrong in its middle, and those behind it.

    Drafts suffice for as many as were in flight at once, and one more.
    """
    monkeypatch.setattr(mtp_drafts, "_JUDGED", 99)  # the layer is random, and hardly ever right
    oracle = PlainMtp(folder)
    tokens = random_prompt(45, 300)
    stages.open(SamplingParams(), n_prompt=len(tokens), n_drafts=9, slot=3)
    tokens.append(stages.step(0, tokens, 1, slot=3).token_ids[0])
    text = [*tokens, *oracle.tokens(tokens, 14)]

    def drafted(position: int, rows: list[int], n_ahead: int, n_known: int) -> int:
        """Count drafts behind rows; check them and that they follow the first `n_known` tokens."""
        found = stages.step(position, rows, len(rows), slot=3, n_ahead=n_ahead).drafts
        for drafts in found:
            assert drafts.position == n_known
            known = text[:n_known]
            assert [*drafts.token_ids] == oracle.drafts(known, len(drafts.token_ids))
        return sum(len(drafts.token_ids) for drafts in found)

    wrong = [319 - text[50], 7]
    assert drafted(45, text[45:47], 0, 48) == 2
    assert drafted(47, text[47:49], 1, 50) == 4
    assert drafted(49, [text[49], *wrong], 3, 51) == 7, "the first of them is right"
    assert drafted(52, [1, 2], 5, 0) == 0
    assert drafted(54, [text[54]], 7, 0) == 0, "right where it stands, behind what is not"
    assert drafted(50, text[50:53], 0, 54) == 7
    assert drafted(53, text[53:55], 2, 56) == 7
    assert drafted(55, [319 - text[55], 3], 4, 0) == 0, "wrong from its first draft on"
    assert drafted(55, text[55:56], 0, 57) == 7


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize("family", cases(["qwen3_next"], ["glm4_moe", "deepseek_v4"]))
def test_drafts_of_the_tail_in_flight_change_no_token(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 1, 2 and 4 stages, alone and two at once, greedy, sampled and with penalties.

    In place of its own drafts, of which hardly any is right, the tail sends those that are, but for
    two of twelve tokens. Without them frames fly too, and nearly all of them are wrong.
    """
    monkeypatch.setattr(mtp_drafts, "_JUDGED", 99)
    monkeypatch.setattr(AdaptiveDrafter, "_most_frames", 9)
    monkeypatch.setattr(AdaptiveDrafter, "_pays_behind", lambda *_: True)
    folder = make_mtp(tmp_path, family, n_layers=4)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.4, seed=3, repetition_penalty=1.3, presence_penalty=0.2),
    ]
    asked = [request(random_prompt(20, 300, seed=n), 40, kind) for n, kind in enumerate(kinds)]
    plain = [tokens_of(events) for events in run(TorchStages(folder, even_split(4, 1)), *asked)]
    drafted = [replace(one, speculation=replace(MTP, most=3, most_by_ring=12)) for one in asked]
    drafts_of, flown = MtpDrafts.draft, [0, 0]

    def knowing(self: MtpDrafts, batch: MicroBatch, *rest: Any) -> list[Drafts]:
        made = drafts_of(self, batch, *rest)
        behind = [group for group in batch.groups if group.n_drafts >= group.n_rows]
        flown[0] += len(behind)
        flown[1] += len({group.sequence_id for group in behind} & {one.sequence_id for one in made})
        if not knows:
            return made
        texts = {n: [*asked[n].prompt, *plain[n]] for n in range(2)}
        found = []
        for one in made:
            text = texts[(one.sequence_id - 1) % 2]
            said = text[one.position : one.position + len(one.token_ids)]
            ids = [token ^ (n % 12 in (0, 5)) for n, token in enumerate(said, start=one.position)]
            found.append(msgspec.structs.replace(one, token_ids=ids))
        return found

    monkeypatch.setattr(MtpDrafts, "draft", knowing)
    for n_stages, knows in ((1, True), (2, True), (2, False), (4, True)):
        stages = TorchStages(folder, even_split(4, n_stages), has_mtp=True)
        for at_once in (True, False):
            flown[:] = 0, 0
            events = run(stages, *drafted, at_once=at_once)
            assert [tokens_of(one) for one in events] == plain
            if n_stages > 1 + at_once:
                assert flown[0] > flown[1]
                assert flown[1] > 1 or not knows


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize("folder", ["qwen3_next"], indirect=True)
def test_drafts_where_layers_are_cut_over_devices(folder: Path) -> None:
    """The tokens of one device without drafts; layers that devices share are refused by name."""
    checkpoint = Checkpoint.open(folder)
    devices = [StageDevice(place=place, name=f"cpu:{place}") for place in range(2)]
    ranges = even_split(N_LAYERS, 2)
    order = StageOrder(
        form=form_of(folder, mtp=True),
        folder=folder,
        layers=LayerRange(0, N_LAYERS),
        is_tail=True,
        parts=tuple(
            StagePart(layers=layers, devices=(device,))
            for layers, device in zip(ranges, devices, strict=True)
        ),
    )

    def loaded(order: StageOrder) -> LoadedStage:
        sizes = [1 << 28, 1 << 28]
        return load_by_device(order, sizes, lambda one, n, told, _: load(one, n, told), Mock())

    def events_of(stage: LoadedStage, *asked: GenerationRequest) -> list[list[RequestEvent]]:
        stage.compute.use_wire(WireDType.FLOAT32, WireDType.FLOAT32)
        ring = LoadedStages(
            computes=[[compute for _, compute in computes_by_device(stage)]],
            vocab_size=checkpoint.config.vocab_size,
            room_states=LEAST_STATES,
        )
        return run(ring, *asked)

    asked = [
        request(random_prompt(n, 300, seed=n), 14, SamplingParams(temperature=t, seed=3))
        for n, t in ((40, 0.0), (17, 0.4))
    ]
    plain = events_of(loaded(with_form(replace(order, parts=()), mtp=False)), *asked)
    drafted = events_of(loaded(order), *(replace(one, speculation=MTP) for one in asked))
    assert [tokens_of(events) for events in drafted] == [tokens_of(events) for events in plain]
    ends = [events[-1] for events in drafted]
    assert all(isinstance(end, GenerationFinished) and end.timing.n_drafted for end in ends)
    shared = StagePart(layers=order.layers, devices=tuple(devices))
    with pytest.raises(UsageError, match="cannot be cut over devices"):
        loaded(order.on(shared))


@pytest.mark.parametrize("family", ["deepseek_v3", *STREAMING])
def test_drafts_go_on_elsewhere(family: str, tmp_path: Path) -> None:
    """What the layer has of a sequence is moved with it to the stages of another split."""
    folder = make_mtp(tmp_path, family)
    oracle = PlainMtp(folder)
    stages = TorchStages(folder, even_split(N_LAYERS, 2), has_mtp=True)
    tokens = random_prompt(30, 300)
    stages.open(SamplingParams(), n_prompt=30, n_drafts=1)
    samples = stages.step(0, tokens, 1)
    new = TorchStages(folder, [LayerRange(0, N_LAYERS)], has_mtp=True)
    target = new.computes[0].moves
    target.begin(SequenceId(0), tokens)
    for rank, compute in enumerate(stages.computes):
        found = compute.moves.look(SequenceId(0), SlotId(0), 30)
        pull(found, target, LayerRange(rank, rank + 1 + rank), SequenceId(0))
    new.open(SamplingParams(), n_prompt=30, n_drafts=1, n_kept=30, is_restored=True)
    tokens.append(samples.token_ids[0])
    samples = new.step(30, tokens[30:], 1)
    tokens.append(samples.token_ids[0])
    assert [*samples.drafts[0].token_ids] == oracle.drafts(tokens, 1)


@pytest.mark.usefixtures("drafts_always_pay")
@pytest.mark.parametrize(
    "family",
    cases(
        ["deepseek_v3", "qwen3_5_text", "deepseek_v4", "glm5_next_text", "qwen4_exp_text"],
        ["glm_moe_dsa", "hy_v4"],
    ),
)
def test_drafts_come_from_a_gguf(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their logits are those of the safetensors but for the order of sums; no token changes."""
    folder = make_mtp(tmp_path, family, **SAID_IN_A_GGUF.get(family, {}))
    file = write_mtp_gguf(folder, tmp_path / "model.gguf")
    tokens, said = random_prompt(30, 300), list[Tensor]()
    for source in (folder, file):
        stages = TorchStages(source, even_split(N_LAYERS, 2), has_mtp=True)
        model = stages.computes[-1]._model
        logits = model.mtp_logits

        def heard(rows: Tensor, of: Callable[[Tensor], Tensor] = logits) -> Tensor:
            said.append(of(rows))
            return said[-1]

        monkeypatch.setattr(model, "mtp_logits", heard)
        stages.open(SamplingParams(), n_prompt=30, n_drafts=1)
        for position, rows in ((0, tokens), (30, [7])):
            stages.step(position, rows, 1)
    assert len(said) == 4
    torch.testing.assert_close(said[2:], said[:2], atol=1e-4, rtol=0)
    asked = [request(random_prompt(n, 300, seed=n), 8) for n in (40, 17)]
    plain, drafted = (
        run(stages, *(replace(one, speculation=how) for one in asked)) for how in (None, MTP)
    )
    assert [tokens_of(events) for events in drafted] == [tokens_of(events) for events in plain]


@pytest.mark.parametrize("family", cases(["deepseek_v4"], ["deepseek_v3", "qwen3_5_text"]))
def test_layers_in_a_file_beside_a_gguf_are_those_of_one_file(family: str, tmp_path: Path) -> None:
    sizes = SAID_IN_A_GGUF.get(family, {})
    folder = make_mtp(tmp_path, family, **sizes)
    whole = Checkpoint.open(write_mtp_gguf(folder, tmp_path / "whole.gguf"))
    (tmp_path / "apart").mkdir()
    file = write_mtp_gguf(folder, tmp_path / "apart" / "model.gguf", is_apart=True)
    ahead = file.with_name("mtp-model.gguf")
    apart = Checkpoint.open(file.parent)
    whole.use_mtp()
    apart.use_mtp()
    assert (apart.config, apart.tensors.keys()) == (whole.config, whole.tensors.keys())
    for name in whole.tensors:
        assert torch.equal(apart.read(name), whole.read(name)), name
    assert {head.name for head in apart.skeleton()} == {file.name, ahead.name}
    assert [name for name, *_ in stamp(file)] == [file.name, ahead.name]
    stages = TorchStages(file, even_split(N_LAYERS, 2), has_mtp=True)
    stages.open(SamplingParams(), n_prompt=30, n_drafts=1)
    assert stages.step(0, random_prompt(30, 300), 1).drafts

    model_id = apart.model_id
    ahead.rename(tmp_path / "other.gguf")
    alone = Checkpoint.open(file)
    assert not alone.has_mtp
    assert alone.model_id != model_id
    sizes = sizes | {"intermediate_size": 96, "moe_intermediate_size": 96}
    other = make_mtp(tmp_path / "wider", family, **sizes)
    made = write_mtp_gguf(other, tmp_path / "model.gguf", is_apart=True)
    made.with_name(ahead.name).rename(ahead)
    with pytest.raises(
        CheckpointError, match=r"mtp-model\.gguf: .* is 96, and \d+ in the model beside"
    ):
        Checkpoint.open(file)


@pytest.mark.parametrize("folder", ["qwen3_next"], indirect=True)
def test_drafts_that_nobody_sends_are_made_now_and_then(stages: TorchStages) -> None:
    stages.open(SamplingParams(), n_drafts=3, slot=7)
    drafted = [bool(stages.step(n, [n + 1], 1, slot=7).drafts) for n in range(34)]
    assert [n for n, is_made in enumerate(drafted, start=1) if is_made] == [1, 2, 16, 32]
    assert len(stages.step(34, [5, 6], 2, slot=7).drafts[0].token_ids) == 2


@pytest.mark.parametrize("folder", ["qwen3_next"], indirect=True)
def test_a_draft_that_cannot_be_drawn_fails_no_step(
    stages: TorchStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came from elsewhere may lack the layer's last row: what it attends to is anything."""
    stages.open(SamplingParams(), n_drafts=3, slot=8)
    model = stages.computes[-1]._model
    logits, n_calls = model.mtp_logits, iter(range(9))
    monkeypatch.setattr(
        model, "mtp_logits", lambda rows: logits(rows) * (torch.nan if next(n_calls) else 1)
    )
    assert len(stages.step(0, [1], 1, slot=8).drafts[0].token_ids) == 1
    samples = stages.step(1, [2], 1, slot=8)
    assert len(samples.token_ids) == 1
    assert not samples.drafts


@pytest.mark.parametrize("folder", ["qwen3_next"], indirect=True)
def test_a_slot_that_the_layer_has_not_run_gets_no_drafts(stages: TorchStages) -> None:
    """Nor is one drafted beyond what is booked for the slot."""
    draft = stages.computes[-1]._tail.drafts  # type: ignore[union-attr]
    stages.open(SamplingParams(), n_drafts=3, slot=5)
    stages.step(0, [1, 2, 3], 0, slot=5)
    assert draft is not None
    draft.keep(SlotId(5), 2, None)
    assert not stages.step(3, [4], 1, slot=5).drafts
    stages.open(SamplingParams(), n_drafts=3, slot=6)
    rows = random_prompt(254, 300)
    assert len(stages.step(0, rows, 1, slot=6).drafts[0].token_ids) == 1
    [drafts] = stages.step(254, [7, 8], 2, slot=6).drafts  # the block is full behind them
    assert len(drafts.token_ids) == (1 if drafts.position == 257 else 2)
