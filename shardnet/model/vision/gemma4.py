"""Gemma 4's tower, and its embedder where there is none (transformers, modeling_gemma4*.py).

In the tower norms stand around sub-layers and over heads. Pictures keep their shape within a number
of rows. Positions are learned and rotary, by column and by line, and squares of patches are
averaged. Rows see each other in layers with a window. The embedder normalises and projects squares
of pixels, with learned positions by column and by line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import read_activation
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import NORM_EPS, THETAS
from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.vision.patches import (
    Filter,
    Marks,
    PatchProcessor,
    RowBudget,
    read_patches,
    required_id,
)
from shardnet.model.vision.picture import EncodedPicture, EncoderWalk, PictureProcessor
from shardnet.model.vision.siglip import AveragingTower
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

    from shardnet.model.kernels.linear import Linear
    from shardnet.model.layers.norms import BareNorm, Norm
    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.vision.tower import Rowwise, TowerLayer


PLACEHOLDER: Final = "<|image|>"
_TABLE: Final = "v.position_embd.weight"
_EMBEDDER: Final = "vision_tower.patch_embedder"
_PROJECTION: Final = "embed_vision.embedding_projection"
_NORMS: Final = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_LIMITS: Final = ("input_min", "input_max", "output_min", "output_max")
_GGUF_LAYER: Final = {
    **{f"self_attn.{part}_proj.linear": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj.linear": "attn_out",
    **{f"mlp.{part}_proj.linear": f"ffn_{part}" for part in ("gate", "up", "down")},
    **dict(zip(_NORMS, ("ln1", "attn_post_norm", "ln2", "ffn_post_norm"), strict=True)),
}


def read_config(outer: Fields, own: Fields, text: ModelConfig) -> VisionConfig:
    """Read a Gemma4VisionConfig, and whether pictures see themselves in both directions."""
    own.ignore("default_output_length", "max_position_embeddings", "global_head_dim")
    own.ignore("hidden_act", "image_size", "layer_norm_eps")  # of projector files
    own.require("attention_bias", False)
    n_heads, width = own.positive("num_attention_heads", 12), own.positive("hidden_size", 768)
    for key, only in (("num_key_value_heads", n_heads), ("head_dim", width // n_heads)):
        own.require(key, only)
    if width % (4 * n_heads):
        raise own.unsupported("hidden_size", width, f"multiples of 4 x {n_heads}")
    language = outer.inner("text_config", outer.take("text_config", dict, {}))
    rope = own.inner("rope_parameters", own.take("rope_parameters", dict, {}))
    eps = own.number("rms_norm_eps", 1e-6, within=NORM_EPS)
    return VisionConfig(
        n_layers=own.positive("num_hidden_layers", 16),
        hidden_size=width,
        intermediate_size=own.positive("intermediate_size", 3072),
        n_heads=n_heads,
        patch=own.positive("patch_size", 16),
        merge=own.positive("pooling_kernel_size", 3),
        out_size=text.hidden_size,
        norm_eps=eps,
        activation=read_activation(own, "hidden_activation", "gelu_pytorch_tanh"),
        row_id=outer.take("image_token_id", int, 258880),
        grid=own.positive("position_embedding_size", 10240),
        rope_theta=rope.number("rope_theta", 100.0, within=THETAS),
        projector_eps=eps,
        standardizes=own.take("standardize", bool, False),
        clips=own.take("use_clipped_linears", bool, False),
        see_each_other=language.take("use_bidirectional_attention", str, None) == "vision",
        colours_last=own.take("colours_last", bool, True),
    )


def tensors(config: VisionConfig) -> Table:
    """Name the parameters."""
    width, inner = config.hidden_size, config.intermediate_size
    made: Table = {
        f"{_EMBEDDER}.input_proj.weight": (width, config.patch_width),
        f"{_EMBEDDER}.position_embedding_table": (2, config.grid, width),
        f"{_PROJECTION}.weight": (config.out_size, width),
    }
    if config.standardizes:
        made |= {f"vision_tower.std_{part}": (width,) for part in ("bias", "scale")}
    for number in range(config.n_layers):
        layer = f"vision_tower.encoder.layers.{number}"
        linears = {f"self_attn.{name}_proj.linear": (width, width) for name in "qkvo"}
        linears |= {f"mlp.{name}_proj.linear": (inner, width) for name in ("gate", "up")}
        linears |= {"mlp.down_proj.linear": (width, inner)}
        made |= linear_tensors(layer, linears)
        if config.clips:
            names = (f"{layer}.{name.removesuffix('.linear')}" for name in linears)
            made |= {f"{name}.{limit}": () for name in names for limit in _LIMITS}
        made |= {f"{layer}.{norm}.weight": (width,) for norm in _NORMS}
        made |= {f"{layer}.self_attn.{part}_norm.weight": (config.head_size,) for part in "qk"}
    return made


def make_processor(config: VisionConfig, own: Fields, token_id: TokenId) -> PatchProcessor:
    """Read a Gemma4ImageProcessor: numbers from 0 to 1, of which the tower knows what they mean."""
    for key, value in (("patch_size", config.patch), ("pooling_kernel_size", config.merge)):
        own.require(key, value)
    own.ignore("size")
    plain = read_patches(own, config, Filter.BICUBIC, (0.0,) * 3, (1.0,) * 3, normalizes=False)
    start, end = (required_id(own, token_id, mark) for mark in ("<|image>", "<image|>"))
    return PatchProcessor(
        size=RowBudget(most=own.positive("max_soft_tokens", 280), multiple=config.row_pixels),
        **plain,
        marks=Marks(row=config.row_id, before=(start,), after=(end,)),
        placeholder=PLACEHOLDER,
        placeholder_id=config.row_id,
        see_each_other=config.see_each_other,
        colours_last=config.colours_last,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """Norms over heads, of values one without weights; scores are not scaled afterwards.

    Columns that turn by line and by column are brought in the order in which others have them.
    """

    queries: Norm
    keys: Norm
    values: BareNorm

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise heads [T, H, D]."""
        queries, keys = (
            norm(heads.flatten(0, 1)).view(*heads.shape[:2], 2, 2, -1).transpose(2, 3)
            for norm, heads in (
                (self.queries, queries.contiguous()),
                (self.keys, keys.contiguous()),
            )
        )
        scale = math.sqrt(values.shape[-1])
        return queries.flatten(2) * scale, keys.flatten(2), self.values(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLinears:
    """Linears of the same rows, outputs side by side, with least and most inputs and outputs."""

    parts: tuple[tuple[Linear, tuple[float, ...]], ...]

    @classmethod
    def load(cls, weights: WeightSource, *names: str) -> ClippedLinears:
        """Take linears and what limits them."""

        def limits(name: str) -> tuple[float, ...]:
            return tuple(float(weights.parameter(f"{name}.{limit}")) for limit in _LIMITS)

        return cls(parts=tuple((weights.linear(f"{name}.linear"), limits(name)) for name in names))

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        import torch

        made = [
            linear(rows.clamp(low, high)).clamp(least, most)
            for linear, (low, high, least, most) in self.parts
        ]
        return torch.cat(made, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Mlp:
    """A gated MLP of linears that may be clipped."""

    activation: Activation
    gate_up_proj: Rowwise
    down_proj: Rowwise

    def __call__(self, hidden: Tensor) -> Tensor:
        """Transform [T, N], row by row."""
        from shardnet.model.layers.norms import activate

        gate, up = self.gate_up_proj(hidden).chunk(2, -1)
        return self.down_proj(activate(self.activation, gate) * up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Tower(AveragingTower):
    """The forward pass. Positions are [2, grid, W], by column and by line."""

    bias: Tensor | None  # [W], float32
    scale: Tensor | None

    @classmethod
    def load(
        cls, config: VisionConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> Gemma4Tower:
        """Take the parameters."""
        from shardnet.model.layers.norms import BareNorm
        from shardnet.model.vision.tower import TowerLayer

        def linears(*names: str) -> Rowwise:
            if config.clips:
                return ClippedLinears.load(weights, *names)
            return weights.linear(*(f"{name}.linear" for name in names))

        def layer(number: int) -> TowerLayer:
            prefix = f"vision_tower.encoder.layers.{number}"
            attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            norms = [weights.norm(f"{prefix}.{norm}", config.norm_eps) for norm in _NORMS]
            queries, keys = (weights.norm(f"{attn}.{part}_norm", config.norm_eps) for part in "qk")
            values = BareNorm(eps=config.norm_eps)
            return TowerLayer(
                n_heads=config.n_heads,
                attention_norm=norms[0],
                qkv_proj=linears(*(f"{attn}.{name}_proj" for name in "qkv")),
                head_norms=HeadNorms(queries=queries, keys=keys, values=values),
                o_proj=linears(f"{attn}.o_proj"),
                after_attention=norms[1],
                mlp_norm=norms[2],
                mlp=Gemma4Mlp(
                    activation=config.activation,
                    gate_up_proj=linears(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                    down_proj=linears(f"{mlp}.down_proj"),
                ),
                after_mlp=norms[3],
            )

        def standard(part: str) -> Tensor | None:
            name = f"vision_tower.std_{part}"
            return weights.parameter(name).to(device) if config.standardizes else None

        return cls(
            config=config,
            patches=weights.linear(f"{_EMBEDDER}.input_proj"),
            positions=weights.parameter(f"{_EMBEDDER}.position_embedding_table").to(device, dtype),
            layers=tuple(layer(number) for number in range(config.n_layers)),
            bias=standard("bias"),
            scale=standard("scale"),
            norm=BareNorm(eps=config.projector_eps),
            projection=weights.linear(_PROJECTION),
        )

    def walk(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderWalk:
        """Encode patches; see Tower."""
        from shardnet.model.vision.tower import in_pieces, patch_places, rotary_of

        config = self.config
        places = patch_places(grid, config.merge).flip(-1)  # column and line
        rotary = rotary_of(config, places, pixels)
        columns, lines = places.to(pixels.device).unbind(-1)
        hidden = yield from in_pieces(lambda part: self.patches(2 * (part - 0.5)), pixels)
        hidden = hidden + (self.positions[0, columns] + self.positions[1, lines])
        yield from self.finish(hidden, rotary)

    def _averages(self, hidden: Tensor) -> Tensor:
        """Average in float32 and round, then scale in float32: it may exceed float16."""
        averages = AveragingTower._averages(self, hidden.float()).to(hidden.dtype)
        rows = averages.float() * math.sqrt(self.config.hidden_size)
        if self.bias is not None and self.scale is not None:
            rows = (rows - self.bias) * self.scale
        return rows.to(hidden.dtype)


def read_gguf(own: Fields, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Read the metadata of a projector, and what its tensors say; it has the kernel of patches."""
    config = {
        "colours_last": False,
        "pooling_kernel_size": own.positive("projector.scale_factor", 3),
        "standardize": "v.std_bias" in stored,
        "use_clipped_linears": any(name.endswith(".input_max") for name in stored),
    }
    if (table := stored.get(_TABLE)) is not None:
        config["position_embedding_size"] = table.shape[1]
    language = {"use_bidirectional_attention": "vision"}
    return {"vision_config": config, "text_config": language}


def _gguf_names(config: VisionConfig) -> dict[str, str]:
    """Name what the `gguf` package knows by names of the converter's own."""
    names = {f"{_EMBEDDER}.position_embedding_table": _TABLE}
    names |= {f"vision_tower.std_{part}": f"v.std_{part}" for part in ("bias", "scale")}
    for number in range(config.n_layers):
        prefix = f"vision_tower.encoder.layers.{number}"
        for own, its in _GGUF_LAYER.items():  # limits stand beside the linear
            stem = f"{prefix}.{own}"
            names |= dict.fromkeys((stem, stem.removesuffix(".linear")), f"v.blk.{number}.{its}")
    return names


VISION = VisionFamily(
    read_config=read_config,
    tensors=tensors,
    make_processor=make_processor,
    load=Gemma4Tower.load,
    gguf=VisionGguf(
        projectors=("gemma4v",),
        read=read_gguf,
        size=lambda own: {},
        row_token=PLACEHOLDER,
        names=_gguf_names,
    ),
)


_EPS: Final = 1e-5
_PIXEL_NORMS: Final = ("patch_ln1", "patch_ln2", "pos_norm")
_PIXEL_POSITIONS: Final = "embed_vision.pos_embedding"
_PIXEL_PROJECTION: Final = "embed_vision.multimodal_embedder.embedding_projection"


def read_pixel_config(outer: Fields, own: Fields, text: ModelConfig) -> VisionConfig:
    """Read a Gemma4UnifiedVisionConfig, and whether pictures see themselves in both directions."""
    width = own.positive("mm_embed_dim", 3840)
    own.require("output_proj_dims", width)
    patch, merge = own.positive("patch_size", 16), own.positive("pooling_kernel_size", 3)
    own.require("model_patch_size", patch * merge)
    language = outer.inner("text_config", outer.take("text_config", dict, {}))
    seeing = language.take("use_bidirectional_attention", str, "vision")
    grid = own.positive("mm_posemb_size", 1120)
    return VisionConfig(
        n_layers=0,
        hidden_size=width,
        intermediate_size=width,
        n_heads=1,
        patch=patch,
        merge=merge,
        out_size=text.hidden_size,
        norm_eps=_EPS,
        activation=Activation.GELU,
        row_id=outer.take("image_token_id", int, 258880),
        grid=grid,
        projector_eps=own.number("rms_norm_eps", 1e-6, within=NORM_EPS),
        see_each_other=seeing == "vision",
        most_rows=min(grid, text.smallest_window or grid),  # in no window they see fewer
        colours_last=True,
    )


def pixel_tensors(config: VisionConfig) -> Table:
    """Name the parameters."""
    width, pixels = config.hidden_size, 3 * config.row_pixels**2
    sizes = dict(zip(_PIXEL_NORMS, (pixels, width, width), strict=True))
    norms: Table = {
        f"embed_vision.{norm}.{part}": (size,)
        for norm, size in sizes.items()
        for part in ("weight", "bias")
    }
    made = linear_tensors("embed_vision", {"patch_dense": (width, pixels)}, with_bias=True)
    made |= {
        _PIXEL_POSITIONS: (config.grid, 2, width),
        f"{_PIXEL_PROJECTION}.weight": (config.out_size, width),
    }
    return norms | made


def spell_pixels(name: str) -> str:
    """Return what `pixel_tensors` calls a stored parameter."""
    if name == "embed_vision.embedding_projection.weight":
        return f"{_PIXEL_PROJECTION}.weight"
    return name.replace("vision_embedder.", "embed_vision.")


def make_pixel_processor(config: VisionConfig, own: Fields, token_id: TokenId) -> PictureProcessor:
    """Read a Gemma4UnifiedImageProcessor: a patch is what becomes a row."""
    most = own.positive("max_soft_tokens", 280)
    if most > config.most_rows:
        raise own.unsupported("max_soft_tokens", most, f"at most {config.most_rows}")
    made = make_processor(config, own, token_id)
    return replace(made, patch=config.row_pixels, merge=1)


class PixelEmbedder:
    """The forward pass. Positions are [grid, 2, W], by column and by line."""

    def __init__(
        self, config: VisionConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> None:
        from shardnet.model.layers.norms import BareNorm

        norms = [weights.norm(f"embed_vision.{norm}", config.norm_eps) for norm in _PIXEL_NORMS]
        self.pixel_norm = norms[0]
        self.patches = weights.linear("embed_vision.patch_dense")
        self.patch_norm = norms[1]
        self.positions = weights.parameter(_PIXEL_POSITIONS).to(device, dtype)
        self.position_norm = norms[2]
        self.norm = BareNorm(eps=config.projector_eps)
        self.projection = weights.linear(_PIXEL_PROJECTION)

    def walk(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderWalk:
        """Encode patches; see Tower."""
        from shardnet.model.vision.tower import in_pieces, patch_places

        lines, columns = patch_places(grid, 1).to(pixels.device).unbind(-1)
        positions = self.positions[columns, 0] + self.positions[lines, 1]
        yield EncodedPicture(rows=(yield from in_pieces(self._embed, pixels, positions)))

    def _embed(self, pixels: Tensor, positions: Tensor) -> Tensor:
        """Embed patches [N, P] that have positions [N, W]: [N, E]."""
        hidden = self.patch_norm(self.patches(self.pixel_norm(pixels)))
        return self.projection(self.norm(self.position_norm(hidden + positions)))


UNIFIED = VisionFamily(
    read_config=read_pixel_config,
    tensors=pixel_tensors,
    spell=spell_pixels,
    make_processor=make_pixel_processor,
    load=PixelEmbedder,
)
