"""Products of rows with panels of any form on a device, by the kernel text.

Knows a form's macros, and how rows are quantised for it. Must not know layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shardnet.errors import CapacityError
from shardnet.model.config.panel_form import PANEL, UNIT, PanelForm
from shardnet.model.drivers.driver import THREADS, Array, Buffer, Driver, Kernel, Kernels, launch
from shardnet.model.kernels.panels import Panels

ROWS: Final = (1, 2, 4, 8)
"""Rows that a group of threads multiplies a panel with: a text for each, and one for 64 rows."""
MANY: Final = 24
"""From so many rows on TILE are multiplied with four panels."""
TILE: Final = 64
GATHERED_FROM: Final = 12
"""From so many visits an expert on they are gathered by expert: TILE rows together cost as many
one by one.
"""
PRODUCT_PARTS: Final = ("vectors", "linear", "many")
"""Of the text."""
NO_ACTIVATION: Final = 5
_HAS_BIAS, _HAS_FACTORS = 1, 2
_WIDE: Final = 1
"""The place of rows of floats among what a product takes."""
_MOST_SPARE: Final = 1 << 24
"""Bytes that scratch grows by for what may come."""


def form_macros(form: PanelForm, rows: int) -> dict[str, object]:
    """Return what the text must know of a form, for groups of so many rows."""
    words = np.array(form.book or [0] * 16).astype(np.int8).view(np.uint32)
    return {
        "ROWS": rows,
        "BITS": form.bits,
        "CODE": int(form.code),
        "OFFSET": form.offset,
        "SIZE_OF_GROUP": form.group,
        "BLOCK": form.block_inputs,
        "BLOCK_SCALES": form.block_scales,
        "BLOCK_BYTES": form.block_bytes,
        "HEADER": form.header_bytes,
        "TOKEN_GROUP": form.token_group,
        "SCALE": int(form.scale),
        "MINIMUM": int(form.minimum),
        "FACTOR": f"{float(form.factor).hex()}f",
        "LEVELS": int(form.has_levels),
        "HAS_MINIMUM": int(form.has_minimum),
        "IS_FLOAT": int(form.is_float),
        "BOOK_VALUES": "{" + ", ".join(f"{float(value).hex()}f" for value in form.book) + "}",
        **{f"BOOK_{4 * place}": f"{word:#x}u" for place, word in enumerate(words)},
    }


def can_multiply(form: PanelForm) -> bool:
    """Say whether the text multiplies panels of a form, as the library does."""
    is_even = form.is_float or form.block_inputs == UNIT or form.block_inputs % (2 * UNIT) == 0
    return form.is_plain or (form.has_kernel and is_even)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    form: PanelForm
    n_out: int
    first: int
    weights: Buffer
    order: Buffer | None
    bias: Buffer | None
    has: int
    """Of _HAS_BIAS and _HAS_FACTORS: biases come first."""
    n_blocks: int
    expert_words: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gating:
    """An activation as numbered in ACTIVATIONS, 3 for gpt-oss's with `limit` and `alpha`.

    4 is the same but for the 1 that is added there.
    """

    activation: int = NO_ACTIVATION
    limit: float = 0.0
    alpha: float = 0.0


NOT_GATED: Final = Gating()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Visits in the order of their experts, and `n` tiles of that: see group_visits in the text."""

    order: Buffer
    tiles: Buffer
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """By which experts rows are multiplied: `each` ids a row, uint32 on the device."""

    ids: Buffer
    each: int
    tiles: Tiles | None = None


@dataclass(slots=True)
class Rows:
    """Scratch for quantised rows, shared by all products of a device: grown as needed."""

    driver: Driver
    sizes: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    n_made: int = 0
    """How often a buffer was made: with the same number all are where they were."""

    def of(self, name: str, n_bytes: int) -> Buffer:
        """Return scratch of at least so many bytes under a name. Raises CapacityError."""
        before = self.sizes.get(name, 0)
        if before < n_bytes:
            self.buffers.pop(name, None)
            self.sizes.pop(name, None)
            self.n_made += 1
            size = max(n_bytes, min(2 * before, before + _MOST_SPARE))
            try:
                made = self.driver.empty(size)
            except CapacityError:
                size = n_bytes
                made = self.driver.empty(size)
            self.sizes[name], self.buffers[name] = size, made
        return self.buffers[name]


class DeviceProduct:
    """A matmul with packed weights on a device: parts one behind the other in the outputs."""

    def __init__(
        self,
        kernels: Kernels,
        driver: Driver,
        scratch: Rows,
        experts: Sequence[Sequence[Panels]],
        bias: Array | None,
        factors: Array | None = None,
        n_columns: int | None = None,
        begin: int = 0,
    ) -> None:
        """Upload weights, of one linear or of several that are chosen by id; `bias` [..., N].

        Outputs of a single linear may be multiplied by `factors` [N]. Rows of outputs are
        `n_columns` apart, N if that is None, and have them from `begin` on. Parts of the same place
        must be alike in all linears. Raises CapacityError.
        """
        self._kernels, self._driver, self._scratch = kernels, driver, scratch
        self._found: dict[tuple[int, str, int], Kernel] = {}
        parts = experts[0]
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self._n_columns = n_columns or self.shape[0]
        self._parts: list[_Part] = []
        first = 0
        for place, part in enumerate(parts):
            n_out = part.shape[0]
            some = None if bias is None else bias[..., first : first + n_out].astype(np.float32)
            if factors is not None:
                added = np.zeros(n_out, np.float32) if some is None else some
                some = np.stack([added, factors[first : first + n_out]])
            packed = [expert[place].packed.numpy().reshape(-1) for expert in experts]
            order = part.input_order
            self._parts.append(
                _Part(
                    form=part.form,
                    n_out=n_out,
                    first=begin + first,
                    weights=self._put(*packed),
                    expert_words=packed[0].nbytes // 4 if len(packed) > 1 else 0,
                    order=None if order is None else self._put(order.numpy().astype(np.uint32)),
                    bias=None if some is None else self._put(some),
                    has=_HAS_BIAS * (bias is not None) + _HAS_FACTORS * (factors is not None),
                    n_blocks=part.form.packed_shape(*part.shape)[1],
                )
            )
            first += n_out

    def _put(self, *arrays: np.ndarray) -> Buffer:
        """Upload arrays of equal size, one behind the other."""
        buffer = self._driver.empty(len(arrays) * arrays[0].nbytes)
        for place, array in enumerate(arrays):
            self._driver.upload(buffer, np.ascontiguousarray(array), place * array.nbytes)
        return buffer

    def __call__(
        self,
        rows: Buffer,
        n_rows: int,
        out: Buffer,
        gating: Gating = NOT_GATED,
        visits: Visits | None = None,
        behind: DeviceProduct | None = None,
    ) -> None:
        """Multiply float32 rows [n_rows, K] on the device: [n_rows, N], in launches.

        `behind` is the product that took the same rows just before, if one did.

        With a `gating` rows are gates and others, [n_rows, 2 K]. With `visits` it is by an expert
        for each: [visits, N].
        """
        before = None if behind is None else behind._parts[-1]
        for part in self._parts:
            taken = self._rows_of(part, n_rows)
            if self._takes_as_they_are(part, gating):
                taken[_WIDE] = rows
            elif before is None or not _shares_rows(before, part):
                self._quantise(part, rows, n_rows, gating, taken)
            self._multiply(part, n_rows, out, visits, taken)
            before = part

    def _takes_as_they_are(self, part: _Part, gating: Gating) -> bool:
        """Whether rows need not be laid out before they are multiplied."""
        is_whole = part.n_blocks * part.form.block_inputs == self.shape[1]
        return part.form.is_float and is_whole and part.order is None and gating is NOT_GATED

    def _quantise(
        self, part: _Part, rows: Buffer, n_rows: int, gating: Gating, taken: Sequence[Buffer]
    ) -> None:
        n_inputs = part.n_blocks * part.form.block_inputs
        numbers = [n_rows, self.shape[1], n_inputs // part.form.token_group]
        numbers += [int(part.order is not None), gating.activation]
        clamps = np.float32(gating.limit), np.float32(gating.alpha)
        order = rows if part.order is None else part.order
        launch(
            self._driver,
            self._kernel(part.form, "quantise", 0),
            (-(-n_rows * n_inputs // (4 * THREADS)), 1),
            [rows, order, *taken],
            *numbers,
            *clamps,
        )

    def _kernel(self, form: PanelForm, name: str, rows: int) -> Kernel:
        """Return a kernel of the text for a form and so many rows; 0: that for all."""
        key = id(form), name, rows
        if key not in self._found:
            names = ("multiply",) if rows else ("quantise", "multiply_many")
            kernels = self._kernels.of(form_macros(form, rows), PRODUCT_PARTS, names)
            self._found[key] = kernels[name]
        return self._found[key]

    def _rows_of(self, part: _Part, n_rows: int) -> list[Buffer]:
        """Return the scratch of quantised, wide rows, scales, sums, and sums of groups."""
        form = part.form
        n_inputs = n_rows * part.n_blocks * form.block_inputs
        n_groups = n_inputs // form.token_group
        sizes = {"quantised": n_inputs, "wide": 4, "scales": 4 * n_groups, "sums": 4 * n_groups}
        sizes["group_sums"] = 2 * n_inputs // min(form.group, UNIT)
        if form.is_float:
            sizes = dict.fromkeys(sizes, 4) | {"wide": 4 * n_inputs}
        return [self._scratch.of(name, n_bytes) for name, n_bytes in sizes.items()]

    def _multiply(
        self,
        part: _Part,
        n_rows: int,
        out: Buffer,
        visits: Visits | None,
        taken: Sequence[Buffer],
    ) -> None:
        form = part.form
        repeats = 1 if visits is None else visits.each
        n_rows *= repeats
        n_panels = -(-part.n_out // PANEL)
        numbers = [part.n_blocks, part.n_out, n_rows, self._n_columns, part.first]
        numbers += [part.has, part.expert_words, repeats]
        bias = out if part.bias is None else part.bias
        tiles = None if visits is None else visits.tiles
        if tiles is not None:
            name, rows, groups = "multiply_many", 0, (tiles.n, -(-n_panels // 4))
            others = [tiles.order, tiles.tiles]
        elif visits is None and n_rows >= MANY:
            name, rows, groups = "multiply_many", 0, (-(-n_rows // TILE), -(-n_panels // 4))
            others = [out, out]
        else:
            rows = 1 if visits else next(n for n in ROWS if n_rows <= n or n == ROWS[-1])
            name, groups = "multiply", (n_panels, -(-n_rows // rows))
            others = [out if visits is None else visits.ids]
        launch(
            self._driver,
            self._kernel(form, name, rows),
            groups,
            [part.weights, *taken, bias, *others, out],
            *numbers,
        )


def _shares_rows(before: _Part, part: _Part) -> bool:
    """Whether two parts take rows that were quantised alike."""
    if before.order is not part.order or before.n_blocks != part.n_blocks:
        return False
    one, other = before.form, part.form
    same = (one.block_inputs, one.token_group, one.is_float) == (
        other.block_inputs,
        other.token_group,
        other.is_float,
    )
    return same and min(one.group, UNIT) == min(other.group, UNIT)
