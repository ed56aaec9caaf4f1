"""The tower of Qwen3-VL and Qwen 3.5 (transformers, modeling_qwen3_vl.py, modeling_qwen3_5.py).

Learned positions, interpolated, beside rotary ones by line and column, and features for DeepStack,
which Qwen 3.5 has not.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import read_activation
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.vision import qwen2_5_vl
from shardnet.model.vision.patches import HALF
from shardnet.model.vision.picture import EncodedPicture, EncoderWalk
from shardnet.model.vision.qwen2_5_vl import LAYERS, PLACEHOLDER, QwenMerger
from shardnet.model.vision.vision_family import (
    Table,
    VisionConfig,
    VisionFamily,
    VisionGguf,
    linear_tensors,
    norm_tensors,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardnet.model.layers.weight_source import WeightSource

_LAYERS: Final = replace(LAYERS, mlp=("mlp.linear_fc1", "mlp.linear_fc2"), has_norm_bias=True)
_PIXELS: Final = (256 * 256, 4096 * 4096)
_DEEP_LAYERS: Final = (8, 16, 24)


def read_config(
    outer: Fields, own: Fields, text: ModelConfig, *, deep_layers: tuple[int, ...] = ()
) -> VisionConfig:
    """Read a Qwen3VLVisionConfig. `deep_layers` is a default."""
    n_positions = own.positive("num_position_embeddings", 2304)
    grid = math.isqrt(n_positions)
    if grid * grid != n_positions:
        raise own.unsupported("num_position_embeddings", n_positions, "squares")
    config = qwen2_5_vl.read_sizes(
        outer, own, text, n_layers=27, hidden_size=1152, intermediate_size=4304, patch=16
    )
    deep: list[Any] = own.take("deepstack_visual_indexes", list, [*deep_layers])
    if len(deep) > text.n_layers or not all(layer in range(config.n_layers) for layer in deep):
        raise own.unsupported("deepstack_visual_indexes", deep, f"below {config.n_layers}")
    activation = read_activation(own, "hidden_act", "gelu_pytorch_tanh")
    return replace(config, activation=activation, grid=grid, deep_layers=tuple(deep))


def tensors(config: VisionConfig) -> Table:
    """Name the parameters."""
    width, joined = config.hidden_size, config.merged_width
    deep = [f"visual.deepstack_merger_list.{number}" for number in range(len(config.deep_layers))]
    made: Table = {"visual.pos_embed.weight": (config.grid**2, width)}
    shapes = {"proj": (width, config.patch_width)}
    made |= linear_tensors("visual.patch_embed", shapes, with_bias=True)
    for merger in ("visual.merger", *deep):
        shapes = {"linear_fc1": (joined, joined), "linear_fc2": (config.out_size, joined)}
        made |= linear_tensors(merger, shapes, with_bias=True)
    made |= norm_tensors(width, "visual.merger.norm")
    return made | norm_tensors(joined, *(f"{n}.norm" for n in deep)) | _LAYERS.tensors(config)


class Qwen3Tower:
    """The forward pass."""

    def __init__(
        self, config: VisionConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        def merger(prefix: str, *, norms_rows: bool = False) -> QwenMerger:
            names = [f"{prefix}.{part}" for part in ("norm", "linear_fc1", "linear_fc2")]
            return QwenMerger(weights, *names, norms_rows=norms_rows)

        self.config = config
        self.patches = weights.linear("visual.patch_embed.proj")
        self.positions = weights.matrix("visual.pos_embed")  # [grid^2, W]
        self.layers = _LAYERS.load(config, weights)
        self.merger = merger("visual.merger")
        self.deep = {
            layer: merger(f"visual.deepstack_merger_list.{number}", norms_rows=True)
            for number, layer in enumerate(config.deep_layers)
        }

    def walk(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderWalk:
        """Encode patches; see Tower."""
        from shardnet.model.vision.tower import in_pieces, patch_places, rotary_of

        config = self.config
        places = patch_places(grid, config.merge)
        rotary = rotary_of(config, places, pixels)
        hidden = yield from in_pieces(self.patches, pixels)
        hidden = hidden + self._interpolated(places, grid).to(hidden.dtype)
        deep = []
        for number, layer in enumerate(self.layers):
            hidden = yield from layer.walk(hidden, rotary)
            if number in self.deep:
                merged = hidden.view(-1, config.merged_width)
                deep.append((yield from in_pieces(self.deep[number], merged)))
        rows = yield from in_pieces(self.merger, hidden.view(-1, config.merged_width))
        yield EncodedPicture(rows=rows, deep=tuple(deep))

    def _interpolated(self, places: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Stretch the learned positions over a picture, corner to corner: [T, W].

        Between them is interpolated linearly, by line and by column.
        """
        side, merge = self.config.grid, self.config.merge
        ends = places.new_tensor([n * merge - 1 for n in grid[1:]]).clamp(min=1)
        at = places.float() * (side - 1) / ends
        low = at.long()
        taps = (low, 1 - (at - low)), ((low + 1).clamp(max=side - 1), at - low)
        table = self.positions
        found = table.new_zeros(())
        for line, by_line in taps:
            for column, by_column in taps:
                rows = table[(line[:, 0] * side + column[:, 1]).to(table.device)]
                found = found + rows * (by_line[:, :1] * by_column[:, 1:]).to(table.device)
        return found


def read_gguf(own: Fields, stored: Container[str]) -> dict[str, Any]:
    """Read the metadata of a projector."""
    flags = own.take("is_deepstack_layers", list, [])
    grid = own.positive("image_size") // own.positive("patch_size")
    config = {
        "num_position_embeddings": grid * grid,
        "spatial_merge_size": own.positive("spatial_merge_size", 2),
        "deepstack_visual_indexes": [layer for layer, is_deep in enumerate(flags) if is_deep],
        "hidden_act": "gelu_pytorch_tanh",
    }
    return {"vision_config": config}


def _gguf_names(config: VisionConfig) -> dict[str, str]:
    """Name what llama.cpp calls otherwise than the `gguf` package says, DeepStack's by layer."""
    names = {
        "visual.merger.norm": "v.post_ln",
        "visual.merger.linear_fc1": "mm.0",
        "visual.merger.linear_fc2": "mm.2",
    }
    for number, layer in enumerate(config.deep_layers):
        for own, stored in (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2")):
            names[f"visual.deepstack_merger_list.{number}.{own}"] = f"v.deepstack.{layer}.{stored}"
    return names


VISION = VisionFamily(
    read_config=partial(read_config, deep_layers=_DEEP_LAYERS),
    tensors=tensors,
    make_processor=partial(qwen2_5_vl.make_processor, mean=HALF, deviation=HALF, pixels=_PIXELS),
    load=Qwen3Tower,
    gguf=VisionGguf(
        projectors=("qwen3vl_merger",),
        read=read_gguf,
        size=lambda own: {},
        row_token=PLACEHOLDER,
        names=_gguf_names,
    ),
)
SHALLOW = replace(VISION, read_config=read_config, gguf=None)
"""Of Qwen 3.5, whose projector files are as Qwen3-VL's."""
