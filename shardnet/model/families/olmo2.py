"""OLMo-2 (transformers, modeling_olmo2.py): norms after the sub-layers, and over all queries."""

from __future__ import annotations

from typing import Final

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import POST_NORMS, Layout, record
from shardnet.model.families.parts import WHOLE_HEADS


def read_config(fields: Fields) -> ModelConfig:
    """Read an Olmo2Config."""
    return read_decoder(fields, norm_eps=1e-5, attention_bias=False)


LAYOUT: Final = Layout(attention=WHOLE_HEADS, norms=POST_NORMS)

FAMILY = record(
    "olmo2",
    "Olmo2ForCausalLM",
    read_config,
    LAYOUT,
    gguf=GgufFormat(
        architecture="olmo2",
        claims=lambda fields: not fields.given("attention.sliding_window"),
    ),
    has_whole_heads=True,
)
