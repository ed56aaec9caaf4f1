"""Families without a record of ours, by transformers' own modules: cut anywhere they say the same.

Each family here is read without its record, should it have one by now.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cluster.small_node import small_settings
from support.models.checkpoints import VOCAB_SIZE, make_decoder
from support.oracles.oracle import load_reference, made_reference, reference_logits
from support.rings.module_stages import load, rows, step
from support.rings.stage_chain import batch_of, random_prompt
from support.rings.stage_forms import form_of, with_form
from support.soak import cases

from shardnet.api.client import connect
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.node.node import listening
from shardnet.errors import RemoteProtocolError, UnsupportedModelError, UsageError
from shardnet.model.families import registry
from shardnet.model.modules.outline import read_outline
from shardnet.runtime.engine.draft_model import load_draft_model
from shardnet.runtime.loading.loading import load as load_whole
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.sampling_params import SamplingParams
from shardnet.stage.module_stage import ModuleStage
from shardnet.stage.runs import Run
from shardnet.types import LayerRange, NodeId, SlotId
from shardnet.wire.messages.plans import ModelChoice

CPU = torch.device("cpu")
CLOSE = 2e-4
"""Of logits about 1: transformers' own two ways through a state differ by a tenth of it."""
GEMMA4_E: dict[str, Any] = {
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "num_kv_shared_layers": 0,
    "head_dim": 8,
    "global_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "persimmon": {},
    "bloom": {"n_layer": 4, "n_head": 6},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 4,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "num_key_value_heads": 6,
        "adapter_rank": 4,
    },
    "phimoe": {"num_local_experts": 4, "sliding_window": 16},
    "zaya": {
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 20,
        "router_hidden_size": 12,
        "head_dim": 8,
        "sliding_window": 16,
    },
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [80] * 4,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
        "num_kv_shared_layers": 0,
        "sliding_window": 16,
        "head_dim": 8,
        "laurel_rank": 6,
        "altup_num_inputs": 3,
    },
    "inkling2_text": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "head_dim": 8,
        "n_layers_per_attn_res_block": 2,
        "unpadded_vocab_size": VOCAB_SIZE,
        "sliding_window": 16,
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "sliding_window": 16, "head_dim": 8},
    "longcat_flash": {
        "num_hidden_layers": 8,
        "ffn_hidden_size": 80,
        "expert_ffn_hidden_size": 20,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 6,
    },
    "gemma4_text": GEMMA4_E,
    "gemma4": GEMMA4_E | {"tie_word_embeddings": True},
}
"""A plain one, one whose embedding is needed everywhere, states with experts and without, layers
that share parameters and read the embedding again, experts, those that hand on a router's state,
several streams, or what blocks of layers began with, layers that run twice, two caches in a layer
and experts that compute nothing, and one whose layers need the token ids, alone and in a multimodal
checkpoint.
"""
STATES = ("jamba", "lfm2", "zamba2", "zaya", "inkling2_text")


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny random checkpoint of the family that the test names."""
    monkeypatch.delitem(registry.FAMILIES, request.param, raising=False)  # type: ignore[arg-type]
    return make(tmp_path / "model", request.param)


def make(folder: Path, family: str, **more: Any) -> Path:
    """Save a tiny random checkpoint of a family."""
    return make_decoder(folder, family, with_tokenizer=False, **(FAMILIES[family] | more))


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_logits_are_those_of_transformers_at_every_split(folder: Path) -> None:
    """A prompt in chunks, beside another sequence, and single rows.

    With the same bits at each split, and beside no other sequence.
    """
    reference = made_reference(folder)
    one, other = random_prompt(30, VOCAB_SIZE, seed=1), random_prompt(9, VOCAB_SIZE, seed=2)
    wanted = [reference_logits(reference, ids) for ids in (one, other)]
    config = Checkpoint.open(folder).config
    n_layers, outline = config.n_layers, config.outline
    assert outline is not None
    said: list[torch.Tensor] = []
    for cut in cases([1, n_layers - 1], range(2, n_layers - 1)):
        if outline.together(LayerRange(0, cut)) is not None:
            continue
        stages = load(folder, [LayerRange(0, cut), LayerRange(cut, n_layers)])
        found = [
            step(stages, rows(0, 0, one[:20]), rows(1, 0, other[:8])),
            step(stages, rows(0, 20, one[20:29])),
            step(stages, rows(1, 8, other[8:]), rows(0, 29, one[29:])),
        ]
        mine = torch.cat((found[0][:20], found[1], found[2][1:]))
        torch.testing.assert_close(mine, wanted[0], rtol=0, atol=CLOSE)
        theirs = torch.cat((found[0][20:], found[2][:1]))
        torch.testing.assert_close(theirs, wanted[1], rtol=0, atol=CLOSE)
        said.append(torch.cat((mine, theirs)))
        if all(stage.takes_chunks for stage in stages):  # else it depends on the stage's layers
            assert torch.equal(said[-1], said[0])
        assert torch.equal(step(stages, rows(2, 0, one[:20])), mine[:20])


@pytest.mark.parametrize("folder", ["longcat_flash"], indirect=True)
def test_experts_that_compute_nothing_have_no_weights_as_published(folder: Path) -> None:
    """transformers keeps room for half of theirs, and does not load files without it."""
    ids, path = random_prompt(20, VOCAB_SIZE, seed=4), folder / "model.safetensors"
    wanted = reference_logits(made_reference(folder), ids)
    tensors = load_file(path)
    theirs = [name for name in tensors if ".experts.4." in name or ".experts.5." in name]
    assert theirs
    kept = {name: tensors[name] for name in tensors if name not in theirs}
    save_file(kept, path, metadata={"format": "pt"})
    stages = load(folder, [LayerRange(0, 2), LayerRange(2, 4)])
    torch.testing.assert_close(step(stages, rows(0, 0, ids)), wanted, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("folder", ["persimmon"], indirect=True)
def test_positions_are_taken_back_and_copied(folder: Path) -> None:
    """As rejected drafts and shared prefixes need it; windows too are kept whole for it."""
    stages = load(folder, [LayerRange(0, 2), LayerRange(2, 4)])
    ids = random_prompt(48, VOCAB_SIZE, seed=3)
    wanted = step(stages, rows(0, 0, ids))
    for stage in stages:
        stage.kv.copy(SlotId(0), SlotId(1), 12)
        assert held_bytes(stage, 1) == held_bytes(stage, 0) // 4
        stage.kv.copy(SlotId(0), SlotId(2), 48)
        stage.kv.trim(SlotId(2), 12)
        assert held_bytes(stage, 2) == held_bytes(stage, 0) // 4
        stage.kv.trim(SlotId(2), 0)
    again = step(stages, rows(1, 10, ids[10:]), rows(0, 15, ids[15:]))
    torch.testing.assert_close(again[:38], wanted[10:], rtol=0, atol=1e-5)
    torch.testing.assert_close(again[38:], wanted[15:], rtol=0, atol=1e-5)
    assert [stage.kv.blocks_used for stage in stages] == [2, 2]


def held_bytes(stage: ModuleStage, slot: int) -> int:
    """What keys and values of a slot take in memory, and what they keep there."""
    layers: Any = stage.kv._slots[SlotId(slot)].cache.layers
    held = [each for layer in layers if layer.is_initialized for each in (layer.keys, layer.values)]
    return sum(each.untyped_storage().nbytes() for each in held)


@pytest.mark.parametrize("folder", ["persimmon"], indirect=True)
def test_of_hidden_states_those_that_are_asked_for_are_kept(folder: Path) -> None:
    [stage] = load(folder, [LayerRange(0, 4)])
    batch = batch_of([rows(0, 0, [5, 6, 7])])
    run = Run(batch=batch, hidden=None, kept_states=frozenset({0, 2}))
    last = stage.run_alone(run)
    assert {number: tuple(state.shape) for number, state in run.states.items()} == dict.fromkeys(
        (0, 2), tuple(last.shape)
    )
    model = stage._model
    with torch.inference_mode():
        assert model.run([5], None, model.new_slot(), {1}).keys() == {1, 4}
    assert not model._pass.rows, "nothing stays after a step"


@pytest.mark.parametrize("folder", ["jamba"], indirect=True)
def test_a_state_is_not_rewound(folder: Path) -> None:
    [stage] = load(folder, [LayerRange(0, 4)])
    assert Checkpoint.open(folder).config.has_state
    assert not stage.takes_chunks, "it would continue from no state: rows go one by one"
    step([stage], rows(0, 0, [5, 6, 7]))
    with pytest.raises(RemoteProtocolError, match="its state cannot be rewound"):
        step([stage], rows(0, 2, [8]))


def test_layers_that_share_keys_and_values_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(registry.FAMILIES, "gemma4_text", raising=False)  # type: ignore[arg-type]
    kinds = ["sliding_attention", "full_attention"] * 3
    folder = make(
        tmp_path, "gemma4_text", num_hidden_layers=6, layer_types=kinds, num_kv_shared_layers=2
    )
    ids = random_prompt(20, VOCAB_SIZE, seed=4)
    stages = load(folder, [LayerRange(0, 2), LayerRange(2, 6)])
    wanted = reference_logits(made_reference(folder), ids)
    torch.testing.assert_close(step(stages, rows(0, 0, ids)), wanted, rtol=0, atol=CLOSE)
    with pytest.raises(UnsupportedModelError, match="one node needs them all"):
        load(folder, [LayerRange(3, 6)])


@pytest.mark.parametrize("folder", ["dory"], indirect=True)
def test_layers_that_run_several_times_stay_together(folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers 1-2 of this dory .*several times"):
        load(folder, [LayerRange(2, 4)])
    [stage] = load(folder, [LayerRange(0, 4)])
    ids = random_prompt(30, VOCAB_SIZE, seed=6)
    step([stage], rows(0, 0, ids))
    taken_back = step([stage], rows(0, 20, ids[20:]))
    torch.testing.assert_close(taken_back, step([stage], rows(1, 0, ids))[20:], rtol=0, atol=CLOSE)


def test_fp8_is_unpacked(tmp_path: Path) -> None:
    """The linears of a checkpoint in FP8 are those that were rounded to it."""
    folder = make(tmp_path, "persimmon")
    stored = load_file(folder / "model.safetensors")
    rounded, parts = dict(stored), dict(stored)
    for name, values in stored.items():
        if name.endswith(("dense.weight", "dense_h_to_4h.weight")):
            scale = values.abs().max() / 448
            parts[name] = (values / scale).to(torch.float8_e4m3fn)
            parts[f"{name}_scale_inv"] = scale.reshape(1, 1)
            rounded[name] = parts[name].float() * scale
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    ids = random_prompt(12, VOCAB_SIZE, seed=6)
    wanted = reference_logits(load_reference(folder), ids)
    save_file(parts, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    found = step(load(folder, [LayerRange(0, 1), LayerRange(1, 4)]), rows(0, 0, ids))
    torch.testing.assert_close(found, wanted, rtol=0, atol=CLOSE)


def test_what_modules_do_not_do_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, "persimmon")
    order = StageOrder(
        form=form_of(folder, context=64),
        folder=folder,
        layers=LayerRange(0, 4),
        is_tail=True,
    )
    for wrong in (
        with_form(order, quant="int8"),
        with_form(order, kv_dtype="int8"),
        replace(order, n_streamed=1),
    ):
        with pytest.raises(UnsupportedModelError, match="which do not do that; leave --"):
            load_whole(wrong, 1 << 30, lambda done, total: None)
    with pytest.raises(UsageError, match="transformers' own modules, which neither draft"):
        load_draft_model(
            folder,
            vocab_size=VOCAB_SIZE,
            device="cpu",
            context=64,
            memory_bytes=1 << 30,
            threads=1,
        )


@pytest.mark.parametrize("family", ["rwkv", "openai-gpt", "cpmant", "camembert"])
def test_what_another_stage_would_not_know_is_noticed(family: str) -> None:
    """Else texts would be wrong without a word: what goes past rows of numbers is seen."""
    config = {"model_type": family, "num_hidden_layers": 4, "n_layer": 4}
    why = (
        "hand on lists|keep nothing in a cache|hand on other rows|"
        "counts positions from its token for padding"
    )
    with pytest.raises(UnsupportedModelError, match=why):
        read_outline(json.dumps(config), "config.json")


def test_without_the_package_the_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, "bloom")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'shardnet\[transformers\]'"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("family", ["bloom", "jamba", "gemma3n_text"])
def test_a_ring_says_what_transformers_says_and_outlives_a_node(
    family: str, tmp_path: Path
) -> None:
    """A node leaves while a request runs: what it held is computed again."""
    folder = make(tmp_path / "model", family)
    prompt = random_prompt(40, VOCAB_SIZE, seed=5)
    reference = made_reference(folder)
    wanted: list[int] = []
    for _ in range(16):
        wanted.append(int(reference_logits(reference, prompt + wanted)[-1].argmax()))

    async def main() -> None:
        async with AsyncExitStack() as stack:
            nodes = []
            for name in ("anna", "bert"):
                settings = small_settings(tmp_path / name)
                settings = replace(settings, node=NodeId(name[0] * 32), name=name)
                nodes.append(await stack.enter_async_context(listening(settings, "127.0.0.1", 0)))
            client = await stack.enter_async_context(connect(nodes[0].address))
            leaving = await stack.enter_async_context(connect(nodes[1].address))
            choice = ModelChoice(model=str(folder), nodes=[node.address for node in nodes])
            plan = await client.plan(choice)
            assert any("transformers' own modules" in warning for warning in plan.warnings)
            token_ids: list[int] = []
            drained = None
            async for event in client.generate(
                [prompt],
                SamplingParams(),
                model=choice,
                max_tokens=len(wanted),
                ignore_eos=True,
                deterministic=True,
            ):
                assert event.error is None
                token_ids += event.token_ids
                if len(token_ids) > 5 and drained is None:
                    drained = asyncio.create_task(leaving.drain(60.0))
            assert drained is not None
            await drained
            assert token_ids == wanted
            [sampled] = await client.complete(
                [prompt],
                SamplingParams(temperature=0.8, seed=4, repetition_penalty=1.1),
                model=replace_nodes(choice, nodes[0].address),
                max_tokens=5,
                speculate="off" if family in STATES else "ngram",
            )
            assert len(sampled.token_ids) == 5

    asyncio.run(main())


def replace_nodes(choice: ModelChoice, address: str) -> ModelChoice:
    """The same model on one node."""
    return ModelChoice(model=choice.model, nodes=[address])
