"""Qwen2 (transformers, modeling_qwen2.py): Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from shardnet.model.config.decoder_config import read_decoder, read_window, read_windows
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.family import GgufFormat
from shardnet.model.families.layout import Layout, record
from shardnet.model.families.parts import attention_part


def read_config(fields: Fields) -> ModelConfig:
    """Read a Qwen2Config."""
    config = read_decoder(fields, n_kv_heads=32, max_positions=32768)
    return replace(config, attention_bias=True, windows=read_qwen_windows(fields, config.n_layers))


def read_qwen_windows(fields: Fields, n_layers: int) -> tuple[int | None, ...]:
    """Read Qwen's windows: switched off as a rule, else in the layers from a number on."""
    is_used = fields.take("use_sliding_window", bool, False)
    window = read_window(fields, 4096)
    first = fields.take("max_window_layers", int, 28)
    window = window if is_used else None
    return read_windows(fields, n_layers, window, lambda n: window is not None and n >= first)


FAMILY = record(
    "qwen2",
    "Qwen2ForCausalLM",
    read_config,
    Layout(attention=attention_part(has_output_bias=False)),
    gguf=GgufFormat(architecture="qwen2", multimodal=("qwen2vl",)),
    pretokenizer="qwen2",
)
