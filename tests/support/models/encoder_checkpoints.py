"""Tiny encoders with random weights, as transformers and sentence-transformers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers.utils import logging as transformers_logging

WORDS = (
    "she",
    "read",
    "a",
    "letter",
    "it",
    "rained",
    "all",
    "day",
    "in",
    "the",
    "north",
    "did",
    "do",
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
}
transformers_logging.disable_progress_bar()  # its thread would stay
_DISTILLED = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 48,
}


def make_encoder(folder: Path, name: str, **keys: Any) -> Path:
    """Save transformers' class `name` with random weights and a tokenizer of words and letters."""
    kind: Any = getattr(transformers, name)
    sizes = _DISTILLED if name.startswith("DistilBert") else SIZES
    tokenizer = make_tokenizer()
    ids: dict[str, Any] = {"pad_token_id": 0, "vocab_size": tokenizer.get_vocab_size()}
    if name.startswith("ModernBert"):
        ids |= {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
        ids["local_attention"] = 8
    if name.endswith("ForSequenceClassification"):
        ids["num_labels"] = 1
    torch.manual_seed(3)
    model = kind(kind.config_class(**{**sizes, **ids, **keys})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_tokenizer() -> Tokenizer:
    """BERT's kind. Its file says to cut and to pad, as those of sentence-transformers do."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [*SPECIAL, *WORDS, *letters, *(f"##{letter}" for letter in letters), "."]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


def add_modules(
    folder: Path, pooling: str, *, normalizes: bool = False, more: tuple[str, ...] = ()
) -> None:
    """Write the files of sentence-transformers, with `pooling` as they name it."""
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalizes, *more]
    modules = [
        {
            "idx": place,
            "name": str(place),
            "path": f"{place}_{kind}" if place else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for place, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens")}
    settings = {"word_embedding_dimension": 32, **flags, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
