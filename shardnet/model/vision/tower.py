"""The transformer of a tower: patches attend to those of their picture, all or in a window.

Knows the parts that towers are made of, and cuts their work into pieces, between which other steps
run. Must not know how a family names its parameters.

Axes in shape comments: T patches of a picture, H heads, D head size, W width of the tower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardnet.model.arithmetic.elementary import cosine_sine, power
from shardnet.model.config.model_config import Activation
from shardnet.model.layers.norms import Norm, activate
from shardnet.model.layers.rotary import Rotary
from shardnet.model.layers.weight_source import WeightSource
from shardnet.model.vision.picture import EncoderWalk, PictureProcessor, PreparedPicture
from shardnet.model.vision.vision_family import VisionConfig

PIECE_ROWS: Final = 64
"""Patches that are computed at a time on a CPU: a few milliseconds of a layer."""
LARGE_PIECES: Final = 4
"""How many of these are one where nothing else waits: the library's linears gain 5 to 10 %."""
_ATTENDED: Final = 1 << 30
"""Operations of attention at a time: about 15 ms of a core."""
_MOST_QUERIES: Final = 1024
"""torch attends for so many with its largest blocks, for fewer than 192 with its smallest."""

Rowwise = Callable[[Tensor], Tensor]
"""Transforms [T, N], row by row."""
Walk = Generator[None, bool | None, Tensor]
"""Computes in pieces: yields before each, and returns the result. See EncoderWalk."""


def in_pieces(compute: Callable[..., Tensor], *rows: Tensor) -> Walk:
    """Compute rows [T, N] of each some at a time: those of a piece do not depend on the others.

    Pieces are whole multiples of `PIECE_ROWS`, so that torch's vectors begin at the same numbers.
    """
    if rows[0].device.type != "cpu":
        yield
        return compute(*rows)
    parts, begin = [], 0
    while begin < len(rows[0]):
        may_be_large = yield
        end = begin + PIECE_ROWS * (LARGE_PIECES if may_be_large else 1)
        parts.append(compute(*(each[begin:end] for each in rows)))
        begin = end
    return torch.cat(parts)


def activated(kind: Activation, rows: Tensor) -> Tensor:
    """Apply a nonlinearity to [T, N]. The rows beside one are always the same here."""
    return F.gelu(rows) if kind is Activation.GELU else activate(kind, rows)


class TowerMlp:
    """An MLP without a gate, on rows that are always computed together."""

    def __init__(self, activation: Activation, weights: WeightSource, up: str, down: str) -> None:
        """Load the linears named `up` and `down`."""
        self.activation = activation
        self.up_proj = weights.linear(up)
        self.down_proj = weights.linear(down)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Transform [T, N], row by row."""
        return self.down_proj(activated(self.activation, self.up_proj(hidden)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerLayer:
    """Attention among patches of a picture, then an MLP, each with a norm and a residual."""

    n_heads: int
    attention_norm: Norm
    qkv_proj: Rowwise
    o_proj: Rowwise
    mlp_norm: Norm
    mlp: Rowwise
    head_norms: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    """Of queries, keys and values, [T, H, D] each."""
    after_attention: Norm | None = None
    after_mlp: Norm | None = None

    def walk(self, hidden: Tensor, rotary: Rotary | None, lengths: Sequence[int] = ()) -> Walk:
        """Run hidden states [T, W] through the layer.

        With `lengths` the rows of each window, which stand together, see each other only.
        """
        projected = yield from in_pieces(
            lambda part: self.qkv_proj(self.attention_norm(part)), hidden
        )
        queries, keys, values = projected.view(len(hidden), 3, self.n_heads, -1).unbind(1)
        if self.head_norms is not None:
            queries, keys, values = self.head_norms(queries, keys, values)
        if rotary is not None:
            queries, keys = rotary.rotate(queries), rotary.rotate(keys)
        heads = queries, keys, values
        parts = []
        split = (torch.split(part, [*lengths] or len(part)) for part in heads)
        for own in zip(*split, strict=True):
            parts.append((yield from _attended(*own)))
        return (yield from in_pieces(self._after_attention, hidden, torch.cat(parts)))

    def _after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Compute what follows from rows and what they attended to: [T, W] each."""
        inner = self.o_proj(attended)
        hidden = hidden + (inner if self.after_attention is None else self.after_attention(inner))
        inner = self.mlp(self.mlp_norm(hidden))
        return hidden + (inner if self.after_mlp is None else self.after_mlp(inner))


def _attended(queries: Tensor, keys: Tensor, values: Tensor) -> Walk:
    """Attend with [T, H, D] each: [T, H x D]. Pieces are some heads' queries, the same always."""
    queries, keys, values = (part.transpose(0, 1)[None] for part in (queries, keys, values))
    if queries.device.type != "cpu":
        yield
        attended = F.scaled_dot_product_attention(queries, keys, values)  # [1, H, T, D]
        return attended[0].transpose(0, 1).flatten(1)
    _, n_heads, n_rows, size = queries.shape
    keys, values = keys.contiguous(), values.contiguous()
    out = queries.new_empty(n_rows, n_heads, size)
    n_queries, n_at_once = _attended_at_once(n_rows, size)
    for first in range(0, n_rows, n_queries):
        rows = slice(first, first + n_queries)
        for head in range(0, n_heads, n_at_once):
            own = slice(head, head + n_at_once)
            yield
            attended = F.scaled_dot_product_attention(
                queries[:, own, rows], keys[:, own], values[:, own]
            )
            out[rows, own] = attended[0].transpose(0, 1)
    return out.flatten(1)


def _attended_at_once(n_rows: int, size: int) -> tuple[int, int]:
    """Return how many queries attend at a time, and for how many heads of `size` columns."""
    of_query = 4 * n_rows * size
    n_queries = min(max(_ATTENDED // of_query // 256 * 256, 256), _MOST_QUERIES)
    return n_queries, max(_ATTENDED // (of_query * min(n_queries, n_rows)), 1)


def patch_places(grid: tuple[int, int, int], merge: int) -> Tensor:
    """Return line and column of every patch, int64 [T, 2], in the order of `pixels`."""
    _, n_high, n_wide = grid
    shape = n_high, n_wide, merge, merge
    lines = torch.arange(n_high * merge).view(n_high, 1, merge, 1).expand(shape)
    columns = torch.arange(n_wide * merge).view(1, n_wide, 1, merge).expand(shape)
    return torch.stack((lines.flatten(), columns.flatten()), -1)


def frequencies(theta: float, n: int) -> Tensor:
    """Return the frequencies of `n` pairs of columns, float32."""
    return 1.0 / power(theta, torch.arange(0, 2 * n, 2, dtype=torch.float32) / (2 * n))


def axial_rotary(
    places: Tensor, by_line: Tensor, by_column: Tensor, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """Make the tables [T, 1, D] of patches: a quarter of the pairs each, by line and by column."""
    lines, columns = places[:, :1].float() * by_line, places[:, 1:].float() * by_column
    cos, sin = cosine_sine(torch.cat((lines, columns), -1).double())  # [T, D / 2]
    tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    cosines, sines = (table[:, None].to(device, torch.float32).to(dtype) for table in tables)
    return Rotary(cos=cosines, sin=sines)


def rotary_of(config: VisionConfig, places: Tensor, pixels: Tensor) -> Rotary:
    """Make the tables of patches at `places`, to compute as `pixels` are."""
    by_turns = frequencies(config.rope_theta, config.head_size // 4)
    return axial_rotary(places, by_turns, by_turns, pixels.dtype, pixels.device)


def window_order(grid: tuple[int, int, int], window: int) -> tuple[Tensor, list[int]]:
    """Return the rows of a picture by windows of `window` x `window` rows, and the sizes of these.

    int64 [N].
    """
    _, n_high, n_wide = grid
    lines, columns = torch.arange(n_high) // window, torch.arange(n_wide) // window
    windows = (lines[:, None] * n_wide + columns).flatten()
    return windows.argsort(stable=True), [n for n in torch.bincount(windows).tolist() if n]


class Tower(Protocol):
    """The forward pass of one family's tower and projector."""

    def walk(
        self, pixels: Tensor, grid: tuple[int, int, int], *args: Any, **arrays: Any
    ) -> EncoderWalk:
        """Encode patches [T, P] of a picture: yields None between pieces, and the rows at last.

        `arrays` are a picture's, as tensors.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerEncoder:
    """A PictureEncoder of a tower."""

    tower: Tower
    processor: PictureProcessor
    weight_bytes: int
    dtype: torch.dtype
    device: torch.device
    is_batch_invariant: bool = False
    """Whether a row has the same bits in pieces of any size."""

    def encode(self, pictures: Sequence[PreparedPicture]) -> EncoderWalk:
        """Encode pictures, one after the other; see PictureEncoder."""
        for picture in pictures:
            pixels = torch.from_numpy(picture.pixels).to(self.device, self.dtype)
            arrays = {
                name: torch.from_numpy(array).to(self.device)
                for name, array in picture.arrays.items()
            }
            walk, may_be_large = self.tower.walk(pixels, picture.grid, **arrays), None
            with contextlib.suppress(StopIteration):
                while True:
                    said = yield walk.send(may_be_large)
                    may_be_large = said and self.is_batch_invariant
