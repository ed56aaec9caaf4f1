"""Pixtral's tower in Mistral 3 and Ministral 3 (transformers, modeling_pixtral.py, _mistral3.py).

Also that of Pixtral 12B, whose patches are projected as they are.

Pictures of any shape, rotary positions by line and column, and a break token behind each line.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import read_activation
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import NORM_EPS, THETAS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.vision.patches import (
    Filter,
    LongestEdge,
    Marks,
    PatchProcessor,
    read_patches,
    required_id,
)
from shardnet.model.vision.picture import EncodedPicture, EncoderWalk, PictureProcessor
from shardnet.model.vision.vision_family import (
    LayerNames,
    Table,
    TokenId,
    VisionConfig,
    VisionFamily,
    VisionGguf,
    linear_tensors,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardnet.model.layers.weight_source import WeightSource

_EPS: Final = 1e-5
_NORM: Final = "multi_modal_projector.norm"
_MERGING: Final = "multi_modal_projector.patch_merger.merging_layer"
_LAYERS: Final = LayerNames(
    prefix="vision_tower.transformer.layers",
    norms=("attention_norm", "ffn_norm"),
    inputs=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    output="attention.o_proj",
    mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
    has_bias=False,
    has_norm_bias=False,
)


def read_config(outer: Fields, own: Fields, text: ModelConfig) -> VisionConfig:
    """Read a PixtralVisionConfig, and what Mistral3Config says of the projector."""
    outer.require("vision_feature_layer", -1)
    n_heads, hidden_size = (
        own.positive("num_attention_heads", 16),
        own.positive("hidden_size", 1024),
    )
    own.ignore("image_size")  # pictures are of any
    rope = own.inner("rope_parameters", own.take("rope_parameters", dict, {}))
    theta = own.number("rope_theta", 10000.0, within=THETAS)
    return VisionConfig(
        n_layers=own.positive("num_hidden_layers", 24),
        hidden_size=hidden_size,
        intermediate_size=own.positive("intermediate_size", 4096),
        n_heads=n_heads,
        patch=own.positive("patch_size", 14),
        merge=outer.positive("spatial_merge_size", 2),
        out_size=text.hidden_size,
        norm_eps=own.number("layer_norm_eps", _EPS, within=NORM_EPS),
        activation=read_activation(own, "hidden_act", "gelu"),
        row_id=outer.take("image_token_index", int, outer.take("image_token_id", int, 10)),
        rope_theta=rope.number("rope_theta", theta, within=THETAS),
        projector_activation=read_activation(outer, "projector_hidden_act", "gelu"),
        projector_bias=outer.take("multimodal_projector_bias", bool, False),
        projector_eps=text.norm_eps,
        joins_patches=outer.take("joins_patches", bool, True),
    )


def tensors(config: VisionConfig) -> Table:
    """Name the parameters."""
    width = config.hidden_size
    made: Table = {
        "vision_tower.patch_conv.weight": (width, config.patch_width),
        "vision_tower.ln_pre.weight": (width,),
    }
    if config.joins_patches:
        made |= {f"{_NORM}.weight": (width,), f"{_MERGING}.weight": (width, config.merged_width)}
    shapes = {"linear_1": (config.out_size, width), "linear_2": (config.out_size, config.out_size)}
    made |= linear_tensors("multi_modal_projector", shapes, with_bias=config.projector_bias)
    return made | _LAYERS.tensors(config)


def make_processor(config: VisionConfig, own: Fields, token_id: TokenId) -> PictureProcessor:
    """Read a PixtralImageProcessor."""
    own.ignore("patch_size", "num_channels")  # as the tower's
    size = own.inner("size", own.take("size", dict, {"longest_edge": 1024}))
    placeholder = "[IMG]"
    line, end = (required_id(own, token_id, mark) for mark in ("[IMG_BREAK]", "[IMG_END]"))
    return PatchProcessor(
        size=LongestEdge(
            longest=size.positive("longest_edge"), multiple=config.patch * config.merge
        ),
        **read_patches(own, config, Filter.BICUBIC),
        marks=Marks(row=config.row_id, line=line, after=(end,)),
        placeholder=placeholder,
        placeholder_id=config.row_id,
    )


class PixtralTower:
    """The forward pass."""

    def __init__(
        self, config: VisionConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        projector = "multi_modal_projector"
        self.config = config
        self.patches = weights.linear("vision_tower.patch_conv")
        self.first_norm = weights.norm("vision_tower.ln_pre", config.norm_eps)
        self.layers = _LAYERS.load(config, weights)
        self.norm = weights.norm(_NORM, config.projector_eps) if config.joins_patches else None
        self.merging = weights.linear(_MERGING) if config.joins_patches else None
        self.linear_1 = weights.linear(f"{projector}.linear_1")
        self.linear_2 = weights.linear(f"{projector}.linear_2")

    def walk(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderWalk:
        """Encode patches; see Tower."""
        from shardnet.model.vision.tower import axial_rotary, frequencies, in_pieces, patch_places

        config = self.config
        by_turns = frequencies(config.rope_theta, config.head_size // 2)
        places = patch_places(grid, config.merge)
        rotary = axial_rotary(places, by_turns[0::2], by_turns[1::2], pixels.dtype, pixels.device)
        hidden = yield from in_pieces(lambda part: self.first_norm(self.patches(part)), pixels)
        for layer in self.layers:
            hidden = yield from layer.walk(hidden, rotary)
        yield EncodedPicture(rows=(yield from in_pieces(self._project, self._merged(hidden))))

    def _merged(self, hidden: Tensor) -> Tensor:
        """Join the patches of a row, in the order of the linear's inputs: [N, merge^2 x W]."""
        n_merged = self.config.merge**2
        return hidden.view(-1, n_merged * hidden.shape[1])

    def _project(self, merged: Tensor) -> Tensor:
        from shardnet.model.vision.tower import activated

        if self.norm is not None and self.merging is not None:
            n_rows, width = len(merged), self.config.hidden_size
            normed = self.norm(merged.view(-1, width))  # each patch by itself
            joined = normed.view(n_rows, -1, width).transpose(1, 2).reshape(n_rows, -1)
            merged = self.merging(joined)
        inner = self.linear_1(merged)
        return self.linear_2(activated(self.config.projector_activation, inner))


def read_gguf(own: Fields, stored: Container[str]) -> dict[str, Any]:
    """Read the metadata of a projector: Pixtral 12B's joins no patches."""
    joins_patches = "mm.patch_merger.weight" in stored
    merge = own.positive("spatial_merge_size", 1)
    if merge > 1 and not joins_patches:
        raise own.unsupported("spatial_merge_size", merge, "1 without mm.patch_merger")
    return {
        "spatial_merge_size": merge,
        "multimodal_projector_bias": "mm.1.bias" in stored,
        "joins_patches": joins_patches,
        "vision_config": {"image_size": own.positive("image_size")},
    }


VISION = VisionFamily(
    read_config=read_config,
    tensors=tensors,
    make_processor=make_processor,
    load=PixtralTower,
    gguf=VisionGguf(
        projectors=("pixtral",),
        read=read_gguf,
        size=lambda own: {"longest_edge": own["image_size"]},
        row_token="[IMG]",
        names=lambda config: {"multi_modal_projector.linear_2": "mm.2"},
        has_rotary_pairs=True,
    ),
)
