"""A tower that computes little: rows of a picture are fixed random projections of its patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from shardnet.errors import UsageError
from shardnet.model.vision.picture import EncodedPicture, PreparedPicture
from shardnet.runtime.stage.compute import StageCompute

T = TypeVar("T")

PATCH = 4


@dataclass(slots=True, kw_only=True)
class FakeProcessor:
    """Cuts a picture into patches of 4 x 4; rows of a line end with a mark if there is one."""

    placeholder_id: int
    mark_id: int | None = None
    see_each_other: bool = False
    placeholder: str = "[IMG]"
    key: str = "fake"

    @property
    def templated(self) -> str:
        return self.placeholder

    def surround(self, prompt: str) -> str:
        return prompt

    def prepare(self, rgb: NDArray[np.uint8], detail: str = "auto") -> PreparedPicture:
        height, width = rgb.shape[0] // PATCH, rgb.shape[1] // PATCH
        if not height or not width:
            raise UsageError(f"it has {rgb.shape[1]} x {rgb.shape[0]} pixels, at least 4 x 4")
        cut = rgb[: height * PATCH, : width * PATCH].astype(np.float32) / 255
        patches = cut.reshape(height, PATCH, width, PATCH, 3).transpose(0, 2, 1, 3, 4)
        line = [self.placeholder_id] * width
        marks = [] if self.mark_id is None else [self.mark_id]
        ids = (line + marks) * height
        return PreparedPicture(
            pixels=patches.reshape(height * width, -1),
            grid=(1, height, width),
            token_ids=tuple(ids),
            is_row=np.array([each == self.placeholder_id for each in ids]),
            see_each_other=self.see_each_other,
        )


@dataclass(slots=True, kw_only=True)
class FakeEncoder:
    """Encodes in three pieces; `width` is the language model's."""

    width: int
    processor: FakeProcessor
    n_deep: int = 0
    weight_bytes: int = 0
    n_pieces: int = 0
    on_piece: Callable[[], None] = field(default=lambda: None)

    def encode(self, pictures: Sequence[PreparedPicture]) -> Iterator[EncodedPicture | None]:
        for picture in pictures:
            for _ in range(3):
                self.n_pieces += 1
                self.on_piece()
                yield None
            pixels = torch.from_numpy(picture.pixels)
            parts = []
            for seed in range(1 + self.n_deep):
                generator = torch.Generator().manual_seed(seed)
                shape = (pixels.shape[1], self.width)
                parts.append(pixels @ torch.randn(shape, generator=generator))
            yield EncodedPicture(rows=parts[0], deep=tuple(parts[1:]))


@dataclass(slots=True)
class FirstPart:
    """The head's own stage: jobs run where they are asked for."""

    compute: StageCompute

    async def on_first_part(self, job: Callable[[StageCompute], T]) -> T:
        return job(self.compute)


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Make a picture [height, width, 3] of random bytes."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
