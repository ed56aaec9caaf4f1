"""What is special in each family, against formulas written out in plain_decoder.py.

Random tiny weights hide mistakes: each model here is one that the mistakes would change, and every
one of them is made once to prove it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.oracles.plain_decoder import PlainDecoder
from support.oracles.plain_llama4 import PlainLlama4
from support.rings.stage_chain import StageChain, even_split, random_prompt
from support.soak import cases

N_ROWS = 50
WINDOW = {"sliding_window": 12, "num_hidden_layers": 3}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 20, "sliding_window": 12}
ROUTING = [
    "worst experts",
    "an expert fewer",
    "normalized the other way",
    "experts off by one",
    "equal shares",
]
LATENTS = ["latents without norm", "halves rotated", "scaled by own columns"]
GROUPS = [
    "groups by another number",
    "no groups",
    "normalized the other way",
    "answers unscaled",
    "shared answers scaled",
    "no shared expert",
]
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mistral": (WINDOW | {"head_dim": None}, ["windows wider by one", "windows swapped"]),
    "qwen2": (
        WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
        ["windows wider by one", "windows swapped", "no biases", "gate and up swapped"],
    ),
    "qwen3": (
        {"num_hidden_layers": 2, "head_dim": 10},
        ["rotated before head norms", "no head norms"],
    ),
    "phi3": (
        WINDOW | {"rope_parameters": PARTIAL},
        ["whole heads", "gate and up swapped", "windows wider by one"],
    ),
    "gemma2": (
        GEMMA
        | {
            "num_hidden_layers": 3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
        [
            "windows swapped",
            "windows wider by one",
            "no score cap",
            "no logit cap",
            "scaled by head size",
            "embedding as it is",
            "norms without 1",
        ],
    ),
    "gemma3_text": (
        GEMMA | {"num_hidden_layers": 7},
        [
            "windows swapped",
            "windows wider by one",
            "thetas swapped",
            "rotated before head norms",
            "no head norms",
            "scaled by head size",
            "norms without 1",
        ],
    ),
    "granite": (
        {
            "num_hidden_layers": 2,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.9,
            "logits_scaling": 3.0,
        },
        [
            "scaled by head size",
            "embedding as it is",
            "residuals as they are",
            "logits as they are",
        ],
    ),
    "mixtral": (
        {"num_hidden_layers": 2, "num_local_experts": 5},
        [*ROUTING, "gate and up swapped"],
    ),
    "deepseek_v2": (
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 1,
            "routed_scaling_factor": 3.0,
        },
        [*LATENTS, *GROUPS],
    ),
    "deepseek_v3": (
        {"num_hidden_layers": 3, "first_k_dense_replace": 1},
        [*LATENTS, *GROUPS, "no bias of the choice", "bias of the weights"],
    ),
    "gpt_oss": (
        WINDOW
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "swiglu_limit": 0.8,
            "swiglu_alpha": 3.0,
        },
        [
            *(set(ROUTING) - {"normalized the other way"}),
            "no sinks",
            "sinks swapped",
            "gates unclamped",
            "gates clamped below",
            "up unclamped",
            "up without 1",
            "gate and up in halves",
            "alpha of 1",
            "no biases",
            "router without bias",
            "windows swapped",
            "windows wider by one",
        ],
    ),
    "qwen2_moe": (
        WINDOW | {"use_sliding_window": True, "max_window_layers": 2, "mlp_only_layers": [1]},
        [
            *ROUTING,
            "no shared expert",
            "shared expert ungated",
            "windows swapped",
            "windows wider by one",
            "no biases",
        ],
    ),
    "qwen3_moe": (
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False},
        [*ROUTING, "rotated before head norms", "no head norms", "gate and up swapped"],
    ),
    "llama4_text": (
        {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "floor_scale": 8,
            "attn_scale": 2.0,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 24,
            "intermediate_size_mlp": 56,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        [
            "chunks attended across",
            "rotated everywhere",
            "halves rotated",
            "heads of any size",
            "one temperature",
            "shares that add up",
            "answers weighted",
            "worst experts",
            "no shared expert",
            "gate and up apart",
            "gate and up swapped",
        ],
    ),
    "olmo2": (
        {"num_hidden_layers": 2},
        ["rotated before head norms", "no head norms", "norms by head"],
    ),
}


@pytest.mark.parametrize("family", list(CASES))
def test_the_parts_of_a_family_are_as_published(family: str, tmp_path: Path) -> None:
    config, mistakes = CASES[family]
    make_decoder(tmp_path, family, **config)
    prompt = random_prompt(N_ROWS, 300)
    n_layers = config["num_hidden_layers"]
    logits = StageChain.load(tmp_path, even_split(n_layers, 2)).prefill(0, prompt).double()
    plain = PlainLlama4 if family == "llama4_text" else PlainDecoder
    expected = plain(tmp_path).logits(prompt)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    for mistake in cases(mistakes[:2], mistakes[2:]):
        wrong = plain(tmp_path, mistake).logits(prompt)
        assert (wrong - expected).abs().max() > 1e-2, f"nobody would notice: {mistake}"
