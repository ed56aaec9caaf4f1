"""Qwen3 (transformers, modeling_qwen3.py): Llama with a norm over each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from shardnet.model.config.decoder_config import read_decoder
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import record
from shardnet.model.families.qwen2 import read_qwen_windows


def read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen3Config."""
    config = read_decoder(
        fields, n_kv_heads=32, max_positions=32768, head_size=128, attention_bias=False
    )
    windows = read_qwen_windows(fields, config.n_layers)
    return replace(config, has_head_norms=True, windows=windows)


FAMILY = record(
    "qwen3",
    "Qwen3ForCausalLM",
    read_config,
    gguf=GgufFormat(architecture="qwen3", multimodal=("qwen3vl",)),
    pretokenizer="qwen2",
)
