"""Tiny multimodal checkpoints with towers of odd sizes, and what the makers' processors say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from support.models.checkpoints import QWEN4, make_tokenizer
from support.models.family_cases import CASES as FAMILY_CASES
from support.oracles.tiles import Gemma4Squares, Llama4Tiles
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

Picture = NDArray[np.uint8]
TOKENS = {
    "[IMG]": 300,
    "[IMG_BREAK]": 301,
    "[IMG_END]": 302,
    "<image_soft_token>": 303,
    "<start_of_image>": 304,
    "<end_of_image>": 305,
    "<|image_pad|>": 306,
    "<|image>": 307,
    "<image|>": 308,
    "<|image|>": 309,
    "<|patch|>": 310,
    "<|image_start|>": 311,
    "<|image_end|>": 312,
    "<|tile_x_separator|>": 313,
    "<|tile_y_separator|>": 314,
}
"""Ids of the tokens that stand for pictures: the padding of the tiny models' vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionCase:
    """A multimodal model: its tower, and what its processor's config says.

    `processor` is transformers' class, `outer` what config.json says beside the two inner configs.
    """

    wrapper: str
    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    settings: Mapping[str, Any]
    processor: Any
    merge: int
    """Patches on a side of what becomes one row."""
    outer: Mapping[str, Any] = field(default_factory=dict)
    wide: Mapping[str, Any] = field(default_factory=dict)
    """The sizes of a tower whose columns are whole blocks of Q8_0."""

    @property
    def multiple(self) -> int:
        """Pixels on a side of what becomes one row."""
        return int(self.tower["patch_size"] * self.merge)

    def make(self, folder: Path, *, seed: int = 0, **tower: Any) -> Path:
        """Write a random checkpoint, its tower changed by `tower`. Return `folder`."""
        torch.manual_seed(seed)
        text = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 80} | {
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
            **self.text,
        }
        whole = {"text_config": text, "vision_config": {**self.tower, **tower}, **self.outer}
        config = AutoConfig.for_model(self.wrapper, tie_word_embeddings=False, **whole)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():  # biases and learned positions are zeros as made
            if parameter.ndim < 2 or not parameter.any():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        for name, values in model.named_buffers():
            if ".std_" in name:  # of averages; whatever was in memory
                values.normal_(1)
            if name.endswith(("put_min", "put_max")):  # that cut off a part
                values.copy_(torch.rand(()) * (0.6 if name.endswith("max") else -0.6))
        model.save_pretrained(folder)
        make_tokenizer(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(dict(self.settings)))
        return folder

    def prepared(self, picture: Picture) -> Mapping[str, Any]:
        """Prepare a picture as the makers' processor does."""
        made: Mapping[str, Any] = self.processor(**self.settings)(
            [picture], return_tensors="pt", **self.arguments
        )
        return made

    def patches(self, prepared: Mapping[str, Any]) -> Picture:
        """Return a prepared picture as patches, those of a row together."""
        pixels = np.asarray(prepared["pixel_values"])
        if pixels.ndim == 2:
            return pixels
        if "image_position_ids" in prepared:
            at = np.asarray(prepared["image_position_ids"])[0]
            is_real = at[:, 0] >= 0
            columns, lines = at[is_real].T
            merge = self.merge
            order = np.lexsort((columns % merge, lines % merge, columns // merge, lines // merge))
            return pixels[0][is_real][order]
        side, merge = self.tower["patch_size"], self.merge
        _, _, height, width = pixels.shape
        shape = (-1, 3, height // self.multiple, merge, side, width // self.multiple, merge, side)
        cut = pixels.reshape(shape).transpose(0, 2, 5, 3, 6, 1, 4, 7)
        return cut.reshape(-1, 3 * side * side)

    def features(
        self, reference: Any, prepared: Mapping[str, Any]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return what transformers' tower and projector make of a picture, and DeepStack's."""
        if self.wrapper == "llama4":
            with torch.inference_mode():
                seen = reference.get_image_features(**self.inputs([prepared])).last_hidden_state
                return reference.multi_modal_projector(seen.flatten(0, 1)), []
        with torch.inference_mode():
            made = reference.model.get_image_features(**self.inputs([prepared]))
        rows = made.pooler_output
        rows = torch.cat([*rows]) if isinstance(rows, list | tuple) else rows
        deep = getattr(made, "deepstack_features", None) or ()
        return rows.reshape(-1, rows.shape[-1]), [torch.cat([*added]) for added in deep]

    def inputs(self, prepared: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return what transformers' model takes of several pictures."""
        pixels = [torch.as_tensor(one["pixel_values"]) for one in prepared]
        if self.wrapper == "mistral3":
            high, wide = (max(one.shape[axis] for one in pixels) for axis in (2, 3))
            padded = [
                torch.nn.functional.pad(one, (0, wide - one.shape[3], 0, high - one.shape[2]))
                for one in pixels
            ]
            sizes = torch.cat([torch.as_tensor(one["image_sizes"]) for one in prepared])
            return {"pixel_values": torch.cat(padded), "image_sizes": sizes}
        more = {}
        if "image_grid_thw" in prepared[0]:
            more["image_grid_thw"] = torch.cat([one["image_grid_thw"] for one in prepared])
        if "image_position_ids" in prepared[0]:
            places = [torch.as_tensor(one["image_position_ids"]) for one in prepared]
            more["image_position_ids"] = torch.cat(places)
        return {"pixel_values": torch.cat(pixels), **more}

    def kinds(self, ids: torch.Tensor) -> dict[str, Any]:
        """Return what transformers wants to be told of each token beside its id."""
        if self.wrapper == "gemma3":
            return {"token_type_ids": (ids == self.outer["image_token_index"]).int()}
        if self.wrapper.startswith(("qwen", "glm")) or self.wrapper.startswith("gemma4"):
            return {"mm_token_type_ids": (ids == self.outer["image_token_id"]).int()}
        return {}

    @property
    def arguments(self) -> dict[str, Any]:
        """What the makers' processors give their image processor."""
        if self.wrapper == "mistral3":
            return {"patch_size": {"height": self.multiple, "width": self.multiple}}
        return {}


def token_id(token: str) -> int | None:
    """The tokenizer's ids."""
    return TOKENS.get(token)


def random_picture(height: int, width: int, seed: int = 0) -> Picture:
    """Draw blots that are larger than a pixel, with edges."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (-(-height // 3), -(-width // 3), 3), dtype=np.uint8)
    whole = coarse.repeat(3, 0).repeat(3, 1)
    return np.ascontiguousarray(whole[:height, :width])


CASES = {
    "mistral3": VisionCase(
        wrapper="mistral3",
        text={"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        tower={
            "model_type": "pixtral",
            "hidden_size": 24,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "head_dim": 8,
            "patch_size": 5,
            "image_size": 60,
            "hidden_act": "silu",
        },
        merge=2,
        outer={"spatial_merge_size": 2, "image_token_index": 300},
        settings={"size": {"longest_edge": 60}},
        processor=PixtralImageProcessorPil,
        wide={"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
    ),
    "gemma3": VisionCase(
        wrapper="gemma3",
        text={
            "num_hidden_layers": 3,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        tower={
            "model_type": "siglip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "patch_size": 5,
            "image_size": 60,
            "vision_use_head": False,
        },
        outer={"mm_tokens_per_image": 36, "image_token_index": 303}
        | {"boi_token_index": 304, "eoi_token_index": 305},
        settings={"size": {"height": 60, "width": 60}},
        processor=Gemma3ImageProcessorPil,
        merge=2,
        wide={"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
    ),
}
CASES["mistral3-ministral3"] = VisionCase(
    wrapper="mistral3",
    text={"model_type": "ministral3", "head_dim": 8}
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "llama_4_scaling_beta": 0.1,
        }
    },
    tower=dict(CASES["mistral3"].tower) | {"hidden_act": "gelu"},
    outer=dict(CASES["mistral3"].outer) | {"multimodal_projector_bias": True},
    settings=CASES["mistral3"].settings,
    processor=PixtralImageProcessorPil,
    merge=2,
    wide=CASES["mistral3"].wide,
)
_QWEN = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_heads": 2,
    "patch_size": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
}
_QWEN_SIZE = {"patch_size": 3, "merge_size": 2, "temporal_patch_size": 2} | {
    "size": {"shortest_edge": 900, "longest_edge": 3000}
}
_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
CASES["qwen2_5_vl"] = VisionCase(
    wrapper="qwen2_5_vl",
    text={"rope_parameters": _AXES},
    tower=_QWEN | {"window_size": 18, "fullatt_block_indexes": [1]},
    outer={"image_token_id": 306},
    settings=_QWEN_SIZE,
    processor=Qwen2VLImageProcessorPil,
    merge=2,
    wide={"hidden_size": 64, "intermediate_size": 96, "num_heads": 4},
)
CASES["qwen2_vl"] = VisionCase(
    wrapper="qwen2_vl",
    text={"rope_parameters": _AXES},
    tower={key: _QWEN[key] for key in _QWEN if not key.startswith(("hidden", "inter", "out"))}
    | {"embed_dim": 24, "hidden_size": 48, "mlp_ratio": 3},
    outer={"image_token_id": 306},
    settings=_QWEN_SIZE,
    processor=Qwen2VLImageProcessorPil,
    merge=2,
    wide={"embed_dim": 64, "mlp_ratio": 2, "num_heads": 4},
)
CASES["qwen3_vl"] = VisionCase(
    wrapper="qwen3_vl",
    text={"num_hidden_layers": 3, "head_dim": 8, "rope_parameters": _AXES},
    tower=_QWEN | {"num_position_embeddings": 25, "deepstack_visual_indexes": [2, 0]},
    outer={"image_token_id": 306},
    settings=_QWEN_SIZE | {"image_mean": [0.5] * 3, "image_std": [0.4, 0.5, 0.6]},
    processor=Qwen2VLImageProcessorPil,
    merge=2,
    wide=CASES["qwen2_5_vl"].wide,
)
CASES["qwen3_5"] = VisionCase(
    wrapper="qwen3_5",
    text={
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 12,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": _AXES | {"partial_rotary_factor": 0.5},
    },
    tower=_QWEN | {"num_position_embeddings": 25},
    outer={"image_token_id": 306},
    settings=CASES["qwen3_vl"].settings,
    processor=Qwen2VLImageProcessorPil,
    merge=2,
    wide=CASES["qwen2_5_vl"].wide,
)
CASES["qwen4_exp"] = replace(
    CASES["qwen3_5"],
    wrapper="qwen4_exp",
    text=QWEN4
    | FAMILY_CASES["qwen4_exp_text"]
    | {"rope_parameters": _AXES | {"partial_rotary_factor": 0.5}, "hc_count": 3},
)
_GLM_AXES = _AXES | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
CASES["glm4v"] = VisionCase(
    wrapper="glm4v",
    text={"head_dim": 8, "rope_parameters": _GLM_AXES, "pad_token_id": None},
    tower=_QWEN | {"image_size": 16, "attention_bias": True},
    outer={"image_token_id": 309},
    settings=_QWEN_SIZE | {"size": {"shortest_edge": 1800, "longest_edge": 6000}},
    processor=Glm4vImageProcessorPil,
    merge=2,
    wide=CASES["qwen2_5_vl"].wide,
)
CASES["glm46v"] = replace(CASES["glm4v"], wrapper="glm46v", processor=Glm46VImageProcessorPil)
CASES["glm4v_moe"] = VisionCase(
    wrapper="glm4v_moe",
    text={
        "head_dim": 12,
        "rope_parameters": _GLM_AXES | {"mrope_section": [1, 0, 2]},
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "pad_token_id": None,
    },
    tower=_QWEN | {"image_size": 21},
    outer={"image_token_id": 309},
    settings=CASES["glm4v"].settings,
    processor=Glm4vImageProcessorPil,
    merge=2,
    wide=CASES["qwen2_5_vl"].wide,
)
CASES["llama4"] = VisionCase(
    wrapper="llama4",
    text={
        "head_dim": 8,
        "floor_scale": 16,
        "attn_scale": 0.7,
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "num_local_experts": 4,
        "intermediate_size_mlp": 72,
        "attention_chunk_size": 512,
        "pad_token_id": None,
    },
    tower={
        "hidden_size": 24,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "patch_size": 3,
        "image_size": 18,
        "projector_input_dim": 20,
        "projector_output_dim": 20,
        "vision_output_dim": 20,
    },
    outer={"image_token_id": 310},
    settings={"size": {"height": 18, "width": 18}, "max_patches": 5},
    processor=Llama4Tiles,
    merge=2,
    wide={"hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 4}
    | dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64),
)
CASES["gemma4"] = VisionCase(
    wrapper="gemma4",
    text={key: CASES["gemma3"].text[key] for key in ("head_dim", "sliding_window")}
    | {
        "num_hidden_layers": 3,
        "global_head_dim": 12,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "use_bidirectional_attention": "vision",
    },
    tower={
        "hidden_size": 24,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "patch_size": 2,
        "pooling_kernel_size": 3,
        "position_embedding_size": 300,
        "standardize": True,
    },
    outer={"image_token_id": 309, "audio_config": None},
    settings={"patch_size": 2, "max_soft_tokens": 70},
    processor=Gemma4ImageProcessorPil,
    merge=3,
    wide={"hidden_size": 32, "intermediate_size": 64}
    | {"num_attention_heads": 4, "num_key_value_heads": 4},
)
CASES["gemma4_unified"] = VisionCase(
    wrapper="gemma4_unified",
    text=dict(CASES["gemma4"].text) | {"sliding_window": 75},
    tower={"mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 80}
    | {"patch_size": 2, "pooling_kernel_size": 3},
    outer=CASES["gemma4"].outer,
    settings=CASES["gemma4"].settings,
    processor=Gemma4Squares,
    merge=1,
)
CASES["gemma4-clipped"] = replace(
    CASES["gemma4"], tower={**CASES["gemma4"].tower, "use_clipped_linears": True}
)
