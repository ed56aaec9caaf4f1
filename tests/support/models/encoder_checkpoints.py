"""Tiny encoders with random weights, as transformers and sentence-transformers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file
from support.models.gguf_files import add_value
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


def add_dense(folder: Path, pooling: str, layers: list[tuple[int, str, bool]]) -> torch.nn.Module:
    """Write linears behind the pooling: outputs, activation, and whether there is a bias."""
    add_modules(folder, pooling, normalizes=True)
    listed = json.loads((folder / "modules.json").read_text())
    made, width = [], 32
    for place, (n_out, activation, has_bias) in enumerate(layers, 2):
        linear = torch.nn.Linear(width, n_out, bias=has_bias)
        where = folder / f"{place}_Dense"
        where.mkdir()
        weights = {f"linear.{name}": one.numpy() for name, one in linear.state_dict().items()}
        save_file(weights, where / "model.safetensors")
        said = {"in_features": width, "out_features": n_out, "bias": has_bias}
        said["activation_function"] = f"torch.nn.modules.any.{activation}"
        (where / "config.json").write_text(json.dumps(said))
        kind = "sentence_transformers.models.Dense"
        listed.insert(-1, {"idx": place, "name": str(place), "path": where.name, "type": kind})
        made += [linear, getattr(torch.nn, activation)()]
        width = n_out
    (folder / "modules.json").write_text(json.dumps(listed))
    return torch.nn.Sequential(*made).requires_grad_(False)


ARCHITECTURES = {
    "NomicBert": gguf.MODEL_ARCH.NOMIC_BERT,
    "ModernBert": gguf.MODEL_ARCH.MODERN_BERT,
    "Gemma3Text": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
}
"""By the beginning of a class's name; the others are BERT's."""
_PREFIXES = ("bert.", "roberta.", "distilbert.", "model.")
_NO_VECTORS = ("pooler.", "cls.", "lm_head.", "vocab_")


OLLAMAS = {
    "output_norm.weight": "norm.weight",
    "dense_2.weight": "dense.0.weight",
    "dense_3.weight": "dense.1.weight",
    "rope.freq_base_swa": "rope.local.freq_base",
}
"""Other names of EmbeddingGemma's tensors and keys, by Ollama's converter."""


def write_encoder_gguf(
    folder: Path, path: Path, kind: str = "F32", *, is_ollamas: bool = False, **metadata: Any
) -> Path:
    """Write the checkpoint in `folder` as llama.cpp's converter does, its matrices as `kind`.

    With `is_ollamas` EmbeddingGemma is written as Ollama's converter does.

    The folder has the values of that file from then on. Of `metadata` None leaves a key out.
    """
    config = json.loads((folder / "config.json").read_text())
    [name] = config["architectures"]
    arch = next((ARCHITECTURES[key] for key in ARCHITECTURES if name.startswith(key)), None)
    arch = arch or gguf.MODEL_ARCH.BERT
    names = gguf.get_tensor_name_map(arch, 8)
    shown = "gemma3" if is_ollamas else gguf.MODEL_ARCH_NAMES[arch]
    others = OLLAMAS if is_ollamas else {}
    writer = gguf.GGUFWriter(path, shown)
    tensors = load_file(folder / "model.safetensors")
    for own, values in tensors.items():
        known = next((own[len(p) :] for p in _PREFIXES if own.startswith(p)), own)
        if known.startswith(_NO_VECTORS):
            continue
        if known in ("classifier.weight", "classifier.bias"):
            known = known.replace("classifier", "classifier.out_proj")
        known = f"model.{known}" if name.startswith("Gemma3Text") else known
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, known
        how = gguf.GGMLQuantizationType[
            kind if values.ndim > 1 and min(values.shape) > 1 else "F32"
        ]
        packed = quantize(values, how)
        tensors[own] = dequantize(packed, how).reshape(values.shape)
        if known.endswith("position_embeddings.weight") and "oberta" in name:
            packed = packed[config["pad_token_id"] + 1 :]
        if name.startswith("Gemma3Text") and values.ndim == 1:
            packed = packed + 1
        whole = packed if packed.size == 1 else packed.squeeze()
        writer.add_tensor(others.get(stored, stored), whole, raw_dtype=how)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for stored in ("dense_2.weight", "dense_3.weight"):
        file = folder / stored.replace("dense_", "").replace(".weight", "_Dense/model.safetensors")
        if file.exists():
            writer.add_tensor(others.get(stored, stored), load_file(file)["linear.weight"])
    said = _encoder_metadata(config) | metadata
    for key, value in sorted(said.items(), key=lambda one: one[0].startswith("tokenizer.")):
        whole = key if key.startswith("tokenizer.") else f"{shown}.{others.get(key, key)}"
        if value is not None:
            add_value(writer, whole, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _encoder_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """What the file says of a config, and BERT's tokenizer of `make_tokenizer`."""
    sizes = {new: config[old] for new, old in zip(SIZES, _DISTILLED, strict=True) if old in config}
    said = {**config, **sizes}
    behind = said["pad_token_id"] + 1 if "oberta" in config["model_type"] else 0
    made = {
        "block_count": said["num_hidden_layers"],
        "context_length": said["max_position_embeddings"] - behind,
        "embedding_length": said["hidden_size"],
        "feed_forward_length": said["intermediate_size"],
        "attention.head_count": said["num_attention_heads"],
        "attention.layer_norm_epsilon": said.get("layer_norm_eps", 1e-12),
        "attention.causal": False,
        "tokenizer.ggml.padding_token_id": 0,
    }
    if config["model_type"] == "nomic_bert":
        made["rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
    if config["model_type"] == "gemma3_text":
        rope = config["rope_parameters"]
        made |= {
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.key_length": config["head_dim"],
            "attention.sliding_window": config["sliding_window"],
            "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
            "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
            "pooling_type": 1,
        }
    if config["model_type"] == "modernbert":
        rope = config["rope_parameters"]
        made |= {
            "attention.layer_norm_epsilon": config["norm_eps"],
            "attention.sliding_window": config["local_attention"],
            "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
            "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        }
    return made | gguf_words(make_tokenizer())


def gguf_words(tokenizer: Tokenizer) -> dict[str, Any]:
    """Describe BERT's tokenizer, with a mark before words in place of ## inside of them."""
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda piece: piece[1])
    tokens = [
        text if text in SPECIAL else text[2:] if text.startswith("##") else f"▁{text}"
        for text, _ in pieces
    ]
    ids = ("padding", 0), ("unknown", 1), ("cls", 2), ("seperator", 3), ("mask", 4)
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if text in SPECIAL else 1 for text in tokens],
        **{f"tokenizer.ggml.{role}_token_id": token_id for role, token_id in ids},
    }
