"""Every family against transformers' own class, on random tiny checkpoints in float32.

One stage is held against transformers: logits within 1e-4, the same greedy tokens. Every split is
held against one stage: the same bits. Prompts are shorter and longer than windows and chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder, make_gpt2
from support.oracles.oracle import check_generation, load_reference, reference_logits
from support.rings.stage_chain import CPU, StageChain, even_split, probed, random_prompt

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.families.registry import FAMILIES
from shardnet.types import DType, LayerRange

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
SOME_WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
ODD = {"hidden_size": 35, "head_dim": 10, "num_attention_heads": 5, "num_key_value_heads": 1}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 20}
CASES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 20, "head_dim": 8},
    "mistral-no-window": {"sliding_window": None, "head_dim": None, "num_hidden_layers": 3},
    "mistral-odd": ODD | {"sliding_window": 260, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2-windows": SOME_WINDOWS | {"num_hidden_layers": 5},
    "qwen2-yarn": {"rope_parameters": YARN},
    "qwen3": ODD | {"num_hidden_layers": 3},
    "qwen3-windows": SOME_WINDOWS | {"head_dim": 12, "attention_bias": True},
    "phi3": {"sliding_window": 20, "num_hidden_layers": 3},
    "phi3-partial-tied": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
        "tie_word_embeddings": True,
    },
    "gemma2": GEMMA | {"num_hidden_layers": 5},
    "gemma2-no-caps": GEMMA
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 10},
    "gemma3_text": GEMMA | {"num_hidden_layers": 7},
    "gemma3_text-long": GEMMA
    | {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
        "logits_scaling": 4.0,
        "tie_word_embeddings": True,
        "num_hidden_layers": 5,
    },
    "olmo2": {"num_hidden_layers": 3, "tie_word_embeddings": True},
    "olmo2-odd": ODD | {"attention_bias": True},
    "mixtral": {"num_local_experts": 5, "sliding_window": 20, "num_hidden_layers": 3},
    "mixtral-odd": ODD | {"num_local_experts": 4, "num_experts_per_tok": 3, "hidden_act": "gelu"},
    "deepseek_v2": {"num_hidden_layers": 3, "mlp_bias": True, "first_k_dense_replace": 1},
    "deepseek_v2-groups": {
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "q_lora_rank": 14,
        "routed_scaling_factor": 16.0,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
    },
    "deepseek_v3": {
        "num_hidden_layers": 5,
        "attention_bias": True,
        "first_k_dense_replace": 2,
        "hidden_size": 42,
        "tie_word_embeddings": True,
    },
    "deepseek_v3-straight": {
        "q_lora_rank": None,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "num_hidden_layers": 3,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gpt_oss": {"sliding_window": 20, "num_hidden_layers": 3},
    "gpt_oss-odd": ODD
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "swiglu_limit": 0.5},
    "qwen2_moe": {"norm_topk_prob": True, "num_hidden_layers": 3},
    "qwen2_moe-windows": ODD
    | SOME_WINDOWS
    | {"num_hidden_layers": 5, "mlp_only_layers": [0], "qkv_bias": False},
    "qwen3_moe": {"num_hidden_layers": 5, "mlp_only_layers": [1]},
    "qwen3_moe-odd": ODD
    | {"norm_topk_prob": True, "decoder_sparse_step": 2, "tie_word_embeddings": True},
    "granite-odd": ODD | {"attention_bias": True, "num_hidden_layers": 3},
}


@pytest.fixture(scope="module", params=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    return make_decoder(path, request.param.split("-")[0], **CASES[request.param])


def test_tokens_and_logits_are_those_of_transformers(folder: Path) -> None:
    """Prefill in chunks and decoding, against full forwards."""
    reference = load_reference(folder)
    n_layers = Checkpoint.open(folder).config.n_layers
    prompts = [random_prompt(length, 300, seed=length) for length in (1, 19, 300)]
    chain = StageChain.load(folder, [LayerRange(0, n_layers)])
    check_generation(chain, reference, prompts, 24)


def test_every_split_gives_the_same_bits(folder: Path) -> None:
    n_layers = Checkpoint.open(folder).config.n_layers
    prompts = [random_prompt(length, 300, seed=length) for length in (7, 290)]
    untested = replace(probed(CPU, DType.FLOAT32, None), exact_rows=1)  # rows' company: elsewhere
    whole = StageChain.load(folder, [LayerRange(0, n_layers)], untested).generate(prompts, 2)
    cuts = [[LayerRange(0, k), LayerRange(k, n_layers)] for k in range(1, n_layers)]
    for ranges in [*cuts, even_split(n_layers, n_layers)]:
        parts = StageChain.load(folder, ranges, untested).generate(prompts, 2)
        for expected, logits in zip(whole, parts, strict=True):
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
    reference = load_reference(tmp_path)
    chain = StageChain.load(tmp_path, even_split(4, 2), context=context)
    check_generation(chain, reference, [random_prompt(context + 1 - n_tokens, 300)], n_tokens)


@pytest.fixture(params=list(FAMILIES))
def make(request: pytest.FixtureRequest) -> Callable[..., Path]:
    """What writes a checkpoint of each family, with a config that is not all default."""
    if request.param == "gpt2":
        return make_gpt2
    config = CASES.get(request.param, {}) | {"num_hidden_layers": 4}
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
    logits = StageChain.load(folder, even_split(4, 2), probed(CPU, DType.BFLOAT16, None))
    error = (logits.prefill(0, prompt) - exact).square().mean()
    assert error <= 1.5**2 * (rounded - exact).square().mean()


def test_a_float16_checkpoint_is_computed_in_float32(
    make: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make(tmp_path, dtype=torch.float16)
    assert Checkpoint.open(folder).config.checkpoint_dtype is DType.FLOAT16
    reference = load_reference(folder)
    chain = StageChain.load(folder, even_split(4, 3), probed(CPU, DType.FLOAT16, None))
    check_generation(chain, reference, [random_prompt(40, 300)], 8)
