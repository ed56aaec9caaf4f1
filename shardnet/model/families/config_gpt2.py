"""Reading GPT-2's config.json, whose keys have names of their own. Must not know tensors."""

from __future__ import annotations

from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import MAX_LAYERS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.config_decoder import (
    read_activation,
    read_dtype,
    read_eos,
    share_of_heads,
)


def read_gpt2(fields: Fields) -> ModelConfig:
    """Read a GPT2Config."""
    hidden_size = fields.positive("n_embd")
    n_heads = fields.positive("n_head")
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    return ModelConfig(
        family="gpt2",
        n_layers=fields.positive("n_layer", at_most=MAX_LAYERS),
        hidden_size=hidden_size,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_size=share_of_heads(fields, hidden_size, n_heads),
        intermediate_size=fields.positive("n_inner", 4 * hidden_size),
        vocab_size=fields.positive("vocab_size"),
        max_positions=fields.positive("n_positions", 1024),
        norm_eps=fields.positive_number("layer_norm_epsilon", 1e-5),
        activation=read_activation(fields, "activation_function", "gelu_new"),
        attention_bias=True,
        mlp_bias=True,
        rope=None,
        tie_word_embeddings=fields.take("tie_word_embeddings", bool, True),
        checkpoint_dtype=read_dtype(fields),
        bos_token_id=fields.take("bos_token_id", int, None),
        eos_token_ids=read_eos(fields),
    )
