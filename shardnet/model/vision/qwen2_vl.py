"""The tower of Qwen2-VL (transformers, modeling_qwen2_vl.py): Qwen2.5-VL's before its windows.

LayerNorm, MLPs without a gate, and all patches of a picture attend to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from shardnet.model.config.decoder_config import read_activation
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.vision import qwen2_5_vl
from shardnet.model.vision.qwen2_5_vl import LAYERS, PLACEHOLDER, Qwen25Tower
from shardnet.model.vision.vision_config import VisionConfig
from shardnet.model.vision.vision_family import (
    Table,
    VisionFamily,
    VisionGguf,
    norm_tensors,
)

_LAYERS: Final = replace(LAYERS, mlp=("mlp.fc1", "mlp.fc2"), has_norm_bias=True)


def read_config(outer: Fields, own: Fields, text: ModelConfig) -> VisionConfig:
    """Read a Qwen2VLVisionConfig, whose `hidden_size` is the language model's."""
    own.ignore("spatial_patch_size", "intermediate_size")  # as the other one; of projector files
    own.require("hidden_size", text.hidden_size)
    width = own.positive("embed_dim", 1280)
    config = qwen2_5_vl.read_sizes(
        outer, own, text, n_layers=32, hidden_size=width, intermediate_size=1, patch=14
    )
    return replace(
        config,
        hidden_size=width,
        intermediate_size=width * own.positive("mlp_ratio", 4),
        activation=read_activation(own, "hidden_act", "quick_gelu"),
    )


def tensors(config: VisionConfig) -> Table:
    """Name the parameters."""
    norm = norm_tensors(config.hidden_size, "visual.merger.ln_q")
    return qwen2_5_vl.merger_tensors(config) | norm | _LAYERS.tensors(config)


def read_gguf(own: Fields, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Read the metadata of a projector. Its inner size is another one: the tensors say it."""
    width = own.positive("embedding_length")
    config = {
        "embed_dim": width,
        "hidden_size": own.positive("projection_dim"),
        "spatial_merge_size": own.positive("spatial_merge_size", 2),
    }
    if (up := stored.get("v.blk.0.ffn_up.weight")) is not None:
        config["mlp_ratio"] = up.shape[0] // width
    return {"vision_config": config}


VISION = VisionFamily(
    read_config=read_config,
    tensors=tensors,
    make_processor=qwen2_5_vl.make_processor,
    load=partial(Qwen25Tower.load, names=_LAYERS),
    gguf=VisionGguf(
        projectors=("qwen2vl_merger",),
        read=read_gguf,
        size=lambda own: {},
        row_token=PLACEHOLDER,
    ),
)
