"""What mixers are given: of the device that they are on, and of a step.

Must not know any mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from shardnet.model.devices.products import DeviceProduct, Rows, Visits
from shardnet.model.drivers.driver import Array, Buffer, Driver, Kernels
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panel_linear import PanelLinear

LINE: Final = 4096
"""Columns that a group of threads holds: LINE of text/rows.h."""
BEFORE: Final = 8
"""What `add_and_norm` does for a norm alone."""


class Make(Protocol):
    """Uploads a linear, whose outputs may be scaled. Raises CapacityError."""

    def __call__(
        self, linear: Linear, *, n_columns: int | None = None, begin: int = 0
    ) -> DeviceProduct:
        """See Device.product."""


class MakeProduct(Protocol):
    """Uploads linears that are alike, one or one for each id. Raises CapacityError."""

    def __call__(
        self,
        *linears: PanelLinear,
        factors: Array | None = None,
        n_columns: int | None = None,
        begin: int = 0,
    ) -> DeviceProduct:
        """See Device.product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerDevice:
    """What a mixer needs of the stage's device: products of linears, buffers with the host's
    numbers, scratch memory, launches, kernels of its own, and where the keys, values, entries,
    states and kept inputs of a layer are.
    """

    driver: Driver
    kernels: Kernels
    make: Make
    make_by_id: MakeProduct
    put: Callable[[Array], Buffer]
    scratch: Rows
    launch: Callable[..., None]
    pages_of: Callable[[int], tuple[Buffer, Buffer]]
    entries_of: Callable[[int], Buffer]
    states_of: Callable[[int], Buffer]
    inputs_of: Callable[[int], Buffer]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBuffers:
    """What layers are told of a step of T rows, on the device.

    `at` and `runs` are what `DeviceKvCache.bring` returns; behind a row's place stands by how much
    its queries grow, float32. No row attends to more than `n_blocks` blocks of positions. `tables`
    has cosines and sines [T, R] by layer, and their R columns. `heads` says which head each of the
    T x H rows of heads is, None where nobody asks. `kept` says where the inputs of each row are
    kept, None where those of none are, and `tokens` has the rows' ids, where any layer asks.
    `of_entries` has the tables of entries of so many positions that rows are the last of, `more`
    what other kinds of layers ask for by name. Where a row sees more than may be chosen it
    `chooses`: then what it attends to is in the scratch `chosen` and `looked`, as text/choice.h has
    them.
    """

    n_rows: int
    n_blocks: int
    at: tuple[Buffer, Buffer]
    runs: Buffer
    tables: Sequence[tuple[Buffer, Buffer, int]]
    heads: Visits | None
    kept: Buffer | None = None
    more: Mapping[str, Buffer] = field(default_factory=dict)
    tokens: Buffer | None = None
    of_entries: Mapping[int, tuple[Buffer, Buffer]] = field(default_factory=dict)
    chooses: bool = False
