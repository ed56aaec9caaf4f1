"""Tiny multimodal checkpoints whose towers transformers computes, with the makers' processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.models.checkpoints import make_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Idefics3Processor,
    LlavaProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

TEXT = {"vocab_size": 400, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2} | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "patch_size": 7} | {
    "num_attention_heads": 4,
    "image_size": 28,
}
SQUARE = {"height": 28, "width": 28}
MARKS = {
    "llava": ["<image>"],
    "idefics3": ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    + [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)],
}
"""The tokens of each kind that stand in pictures' places."""


def make_by_modules(kind: str, folder: Path) -> Path:
    """Write a random checkpoint with tokenizer and processor. Return `folder`."""
    make_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS[kind]})
    tokenizer.pad_token = "<image>"
    processor, text, tower, outer = _parts(kind, tokenizer)
    processor.save_pretrained(folder)
    config = AutoConfig.for_model(
        kind,
        tie_word_embeddings=False,
        text_config={**TEXT, "model_type": text},
        vision_config={**TOWER, **tower},
        **{"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), **outer},
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def _parts(kind: str, tokenizer: Any) -> tuple[Any, str, dict[str, Any], dict[str, Any]]:
    """Make the processor; return it, the kind of the language model, and what configs say."""
    if kind == "llava":
        squares = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SQUARE)
        processor = LlavaProcessor(
            image_processor=squares,
            tokenizer=tokenizer,
            patch_size=7,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
        return processor, "llama", {"model_type": "clip_vision_model", "projection_dim": 16}, {}
    tiles = Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    processor = Idefics3Processor(image_processor=tiles, tokenizer=tokenizer, image_seq_len=4)
    return processor, "llama", {"model_type": "idefics3_vision"}, {"scale_factor": 2}
