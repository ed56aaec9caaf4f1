"""What a picture is on its way to rows of the language model, and who turns it into them.

Knows the stations: prepared for the tower, encoded to rows. Must not know image files, families or
wire, nor import torch: a processor runs where no tower is loaded.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPicture:
    """A picture as the tower takes it.

    `pixels`, float32, are patches or whole pictures, in the shape of the family. `grid` is time,
    height and width in rows of the language model. `token_ids` stand for it in the prompt, marks of
    lines and ends included; `is_row` says which of them take a row of the encoder's output.
    `see_each_other`: these attend in both directions, so all of them are in one chunk. `arrays` is
    what else transformers' own towers take, by the names of their arguments.
    """

    pixels: NDArray[np.float32]
    grid: tuple[int, int, int]
    token_ids: tuple[int, ...]
    is_row: NDArray[np.bool_]
    see_each_other: bool = False
    arrays: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """The bytes of what only the tower needs."""
        return sum(each.nbytes for each in (self.pixels, *self.arrays.values()))

    @property
    def n_rows(self) -> int:
        """How many rows the encoder makes of it."""
        return int(self.is_row.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPicture:
    """Rows of the language model, [n_rows, E], in the compute dtype.

    `deep` are what DeepStack adds after the language model's first layers, [n_rows, E] each.
    """

    rows: Tensor
    deep: tuple[Tensor, ...] = ()


EncoderWalk = Generator[EncodedPicture | None, bool | None, None]
"""Encodes in pieces: yields None between them, and what is done. Sent True it makes larger ones."""


class PictureProcessor(Protocol):
    """Prepares pictures as the model's makers do. Needs no weights."""

    @property
    def key(self) -> str:
        """What stands for all of its settings: with other ones a picture gives other rows."""

    @property
    def placeholder(self) -> str:
        """The text of the token that stands for a picture in a prompt."""

    @property
    def placeholder_id(self) -> int:
        """The id of the placeholder, which a picture's `token_ids` replace."""

    @property
    def templated(self) -> str:
        """What chat templates write for a picture: the placeholder, with marks around it if any."""

    def surround(self, prompt: str) -> str:
        """Write what belongs around each placeholder into a prompt that is not tokenised yet."""

    def prepare(self, rgb: NDArray[np.uint8], detail: str = "auto") -> PreparedPicture:
        """Prepare a picture [H, W, 3]. With the `detail` low it takes fewer tokens where it can.

        Raises UsageError for one of a shape that the model does not take.
        """


class PictureEncoder(Protocol):
    """A loaded tower with its projector. Not thread-safe: the compute thread owns it."""

    @property
    def processor(self) -> PictureProcessor:
        """What prepares pictures for it."""

    @property
    def weight_bytes(self) -> int:
        """The bytes of its weights in memory."""

    def encode(self, pictures: Sequence[PreparedPicture]) -> EncoderWalk:
        """Encode pictures, one after the other: yields each, in order, and None between pieces.

        A picture's rows depend neither on the others nor on the size of the pieces.
        """
