"""Every family against transformers' own class, on random tiny checkpoints in float32.

One stage is held against transformers: logits within 1e-4, the same greedy tokens. Every split is
held against one stage: the same bits. Prompts are shorter and longer than windows and chunks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support.models.checkpoints import EOS_ID, make_decoder, make_gpt2
from support.models.family_cases import CASES, SELDOM
from support.models.gguf_files import in_pairs
from support.oracles.oracle import (
    check_generation,
    load_reference,
    made_reference,
    reference_logits,
)
from support.rings.stage_chain import CPU, StageChain, even_split, probed, random_prompt
from support.soak import cases, is_soak

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.families.registry import FAMILIES
from shardnet.model.kernels.linear import KernelChoice
from shardnet.stage.load import choose_kernels
from shardnet.stage_form import StageForm
from shardnet.types import Arith, DType, LayerRange

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 64,
}

SPLIT = {case.split("-")[0]: case for case in CASES if case not in SELDOM}.values()
"""A case of each family."""


@pytest.fixture(
    scope="module", params=cases([case for case in CASES if case not in SELDOM], SELDOM)
)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_decoder(tmp_path_factory.mktemp(case), case.split("-")[0], **CASES[case])


def untested() -> KernelChoice:
    """What rows do in company is tried in test_exactness.py."""
    return replace(probed(CPU, DType.FLOAT32, None), exact_rows=1)


@pytest.fixture(scope="module")
def whole(folder: Path) -> StageChain:
    """One stage of all layers."""
    n_layers = Checkpoint.open(folder).config.n_layers
    return StageChain.load(folder, [LayerRange(0, n_layers)], untested())


def test_tokens_and_logits_are_those_of_transformers(folder: Path, whole: StageChain) -> None:
    """Prefill in chunks and decoding, against full forwards."""
    prompts = [random_prompt(length, 300, seed=length) for length in (19, 300)]
    check_generation(whole, made_reference(folder), prompts, 6)


def test_every_split_gives_the_same_bits(folder: Path, case: str, whole: StageChain) -> None:
    if case not in SPLIT and not is_soak():
        pytest.skip("scripts/soak runs it")
    n_layers = Checkpoint.open(folder).config.n_layers
    prompts = [random_prompt(length, 300, seed=length) for length in cases([290], [7])]
    whole.stages[0].kv.clear()
    together = whole.generate(prompts, 2)
    cuts = [[LayerRange(0, k), LayerRange(k, n_layers)] for k in range(1, n_layers)]
    for ranges in cases([even_split(n_layers, n_layers)], cuts):
        parts = StageChain.load(folder, ranges, untested()).generate(prompts, 2)
        for expected, logits in zip(together, parts, strict=True):
            assert torch.equal(logits, expected), f"split {[str(part) for part in ranges]}"


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "phi3"])
@pytest.mark.parametrize("context", [60, 290])
def test_a_sequence_that_fills_its_context_is_as_in_transformers(
    kind: str, context: int, tmp_path: Path
) -> None:
    """Rotary positions that depend on the length, within the positions trained with and beyond."""
    n_tokens = 5
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    rope = dynamic if kind == "dynamic" else dict(LONGROPE)
    sizes = {"max_position_embeddings": 64 if kind == "dynamic" else 512}
    family = "phi3" if kind == "phi3" else "llama"
    if kind == "phi3":
        sizes["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
    make_decoder(tmp_path, family, rope_parameters=rope, **sizes)
    assert Checkpoint.open(tmp_path).config.default_context == 64
    reference = made_reference(tmp_path)
    chain = StageChain.load(tmp_path, even_split(4, 2), context=context)
    check_generation(chain, reference, [random_prompt(context + 1 - n_tokens, 300)], n_tokens)


def test_layers_may_be_listed_by_their_older_names(tmp_path: Path) -> None:
    make_decoder(tmp_path, "nemotron_h")
    path = tmp_path / "config.json"
    text = path.read_text().replace('"linear_attention"', '"mamba"')
    path.write_text(text.replace('"full_attention"', '"attention"'))
    chain = StageChain.load(tmp_path, even_split(4, 2))
    check_generation(chain, load_reference(tmp_path), [random_prompt(40, 300)], 8)


def test_hunyuan_4_is_read_as_its_makers_publish_it(tmp_path: Path) -> None:
    """With other names than transformers saves, and rotated pairs side by side."""
    source = make_decoder(tmp_path / "source", "hy_v4", **CASES["hy_v4"])
    config = json.loads((source / "config.json").read_text())
    made = {}
    for name, values in load_file(source / "model.safetensors").items():
        mixer = re.sub(r"hc_pre\.(hc_(?:attn|mlp)_layer)", r"\1.hc_pre", name)
        spelled = mixer.replace("hc_pre.hc_head.", "hc_head.")
        spelled = re.sub(r"mlp\.(shared_experts\.)?linear_gate", r"mlp.\1gate_proj", spelled)
        made[spelled] = np.ascontiguousarray(in_pairs(config, name, values))
    folder = tmp_path / "published"
    folder.mkdir()
    save_file(made, folder / "model.safetensors")
    said = dict.fromkeys(("use_mla", "use_dsa", "gated_mla", "learnable_sink", "enable_ihc"), True)
    said |= {"gating_type": "elementwise", "enable_lm_head_fp32": True, "mtp_loss_factor": 0.1}
    (folder / "config.json").write_text(json.dumps(config | said))
    chain = StageChain.load(folder, even_split(4, 2))
    check_generation(chain, made_reference(source), [random_prompt(90, 300)], 4)
    (folder / "config.json").write_text(json.dumps(config | said | {"gated_mla": False}))
    with pytest.raises(UnsupportedModelError, match="gated_mla = False"):
        Checkpoint.open(folder)


def test_ngrams_begin_anew_behind_an_end_of_text_and_their_table_stays_on_disk(
    tmp_path: Path,
) -> None:
    make_decoder(tmp_path, "qwen4_exp_text", **CASES["qwen4_exp_text"])
    chain = StageChain.load(tmp_path, even_split(4, 2), untested())
    prompt = [EOS_ID, 25, 6, EOS_ID, 7, EOS_ID, EOS_ID, 8, 9, 10, EOS_ID, 11]
    check_generation(chain, made_reference(tmp_path), [prompt], 8)
    [file] = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        chain.generate([prompt], 1)


def test_int8_would_round_positions_behind_values(tmp_path: Path) -> None:
    make_decoder(tmp_path, "qwen4_exp_text", **CASES["qwen4_exp_text"])
    form = StageForm(model="m", model_id="m", dtype=DType.FLOAT32, context=64, kv_dtype="int8")
    with pytest.raises(UnsupportedModelError, match="--kv-dtype int8"):
        choose_kernels(Checkpoint.open(tmp_path), form, Arith.PORTABLE, CPU)


IN_BFLOAT16 = ["llama", "gpt2", "qwen3", "gemma3_text", "qwen2_moe", "gpt_oss", "deepseek_v3"]


@pytest.fixture(
    params=cases(IN_BFLOAT16, [family for family in FAMILIES if family not in IN_BFLOAT16])
)
def make(request: pytest.FixtureRequest) -> Callable[..., Path]:
    """What writes a checkpoint of each family, with a config that is not all default."""
    if request.param == "gpt2":
        return make_gpt2
    config = CASES.get(request.param, {})
    if "layer_types" not in config:
        config = config | {"num_hidden_layers": 4}
    return partial(make_decoder, family=request.param, **config)


def test_bfloat16_is_as_close_as_transformers_in_bfloat16(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    """No further from float32 on the same weights than 1.5 times what transformers itself is."""
    folder = make(tmp_path, dtype=torch.bfloat16)
    prompt = random_prompt(290, 300)
    exact, rounded = (
        reference_logits(load_reference(folder, dtype), prompt)
        for dtype in (torch.float32, torch.bfloat16)
    )
    halves = even_split(Checkpoint.open(folder).config.n_layers, 2)
    logits = StageChain.load(folder, halves, probed(CPU, DType.BFLOAT16, None))
    error = (logits.prefill(0, prompt) - exact).square().mean()
    assert error <= 1.5**2 * (rounded - exact).square().mean()


IN_FLOAT16 = ["llama", "gpt2", "qwen3", "deepseek_v2", "gpt_oss"]


@pytest.mark.parametrize(
    "make",
    cases(IN_FLOAT16, [family for family in FAMILIES if family not in IN_FLOAT16]),
    indirect=True,
)
def test_a_float16_checkpoint_is_computed_in_float32(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make(tmp_path, dtype=torch.float16)
    config = Checkpoint.open(folder).config
    assert config.checkpoint_dtype is DType.FLOAT16
    reference = load_reference(folder)
    prompt = random_prompt(40, 300)
    halves, thirds = (even_split(config.n_layers, n) for n in (2, 3))
    chain = StageChain.load(folder, thirds, probed(CPU, DType.FLOAT32, DType.FLOAT16))
    check_generation(chain, reference, [prompt], 8)
    exact = reference_logits(reference, prompt)
    rounded = StageChain.load(folder, halves, probed(CPU, DType.FLOAT16, DType.FLOAT16))
    error = rounded.prefill(1, prompt) - exact
    is_near = error.square().mean(-1) < 0.01**2 * exact.square().mean(-1)
    # A row for which two experts are nearly as likely may take the other one.
    assert int((~is_near).sum()) <= (1 if config.experts is not None else 0)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_a_table_that_names_no_expert_is_refused_at_loading(tmp_path: Path, wrong: int) -> None:
    make_decoder(tmp_path, "deepseek_v4", **CASES["deepseek_v4"])
    [file] = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    table = next(name for name in tensors if name.endswith("tid2eid"))
    tensors[table][-1, -1] = wrong
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="tid2eid names experts that are none of 8"):
        StageChain.load(tmp_path, even_split(4, 2))


def test_a_table_of_ngrams_in_several_types_is_refused(tmp_path: Path) -> None:
    make_decoder(tmp_path, "qwen4_exp_text", **CASES["qwen4_exp_text"])
    [file] = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    [*_, table] = (name for name in sorted(tensors) if ".ngram_embedding.shard_" in name)
    tensors[table] = tensors[table].astype(np.float16)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="is not stored as rows"):
        StageChain.load(tmp_path, even_split(4, 2))


@pytest.mark.parametrize("shape", [(), (9, 32)])
def test_a_linear_without_its_groups_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    make_decoder(tmp_path, "deepseek_v4", **CASES["deepseek_v4"])
    [file] = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if ".o_a_proj." in name or ".wo_a." in name)
    tensors[name] = np.zeros(shape, np.float32)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"o_a_proj|wo_a"):
        StageChain.load(tmp_path, even_split(4, 2))
