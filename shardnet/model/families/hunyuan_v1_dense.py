"""Hunyuan's dense models (transformers, modeling_hunyuan_v1_dense.py): heads are normed rotated."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import ModelConfig, Rope
from shardnet.model.config.rope import read_rope, rope_object
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import attention_part

_OF_YARN = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")


def read_config(fields: Fields) -> ModelConfig:
    """Read a HunYuanDenseV1Config."""
    for key in ("use_qk_norm", "use_rotary_pos_emb"):
        fields.require(key, only=True)
    for key in ("mlp_bias", "use_cla", "position_embedding_xdrope", "add_classification_head"):
        fields.require(key, only=False)
    fields.ignore("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "norm_type")
    fields.ignore("eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "image_token_id")
    fields.ignore("mask_init_id", "org_vocab_size", "pad_id", "pool_type", "text_end_id")
    fields.ignore("text_start_id", "sep_token_id")
    config = read_decoder(fields, norm_eps=1e-5, rope=_read_rope)
    bias = fields.take("attention_bias", bool, False)
    return replace(config, attention_bias=bias, has_head_norms=True)


def _read_rope(fields: Fields, max_positions: int, head_size: int) -> Rope:
    """Read the positions, whose base `alpha` stretches; what stands beside it changes nothing."""
    inner = rope_object(fields)
    alpha = inner.optional_number("alpha")
    kind = inner.take("rope_type", str, inner.take("type", str, "default"))
    if alpha is None or kind != "dynamic":
        return read_rope(fields, max_positions, head_size)
    theta = inner.number(
        "rope_theta", fields.number("rope_theta", 10000.0, within=THETAS), within=THETAS
    )
    inner.ignore(*_OF_YARN)
    inner.note_the_rest()
    return Rope(theta=theta * alpha ** (head_size / (head_size - 2)))


HEADS: Final = attention_part(norms=("query_layernorm", "key_layernorm"), norms_rotated=True)
"""Attention whose heads are normed behind the rotation."""

FAMILY = record(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    read_config,
    Layout(attention=HEADS),
    gguf=GgufFormat(architecture="hunyuan-dense"),
)
