"""The towers of Qwen2.5-VL and Qwen2-VL (transformers, modeling_qwen2_5_vl.py, _qwen2_vl.py).

Pictures of any shape as two frames, rotary positions by line and column, and most layers attend
within windows only; Qwen2-VL has none, LayerNorm, and MLPs without a gate. What the towers after
them have in common with them is here too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import read_activation
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import THETAS
from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.vision.patches import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    Filter,
    Marks,
    PatchProcessor,
    PixelCount,
    read_patches,
)
from shardnet.model.vision.picture import EncodedPicture, EncoderWalk
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
    import torch
    from torch import Tensor

    from shardnet.model.layers.weight_source import WeightSource


EPS: Final = 1e-6
PLACEHOLDER: Final = "<|image_pad|>"
LAYERS: Final = LayerNames(
    prefix="visual.blocks",
    norms=("norm1", "norm2"),
    inputs=("attn.qkv",),
    output="attn.proj",
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    has_norm_bias=False,
)
_FULL_LAYERS: Final = (7, 15, 23, 31)
_PIXELS: Final = (56 * 56, 28 * 28 * 16384)


def read_sizes(
    outer: Fields,
    own: Fields,
    text: ModelConfig,
    *,
    n_layers: int,
    hidden_size: int,
    intermediate_size: int,
    patch: int,
) -> VisionConfig:
    """Read what the configs of all these towers say; the numbers are defaults."""
    own.require("in_chans", 3)
    own.ignore("image_size", "layer_norm_eps")  # of projector files: pictures are of any
    rope = own.inner("rope_parameters", own.take("rope_parameters", dict, {}))
    out_size = own.positive("out_hidden_size", text.hidden_size)
    if out_size != text.hidden_size:
        raise own.unsupported("out_hidden_size", out_size, f"the model's, {text.hidden_size}")
    return VisionConfig(
        n_layers=own.positive("depth", own.positive("num_hidden_layers", n_layers)),
        hidden_size=own.positive("hidden_size", hidden_size),
        intermediate_size=own.positive("intermediate_size", intermediate_size),
        n_heads=own.positive("num_heads", own.positive("num_attention_heads", 16)),
        patch=own.positive("patch_size", patch),
        merge=own.positive("spatial_merge_size", 2),
        n_frames=own.positive("temporal_patch_size", 2),
        out_size=out_size,
        norm_eps=EPS,
        activation=Activation.SILU,
        row_id=outer.take("image_token_id", int, 151655),
        rope_theta=rope.number("rope_theta", 10000.0, within=THETAS),
        projector_eps=EPS,
    )


def read_config(outer: Fields, own: Fields, text: ModelConfig) -> VisionConfig:
    """Read a Qwen2_5_VLVisionConfig."""
    own.ignore("tokens_per_second", "spatial_patch_size")  # of films; as the other one
    config = read_sizes(
        outer, own, text, n_layers=32, hidden_size=3584, intermediate_size=3420, patch=14
    )
    full: list[Any] = own.take("fullatt_block_indexes", list, [*_FULL_LAYERS])
    pixels = own.positive("window_size", 112)
    if pixels < config.row_pixels:
        raise own.unsupported("window_size", pixels, f"{config.row_pixels} or more")
    return replace(
        config,
        activation=read_activation(own, "hidden_act", "silu"),
        window=pixels // config.merge // config.patch,
        full_layers=tuple(full),
    )


def merger_tensors(config: VisionConfig) -> Table:
    """Name the patches' linear, and those of the merger."""
    joined = config.merged_width
    made: Table = {"visual.patch_embed.proj.weight": (config.hidden_size, config.patch_width)}
    merger = {"0": (joined, joined), "2": (config.out_size, joined)}
    return made | linear_tensors("visual.merger.mlp", merger, with_bias=True)


def tensors(config: VisionConfig) -> Table:
    """Name the parameters."""
    norm = norm_tensors(config.hidden_size, "visual.merger.ln_q", with_bias=False)
    return merger_tensors(config) | norm | LAYERS.tensors(config)


def make_processor(
    config: VisionConfig,
    own: Fields,
    token_id: TokenId,
    *,
    mean: tuple[float, ...] = CLIP_MEAN,
    deviation: tuple[float, ...] = CLIP_DEVIATION,
    pixels: tuple[int, int] = _PIXELS,
    n_frames: int = 0,
) -> PatchProcessor:
    """Read a Qwen2VLImageProcessor. Mean, deviation, and fewest and most pixels are defaults.

    With `n_frames` those of all frames count.
    """
    for key, value in (
        ("patch_size", config.patch),
        ("temporal_patch_size", config.n_frames),
        ("merge_size", config.merge),
    ):
        own.require(key, value)
    size = own.inner("size", own.take("size", dict, {}))
    return PatchProcessor(
        size=PixelCount(
            fewest=own.positive("min_pixels", size.positive("shortest_edge", pixels[0])),
            most=own.positive("max_pixels", size.positive("longest_edge", pixels[1])),
            multiple=config.row_pixels,
            n_frames=n_frames,
        ),
        **read_patches(own, config, Filter.BICUBIC, mean, deviation),
        n_frames=config.n_frames,
        marks=Marks(row=config.row_id),
        placeholder=PLACEHOLDER,
        placeholder_id=config.row_id,
        template_marks=("<|vision_start|>", "<|vision_end|>"),
    )


class QwenMerger:
    """Makes rows of the language model of patches, normalised one by one or those of a row."""

    def __init__(
        self, weights: WeightSource, norm: str, up: str, down: str, *, norms_rows: bool = False
    ) -> None:
        from shardnet.model.vision.tower import TowerMlp

        mlp = TowerMlp(Activation.GELU, weights, up, down)
        self.norm = weights.norm(norm, EPS)
        self.mlp = mlp
        self.norms_rows = norms_rows

    def __call__(self, merged: Tensor) -> Tensor:
        """Project patches of rows, side by side: [N, merge^2 x W] to [N, E]."""
        width = merged.shape[1] if self.norms_rows else len(self.norm.weight)
        return self.mlp(self.norm(merged.view(-1, width)).view(merged.shape))


class Qwen25Tower:
    """The forward pass."""

    def __init__(
        self,
        config: VisionConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        names: LayerNames = LAYERS,
    ) -> None:
        """Take the parameters, those of layers by their `names`."""
        merger = ("visual.merger.ln_q", "visual.merger.mlp.0", "visual.merger.mlp.2")
        self.config = config
        self.patches = weights.linear("visual.patch_embed.proj")
        self.layers = names.load(config, weights)
        self.merger = QwenMerger(weights, *merger)

    def walk(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderWalk:
        """Encode patches; see Tower. Those of a window stand together until they are merged."""
        from shardnet.model.vision.tower import in_pieces, patch_places, rotary_of, window_order

        config = self.config
        order, n_rows = window_order(grid, config.window or max(grid))
        n_merged = config.merge**2
        own = (order[:, None] * n_merged + order.new_tensor(range(n_merged))).flatten()
        places = patch_places(grid, config.merge)[own]
        rotary = rotary_of(config, places, pixels)
        hidden = yield from in_pieces(self.patches, pixels[own.to(pixels.device)])
        windows = [n * n_merged for n in n_rows]
        for number, layer in enumerate(self.layers):
            lengths = () if number in config.full_layers else windows
            hidden = yield from layer.walk(hidden, rotary, lengths)
        merged = hidden.view(len(order), -1)
        rows = yield from in_pieces(self.merger, merged)
        yield EncodedPicture(rows=rows[order.argsort().to(rows.device)])


def read_gguf(own: Fields, stored: Container[str]) -> dict[str, Any]:
    """Read the metadata of a projector: all layers but each `n_wa_pattern`th have windows."""
    period, n_layers = own.positive("n_wa_pattern"), own.positive("block_count")
    full = [*range(period - 1, n_layers, period)]
    config = {
        "fullatt_block_indexes": full,
        "spatial_merge_size": own.positive("spatial_merge_size", 2),
        "window_size": own.positive("window_size", 112),
    }
    return {"vision_config": config}


VISION = VisionFamily(
    read_config=read_config,
    tensors=tensors,
    make_processor=make_processor,
    load=Qwen25Tower,
    gguf=VisionGguf(
        projectors=("qwen2.5vl_merger",),
        read=read_gguf,
        size=lambda own: {},
        row_token=PLACEHOLDER,
    ),
)


_QWEN2_LAYERS: Final = replace(LAYERS, mlp=("mlp.fc1", "mlp.fc2"), has_norm_bias=True)


def read_qwen2_config(outer: Fields, own: Fields, text: ModelConfig) -> VisionConfig:
    """Read a Qwen2VLVisionConfig, whose `hidden_size` is the language model's."""
    own.ignore("spatial_patch_size", "intermediate_size")  # as the other one; of projector files
    own.require("hidden_size", text.hidden_size)
    width = own.positive("embed_dim", 1280)
    config = read_sizes(
        outer, own, text, n_layers=32, hidden_size=width, intermediate_size=1, patch=14
    )
    return replace(
        config,
        hidden_size=width,
        intermediate_size=width * own.positive("mlp_ratio", 4),
        activation=read_activation(own, "hidden_act", "quick_gelu"),
    )


def qwen2_tensors(config: VisionConfig) -> Table:
    """Name the parameters."""
    norm = norm_tensors(config.hidden_size, "visual.merger.ln_q")
    return merger_tensors(config) | norm | _QWEN2_LAYERS.tensors(config)


def read_qwen2_gguf(own: Fields, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Read the metadata of a projector. Its inner size is another one: the qwen2_tensors say it."""
    width = own.positive("embedding_length")
    config = {
        "embed_dim": width,
        "hidden_size": own.positive("projection_dim"),
        "spatial_merge_size": own.positive("spatial_merge_size", 2),
    }
    if (up := stored.get("v.blk.0.ffn_up.weight")) is not None:
        config["mlp_ratio"] = up.shape[0] // width
    return {"vision_config": config}


QWEN2 = VisionFamily(
    read_config=read_qwen2_config,
    tensors=qwen2_tensors,
    make_processor=make_processor,
    load=partial(Qwen25Tower, names=_QWEN2_LAYERS),
    gguf=VisionGguf(
        projectors=("qwen2vl_merger",),
        read=read_qwen2_gguf,
        size=lambda own: {},
        row_token=PLACEHOLDER,
    ),
)
