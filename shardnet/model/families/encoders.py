"""Encoders: models that make vectors or scores of texts, and write none.

Knows by a config.json which models these are, and what of it limits their inputs. They are computed
by transformers' own classes (runtime/encoding), never by code from a checkpoint. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from shardnet.errors import UnsupportedModelError
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH

Kind = Literal["embedding", "reranker"]

_BOTH_WAYS: Final = "gemma3_text"
"""A family of encoders (EmbeddingGemma) only where attention is said to go both ways."""

CLASSES: Final[Mapping[str, str]] = {
    "bert": "Bert",
    "distilbert": "DistilBert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "mpnet": "MPNet",
    "nomic_bert": "NomicBert",
    "modernbert": "ModernBert",
    _BOTH_WAYS: "Gemma3Text",
}
"""What the names of transformers' classes begin with, by `model_type`."""
GGUF_TYPES: Final[Mapping[str, str]] = {
    "bert": "bert",  # RoBERTa, XLM-RoBERTa and DistilBERT, too: only tokenizers differ
    "nomic-bert": "nomic_bert",
    "modern-bert": "modernbert",
    "gemma-embedding": _BOTH_WAYS,
}
"""The `model_type` of a GGUF's `general.architecture`."""
MAX_ENCODED_POSITIONS: Final = 1 << 17
"""Most positions that a config may claim: transformers makes tables of so many."""

MAX_VECTOR: Final = 1 << 14
"""Most numbers in a vector: it travels in one frame."""
_BEHIND_PADDING: Final = frozenset(("roberta", "xlm-roberta", "mpnet"))
"""Families that count positions from the one behind the padding's id."""
_ROTARY: Final = frozenset(("nomic_bert", "modernbert"))
_HAS_TYPES: Final = frozenset(("bert", "nomic_bert"))
_N_MASKS: Final = 2
"""Masks of attention: of all positions, and of a window. MPNet's attention holds all scores."""
_NOMIC_KEYS: Final = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
"""Keys of Nomic's own code, and what transformers calls them."""
_NOMIC_VALUES: Final = {
    "activation_function": "swiglu",
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "use_rms_norm": False,
    "parallel_block": False,
}
"""What transformers computes, of what the same code could."""
_FOREIGN: Final = (
    *("auto_map", "attn_implementation", "experts_implementation", "dtype", "torch_dtype"),
    *("return_dict", "use_return_dict", "output_attentions", "output_hidden_states"),
    "chunk_size_feed_forward",
)
"""Keys that name code or kernels, the dtype of training, and what a call returns or how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """An encoder's config: transformers' class and the keys it is made of, and what limits inputs.

    `context` is the most tokens of one input, special ones included. `n_maps` numbers are held for
    each pair of positions of an input while it is computed. `has_types`: it is told of which of
    two texts a token is.
    """

    model_type: str
    kind: Kind
    class_name: str
    keys: Mapping[str, Any]
    context: int
    hidden_size: int
    n_layers: int
    n_maps: int
    has_types: bool


def is_encoder(raw: Mapping[str, Any]) -> bool:
    """Say whether a parsed config.json is an encoder's."""
    kind = raw.get("model_type")
    if kind == _BOTH_WAYS:
        return raw.get("use_bidirectional_attention") is True
    return isinstance(kind, str) and kind in CLASSES


def writes_nothing(where: str) -> UnsupportedModelError:
    """Make the error for an encoder that is asked for text."""
    return UnsupportedModelError(
        f"{where}: the model is an encoder, which makes vectors or scores of texts and writes none",
        remedy="ask for embeddings or rerank with it, and name another model to generate",
    )


def read_encoder_config(raw: Mapping[str, Any], where: str) -> EncoderConfig:
    """Read the parsed config.json `raw` of an encoder; `where` is its path, for messages.

    Raises CheckpointError for a missing or malformed field, UnsupportedModelError for a class or a
    value that is not implemented.
    """
    keys = _transformers_keys(raw, where)
    fields = Fields(keys, where)
    model_type = fields.take("model_type", str)
    prefix = CLASSES[model_type]
    kind, suffix = _kind(fields, prefix)
    if kind == "reranker" and _n_labels(raw) != 1:
        raise fields.unsupported("num_labels", _n_labels(raw), "1, a score")
    if fields.take("is_decoder", bool, False):
        raise fields.unsupported("is_decoder", True, "false")
    known = ("absolute", "rotary") if model_type in _ROTARY else ("absolute",)
    fields.one_of("position_embedding_type", known, "absolute")  # others are in makers' own code
    if n_experts := fields.take("num_experts", int, 0):
        raise fields.unsupported("num_experts", n_experts, "none")
    distils = model_type == "distilbert"
    fields.positive("vocab_size", at_most=MAX_VOCABULARY)
    fields.positive("hidden_dim" if distils else "intermediate_size", at_most=MAX_WIDTH)
    hidden_size = fields.positive("dim" if distils else "hidden_size", at_most=MAX_VECTOR)
    n_layers = fields.positive("n_layers" if distils else "num_hidden_layers", at_most=MAX_LAYERS)
    context = fields.positive("max_position_embeddings", at_most=MAX_ENCODED_POSITIONS)
    if model_type in _BEHIND_PADDING:
        context -= fields.take("pad_token_id", int, 1) + 1
    return EncoderConfig(
        model_type=model_type,
        kind=kind,
        class_name=prefix + suffix,
        keys=keys,
        context=context,
        hidden_size=hidden_size,
        n_layers=n_layers,
        has_types=model_type in _HAS_TYPES and fields.take("type_vocab_size", int, 2) > 1,
        n_maps=2 * fields.positive("num_attention_heads") if model_type == "mpnet" else _N_MASKS,
    )


def _kind(fields: Fields, prefix: str) -> tuple[Kind, str]:
    """Return what the model is for, and what the name of its class ends with."""
    architectures = fields.take("architectures", list, [f"{prefix}Model"])
    made_for = {
        f"{prefix}Model": "",
        f"{prefix}ForMaskedLM": "",  # its head is not needed
        f"{prefix}ForPreTraining": "",
        f"{prefix}ForSequenceClassification": "reranker",
    }
    if architectures not in [[name] for name in made_for]:
        raise fields.unsupported("architectures", architectures, ", ".join(made_for))
    if made_for[architectures[0]]:
        return "reranker", "ForSequenceClassification"
    return "embedding", "Model"


def _n_labels(raw: Mapping[str, Any]) -> object:
    """Return how many scores a classifier gives, as transformers reads it."""
    labels = raw.get("id2label")
    return len(labels) if isinstance(labels, dict) else raw.get("num_labels", 2)


def _transformers_keys(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the keys that transformers' class is made of, Nomic's own translated."""
    keys = {key: raw[key] for key in raw if key not in _FOREIGN and not key.startswith("_")}
    if "n_embd" not in raw or raw.get("model_type") != "nomic_bert":
        return keys
    for key, value in _NOMIC_VALUES.items():
        if keys.get(key, value) != value:
            raise Fields(raw, where).unsupported(key, keys[key], str(value))
    keys = {_NOMIC_KEYS.get(key, key): value for key, value in keys.items()}
    return {"hidden_act": "silu", **keys}
