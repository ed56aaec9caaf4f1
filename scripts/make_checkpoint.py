#!/usr/bin/env python3
"""Write a random checkpoint of a given shape: by default TinyLlama-1.1B's, in bfloat16.

For measuring, not for reading: the weights are noise. The file is streamed, so that its size is
bounded by the disk and not by memory.

    python scripts/make_checkpoint.py /tmp/tiny-llama            # 2.2 GB in a few seconds
    python scripts/make_checkpoint.py /tmp/small --layers 4 --hidden 512 --heads 8 --kv-heads 2
    python scripts/make_checkpoint.py /tmp/hybrid --config qwen3_5.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shardnet.model.families.registry import parse_config
from shardnet.model.families.stage_tensors import Shape, stage_tensors
from shardnet.types import LayerRange

NOISE_VALUES = 1 << 22
"""Distinct values; tensors are cut from them at changing offsets."""
NOISE_STD = 0.02


def main() -> None:
    """Write the checkpoint that the command line asks for and say where it is."""
    options = _parse_options()
    raw = json.loads(options.config.read_text()) if options.config else _config(options)
    n_parameters = write_checkpoint(options.folder, raw, options.seed)
    path = options.folder / "model.safetensors"
    print(
        f"{path}: {n_parameters / 1e9:.2f} billion parameters, {path.stat().st_size / 1e9:.2f} GB"
    )


def write_checkpoint(folder: Path, raw: dict[str, Any], seed: int = 0) -> int:
    """Write a random checkpoint with the config `raw`. Return how many parameters it has."""
    config = parse_config(raw, "config.json")
    tensors = stage_tensors(config, LayerRange(0, config.n_layers)).all
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    with (folder / "model.safetensors").open("wb") as file:
        _write_header(file, tensors)
        noise = _bfloat16_noise(seed)
        for number, shape in enumerate(tensors.values()):
            for piece in _tensor_bytes(shape, noise, start=number * 7919):
                file.write(piece)
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    return sum(math.prod(shape) for shape in tensors.values())


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write config.json and the tensors")
    parser.add_argument("--config", type=Path, help="a config.json of any family instead of Llama")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--positions", type=int, default=2048, help="longest context")
    parser.add_argument("--tied", action="store_true", help="the LM head is the embedding table")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _config(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": options.layers,
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "vocab_size": options.vocab,
        "max_position_embeddings": options.positions,
        "tie_word_embeddings": options.tied,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }


def _write_header(file: BinaryIO, tensors: dict[str, Shape]) -> None:
    """Write a safetensors header: its length in 8 bytes, then JSON padded to 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _bfloat16_noise(seed: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Normal noise, bfloat16 in uint16: the upper half of a float32."""
    values = np.random.default_rng(seed).standard_normal(NOISE_VALUES, dtype=np.float32) * NOISE_STD
    return (values.view(np.uint32) >> 16).astype("<u2")


def _tensor_bytes(
    shape: Shape, noise: np.ndarray[Any, np.dtype[np.uint16]], start: int
) -> Iterator[memoryview | bytes]:
    """Yield a tensor in pieces: ones for a norm (one axis), else noise from `start` on."""
    left = math.prod(shape)
    if len(shape) == 1:
        yield (np.float32(1).view(np.uint32) >> 16).astype("<u2").tobytes() * left
        return
    while left:
        start %= len(noise)
        piece = noise[start : start + left]
        yield piece.data
        left -= len(piece)
        start = 0


def _byte_tokenizer() -> Tokenizer:
    """One token per byte, so that any text is a prompt."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


if __name__ == "__main__":
    main()
