"""Benchmark the encoding of a picture beside transformers', in towers of published shapes.

Weights are random, layers few, in float32 on one thread unless told otherwise. Both prepare and
encode the same picture in turns; the least time of each counts, and ratios are what to look at.
Where llama-cpp-python is installed, which builds llama.cpp, that takes its turns too, with
the same tower in a projector file in F16.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llama_cpp_model import LlamaCppTower
from transformers import AutoConfig, AutoModelForImageTextToText

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.pictures import open_pictures
from shardnet.model.kernels.linear import probe
from shardnet.model.vision.picture import PictureEncoder, PreparedPicture
from shardnet.stage.load import load_encoder
from shardnet.types import DType

CPU = torch.device("cpu")
TEXT = {"hidden_size": 2048, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 320} | {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TOKENS = {"[IMG_BREAK]": 301, "[IMG_END]": 302, "<start_of_image>": 303, "<end_of_image>": 304}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A published tower: its config, and where transformers' processor is."""

    model_type: str
    tower: Mapping[str, Any]
    processor: str
    layers: str = "num_hidden_layers"
    text: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    n_deep: int = 0
    """Layers of the tower whose outputs the language model takes too."""


QWEN_SIZE = {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}
QWEN = "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil"
SHAPES = (
    Shape(
        model_type="mistral3",
        tower={"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096}
        | {"num_attention_heads": 16, "head_dim": 64, "patch_size": 14, "hidden_act": "silu"},
        processor="pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil",
        text={"model_type": "mistral"},
        settings={"size": {"longest_edge": 1540}},
    ),
    Shape(
        model_type="gemma3",
        tower={"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896}
        | {"intermediate_size": 4304, "num_attention_heads": 16, "patch_size": 14},
        processor="gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        settings={"size": {"height": 896, "width": 896}},
    ),
    Shape(
        model_type="qwen2_5_vl",
        tower={"hidden_size": 1280, "out_hidden_size": 2048, "fullatt_block_indexes": [1]},
        processor=QWEN,
        layers="depth",
        text={"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        settings=QWEN_SIZE,
    ),
    Shape(
        model_type="qwen3_vl",
        tower={"hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048}
        | {"deepstack_visual_indexes": [0]},
        n_deep=1,
        processor=QWEN,
        layers="depth",
        settings={"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3} | QWEN_SIZE,
    ),
)


def main() -> None:
    """Print a line for each tower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--side", type=int, default=448, help="pixels of the picture on a side")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    side = arguments.side
    picture = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            compare = partial(_compared, shape, Path(folder), picture, arguments.layers)
            with contextlib.ExitStack() as stack:
                print(
                    compare(
                        arguments.rounds, partial(_in_llama_cpp, stack, arguments.threads, shape)
                    )
                )


def _in_llama_cpp(
    stack: contextlib.ExitStack, threads: int, shape: Shape, folder: Path
) -> LlamaCppTower | None:
    """Open the tower of a checkpoint in llama.cpp, None where that is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    names = ("checkpoints", "gguf_files", "projector_files", "trained_tokenizers")
    made: Any = [import_module(f"support.models.{name}") for name in names]  # they are not typed
    checkpoints, files, projectors, tokenizers = made
    said = tokenizers.gguf_ranks(tokenizers.LLAMA3, "llama-bpe")
    own = TEXT | {"vocab_size": len(said["tokenizer.ggml.tokens"])}
    family, more = "llama", {}
    if shape.n_deep:
        more = {"architecture": "qwen3vl", "n_deepstack_layers": shape.n_deep}
        family, more["rope__dimension_sections"] = "qwen3", [24, 20, 20, 0]
    source = checkpoints.make_decoder(folder / "text", family, with_tokenizer=False, **own)
    text = files.write_gguf(source, folder / "text.gguf", tokenizer=said, **more)
    mmproj = projectors.write_mmproj(folder, folder / "mmproj.gguf", projectors.Kind.F16)
    tower = LlamaCppTower(text, mmproj, threads)
    stack.callback(tower.close)
    return tower


def _compared(
    shape: Shape,
    folder: Path,
    picture: np.ndarray,
    n_layers: int,
    rounds: int,
    in_llama_cpp: Callable[[Path], LlamaCppTower | None],
) -> str:
    """Time all for one tower."""
    config = AutoConfig.for_model(
        shape.model_type,
        text_config={**TEXT, **shape.text},
        vision_config={**shape.tower, shape.layers: n_layers},
        image_token_id=300,
    )
    made: Any = AutoModelForImageTextToText
    model = made.from_config(config).eval()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(shape.settings)))
    pictures = open_pictures(Checkpoint.open(folder), TOKENS.get)
    encoder = load_encoder(
        pictures,
        choice=probe(CPU, DType.FLOAT32, None),
        device=CPU,
        progress=lambda done, total: None,
    )
    module, _, name = shape.processor.rpartition(".")
    processor = getattr(import_module(f"transformers.models.{module}"), name)(**shape.settings)
    theirs = processor([picture], return_tensors="pt")
    theirs = {key: theirs[key] for key in theirs if key != "num_crops"}
    prepared = encoder.processor.prepare(picture)
    other = in_llama_cpp(folder)
    preparing = _least_ms(
        rounds,
        lambda: encoder.processor.prepare(picture),
        lambda: processor([picture], return_tensors="pt"),
        partial(other.prepare, picture) if other is not None else None,
    )
    alone, beside = (
        _least_ms(
            rounds,
            partial(_encode, encoder, prepared, is_alone=is_alone),
            lambda: model.model.get_image_features(**theirs),
            other.encode if other is not None else None,
        )
        for is_alone in (True, False)
    )
    ways = f"prepared in {preparing}; encoded alone in {alone}; beside streams in {beside}"
    return f"{shape.model_type}, {len(prepared.pixels)} patches, {n_layers} layers: {ways}"


def _encode(encoder: PictureEncoder, prepared: PreparedPicture, *, is_alone: bool) -> None:
    """Encode a picture, in large pieces where it `is_alone`."""
    walk = encoder.encode([prepared])
    next(walk)
    with contextlib.suppress(StopIteration):
        while True:
            walk.send(is_alone)


def _least_ms(rounds: int, own: Callable[[], object], *others: Callable[[], object] | None) -> str:
    """Run all in turns, and say the least time of each: transformers', and llama.cpp's if any."""
    ways = [own, *(way for way in others if way is not None)]
    least_ms = [float("inf")] * len(ways)
    for _ in range(rounds):
        for place, way in enumerate(ways):
            began = time.perf_counter()
            way()
            least_ms[place] = min(least_ms[place], 1000 * (time.perf_counter() - began))
    beside = (
        f"{name} {other_ms:.1f}: {other_ms / least_ms[0]:.2f} x"
        for name, other_ms in zip(("transformers", "llama.cpp"), least_ms[1:], strict=False)
    )
    return f"{least_ms[0]:.1f} ms, {', '.join(beside)}"


if __name__ == "__main__":
    main()
