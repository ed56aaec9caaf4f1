"""Checkpoints that scripts/chaos asks, by what they have, all with room for long prompts.

The bundled model, and random weights: no text of theirs means anything, and each is as long as it
is asked for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.models.checkpoints import make_decoder, make_llama
from support.models.gguf_files import write_gguf
from support.models.packed_blocks import packed_and_plain
from support.models.trained_tokenizers import LLAMA3, gguf_ranks

from shardnet.assets import DEFAULT_MODEL_PATH

CONTEXT = 1 << 14
SIZES: dict[str, Any] = {"num_hidden_layers": 8, "max_position_embeddings": CONTEXT}


def _bundled(folder: Path) -> Path:
    """The bundled model as it is, but for the 1,024 tokens of its context."""
    shutil.copytree(DEFAULT_MODEL_PATH, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


def _stored_in_4_bits(folder: Path) -> Path:
    metadata = gguf_ranks(LLAMA3, "llama-bpe")
    n_rows = len(metadata["tokenizer.ggml.tokens"])
    source = make_llama(
        folder / "source",
        vocab_size=n_rows,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=8,
        with_tokenizer=False,
        **SIZES,
    )
    packed, _ = packed_and_plain({"weight": "Q4_K"})
    return write_gguf(source, folder / "q4_k.gguf", pack=packed, tokenizer=metadata)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "bundled": _bundled,
    "q4_k": _stored_in_4_bits,
    "hybrid": lambda folder: make_decoder(folder, "qwen3_next", **SIZES),
    "mixture": lambda folder: make_decoder(folder, "qwen3_moe", **SIZES),
    "latents": lambda folder: make_decoder(folder, "glm4_moe_lite", **SIZES),
}
"""The bundled model, weights stored in Q4_K, layers with states, experts, latents."""


def made_model(name: str, folder: Path) -> str:
    """Write the checkpoint of a kind below `folder`; what is no kind is the name of a model."""
    if name not in MAKERS:
        return name
    (folder / name).mkdir(parents=True)
    return str(MAKERS[name](folder / name))
