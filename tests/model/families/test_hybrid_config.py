"""Configs of models with gated DeltaNets, as they are published and as they may be damaged."""

from __future__ import annotations

from typing import Any

import pytest

from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import read_gguf_delta_net
from shardnet.model.config.model_config import DeltaNet, ModelConfig
from shardnet.model.families.registry import parse_config
from shardnet.model.families.stage_tensors import layer_tensors
from shardnet.types import DType

HYBRID = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 1516,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_cache": True,
}
FALCON_H1 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "model_type": "falcon_h1",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}
QWEN3_NEXT = HYBRID | {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "intermediate_size": 5120,
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_5_MOE = HYBRID | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "mamba_ssm_dtype": "float32",
    "model_type": "qwen3_5_moe_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}


def parse(raw: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_config(raw | changes, "config.json")


@pytest.mark.parametrize("raw", [QWEN3_NEXT, QWEN3_5_MOE], ids=["3-next", "3.5-moe"])
def test_published_configs_are_read(raw: dict[str, Any]) -> None:
    config = parse(raw)
    assert config.rope is not None
    assert (config.rope.theta, config.rope.rotated(config.head_size)) == (1e7, 64)
    assert (config.has_gates, config.norm_offset, config.checkpoint_dtype) == (
        True,
        1.0,
        DType.BFLOAT16,
    )
    assert config.delta_net == DeltaNet(
        n_key_heads=16,
        n_value_heads=32,
        key_size=128,
        value_size=128,
        n_taps=4,
        layers=tuple(layer for layer in range(48) if layer % 4 != 3),
    )
    assert config.experts is not None
    assert config.experts.normalize_top_k
    assert config.sparse_layers == tuple(range(48))
    state = config.state(0)
    assert state is not None
    assert state.size_bytes(DType.BFLOAT16) == 32 * 128 * 128 * 4 + 3 * 8192 * 2
    assert config.state(3) is None


def test_a_thinned_model_keeps_the_kind_of_its_layers() -> None:
    thin = parse(QWEN3_NEXT).thinned(4)  # layers 6, 18, 30, 42
    assert thin.delta_net is not None
    assert thin.delta_net.layers == (0, 1, 2, 3)
    thin = parse(QWEN3_NEXT, num_hidden_layers=8).thinned(4)  # layers 1, 3, 5, 7
    assert thin.delta_net is not None
    assert thin.delta_net.layers == (0, 2)
    assert "model.layers.1.self_attn.q_proj.weight" in layer_tensors(thin, 1)


def test_without_linear_layers_there_is_no_state() -> None:
    config = parse(QWEN3_NEXT, full_attention_interval=1)
    assert (config.delta_net, config.has_state) == (None, False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"linear_num_key_heads": 5}, "32 is no multiple of linear_num_key_heads 5"),
        ({"linear_key_head_dim": 1 << 20}, "numbers of state in a layer, expected at most"),
        ({"linear_value_head_dim": 2**31 - 1}, "numbers of state in a layer"),
        ({"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim is 65, expected 1 to 64"),
        ({"linear_num_value_heads": 0}, "linear_num_value_heads is 0"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 48 layers"),
    ],
)
def test_a_malformed_field_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse(QWEN3_NEXT, **change)


@pytest.mark.parametrize(
    ("raw", "change", "named"),
    [
        (QWEN3_NEXT, {"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        (
            QWEN3_NEXT,
            {"layer_types": ["sliding_attention"] * 48},
            "layer_types = 'sliding_attention' is not supported; supported: linear_attention, full",
        ),
        (QWEN3_5_MOE, {"norm_topk_prob": False}, "norm_topk_prob = False is not supported"),
        (FALCON_H1, {"mamba_rms_norm": True}, "mamba_norm_before_gate = True is not supported"),
        (FALCON_H1, {"projectors_bias": True}, "projectors_bias = True is not supported"),
    ],
)
def test_a_value_that_is_not_implemented_is_named(
    raw: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse(raw, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ssm.inner_size": 4097}, "ssm.inner_size 4097 is no multiple of 32 value heads"),
        ({"ssm.state_size": 0}, "ssm.state_size is 0"),
    ],
)
def test_malformed_metadata_is_named(change: dict[str, Any], named: str) -> None:
    metadata = {
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 32,
        "ssm.inner_size": 4096,
    }
    assert read_gguf_delta_net(Fields(metadata, "x.gguf"))["linear_value_head_dim"] == 128
    with pytest.raises(CheckpointError, match=named):
        read_gguf_delta_net(Fields(metadata | change, "x.gguf"))
