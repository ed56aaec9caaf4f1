"""Processors of Llama 4 and Gemma 4's 12B where torchvision is not there.

The functions that choose tiles and merge patches are transformers' own, taken out of files whose
imports need torchvision. What that computes is written here: resizing by Pillow, levels.
"""

from __future__ import annotations

import ast
import math
from collections import defaultdict
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil


def _functions(model: str, *wanted: str) -> list[Any]:
    """Take functions out of a model's image_processing file."""
    spec = find_spec(f"transformers.models.{model}")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / f"image_processing_{model}.py"
    tree = ast.parse(path.read_text())
    tree.body = [
        each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in wanted
    ]
    names: dict[str, Any] = {"math": math, "torch": torch, "SizeDict": SizeDict}
    names |= {"defaultdict": defaultdict, "lru_cache": lru_cache}
    exec(compile(tree, path.name, "exec"), names)
    return [names[name] for name in wanted]


class Llama4Tiles:
    """Stands for transformers' Llama4ImageProcessor."""

    def __init__(self, *, size: dict[str, int], max_patches: int = 16, **settings: Any) -> None:
        self.side = size["height"]
        self.most = max_patches
        self.fills = settings.get("resize_to_max_canvas", False)
        self.mean = settings.get("image_mean", [0.5] * 3)
        self.deviation = settings.get("image_std", [0.5] * 3)

    def __call__(self, pictures: Any, **_: Any) -> dict[str, Any]:
        [picture] = pictures
        size, side = picture.shape[:2], self.side
        supported, best_fit, largest, _ = _functions(
            "llama4",
            "find_supported_resolutions",
            "get_best_fit",
            "get_max_res_without_distortion",
            "get_factors",
        )
        square = SizeDict(height=side, width=side)
        possible = supported(max_num_chunks=self.most, patch_size=square)
        ends = best_fit(size, torch.tensor(possible), resize_to_max_canvas=self.fills)
        high, wide = limits = [int(end) for end in ends]
        if not self.fills:
            limits = [min(max(own, side), end) for own, end in zip(size, limits, strict=True)]
        fit = largest(size, tuple(limits))
        canvas = np.zeros((high, wide, 3), np.uint8)
        canvas[: max(fit[0], 1), : max(fit[1], 1)] = self._resized(picture, *fit)
        n_high, n_wide = high // side, wide // side
        tiles = [
            canvas[line * side :, column * side :][:side, :side]
            for line in range(n_high)
            for column in range(n_wide)
        ]
        if len(tiles) > 1:
            tiles.append(self._resized(picture, side, side))
        pixels = torch.stack([self._normal(tile) for tile in tiles])
        return {"pixel_values": pixels.float(), "aspect_ratios": torch.tensor([[n_high, n_wide]])}

    def _resized(self, picture: Any, height: int, width: int) -> Any:
        size = max(width, 1), max(height, 1)
        return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR))

    def _normal(self, tile: Any) -> torch.Tensor:
        pixels = torch.from_numpy(tile.copy()).permute(2, 0, 1).to(torch.bfloat16) * (1 / 255)
        mean, deviation = (
            torch.tensor(own, dtype=torch.bfloat16)[:, None, None]
            for own in (self.mean, self.deviation)
        )
        return pixels.sub(mean).div(deviation)


class Gemma4Squares:
    """Stands for transformers' Gemma4UnifiedImageProcessor: patches of its tower's, merged."""

    def __init__(self, **settings: Any) -> None:
        self.patches = Gemma4ImageProcessorPil(**settings)

    def __call__(self, pictures: Any, **how: Any) -> dict[str, Any]:
        merge, pad = _functions("gemma4_unified", "patches_merge", "pad_along_first_dim")
        made = self.patches(pictures, **how)
        [places], [pixels] = made["image_position_ids"], made["pixel_values"]
        is_real = places[:, 0] >= 0
        n_rows = int(is_real.sum()) // self.patches.pooling_kernel_size**2
        merged = merge(pixels[is_real][None], places[is_real][None], n_rows)
        pixels, places = pad(merged[0][0], merged[1][0], self.patches.max_soft_tokens)
        return {"pixel_values": pixels[None], "image_position_ids": places[None]}
