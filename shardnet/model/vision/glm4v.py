"""The tower of GLM-4.1V and GLM-4.5V (transformers, modeling_glm4v.py).

Qwen2.5-VL's layers without windows. Learned positions are interpolated between beside rotary ones,
squares of patches are folded into one, and the projector is gated.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import read_activation
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import NORM_EPS
from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.vision import qwen2_5_vl
from shardnet.model.vision.picture import EncodedPicture, EncoderWalk, PictureProcessor
from shardnet.model.vision.vision_family import (
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

PLACEHOLDER: Final = "<|image|>"
_EPS: Final = 1e-5
_LAYERS: Final = replace(qwen2_5_vl.LAYERS, has_bias=False)
_PIXELS: Final = (112 * 112, 28 * 28 * 15000)
_TABLE: Final = "visual.embeddings.position_embedding"


def read_config(outer: Fields, own: Fields, text: ModelConfig) -> VisionConfig:
    """Read a Glm4vVisionConfig. Its inner size is the projector's; the layers have the model's."""
    config = qwen2_5_vl.read_sizes(
        outer, own, text, n_layers=24, hidden_size=1536, intermediate_size=13696, patch=14
    )
    return replace(
        config,
        n_heads=own.positive("num_heads", own.positive("num_attention_heads", 12)),
        norm_eps=own.number("rms_norm_eps", _EPS, within=NORM_EPS),
        activation=read_activation(own, "hidden_act", "silu"),
        row_id=outer.take("image_token_id", int),
        grid=own.positive("image_size", 336) // config.patch,
        attention_bias=own.take("attention_bias", bool, False),
        projector_eps=_EPS,
    )


def tensors(config: VisionConfig) -> Table:
    """Name the parameters."""
    width, out, inner = config.hidden_size, config.out_size, config.intermediate_size
    made: Table = {
        f"{_TABLE}.weight": (config.grid**2, width),
        "visual.post_conv_layernorm.weight": (width,),
        "visual.post_layernorm.weight": (width,),
        **{f"visual.merger.post_projection_norm.{part}": (out,) for part in ("weight", "bias")},
    }
    folds = {"patch_embed.proj": (width, config.patch_width)}
    folds |= {"downsample": (out, config.merged_width)}
    made |= linear_tensors("visual", folds, with_bias=True)
    shapes = dict.fromkeys(("gate_proj", "up_proj"), (inner, out)) | {"down_proj": (out, inner)}
    shapes |= {"proj": (out, out)}
    made |= linear_tensors("visual.merger", shapes)
    if config.attention_bias:
        layers = (f"visual.blocks.{number}" for number in range(config.n_layers))
        made |= {f"{layer}.attn.qkv.bias": (3 * width,) for layer in layers}
    return made | _LAYERS.tensors(replace(config, intermediate_size=out))


def make_processor(config: VisionConfig, own: Fields, token_id: TokenId) -> PictureProcessor:
    """Read a Glm4vImageProcessor, which counts the pixels of all frames."""
    made = qwen2_5_vl.make_processor(
        config, own, token_id, pixels=_PIXELS, n_frames=config.n_frames
    )
    marks = ("<|begin_of_image|>", "<|end_of_image|>")
    return replace(made, placeholder=PLACEHOLDER, template_marks=marks)


class GlmProjector:
    """Makes rows of the language model of patches, those of a row folded into one."""

    def __init__(self, config: VisionConfig, weights: WeightSource) -> None:
        from shardnet.model.layers.modules import GatedMlp

        merger = "visual.merger"
        self.folding = weights.linear("visual.downsample")
        self.linear = weights.linear(f"{merger}.proj")
        self.norm = weights.norm(f"{merger}.post_projection_norm", config.projector_eps)
        self.mlp = GatedMlp.load(config, weights, merger)

    def __call__(self, patches: Tensor) -> Tensor:
        """Project the patches of rows [N, merge^2, W]: [N, E]."""
        from shardnet.model.vision.tower import activated

        rows = self.folding(patches.transpose(1, 2).reshape(len(patches), -1))
        return self.mlp(activated(Activation.GELU, self.norm(self.linear(rows))))


class GlmTower:
    """The forward pass."""

    def __init__(
        self, config: VisionConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.patches = weights.linear("visual.patch_embed.proj")
        self.first_norm = weights.norm("visual.post_conv_layernorm", config.norm_eps)
        self.positions = weights.matrix(_TABLE)  # [grid^2, W]
        self.layers = _LAYERS.load(config, weights)
        self.last_norm = weights.norm("visual.post_layernorm", config.norm_eps)
        self.projector = GlmProjector(config, weights)

    def walk(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderWalk:
        """Encode patches; see Tower."""
        from shardnet.model.vision.tower import in_pieces, patch_places, rotary_of

        config = self.config
        places = patch_places(grid, config.merge)
        rotary = rotary_of(config, places, pixels)
        hidden = yield from in_pieces(lambda part: self.first_norm(self.patches(part)), pixels)
        hidden = hidden + self._interpolated(places, grid).to(hidden.dtype)
        for layer in self.layers:
            hidden = yield from layer.walk(hidden, rotary)
        merged = hidden.view(-1, config.merged_width)
        yield EncodedPicture(rows=(yield from in_pieces(self._project, merged)))

    def _interpolated(self, places: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Stretch the learned positions over a picture by cubic interpolation: [T, W], float32."""
        import torch.nn.functional as F

        side, merge = self.config.grid, self.config.merge
        table = self.positions.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        sides = places.new_tensor([n * merge for n in grid[1:]]).float()
        at = ((places.float() + 0.5) / sides * 2 - 1).flip(-1)  # column and line, from -1 to 1
        found = F.grid_sample(
            table,
            at[None, :, None].to(table.device),
            mode="bicubic",
            padding_mode="border",
            align_corners=False,
        )  # [1, W, T, 1]
        return found[0, :, :, 0].T

    def _project(self, merged: Tensor) -> Tensor:
        """Project the patches of rows, side by side: [N, merge^2 x W] to [N, E]."""
        width = self.config.hidden_size
        normed = self.last_norm(merged.view(-1, width))
        return self.projector(normed.view(len(merged), -1, width))


def read_gguf(own: Fields, stored: Container[str]) -> dict[str, Any]:
    """Read the metadata of a projector."""
    config = {
        "attention_bias": "v.blk.0.attn_qkv.bias" in stored,
        "rms_norm_eps": own.number("attention.layer_norm_epsilon", _EPS),
        "spatial_merge_size": own.positive("spatial_merge_size", 2),
    }
    return {"vision_config": config}


VISION = VisionFamily(
    read_config=read_config,
    tensors=tensors,
    make_processor=make_processor,
    load=GlmTower,
    gguf=VisionGguf(
        projectors=("glm4v",),
        read=read_gguf,
        size=lambda own: {},
        row_token=PLACEHOLDER,
    ),
)
