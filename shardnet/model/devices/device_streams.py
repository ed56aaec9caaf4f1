"""What mixes residual streams around a sub-layer on a device, by the kernel text.

Knows which mixers the text computes, and the order of launches. Must not know the sub-layer.

Axes in shape comments: T rows of the micro-batch, N streams, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from shardnet.model.config.model_config import StreamKind
from shardnet.model.devices.mixer_device import BEFORE, MixerDevice, StepBuffers
from shardnet.model.devices.products import NO_ACTIVATION, Gating
from shardnet.model.drivers.driver import THREADS, Buffer, launch
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.layers.decoder_layer import StreamResidual
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.streams import GatedMixer, StreamMixer

STREAM_PARTS: Final = ("vectors", "streams")
"""Of the text."""
STREAM_NAMES: Final = ("join_streams", "join_gated", "share_streams")
_MOST: Final = 14
"""Streams whose mixes the threads of a group have one each."""
_Norm = tuple[Buffer, np.float32]
Add = Callable[[Buffer, StepBuffers], None]
"""Adds to streams [T, N x E]."""
_BY_SILU: Final = Gating(activation=NO_ACTIVATION + 1)


def why_no_streams(own: StreamResidual, is_multiplied: Callable[[Linear], bool]) -> str:
    """Say what the text does not compute of streams around a sub-layer, "" for nothing."""
    mixer, linears = own.mixer, list[object]()
    if isinstance(mixer, GatedMixer):
        count, width = mixer.norm.weight.shape
        linears = [mixer.down, mixer.up, mixer.inject]
        if mixer.count.bit_count() > 1:
            return f"{count} gated streams, which are no power of two"
    else:
        if not isinstance(own.before, Norm) or own.before.bias is not None:
            return "this norm"
        assert isinstance(mixer, StreamMixer)
        count, width = mixer.config.count, own.before.weight.shape[0]
        linears = [mixer.project]
    if count > _MOST or width % 4:
        return f"{count} streams of {width} columns"
    if not all(isinstance(one, PanelLinear) and is_multiplied(one) for one in linears):
        return "linears whose weights do not stay packed in memory"
    return ""


class DeviceStreams:
    """The mixer around one sub-layer, of which `why_no_streams` says nothing."""

    def __init__(self, own: StreamResidual, on: MixerDevice, add: Add | None = None) -> None:
        """Upload it; `add` is what adds to streams before it. Raises CapacityError."""
        self._on, self._add, mixer = on, add, own.mixer
        self._is_balanced = False
        if isinstance(mixer, GatedMixer):
            self._count, self._width = mixer.norm.weight.shape
            self._linears = [
                on.make_by_id(linear, factors=np.full(linear.shape[0], np.float32(1 / self._count)))
                for linear in (mixer.down, mixer.inject)
                if isinstance(linear, PanelLinear)
            ] + [on.make(mixer.up)]
            self._norm = on.put(mixer.norm.weight.float().numpy()), np.float32(mixer.norm.eps)
        else:
            assert isinstance(mixer, StreamMixer)
            self._upload(mixer, own.before)
        self._kernels = on.kernels.of({"STREAMS": self._count}, STREAM_PARTS, STREAM_NAMES)

    def _upload(self, mixer: StreamMixer, norm: object) -> None:
        """Upload a mixer of factors, and the norm of what is joined."""
        on, config = self._on, mixer.config
        assert isinstance(norm, Norm)
        assert isinstance(mixer.project, PanelLinear)
        self._is_balanced = config.kind is StreamKind.BALANCED
        self._count, self._width = config.count, norm.weight.shape[0]
        self._linears = [on.make(mixer.project)]
        ones = np.ones(self._count * self._width, np.float32)
        self._norm = on.put(ones), np.float32(mixer.norm.eps)
        self._after = on.put(norm.weight.float().numpy()), np.float32(norm.eps)
        numbers = np.zeros(3 + len(mixer.base), np.float32)
        numbers[: len(mixer.scale)], numbers[3:] = mixer.scale.numpy(), mixer.base.numpy()
        self._numbers = on.put(numbers)
        self._how = config.n_rounds, np.float32(config.magnitude), np.float32(config.eps)

    def join(self, streams: Buffer, step: StepBuffers) -> None:
        """Join rows [T, N x E] for the sub-layer: [T, E], normed, in the scratch `normed`."""
        if self._add is not None:
            self._add(streams, step)
        count, of, width, n_rows = self._count, self._on.scratch.of, self._width, step.n_rows
        n_mixes = count * (count + 2 if self._is_balanced else 2)
        mixes, normed = of("mixes", 4 * n_rows * n_mixes), of("normed", 4 * n_rows * width)
        wide = of("normed streams", 4 * n_rows * count * width)
        linear, *more = self._linears
        if more:  # of a GatedMixer
            inject, up = more
            self._normalize(streams, self._norm, wide, (n_rows * count, width, count))
            low, gates = (
                of(name, 4 * n_rows * made.shape[0])
                for name, made in (("low rank", linear), ("gates of streams", up))
            )
            raw = of("raw mixes", 4 * n_rows * count)
            linear(wide, n_rows, low)
            inject(wide, n_rows, raw, behind=linear)
            up(low, n_rows, gates, _BY_SILU)
            self._launch("join_gated", n_rows, [wide, gates, raw, mixes, normed])
            return
        self._normalize(streams, self._norm, wide, (n_rows, count * width, 1))
        raw, joined = of("raw mixes", 4 * n_rows * n_mixes), of("joined", 4 * n_rows * width)
        linear(wide, n_rows, raw)
        launch(
            self._on.driver,
            self._kernels["join_streams"],
            (n_rows, 1),
            [streams, raw, self._numbers, mixes, joined],
            *(width, int(self._is_balanced), *self._how),
        )
        self._normalize(joined, self._after, normed, (n_rows, width, 1))

    def share(self, streams: Buffer, inner: Buffer, n_rows: int, *, rounds: bool) -> None:
        """Add what the sub-layer gives, [T, E], to all streams."""
        buffers = [streams, inner, self._on.scratch.of("mixes", 0)]
        self._launch("share_streams", n_rows, buffers, int(self._is_balanced), int(rounds))

    def _launch(self, name: str, n_rows: int, buffers: list[Buffer], *more: int) -> None:
        """Launch a kernel whose threads have a column each."""
        groups = -(-self._width // THREADS), n_rows
        launch(self._on.driver, self._kernels[name], groups, buffers, self._width, *more)

    def _normalize(
        self, rows: Buffer, norm: _Norm, out: Buffer, shape: tuple[int, int, int]
    ) -> None:
        """Norm so many rows of so many columns, with so many weights in turns."""
        (weight, eps), (n_rows, width, n_turns), none = norm, shape, np.float32(0)
        buffers = [rows, rows, weight, weight, out]
        numbers = width, BEFORE, n_turns, none, none, eps
        self._on.launch("add_and_norm", (n_rows, 1), buffers, *numbers)
