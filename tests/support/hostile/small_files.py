"""The smallest good checkpoint in each format, written byte by byte, to be damaged.

One Llama layer of 8 columns and 16 tokens, always the same bytes. Imports neither torch nor numpy.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

Files = dict[str, bytes]
"""The content of a folder's files, by name."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "max_position_embeddings": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LAYER = {
    "self_attn.q_proj": ("attn_q", "attention.wq"),
    "self_attn.k_proj": ("attn_k", "attention.wk"),
    "self_attn.v_proj": ("attn_v", "attention.wv"),
    "self_attn.o_proj": ("attn_output", "attention.wo"),
    "mlp.gate_proj": ("ffn_gate", "feed_forward.w1"),
    "mlp.up_proj": ("ffn_up", "feed_forward.w3"),
    "mlp.down_proj": ("ffn_down", "feed_forward.w2"),
    "input_layernorm": ("attn_norm", "attention_norm"),
    "post_attention_layernorm": ("ffn_norm", "ffn_norm"),
}
_NAMES = {
    "model.embed_tokens.weight": ("token_embd.weight", "tok_embeddings.weight"),
    "model.norm.weight": ("output_norm.weight", "norm.weight"),
    "lm_head.weight": ("output.weight", "output.weight"),
} | {
    f"model.layers.0.{name}.weight": (f"blk.0.{gguf}.weight", f"layers.0.{own}.weight")
    for name, (gguf, own) in _LAYER.items()
}
"""From transformers' names to GGUF's and Meta's."""


def _shape(name: str) -> tuple[int, ...]:
    if "norm" in name:
        return (8,)
    return (16, 8) if "embed" in name or "lm_head" in name else (8, 8)


TENSORS: dict[str, tuple[int, ...]] = {name: _shape(name) for name in _NAMES}
"""The shapes of the model's tensors, all float32."""


def values(shape: Sequence[int]) -> bytes:
    """Return the bytes of a float32 tensor, small numbers that differ."""
    n = prod(shape)
    return struct.pack(f"<{n}f", *((place % 7 - 3) / 8 for place in range(n)))


def as_json(value: object) -> bytes:
    """Write JSON as transformers does."""
    return json.dumps(value, indent=2).encode()


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    """Put a header and data into a safetensors file."""
    return len(header).to_bytes(8, "little") + header + data


def safetensors_of(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """Write float32 tensors of these shapes as a safetensors file."""
    entries, data = {}, b""
    for name, shape in tensors.items():
        content = values(shape)
        places = [len(data), len(data) + len(content)]
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": places}
        data += content
    return safetensors(json.dumps(entries).encode(), data)


def text(content: str) -> bytes:
    """Write a text as a step of a pickle."""
    return b"X" + struct.pack("<I", len(content.encode())) + content.encode()


def integer(value: int) -> bytes:
    """Write a number below 2^31 as a step of a pickle."""
    return b"J" + struct.pack("<i", value)


def pickled_tensor(key: str, shape: Sequence[int]) -> bytes:
    """Write the steps that torch.save writes for a float32 tensor that fills the storage `key`."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    sizes, steps = (b"(" + b"".join(map(integer, ns)) + b"t" for ns in (shape, strides))
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + (storage + integer(prod(shape)) + b"tQ")
        + (integer(0) + sizes + steps + b"\x89ccollections\nOrderedDict\n)RtR")
    )


def pickled(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """Write a pickle of a dict of float32 tensors, as torch.save does."""
    pairs = (text(n) + pickled_tensor(str(k), s) for k, (n, s) in enumerate(tensors.items()))
    return b"\x80\x02}(" + b"".join(pairs) + b"u."


def torch_file(pickle: bytes, storages: Mapping[str, bytes]) -> bytes:
    """Put a pickle and storages into an archive as torch.save writes it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        members = {"data.pkl": pickle, "byteorder": b"little"}
        members |= {f"data/{key}": content for key, content in storages.items()}
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return made.getvalue()


def torch_file_of(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """Write float32 tensors of these shapes as torch.save does."""
    storages = {str(key): values(shape) for key, shape in enumerate(tensors.values())}
    return torch_file(pickled(tensors), storages)


def gguf_text(content: str | bytes) -> bytes:
    """Write a string of a GGUF."""
    data = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(data)) + data


def gguf_value(value: object) -> bytes:
    """Write the type and the value of a GGUF's key: bool, int, float, text or a list of texts."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + gguf_text(value)
        case list():
            head = struct.pack("<IIQ", 9, 8, len(value))
            return head + b"".join(gguf_text(one) for one in value)
    raise AssertionError(value)


def gguf(
    metadata: Mapping[str, bytes],
    tensors: Mapping[str, tuple[int, ...]],
    *,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """Write a GGUF of values with their types and of float32 tensors; counts may lie."""
    counts = (len(tensors) if n_tensors is None else n_tensors, len(metadata), n_keys)
    head = b"GGUF" + struct.pack("<IQQ", 3, counts[0], counts[1] if n_keys is None else n_keys)
    head += b"".join(gguf_text(key) + value for key, value in metadata.items())
    data = b""
    for name, shape in tensors.items():
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += gguf_text(name) + axes + struct.pack("<IQ", 0, len(data))
        data += values(shape)
        data += bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + data


GGUF_METADATA: dict[str, bytes] = {
    key: gguf_value(value)
    for key, value in {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 32,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b"],
    }.items()
}
GGUF_TENSORS = {_NAMES[name][0]: shape for name, shape in TENSORS.items()}
PARAMS = {
    "dim": 8,
    "n_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "head_dim": 4,
    "hidden_dim": 8,
    "vocab_size": 16,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_BESIDE: Files = {
    "generation_config.json": as_json({"bos_token_id": 0, "eos_token_id": [1, 2]}),
    "tokenizer_config.json": as_json(
        {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>"},
            "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
        }
    ),
    "special_tokens_map.json": as_json({"bos_token": "<s>"}),
    "added_tokens.json": as_json({"<pad>": 15}),
    "chat_template.jinja": b"{% for message in messages %}{{ message.content }}{% endfor %}",
}
_NAMED_PARTS = {"model-1.safetensors": dict([*TENSORS.items()][:6])}
_NAMED_PARTS["model-2.safetensors"] = dict([*TENSORS.items()][6:])
_WEIGHT_MAP = {name: file for file, tensors in _NAMED_PARTS.items() for name in tensors}

GOOD: dict[str, Callable[[], Files]] = {
    "safetensors": lambda: {
        "config.json": as_json(CONFIG),
        "model.safetensors": safetensors_of(TENSORS),
        **_BESIDE,
    },
    "indexed": lambda: {
        "config.json": as_json(CONFIG),
        "model.safetensors.index.json": as_json({"metadata": {}, "weight_map": _WEIGHT_MAP}),
        **{file: safetensors_of(tensors) for file, tensors in _NAMED_PARTS.items()},
    },
    "torch": lambda: {
        "config.json": as_json(CONFIG),
        "pytorch_model.bin": torch_file_of(TENSORS),
    },
    "gguf": lambda: {"model.gguf": gguf(GGUF_METADATA, GGUF_TENSORS)},
    "consolidated": lambda: {
        "params.json": as_json(PARAMS),
        "consolidated.safetensors": safetensors_of(
            {_NAMES[name][1]: shape for name, shape in TENSORS.items()}
        ),
    },
}
"""Good checkpoints by format."""
