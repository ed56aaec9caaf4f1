"""Llama 4's tower (transformers, modeling_llama4.py, image_processing_llama4.py).

Pictures are cut into square tiles, with the whole one beside them where they are several. Patches
attend within their tile, with a class token behind them; squares of patches are joined.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import THETAS, Range
from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.vision.patches import (
    HALF,
    Filter,
    Marks,
    PatchProcessor,
    check_ratio,
    read_fixed_size,
    read_patches,
    required_id,
    resize,
)
from shardnet.model.vision.picture import (
    EncodedPicture,
    EncoderWalk,
    PictureProcessor,
    PreparedPicture,
)
from shardnet.model.vision.vision_family import (
    LayerNames,
    Table,
    TokenId,
    VisionConfig,
    VisionFamily,
    VisionGguf,
    linear_tensors,
    norm_tensors,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from shardnet.model.layers.weight_source import WeightSource

PLACEHOLDER: Final = "<|image|>"
MAX_TILES: Final = 256
_EPS: Final = 1e-5
_CLASS: Final = "vision_model.class_embedding"
_POSITIONS: Final = "vision_model.positional_embedding_vlm"
_ADAPTER: Final = "vision_model.vision_adapter.mlp"
_PROJECTION: Final = "multi_modal_projector.linear_1"
_LAYERS: Final = LayerNames(
    prefix="vision_model.model.layers",
    norms=("input_layernorm", "post_attention_layernorm"),
    inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    mlp=("mlp.fc1", "mlp.fc2"),
)


def read_config(outer: Fields, own: Fields, text: ModelConfig) -> VisionConfig:
    """Read a Llama4VisionConfig."""
    own.ignore("norm_eps", "layer_norm_eps", "vision_feature_select_strategy")  # it reads none
    own.ignore("projector_dropout", "vision_feature_layer")
    own.require("hidden_act", "gelu")
    own.require("multi_modal_projector_bias", False)
    merge = round(1 / own.number("pixel_shuffle_ratio", 0.5, within=Range(0.01, 1)))
    width, patch = own.positive("hidden_size", 768), own.positive("patch_size", 14)
    size = own.positive("image_size", 448)
    if size % (patch * merge):
        raise own.unsupported("image_size", size, f"multiples of {patch} x {merge}")
    n_heads = own.positive("num_attention_heads", 16)
    if width % (4 * n_heads):
        raise own.unsupported("hidden_size", width, f"multiples of 4 x {n_heads}")
    inner = own.positive("intermediate_size", 5632)
    if inner != width * merge * merge:  # the adapter's first linear has it too
        raise own.unsupported("intermediate_size", inner, f"{width * merge * merge}")
    projector_size = own.positive("projector_input_dim", 4096)
    for key in ("projector_output_dim", "vision_output_dim"):
        if own.positive(key, projector_size) != projector_size:
            raise own.unsupported(key, own.positive(key), f"projector_input_dim, {projector_size}")
    rope = own.inner("rope_parameters", own.take("rope_parameters", dict, {}))
    theta = own.number("rope_theta", 10000.0, within=THETAS)
    return VisionConfig(
        n_layers=own.positive("num_hidden_layers", 34),
        hidden_size=width,
        intermediate_size=inner,
        n_heads=n_heads,
        patch=patch,
        merge=merge,
        out_size=text.hidden_size,
        norm_eps=_EPS,
        activation=Activation.GELU,
        row_id=outer.take("image_token_id", int, outer.take("image_token_index", int, 200092)),
        grid=size // patch,
        rope_theta=rope.number("rope_theta", theta, within=THETAS),
        projector_size=projector_size,
    )


def tensors(config: VisionConfig) -> Table:
    """Name the parameters."""
    width, inner, joined = config.hidden_size, config.intermediate_size, config.projector_size
    made: Table = {_CLASS: (width,), _POSITIONS: (config.grid**2 + 1, width)}
    made |= linear_tensors("vision_model.patch_embedding", {"linear": (width, config.patch_width)})
    made |= linear_tensors(_ADAPTER, {"fc1": (joined, inner), "fc2": (joined, joined)})
    made |= {f"{_PROJECTION}.weight": (config.out_size, joined)}
    made |= norm_tensors(width, "vision_model.layernorm_pre", "vision_model.layernorm_post")
    return made | _LAYERS.tensors(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileProcessor(PatchProcessor):
    """Cuts a picture into at most `most` tiles of the `size`, and adds the whole one behind them.

    `column_id` and `line_id` are tokens behind a tile, `marks.before` and `marks.after` those
    around all. With `fills` a picture grows to the tiles.
    """

    most: int
    column_id: int
    line_id: int
    fills: bool

    def levels(self) -> NDArray[np.float32]:
        """Return what the tower gets of each byte, by colour: [256, 3], rounded to bfloat16."""
        import numpy as np

        mean, deviation = (_bfloat16(np.array(own)) for own in (self.mean, self.deviation))
        scaled = _bfloat16(np.arange(256, dtype=np.float32)[:, None] * np.float32(1 / 255))
        return _bfloat16(_bfloat16(scaled - mean) / deviation)

    def prepare(self, rgb: NDArray[np.uint8], detail: str = "auto") -> PreparedPicture:
        """Prepare a picture [H, W, 3]; see PictureProcessor."""
        import numpy as np

        height, width = check_ratio(rgb)
        side, _ = self.size(height, width, is_low=False)
        n_high, n_wide = _tiles(
            height, width, side, 1 if detail == "low" else self.most, self.fills
        )
        ends = n_high * side, n_wide * side
        limits = ends if self.fills else _limits((height, width), ends, side)
        canvas = np.zeros((*ends, 3), np.uint8)
        high, wide = _fit(height, width, *limits)
        canvas[:high, :wide] = resize(rgb, high, wide, self.filter)
        cut = (
            canvas.reshape(n_high, side, n_wide, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        )
        tiles = [self.cut(tile) for tile in cut]
        if len(tiles) > 1:
            tiles.append(self.cut(resize(rgb, side, side, self.filter)))
        n_side = side // (self.patch * self.merge)
        ids = self._token_ids(n_high, n_wide, n_side * n_side)
        return PreparedPicture(
            pixels=np.concatenate(tiles),
            grid=(len(tiles), n_side, n_side),
            token_ids=ids,
            is_row=np.array(ids) == self.marks.row,
        )

    def _token_ids(self, n_high: int, n_wide: int, n_rows: int) -> tuple[int, ...]:
        """Return the tokens of `n_high` lines of `n_wide` tiles, and of the whole picture."""
        tile = (self.marks.row,) * n_rows
        line = (*((*tile, self.column_id) * n_wide)[:-1], self.line_id)
        tiles = line * n_high if n_high * n_wide > 1 else ()
        return (*self.marks.before, *tiles, self.placeholder_id, *tile, *self.marks.after)


def _bfloat16(values: NDArray[Any]) -> NDArray[np.float32]:
    """Round finite numbers to the nearest of bfloat16."""
    import numpy as np

    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def _tiles(height: int, width: int, side: int, most: int, fills: bool) -> tuple[int, int]:
    """Return lines and columns of the tiles that a picture fits best, with the least empty room.

    They make it grow as little as possible, the most if it `fills` them, or shrink the least.
    """
    import numpy as np

    found = [(high, wide) for high in range(1, most + 1) for wide in range(1, most // high + 1)]
    sides = np.array(found, np.float32) * np.float32(side)
    scales = (sides / np.array((height, width), np.float32)).min(1)
    growing = scales[scales >= 1]
    scale = scales.max() if not len(growing) or fills else growing.min()
    fitting = [tiles for tiles, own in zip(found, scales, strict=True) if own == scale]
    return min(fitting, key=math.prod)


def _limits(sides: tuple[int, int], ends: tuple[int, int], side: int) -> tuple[int, int]:
    """Return up to which height and width a picture grows: one tile, or as large as it is."""
    high, wide = (min(max(own, side), end) for own, end in zip(sides, ends, strict=True))
    return high, wide


def _fit(height: int, width: int, most_high: int, most_wide: int) -> tuple[int, int]:
    """Return the largest size of the same shape, rounded down."""
    by_width, by_height = most_wide / width, most_high / height
    if by_width < by_height:
        return max(1, min(math.floor(height * by_width), most_high)), most_wide
    return most_high, max(1, min(math.floor(width * by_height), most_wide))


def make_processor(config: VisionConfig, own: Fields, token_id: TokenId) -> PictureProcessor:
    """Read a Llama4ImageProcessor."""
    marks = ("<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    start, end, column, line = (required_id(own, token_id, mark) for mark in marks)
    return TileProcessor(
        size=read_fixed_size(own, config),
        **read_patches(own, config, Filter.BILINEAR, HALF, HALF),
        marks=Marks(row=config.row_id, before=(start,), after=(end,)),
        placeholder=PLACEHOLDER,
        placeholder_id=required_id(own, token_id, PLACEHOLDER),
        most=own.positive("max_patches", 16, at_most=MAX_TILES),
        column_id=column,
        line_id=line,
        fills=own.take("resize_to_max_canvas", bool, False),
    )


def _apart(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put the first ones of adjacent pairs of columns before the second ones: [T, H, D] each."""
    queries, keys = (
        heads.view(*heads.shape[:2], -1, 2).transpose(-1, -2).flatten(-2)
        for heads in (queries, keys)
    )
    return queries, keys, values


class Llama4Tower:
    """The forward pass. Positions are [grid^2 + 1, W]: the last one is the class token's."""

    def __init__(
        self, config: VisionConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        from shardnet.model.vision.tower import TowerMlp

        self.class_token, self.positions = (
            weights.parameter(name).to(device, dtype) for name in (_CLASS, _POSITIONS)
        )  # [W], [grid^2 + 1, W]
        adapter = f"{_ADAPTER}.fc1", f"{_ADAPTER}.fc2"
        layers = _LAYERS.load(config, weights)
        self.config = config
        self.patches = weights.linear("vision_model.patch_embedding.linear")
        self.first_norm = weights.norm("vision_model.layernorm_pre", config.norm_eps)
        self.layers = tuple(replace(layer, head_norms=_apart) for layer in layers)
        self.last_norm = weights.norm("vision_model.layernorm_post", config.norm_eps)
        self.adapter = TowerMlp(Activation.GELU, weights, *adapter)
        self.projection = weights.linear(_PROJECTION)

    def walk(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderWalk:
        """Encode the patches of all tiles; see Tower."""
        import torch

        from shardnet.model.vision.tower import in_pieces, patch_places, rotary_of

        config, n_tiles = self.config, grid[0]
        places = patch_places(grid, config.merge)
        lines, columns = places.to(pixels.device).unbind(-1)
        own = torch.cat((lines * config.grid + columns, lines.new_tensor([config.grid**2])))
        turned = torch.cat((places.flip(-1) + 1, places.new_zeros(1, 2)))  # by column and line
        rotary = rotary_of(config, turned.repeat(n_tiles, 1), pixels)
        hidden = yield from in_pieces(self.patches, pixels)
        hidden = hidden.view(n_tiles, -1, hidden.shape[1])
        hidden = torch.cat((hidden, self.class_token.expand(n_tiles, 1, -1)), 1)
        hidden = (hidden + self.positions[own]).flatten(0, 1)
        hidden = yield from in_pieces(self.first_norm, hidden)
        for layer in self.layers:
            hidden = yield from layer.walk(hidden, rotary, [len(own)] * n_tiles)
        hidden = hidden.view(n_tiles, len(own), -1)[:, :-1]
        merged = hidden.reshape(-1, config.merged_width)
        yield EncodedPicture(rows=(yield from in_pieces(self._project, merged)))

    def _project(self, merged: Tensor) -> Tensor:
        """Join the patches of rows [N, merge^2 x W], and project them: [N, E]."""
        from shardnet.model.vision.tower import activated

        width = self.config.hidden_size
        normed = self.last_norm(merged.reshape(-1, width)).view(merged.shape)
        return self.projection(activated(Activation.GELU, self.adapter(normed)))


def read_gguf(own: Fields, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Read the metadata of a projector, and what its tensors say."""
    config: dict[str, Any] = {
        "hidden_act": "gelu",
        "image_size": own.positive("image_size"),
        "pixel_shuffle_ratio": 1 / own.positive("projector.scale_factor", 2),
    }
    if (first := stored.get("mm.model.mlp.1.weight")) is not None:
        config["projector_input_dim"] = first.shape[0]
    return {"vision_config": config}


def _gguf_names(config: VisionConfig) -> dict[str, str]:
    """Name what the `gguf` package knows by another model's names, or by no other."""
    names = {_CLASS: "v.class_embd", _POSITIONS: "v.position_embd.weight"}
    for number in range(config.n_layers):
        norm = f"vision_model.model.layers.{number}.post_attention_layernorm"
        names[norm] = f"v.blk.{number}.ln2"
    return names | {_PROJECTION: "mm.model.fc"}


VISION = VisionFamily(
    read_config=read_config,
    tensors=tensors,
    make_processor=make_processor,
    load=Llama4Tower,
    gguf=VisionGguf(
        projectors=("llama4",),
        read=read_gguf,
        size=lambda own: {"height": own["image_size"], "width": own["image_size"]},
        row_token="<|patch|>",
        names=_gguf_names,
    ),
)
