"""Gemma 4's embedder of pictures where there is no tower (modeling_gemma4_unified.py).

Squares of pixels are normalised and projected, with learned positions by column and by line. They
are prepared as for Gemma 4's tower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import NORM_EPS
from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.vision import gemma4
from shardnet.model.vision.picture import EncodedPicture, EncoderWalk, PictureProcessor
from shardnet.model.vision.vision_config import VisionConfig
from shardnet.model.vision.vision_family import Table, TokenId, VisionFamily, linear_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardnet.model.kernels.linear import Linear
    from shardnet.model.layers.norms import BareNorm, Norm
    from shardnet.model.layers.weight_source import WeightSource

_EPS: Final = 1e-5
_NORMS: Final = ("patch_ln1", "patch_ln2", "pos_norm")
_POSITIONS: Final = "embed_vision.pos_embedding"
_PROJECTION: Final = "embed_vision.multimodal_embedder.embedding_projection"


def read_config(outer: Fields, own: Fields, text: ModelConfig) -> VisionConfig:
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


def tensors(config: VisionConfig) -> Table:
    """Name the parameters."""
    width, pixels = config.hidden_size, 3 * config.row_pixels**2
    sizes = dict(zip(_NORMS, (pixels, width, width), strict=True))
    norms: Table = {
        f"embed_vision.{norm}.{part}": (size,)
        for norm, size in sizes.items()
        for part in ("weight", "bias")
    }
    made = linear_tensors("embed_vision", {"patch_dense": (width, pixels)}, with_bias=True)
    made |= {_POSITIONS: (config.grid, 2, width), f"{_PROJECTION}.weight": (config.out_size, width)}
    return norms | made


def spell(name: str) -> str:
    """Return what `tensors` calls a stored parameter."""
    if name == "embed_vision.embedding_projection.weight":
        return f"{_PROJECTION}.weight"
    return name.replace("vision_embedder.", "embed_vision.")


def make_processor(config: VisionConfig, own: Fields, token_id: TokenId) -> PictureProcessor:
    """Read a Gemma4UnifiedImageProcessor: a patch is what becomes a row."""
    most = own.positive("max_soft_tokens", 280)
    if most > config.most_rows:
        raise own.unsupported("max_soft_tokens", most, f"at most {config.most_rows}")
    made = gemma4.make_processor(config, own, token_id)
    return replace(made, patch=config.row_pixels, merge=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelEmbedder:
    """The forward pass. Positions are [grid, 2, W], by column and by line."""

    pixel_norm: Norm
    patches: Linear
    patch_norm: Norm
    positions: Tensor
    position_norm: Norm
    norm: BareNorm
    projection: Linear

    @classmethod
    def load(
        cls, config: VisionConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> PixelEmbedder:
        """Take the parameters."""
        from shardnet.model.layers.norms import BareNorm

        norms = [weights.norm(f"embed_vision.{norm}", config.norm_eps) for norm in _NORMS]
        return cls(
            pixel_norm=norms[0],
            patches=weights.linear("embed_vision.patch_dense"),
            patch_norm=norms[1],
            positions=weights.parameter(_POSITIONS).to(device, dtype),
            position_norm=norms[2],
            norm=BareNorm(eps=config.projector_eps),
            projection=weights.linear(_PROJECTION),
        )

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


VISION = VisionFamily(
    read_config=read_config,
    tensors=tensors,
    spell=spell,
    make_processor=make_processor,
    load=PixelEmbedder.load,
)
