"""Encoders in GGUF: the config and the parameters of transformers' class, and the pooling.

Knows llama.cpp's names of keys and tensors. Reads headers only, and imports torch only to make a
parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shardnet.checkpoint.formats.gguf_header import GgufHeader
from shardnet.checkpoint.formats.gguf_types import PLAIN, unpack
from shardnet.checkpoint.tensors.model_tensor import ModelTensor
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor
from shardnet.errors import UnsupportedModelError
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import NORM_EPS, THETAS
from shardnet.model.families.encoders import CLASSES, GGUF_TYPES
from shardnet.runtime.encoding.sentence_modules import Pooling

if TYPE_CHECKING:
    import torch


POOLINGS: Final[Mapping[object, Pooling]] = {1: "mean", 2: "cls", 3: "last"}
RANK: Final = 4
_TYPES: Final = "embeddings.token_type_embeddings.weight"
_BERT_LAYER: Final = "encoder.layer.{}."
_GEMMA: Final = "gemma-embedding"
_DENSE: Final = ("dense_2.weight", "dense_3.weight")
"""The linears behind EmbeddingGemma's pooling."""
_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "bert": {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        "attn_q": f"{_BERT_LAYER}attention.self.query",
        "attn_k": f"{_BERT_LAYER}attention.self.key",
        "attn_v": f"{_BERT_LAYER}attention.self.value",
        "attn_output": f"{_BERT_LAYER}attention.output.dense",
        "attn_output_norm": f"{_BERT_LAYER}attention.output.LayerNorm",
        "ffn_up": f"{_BERT_LAYER}intermediate.dense",
        "ffn_down": f"{_BERT_LAYER}output.dense",
        "layer_output_norm": f"{_BERT_LAYER}output.LayerNorm",
        "cls": "pooler.dense",
        "cls.output": "classifier",
    },
    "nomic-bert": {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
        "attn_qkv": "encoder.layers.{}.attn.Wqkv",
        "attn_output": "encoder.layers.{}.attn.out_proj",
        "attn_output_norm": "encoder.layers.{}.norm1",
        "ffn_up": "encoder.layers.{}.mlp.fc11",
        "ffn_gate": "encoder.layers.{}.mlp.fc12",
        "ffn_down": "encoder.layers.{}.mlp.fc2",
        "layer_output_norm": "encoder.layers.{}.norm2",
    },
    _GEMMA: {
        "token_embd": "embed_tokens",
        "attn_norm": "layers.{}.input_layernorm",
        "attn_q": "layers.{}.self_attn.q_proj",
        "attn_q_norm": "layers.{}.self_attn.q_norm",
        "attn_k": "layers.{}.self_attn.k_proj",
        "attn_k_norm": "layers.{}.self_attn.k_norm",
        "attn_v": "layers.{}.self_attn.v_proj",
        "attn_output": "layers.{}.self_attn.o_proj",
        "post_attention_norm": "layers.{}.post_attention_layernorm",
        "ffn_norm": "layers.{}.pre_feedforward_layernorm",
        "ffn_gate": "layers.{}.mlp.gate_proj",
        "ffn_up": "layers.{}.mlp.up_proj",
        "ffn_down": "layers.{}.mlp.down_proj",
        "post_ffw_norm": "layers.{}.post_feedforward_layernorm",
        "output_norm": "norm",
        "norm": "norm",  # Ollama's converter
    },
    "modern-bert": {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "attn_norm": "layers.{}.attn_norm",
        "attn_qkv": "layers.{}.attn.Wqkv",
        "attn_output": "layers.{}.attn.Wo",
        "ffn_norm": "layers.{}.mlp_norm",
        "ffn_up": "layers.{}.mlp.Wi",
        "ffn_down": "layers.{}.mlp.Wo",
        "output_norm": "final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    },
}
"""What transformers, or a model's makers, call a tensor, by its name in GGUF."""
_TENSOR: Final = re.compile(r"(?:blk\.(\d+)\.)?(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufEncoder:
    """What a file says of an encoder: its config as config.json, its parameters by transformers'
    names, its pooling, and the weights of linears behind that.
    """

    config: dict[str, Any]
    parameters: tuple[ModelTensor, ...]
    pooling: Pooling
    dense: tuple[ModelTensor, ...]


def gguf_encoder(header: GgufHeader, stored: Mapping[str, StoredTensor], where: str) -> GgufEncoder:
    """Describe an encoder from the header of the file `where`.

    Raises CheckpointError for a missing or malformed key, UnsupportedModelError for a value that is
    not implemented.
    """
    arch = str(header.metadata["general.architecture"])
    own = {
        key.removeprefix(f"{arch}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{arch}.")
    }
    fields = Fields(own, where, f"{arch}.")
    pooling = fields.take("pooling_type", int, 0)
    if pooling not in (0, *POOLINGS, RANK):
        raise fields.unsupported("pooling_type", pooling, "mean 1, cls 2, last 3, rank 4")
    ranks = pooling == RANK or "cls.output.weight" in stored
    tensors = [_parameter(arch, tensor) for tensor in stored.values() if tensor.name not in _DENSE]
    dense = [_parameter(arch, stored[name]) for name in _DENSE if name in stored]
    if arch == _GEMMA and len(dense) < len(_DENSE):
        raise UnsupportedModelError(
            f"{where} lacks the linears behind its pooling ({', '.join(_DENSE)}), without which "
            "its vectors would not be the model's",
            remedy="choose a file that was converted with --sentence-transformers-dense-modules",
        )
    config = _config(arch, fields, {tensor.name: tensor.shape for tensor in tensors})
    config["architectures"] = [
        CLASSES[GGUF_TYPES[arch]] + ("ForSequenceClassification" if ranks else "Model")
    ]
    pad = Fields(header.metadata, where).take("tokenizer.ggml.padding_token_id", int, 0)
    config["pad_token_id"] = pad if 0 <= pad < config["vocab_size"] else 0
    if arch == "bert" and "token_types.weight" not in stored:
        if ranks:  # their heads are told from BERT's by nothing
            raise UnsupportedModelError(
                f"{where}: rerankers of DistilBERT are not read from GGUF",
                remedy="take the model's own repository, with safetensors",
            )
        tensors.append(_no_types(config["hidden_size"]))
    return GgufEncoder(
        config=config,
        parameters=tuple(tensors),
        pooling=POOLINGS.get(pooling, "mean"),
        dense=tuple(dense),
    )


def _config(arch: str, fields: Fields, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Read what transformers' class is made of."""
    names = _NAMES[arch]
    (vocab_size, *_) = shapes.get(f"{names['token_embd']}.weight", (0,))
    n_heads, width = fields.positive("attention.head_count"), fields.positive("embedding_length")
    fields.require("attention.causal", False)
    if fields.take("rope.scaling.type", str, "none") != "none":
        raise fields.unsupported("rope.scaling.type", "another one", "none")
    config = {
        "model_type": GGUF_TYPES[arch],
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": fields.positive("block_count"),
        "num_attention_heads": n_heads,
        "intermediate_size": fields.positive("feed_forward_length"),
        "max_position_embeddings": fields.positive("context_length"),
        "num_labels": shapes.get("classifier.weight", (1,))[0],
    }
    eps_key = "attention.layer_norm_epsilon"
    if arch == _GEMMA:
        return config | _gemma(fields, fields.positive("block_count"))
    if arch == "modern-bert":
        every = fields.take("attention.sliding_window_pattern", int, 3)
        if fields.missing(eps_key):
            eps_key = "attention.layer_norm_rms_epsilon"
        return config | {
            "norm_eps": fields.number(eps_key, within=NORM_EPS),
            "local_attention": fields.positive("attention.sliding_window"),
            "global_attn_every_n_layers": every,
            "global_rope_theta": fields.number("rope.freq_base", 160000.0, within=THETAS),
            "local_rope_theta": fields.number("rope.freq_base_swa", 10000.0, within=THETAS),
            "classifier_pooling": "mean",  # as llama.cpp has it: no key says
        }
    config["layer_norm_eps"] = fields.number(eps_key, within=NORM_EPS)
    config["type_vocab_size"] = shapes.get(_TYPES, (1,))[0]
    if arch == "nomic-bert":
        theta = fields.number("rope.freq_base", 1000.0, within=THETAS)
        return config | {"hidden_act": "silu", "rope_theta": theta}
    positions = shapes.get("embeddings.position_embeddings.weight", (0,))[0]
    return config | {"hidden_act": "gelu", "max_position_embeddings": positions}


def _gemma(fields: Fields, n_layers: int) -> dict[str, Any]:
    """Read what only a Gemma3TextConfig has: every sixth layer sees all, where no list says which.

    Windows are stored as wide as in config.json, to both sides together.
    """
    size = fields.positive("attention.key_length")
    has_window = fields.take("attention.sliding_window_pattern", (int, list), 6)
    if isinstance(has_window, int):
        has_window = [bool((layer + 1) % max(has_window, 1)) for layer in range(n_layers)]
    thetas = {
        "full_attention": fields.number("rope.freq_base", 1e6, within=THETAS),
        "sliding_attention": fields.number("rope.freq_base_swa", 1e4, within=THETAS),
    }
    return {
        "head_dim": size,
        "query_pre_attn_scalar": size,
        "num_key_value_heads": fields.positive("attention.head_count_kv"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", within=NORM_EPS),
        "sliding_window": fields.positive("attention.sliding_window"),
        "layer_types": ["sliding_attention" if one else "full_attention" for one in has_window],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()
        },
        "use_bidirectional_attention": True,
    }


def _parameter(arch: str, source: StoredTensor) -> ModelTensor:
    """Describe a parameter by transformers' name; one that nobody knows has its own."""
    name, shape = source.name, source.shape
    match = _TENSOR.fullmatch(source.name)
    if match and match[2] in _NAMES[arch]:
        name = f"{_NAMES[arch][match[2]].format(match[1])}.{match[3]}"
    if len(shape) == 1 and name in (_TYPES, "classifier.weight"):
        shape = (1, *shape)  # the converter leaves axes of one out

    added = 1.0 if arch == _GEMMA and name.endswith("norm.weight") else 0.0

    def make(stored: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        if source.dtype in PLAIN:
            values = stored[0].to(dtype).view(shape)
            return values - added if added else values  # norms are stored with their 1
        return unpack(stored[0], source.dtype, shape, dtype)

    return ModelTensor(name=name, shape=shape, dtype=None, sources=(source,), make=make)


def _no_types(width: int) -> ModelTensor:
    """Make the types of tokens of a model that has none, as DistilBERT."""

    def make(stored: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(1, width, dtype=dtype)

    return ModelTensor(name=_TYPES, shape=(1, width), dtype=None, sources=(), make=make)
