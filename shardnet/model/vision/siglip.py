"""SigLIP's tower in Gemma 3 (transformers, modeling_siglip.py, modeling_gemma3.py).

Pictures of one size, learned positions, and averages over squares of patches. The rows of a picture
see each other in the language model.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import read_activation
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import NORM_EPS
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.vision.patches import (
    HALF,
    Filter,
    Marks,
    PatchProcessor,
    read_fixed_size,
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
    norm_tensors,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardnet.model.kernels.linear import Linear
    from shardnet.model.layers.norms import BareNorm, Norm
    from shardnet.model.layers.rotary import Rotary
    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.vision.tower import TowerLayer

_EPS: Final = 1e-6
_TOWER: Final = "vision_tower.vision_model"
_PROJECTION: Final = "multi_modal_projector.mm_input_projection"
_NORM: Final = "multi_modal_projector.mm_soft_emb_norm"
_LAYERS: Final = LayerNames(
    prefix=f"{_TOWER}.encoder.layers",
    norms=("layer_norm1", "layer_norm2"),
    inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    mlp=("mlp.fc1", "mlp.fc2"),
)


def read_config(outer: Fields, own: Fields, text: ModelConfig) -> VisionConfig:
    """Read a SiglipVisionConfig, and what Gemma3Config says of the projector."""
    own.ignore("vision_use_head", "projection_size")  # which Gemma does not use
    patch, size = own.positive("patch_size", 16), own.positive("image_size", 224)
    n_rows = outer.positive("mm_tokens_per_image", 256)
    side, grid = math.isqrt(n_rows), size // patch
    if side * side != n_rows or grid % side or size % patch:
        raise outer.unsupported(
            "mm_tokens_per_image", n_rows, f"squares of numbers that divide {size} / {patch}"
        )
    eps = own.number("layer_norm_eps", _EPS, within=NORM_EPS)
    return VisionConfig(
        n_layers=own.positive("num_hidden_layers", 12),
        hidden_size=own.positive("hidden_size", 768),
        intermediate_size=own.positive("intermediate_size", 3072),
        n_heads=own.positive("num_attention_heads", 12),
        patch=patch,
        merge=grid // side,
        out_size=text.hidden_size,
        norm_eps=eps,
        activation=read_activation(own, "hidden_act", "gelu_pytorch_tanh"),
        row_id=outer.take("image_token_index", int, outer.take("image_token_id", int, 262144)),
        grid=grid,
        projector_eps=eps,
        see_each_other=True,
    )


def tensors(config: VisionConfig) -> Table:
    """Name the parameters, as published checkpoints do; the projection as a linear."""
    width = config.hidden_size
    made: Table = {
        f"{_TOWER}.embeddings.position_embedding.weight": (config.grid**2, width),
        f"{_NORM}.weight": (width,),
        f"{_PROJECTION}.weight": (width, config.out_size),
    }
    shapes = {"patch_embedding": (width, config.patch_width)}
    made |= linear_tensors(f"{_TOWER}.embeddings", shapes, with_bias=True)
    return made | norm_tensors(width, f"{_TOWER}.post_layernorm") | _LAYERS.tensors(config)


def spell(name: str) -> str:
    """Return what `tensors` calls a stored parameter."""
    inside = name.removeprefix("vision_tower.").removeprefix("vision_model.")
    name = f"{_TOWER}.{inside}" if name.startswith("vision_tower.") else name
    return f"{_PROJECTION}.weight" if name == f"{_PROJECTION}_weight" else name


def make_processor(config: VisionConfig, own: Fields, token_id: TokenId) -> PictureProcessor:
    """Read a Gemma3ImageProcessor. Pictures are not cut into crops."""
    placeholder = "<start_of_image>"
    start, end = (required_id(own, token_id, mark) for mark in (placeholder, "<end_of_image>"))
    return PatchProcessor(
        size=read_fixed_size(own, config),
        **read_patches(own, config, Filter.BILINEAR, HALF, HALF),
        marks=Marks(row=config.row_id, before=(start,), after=(end,)),
        placeholder=placeholder,
        placeholder_id=start,
        around=("\n\n", "\n\n"),
        see_each_other=config.see_each_other,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingTower:
    """A tower whose rows are averages over squares of patches, normalised and projected."""

    config: VisionConfig
    patches: Linear
    positions: Tensor
    layers: tuple[TowerLayer, ...]
    norm: Norm | BareNorm
    projection: Linear

    def finish(self, hidden: Tensor, rotary: Rotary | None) -> EncoderWalk:
        """Encode patches [T, W] that have their positions; see Tower."""
        from shardnet.model.vision.tower import in_pieces

        for layer in self.layers:
            hidden = yield from layer.walk(hidden, rotary)
        rows = self._averages(hidden)
        project = in_pieces(lambda part: self.projection(self.norm(part)), rows)
        yield EncodedPicture(rows=(yield from project))

    def _averages(self, hidden: Tensor) -> Tensor:
        return hidden.view(-1, self.config.merge**2, hidden.shape[1]).mean(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiglipTower(AveragingTower):
    """The forward pass. Positions are [grid^2, W]."""

    last_norm: Norm

    @classmethod
    def load(
        cls, config: VisionConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device
    ) -> SiglipTower:
        """Take the parameters."""
        return cls(
            config=config,
            patches=weights.linear(f"{_TOWER}.embeddings.patch_embedding"),
            positions=weights.matrix(f"{_TOWER}.embeddings.position_embedding"),
            layers=_LAYERS.load(config, weights),
            last_norm=weights.norm(f"{_TOWER}.post_layernorm", config.norm_eps),
            norm=weights.norm(_NORM, config.projector_eps, 1.0),
            projection=weights.linear(_PROJECTION, transposed=True),
        )

    def walk(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderWalk:
        """Encode patches; see Tower."""
        from shardnet.model.vision.tower import in_pieces, patch_places

        places = patch_places(grid, self.config.merge).to(pixels.device)
        lines, columns = places.unbind(-1)
        hidden = yield from in_pieces(self.patches, pixels)
        hidden = hidden + self.positions[lines * self.config.grid + columns]
        yield from self.finish(hidden, None)

    def _averages(self, hidden: Tensor) -> Tensor:
        return AveragingTower._averages(self, self.last_norm(hidden))


def read_gguf(own: Fields, stored: Container[str]) -> dict[str, Any]:
    """Read the metadata of a projector: llama.cpp computes one kind of GELU, by tanh."""
    grid = own.positive("image_size") // own.positive("patch_size")
    side = grid // own.positive("projector.scale_factor", 4)
    return {
        "mm_tokens_per_image": side * side,
        "vision_config": {"hidden_act": "gelu_pytorch_tanh"},
    }


VISION = VisionFamily(
    read_config=read_config,
    tensors=tensors,
    spell=spell,
    make_processor=make_processor,
    load=SiglipTower.load,
    gguf=VisionGguf(
        projectors=("gemma3",),
        read=read_gguf,
        size=lambda own: {"height": own["image_size"], "width": own["image_size"]},
        row_token="<image_soft_token>",
        stand_in="<pad>",  # llama.cpp's converter drops the other, Ollama's its embedding
        added={f"{_NORM}.weight": 1.0},
    ),
)
