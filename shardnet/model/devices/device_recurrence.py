"""Recurrences and short convolutions between their linears on a device, by the kernel text.

Knows which of them the text computes, and where their columns are. Must not know the layer around
them, nor where states are kept.

Axes in shape comments: T rows of the micro-batch, E hidden size, C columns of the convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from shardnet.model.devices.device_ngrams import DeviceNgrams
from shardnet.model.devices.device_states import INPUT_ROWS, Cell
from shardnet.model.devices.mixer_device import BEFORE, MixerDevice, StepBuffers
from shardnet.model.drivers.driver import THREADS, Array, Buffer
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.mixers.gated_delta import (
    GatedDeltaNet,
    LowRankProjections,
    MambaProjection,
    Projections,
)
from shardnet.model.mixers.short_conv import ShortConvolution

STATE_PARTS: Final = ("vectors", "reals", "states")
"""Of the text."""
STATE_NAMES: Final = ("recur", "convolve", "convolve_ngrams", "keep_rows", "take_columns")
_MOST: Final = 256
"""Columns of a head's keys, and of its values, that a group of threads holds."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where columns begin in a row of the projection: `places` of the text."""

    queries: int
    keys: int
    values: int
    gate: int
    key_stride: int
    value_stride: int
    write: int
    decay: int
    small_share: int
    """Heads whose writes stand side by side, before as many decays."""

    @classmethod
    def of(cls, own: GatedDeltaNet) -> _Places:
        config, project = own.config, own.project
        keys, values, n_heads = config.key_width, config.value_width, config.n_value_heads
        n_shared = n_heads // config.n_key_heads
        width = n_shared * config.value_size
        if isinstance(project, MambaProjection):
            last = 2 * (values + keys)
            begins = 2 * values + keys, 2 * values, values, 0
            return cls(*begins, config.key_size, width, last, last, n_heads)
        if isinstance(project, LowRankProjections):
            write = project.qkv_proj.shape[0]
            gate = write + project.small_proj.shape[0]
            small = write, gate + project.gate_proj.shape[0], n_heads
            return cls(0, keys, 2 * keys, gate, config.key_size, width, *small)
        assert isinstance(project, Projections)
        share = n_shared if project.groups_ba else n_heads
        if project.groups_qkvz:
            size = config.key_size
            begins = 0, size, 2 * size, 2 * size + width
            return cls(*begins, *(2 * (size + width),) * 2, 0, share, share)
        begins = 0, keys, 2 * keys, 2 * keys + values
        return cls(*begins, config.key_size, width, 0, share, share)


def why_no_recurrence(own: GatedDeltaNet, is_multiplied: Callable[[Linear], bool]) -> str:
    """Say what the text does not compute of a recurrence, "" for nothing."""
    config = own.config
    if own.native is None:
        return "this recurrence"
    if max(config.key_size, config.value_size) > _MOST:
        return f"a recurrence with heads of more than {_MOST} columns"
    if own.group_norm is not None and own.group_norm.weight.shape[1] % 4:
        return f"groups of {own.group_norm.weight.shape[1]} columns"
    if not all(map(is_multiplied, [*_projections(own), own.out_proj])):
        return "linears whose weights do not stay packed in memory"
    return ""


def _projections(own: GatedDeltaNet) -> list[Linear]:
    """Return the linears before the recurrence."""
    if isinstance(own.project, MambaProjection):
        return [own.project.in_proj]
    if isinstance(own.project, LowRankProjections):
        project = own.project
        return [project.qkv_proj, project.small_proj, project.gate_proj, project.decay_proj]
    assert isinstance(own.project, Projections)
    return [own.project.qkvz_proj, own.project.ba_proj]


class KeptRows:
    """Columns of rows that are kept in a layer, to compute its state again: see StateDevice."""

    def __init__(self, on: MixerDevice, widths: Sequence[int]) -> None:
        """Keep what so many projections give."""
        self._on, self._widths, self.width = on, widths, sum(widths)

    def keep(self, made: Sequence[Buffer], index: int, step: StepBuffers) -> None:
        """Keep what projections gave in layer `index`, of rows that are to be."""
        first = 0
        for given, width in zip(made, self._widths, strict=True) if step.kept is not None else ():
            self._on.launch(
                "keep_rows",
                (-(-width // THREADS), step.n_rows),
                [given, step.kept, self._on.inputs_of(index)],
                *(width, self.width, first),
            )
            first += width

    def bring(
        self, index: int, cells: Sequence[Cell], n_rows: int, states: tuple[int, int]
    ) -> tuple[Buffer, Buffer]:
        """Put rows one behind the other, and return them and `runs` of them: see text/vectors.h.

        They are those of one slot: `states` are the cells with the state before and after them.
        """
        on, each = self._on, 4 * self.width
        rows = on.scratch.of("rows again", n_rows * each)
        for place, cell in enumerate(cells[: -(-n_rows // INPUT_ROWS)]):
            begin = place * INPUT_ROWS
            n_bytes = min(INPUT_ROWS, n_rows - begin) * each
            at = cell.number * INPUT_ROWS * each, begin * each
            on.driver.copy(on.inputs_of(index), rows, n_bytes, at)
        runs = np.array([(0, n_rows, *states)] * n_rows, np.uint32)
        places = on.scratch.of("runs again", runs.nbytes)
        on.driver.upload(places, runs)
        return rows, places


class DeviceRecurrence:
    """A gated DeltaNet or Mamba-2 of one layer, of which `why_no_recurrence` says nothing."""

    def __init__(
        self, own: GatedDeltaNet, on: MixerDevice, ngrams: DeviceNgrams | None = None
    ) -> None:
        """Upload its parameters; its layer has `ngrams` before it. Raises CapacityError."""
        make, put, self._ngrams = on.make, on.put, ngrams
        self._config, self._scratch, self._launch = own.config, on.scratch, on.launch
        self._states_of = on.states_of
        linears, self._is_low_rank = _projections(own), isinstance(own.project, LowRankProjections)
        widths = [linear.shape[0] for linear in linears]
        if self._is_low_rank:  # all in one row
            *begins, end = itertools.accumulate(widths, initial=0)
            self._projections = [
                on.make_by_id(linear, n_columns=end, begin=begin)
                for linear, begin in zip(linears, begins, strict=True)
                if isinstance(linear, PanelLinear)
            ]
            widths = [end]
        else:
            self._projections = [make(linear) for linear in linears]
        self._widths = widths[0], widths[-1]
        self._kept = KeptRows(on, widths if ngrams is None else [*widths, ngrams.n_columns])
        self.row_bytes = 4 * self._kept.width
        self._output = make(own.out_proj)
        self._numbers, self._has_norm = put(_numbers(own)), own.parameters.norm_weight is not None
        self._eps = np.float32(own.parameters.norm_eps)
        self._gates_alone = int(own.parameters.gates_alone)
        self._decay_floor = np.float32(own.parameters.decay_floor)
        self._write_scale = np.float32(own.parameters.write_scale)
        places = _Places.of(own)
        first = places.queries, places.keys, places.values, places.gate
        others = places.key_stride, places.value_stride, places.write, places.decay
        self._places = put(np.array([*first, *others], np.uint32))
        behind = widths[0] if len(widths) > 1 else 0
        others = *others[:2], others[2] + behind, others[3] + behind
        self._places_kept = put(np.array([*first, *others], np.uint32))
        self._small_share = places.small_share
        norm = own.group_norm
        self._norm = None if norm is None else put(norm.weight.float().numpy())
        self._norm_shape = (1, 1) if norm is None else (norm.weight.shape[0], norm.weight.shape[1])
        self._norm_eps = np.float32(0.0 if norm is None else norm.eps)

    def __call__(self, rows: Buffer, inner: Buffer, index: int, step: StepBuffers) -> None:
        """Run normalised rows [T, E] through it in layer `index` within the stage: `inner`."""
        own, of, n_rows = self._config, self._scratch.of, step.n_rows
        made = self._project(rows, n_rows)
        ngrams = [] if self._ngrams is None else [self._ngrams.made(n_rows)]
        self._kept.keep([*made, *ngrams], index, step)
        outputs = of("recurred", 4 * n_rows * own.value_width)
        given = made[0], made[-1], self._numbers, self._places, step.runs, self._states_of(index)
        self._recur([*given, outputs], n_rows, self._widths)
        if self._norm is not None:
            n_groups, width = self._norm_shape
            normed = of("normed groups", 4 * n_rows * own.value_width)
            self._launch(
                "add_and_norm",
                (n_rows * n_groups, 1),
                [outputs, outputs, outputs, self._norm, normed],
                *(width, BEFORE, n_groups, np.float32(1), np.float32(0), self._norm_eps),
            )
            outputs = normed
        self._output(outputs, n_rows, inner)

    def _project(self, rows: Buffer, n_rows: int) -> list[Buffer]:
        """Project normalised rows [T, E], to one buffer or two."""
        of, width, made = self._scratch.of, self._widths[0], list[Buffer]()
        if not self._is_low_rank:
            for name, linear in zip(("projected", "small"), self._projections, strict=False):
                made.append(of(name, 4 * n_rows * linear.shape[0]))
                linear(rows, n_rows, made[-1])
            return made
        projected, (first, small, *others) = of("projected", 4 * n_rows * width), self._projections
        first(rows, n_rows, projected)
        small(rows, n_rows, projected, behind=first)
        ends = first.shape[0], first.shape[0] + small.shape[0]
        for linear, end in zip(others, ends, strict=True):
            rank = linear.shape[1]
            low = of("low rank", 4 * n_rows * rank)
            sizes = width, end - rank, rank
            self._launch("take_columns", (-(-rank // THREADS), n_rows), [projected, low], *sizes)
            linear(low, n_rows, projected)
        return [projected]

    def _recur(self, buffers: Sequence[Buffer], n_rows: int, widths: tuple[int, int]) -> None:
        own = self._config
        self._launch(
            "recur",
            (own.n_value_heads, n_rows),
            buffers,
            *(*widths, self._small_share),
            *(own.n_taps, own.n_key_heads, own.n_value_heads, own.key_size, own.value_size),
            *(int(own.takes_turns), int(own.is_mamba), int(self._has_norm)),
            *(self._gates_alone, int(own.has_key_decays)),
            0 if self._ngrams is None else self._ngrams.n_beside,
            *(self._eps, self._write_scale, self._decay_floor),
        )

    def replay(
        self, index: int, inputs: Sequence[Cell], n_rows: int, before: int, after: int
    ) -> None:
        """See StateLayer."""
        rows, runs = self._kept.bring(index, inputs, n_rows, (before, after))
        outputs = self._scratch.of("recurred", 4 * n_rows * self._config.value_width)
        given = rows, rows, self._numbers, self._places_kept, runs, self._states_of(index)
        self._recur([*given, outputs], n_rows, (self._kept.width,) * 2)
        if self._ngrams is not None:
            self._ngrams.convolve(rows, runs, n_rows, self._kept.width)


def _numbers(own: GatedDeltaNet) -> Array:
    """Return the parameters of a recurrence as the text wants them, float32."""
    given, config = own.parameters, own.config
    heads, size = torch.zeros(config.n_value_heads), torch.ones(config.value_size)
    skip = heads if given.skip is None else given.skip
    weight = size if given.norm_weight is None else given.norm_weight
    biases = torch.zeros(config.mixed_width) if given.taps_bias is None else given.taps_bias
    parts = [given.decay_rate, given.decay_bias, skip, weight, given.taps.flatten(), biases]
    numbers: Array = torch.cat([part.float() for part in parts]).numpy()
    return numbers


class DeviceConvolution:
    """A short convolution of one layer."""

    def __init__(self, own: ShortConvolution, on: MixerDevice) -> None:
        """Upload its parameters. Raises CapacityError."""
        put = on.put
        self._scratch, self._launch, self._states_of = on.scratch, on.launch, on.states_of
        self._projection, self._output = on.make(own.in_proj), on.make(own.out_proj)
        self._n_taps, self._width = own.taps.shape
        self._kept = KeptRows(on, [self._projection.shape[0]])
        self.row_bytes = 4 * self._kept.width
        self._taps = put(own.taps.numpy())
        self._bias = None if own.bias is None else put(own.bias.numpy())

    def __call__(self, rows: Buffer, inner: Buffer, index: int, step: StepBuffers) -> None:
        """Run normalised rows [T, E] through it in layer `index` within the stage: `inner`."""
        n_rows = step.n_rows
        projected = self._scratch.of("projected", 4 * n_rows * self._projection.shape[0])
        self._projection(rows, n_rows, projected)
        self._kept.keep([projected], index, step)
        self._output(self._convolve(projected, step.runs, index, n_rows), n_rows, inner)

    def _convolve(self, projected: Buffer, runs: Buffer, index: int, n_rows: int) -> Buffer:
        convolved = self._scratch.of("recurred", 4 * n_rows * self._width)
        bias = self._taps if self._bias is None else self._bias
        self._launch(
            "convolve",
            (-(-self._width // THREADS), n_rows),
            [projected, self._taps, bias, runs, self._states_of(index), convolved],
            *(self._width, self._n_taps, int(self._bias is not None)),
        )
        return convolved

    def replay(
        self, index: int, inputs: Sequence[Cell], n_rows: int, before: int, after: int
    ) -> None:
        """See StateLayer."""
        rows, runs = self._kept.bring(index, inputs, n_rows, (before, after))
        self._convolve(rows, runs, index, n_rows)
