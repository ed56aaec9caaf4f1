"""Small random checkpoints of the kinds of models that people give coding agents.

Knows the configs; scripts/make_checkpoint.py writes what they say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from make_checkpoint import write_checkpoint

VOCAB = 4096
END_ID = 1
"""Ends a message, as a chat template's own token does."""
HEAD_SIZE = 64
_NO_NORM = ("rms_norm_eps", "hidden_act", "head_dim")
_LATENT = {
    "head_dim": None,
    "num_key_value_heads": None,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}


def _common(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_SIZE,
        "num_key_value_heads": max(1, hidden // HEAD_SIZE // 3),
        "head_dim": HEAD_SIZE,
        "intermediate_size": hidden * 8 // 3,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1 << 16,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "eos_token_id": END_ID,
    }


def _every_fourth(layers: int, kind: str) -> list[str]:
    return [kind if (n + 1) % 4 else "full_attention" for n in range(layers)]


def _delta_net(layers: int, hidden: int) -> dict[str, Any]:
    n_heads = hidden // HEAD_SIZE
    return {
        "linear_num_key_heads": max(1, n_heads // 2),
        "linear_num_value_heads": max(1, n_heads // 2) * 2,
        "linear_key_head_dim": HEAD_SIZE,
        "linear_value_head_dim": HEAD_SIZE,
        "linear_conv_kernel_dim": 4,
        "layer_types": _every_fourth(layers, "linear_attention"),
    }


def _kda(layers: int, hidden: int) -> dict[str, Any]:
    return _LATENT | {
        "linear_head_dim": HEAD_SIZE,
        "linear_num_heads": hidden // HEAD_SIZE,
        "layer_types": _every_fourth(layers, "linear_attention"),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "first_k_dense_replace": layers,
    }


def _mamba2(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "mamba_d_ssm": 2 * hidden,
        "mamba_n_heads": 2 * hidden // HEAD_SIZE,
        "mamba_d_head": HEAD_SIZE,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    }


def _short_conv(layers: int, hidden: int) -> dict[str, Any]:
    return dict.fromkeys(_NO_NORM) | {
        "layer_types": _every_fourth(layers, "conv"),
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    }


def _experts(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": hidden // 4,
    }


_More = Callable[[int, int], dict[str, Any]]
KINDS: dict[str, tuple[str, str, str, _More]] = {
    "dense": ("Qwen 3", "qwen3", "Qwen3ForCausalLM", lambda layers, hidden: {}),
    "hybrid": ("Qwen 3.5", "qwen3_5_text", "Qwen3_5ForCausalLM", _delta_net),
    "mixture": ("Qwen 3 MoE", "qwen3_moe", "Qwen3MoeForCausalLM", _experts),
    "windows": (
        *("Gemma 3", "gemma3_text", "Gemma3ForCausalLM"),
        lambda layers, hidden: (
            {"sliding_window": 1024, "query_pre_attn_scalar": HEAD_SIZE}
            | {"hidden_activation": "gelu_pytorch_tanh"}
        ),
    ),
    "latents": (
        *("MiniCPM3, as DeepSeek's", "minicpm3", "MiniCPM3ForCausalLM"),
        lambda layers, hidden: _LATENT | {"q_lora_rank": hidden // 2},
    ),
    "mamba2": ("Falcon-H1", "falcon_h1", "FalconH1ForCausalLM", _mamba2),
    "kda": ("Kimi Linear", "kimi_linear", "KimiLinearForCausalLM", _kda),
    "short-conv": ("LFM2", "lfm2", "Lfm2ForCausalLM", _short_conv),
}
"""By name: whose kind it is, `model_type`, the class, and what a config has beside the common keys.
A key that is None is left out."""


def write_kind(kind: str, folder: Path, layers: int, hidden: int) -> int:
    """Write a checkpoint of a kind into `folder`. Return how many parameters it has."""
    _, model_type, architecture, more = KINDS[kind]
    raw = _common(layers, hidden) | more(layers, hidden)
    raw |= {"model_type": model_type, "architectures": [architecture]}
    return write_checkpoint(folder, {key: value for key, value in raw.items() if value is not None})
