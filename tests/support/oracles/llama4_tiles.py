"""Llama 4's processor where torchvision is not there: transformers' sizes, Pillow's pixels.

The functions that choose tiles are transformers' own, taken out of the file whose imports need
torchvision. What that computes is written here: resizing by Pillow, levels in bfloat16.
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


def _chosen() -> dict[str, Any]:
    spec = find_spec("transformers.models.llama4")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "image_processing_llama4.py").read_text()
    wanted = ("get_factors", "get_max_res_without_distortion", "get_best_fit")
    wanted += ("find_supported_resolutions",)
    tree = ast.parse(source)
    tree.body = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted
    ]
    assert len(tree.body) == len(wanted)
    names: dict[str, Any] = {"math": math, "torch": torch, "SizeDict": SizeDict}
    names |= {"defaultdict": defaultdict, "lru_cache": lru_cache}
    exec(compile(tree, "image_processing_llama4.py", "exec"), names)
    return names


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
        own, size, side = _chosen(), picture.shape[:2], self.side
        square = SizeDict(height=side, width=side)
        possible = own["find_supported_resolutions"](max_num_chunks=self.most, patch_size=square)
        ends = own["get_best_fit"](size, torch.tensor(possible), resize_to_max_canvas=self.fills)
        high, wide = limits = [int(end) for end in ends]
        if not self.fills:
            limits = [min(max(own, side), end) for own, end in zip(size, limits, strict=True)]
        fit = own["get_max_res_without_distortion"](size, tuple(limits))
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
