"""Tiny multimodal checkpoints whose towers transformers computes, with the makers' processors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import (
    VideoLlama3ImageProcessorPil,
)

from shardnet.model.vision.picture import PreparedPicture

TEXT = {"vocab_size": 400, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2} | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "patch_size": 7} | {
    "num_attention_heads": 4,
    "image_size": 28,
}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16}
SQUARE = {"height": 28, "width": 28}
QWEN_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
Arrays = Mapping[str, "np.ndarray[Any, Any]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One `model_type`: its language model and tower, and how its makers prepare pictures.

    `marks` are the tokens that stand in a picture's place, first that of a row; `attributes` is
    what the tokenizer calls the first ones. The processor is of the class `made_by`, whose image
    processor `images` makes. Where that needs torchvision, a picture is what `images` makes of it,
    or `arrays` made by hand; it takes `n_rows`.
    """

    text: str
    marks: tuple[str, ...] = ("<image>",)
    attributes: tuple[str, ...] = ()
    own_text: Mapping[str, Any] = field(default_factory=dict)
    tower: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    made_by: str = ""
    images: Callable[[], Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    arrays: Callable[[], Arrays] = dict
    n_rows: int = 0


def _numbers(*shape: int) -> Any:
    return np.random.default_rng(4).standard_normal(shape, np.float32)


def _patches_of_lfm2() -> Arrays:
    """Two tiles of 4 x 6 and 2 x 4 patches, padded to 24."""
    mask = np.arange(24) < np.array([[24], [8]])
    shapes = np.array([[4, 6], [2, 4]])
    return {"pixel_values": _numbers(2, 24, 147) * mask[..., None]} | {
        "pixel_attention_mask": mask.astype(np.int64),
        "spatial_shapes": shapes,
    }


TOWERS = {
    "llava": Kind(
        text="llama",
        tower=CLIP,
        made_by="LlavaProcessor",
        images=lambda: CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SQUARE),
        settings={"patch_size": 7, "vision_feature_select_strategy": "default"}
        | {"num_additional_image_tokens": 1},
    ),
    "idefics3": Kind(
        text="llama",
        marks=(
            *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
            *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
        ),
        tower={"model_type": "idefics3_vision"},
        outer={"scale_factor": 2},
        made_by="Idefics3Processor",
        images=lambda: Idefics3ImageProcessorPil(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
        ),
        settings={"image_seq_len": 4},
    ),
    "glm5_next": Kind(
        text="glm5_next_text",
        own_text={"num_key_value_heads": 6, "kv_lora_rank": 16, "q_lora_rank": 14}
        | {"qk_nope_head_dim": 10, "v_head_dim": 12, "moe_intermediate_size": 16}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "linear_num_heads": 2}
        | {"linear_head_dim": 10, "index_head_dim": 16, "index_n_heads": 8, "index_kpool": 4}
        | {"index_topk": 8, "layer_types": ["linear_attention", "indexed_attention"]}
        | {"mlp_layer_types": ["dense", "sparse"]},
        marks=("<|image|>", "<|video|>"),
        tower={
            "num_heads": 4,
            "depth": 2,
            "out_hidden_size": 48,
            "projection_intermediate_size": 8,
        },
        images=lambda: Glm5NextImageProcessorPil(patch_size=7, min_image_tokens=4),
        n_rows=12,
    ),
    "kimi_k25": Kind(
        text="deepseek_v3",
        own_text={"num_key_value_heads": 6, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
        | {"v_head_dim": 8},
        tower={"pos_emb_height": 4, "pos_emb_width": 4},
        outer={"projection_hidden_size": 32},
        arrays=lambda: {
            "pixel_values": _numbers(24, 3, 7, 7),
            "image_grid_thw": np.array([[1, 4, 6]]),
        },
        n_rows=6,
    ),
    "lfm2_vl": Kind(
        text="lfm2",
        own_text={"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        tower={"model_type": "siglip2_vision_model", "num_patches": 16}
        | {"vision_use_head": False},
        outer={"projector_hidden_size": 40},
        arrays=_patches_of_lfm2,
        n_rows=8,
    ),
    "lfm3_vl": Kind(
        text="lfm3",
        own_text={"layer_types": ["conv", "full_attention"]},
        marks=QWEN_MARKS,
        tower={"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        outer={"projector_hidden_size": 40},
        images=lambda: Qwen2VLImageProcessorPil(patch_size=7, min_pixels=196, max_pixels=2000),
        n_rows=6,
    ),
    "llava_next": Kind(
        text="mistral",
        tower=CLIP,
        outer={"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
        made_by="LlavaNextProcessor",
        images=lambda: LlavaNextImageProcessorPil(
            size={"shortest_edge": 28},
            crop_size=SQUARE,
            image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        ),
        settings={"patch_size": 7, "vision_feature_select_strategy": "default"}
        | {"num_additional_image_tokens": 1},
    ),
    "llava_onevision": Kind(
        text="qwen2",
        marks=("<image>", "<video>"),
        tower={"model_type": "siglip_vision_model", "vision_use_head": False},
        outer={"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
        images=lambda: LlavaOnevisionImageProcessorPil(
            size=SQUARE, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]]
        ),
        n_rows=70,
    ),
    "got_ocr2": Kind(
        text="qwen2",
        marks=("<imgpad>", "<img>", "</img>"),
        tower={"patch_size": 2, "image_size": 128, "output_channels": 8, "mlp_dim": 16}
        | {"hidden_size": 16, "window_size": 4, "global_attn_indexes": [], "num_hidden_layers": 1},
        made_by="GotOcr2Processor",
        images=lambda: GotOcr2ImageProcessorPil(size={"height": 128, "width": 128}),
    ),
    "idefics2": Kind(
        text="mistral",
        marks=("<image>", "<fake_token_around_image>", "<end_of_utterance>"),
        tower={"model_type": "idefics2_vision"},
        outer={
            "perceiver_config": {"hidden_size": 48, "resampler_n_latents": 4, "resampler_depth": 1}
            | {"resampler_n_heads": 4, "resampler_head_dim": 12, "num_key_value_heads": 2}
        },
        made_by="Idefics2Processor",
        images=lambda: Idefics2ImageProcessorPil(
            size={"shortest_edge": 14, "longest_edge": 28}, do_image_splitting=False
        ),
        settings={"image_seq_len": 4},
    ),
    "lighton_ocr": Kind(
        text="qwen3",
        marks=("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
        attributes=("image_token", "image_break_token", "image_end_token"),
        tower={"model_type": "pixtral", "head_dim": 8, "image_size": 56},
        made_by="LightOnOcrProcessor",
        images=lambda: PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=14),
        settings={"patch_size": 7, "spatial_merge_size": 2},
    ),
    "exaone4_5": Kind(
        text="exaone4",
        marks=QWEN_MARKS,
        tower={"depth": 2, "num_heads": 4, "num_key_value_heads": 2, "window_size": 28}
        | {"out_hidden_size": 48, "fullatt_block_indexes": [1]},
        images=lambda: Qwen2VLImageProcessorPil(patch_size=7, min_pixels=196, max_pixels=2000),
        n_rows=6,
    ),
    "step3p7": Kind(
        text="step3p5",
        own_text={"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "share_expert_dim": 24, "sliding_window": 16}
        | {"layer_types": ["full_attention", "sliding_attention"]}
        | {"mlp_layer_types": ["dense", "sparse"], "num_sliding_attention_heads": 4}
        | {"pad_token_id": 0},
        tower={"width": 32, "layers": 2, "heads": 4, "image_size": 56, "mlp_ratio": 2.0},
        arrays=lambda: {
            "pixel_values": _numbers(1, 3, 56, 56),
            "pixel_values_local": _numbers(2, 3, 28, 28),
            "num_local_patches": np.array([2]),
        },
        n_rows=6,
    ),
    "video_llama_3": Kind(
        text="qwen2",
        marks=QWEN_MARKS,
        images=lambda: VideoLlama3ImageProcessorPil(patch_size=7, min_pixels=196, max_pixels=2000),
        n_rows=40,
    ),
}
"""Those whose pictures are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByHand:
    """A processor that says the same of any picture: one of a kind's `arrays`."""

    kind: Kind
    row_id: int
    takes: frozenset[str]

    def prepare(self, rgb: Any, detail: str = "auto") -> PreparedPicture:
        """Return it, in two pieces among other tokens."""
        arrays = dict(self.kind.arrays())
        if self.kind.images is not None:
            made = self.kind.images()(images=[rgb], return_tensors="np")
            arrays = {name: np.asarray(made[name]) for name in made if name in self.takes}
        cut = self.kind.n_rows // 2
        ids = [5, *[self.row_id] * cut, 6, *[self.row_id] * (self.kind.n_rows - cut), 7]
        return PreparedPicture(
            pixels=arrays.pop("pixel_values"),
            grid=(1, 1, self.kind.n_rows),
            token_ids=tuple(ids),
            is_row=np.array(ids) == self.row_id,
            arrays=arrays,
        )


def make_by_modules(name: str, folder: Path) -> Path:
    """Write a random checkpoint with tokenizer and processor. Return `folder`."""
    kind = TOWERS[name]
    make_tokenizer(folder)
    named = dict(zip(kind.attributes, kind.marks, strict=False))
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=named)
    tokenizer.add_special_tokens({"additional_special_tokens": [*kind.marks]})
    tokenizer.pad_token = kind.marks[0]
    if kind.made_by:
        made: Any = getattr(transformers, kind.made_by)
        assert kind.images is not None
        made(image_processor=kind.images(), tokenizer=tokenizer, **kind.settings).save_pretrained(
            folder
        )
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(kind.marks[0])}
    write_model(name, folder, kind.text, kind.own_text, kind.tower, {**ids, **kind.outer})
    if name == "kimi_k25":  # whose layers get the names of its tower's
        file = folder / "model.safetensors"
        wrong, right = "language_model.model.blocks.", "language_model.model.layers."
        tensors = {key.replace(wrong, right): value for key, value in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return folder


def write_model(
    name: str,
    folder: Path,
    text: str,
    own_text: Mapping[str, Any],
    tower: Mapping[str, Any],
    outer: Mapping[str, Any],
) -> None:
    """Write random weights of the kind `name` and its config, but for what configs here share."""
    config = AutoConfig.for_model(
        name,
        tie_word_embeddings=False,
        text_config={**TEXT, **own_text, "model_type": text},
        vision_config={**TOWER, **tower},
        **outer,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
