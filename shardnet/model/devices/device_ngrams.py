"""Features of n-grams that layers add to their streams on a device, by the kernel text.

Knows which of them the text computes, and the order of launches. Rows of tables are looked up on
the host, and come with the step. Must not know the layer behind them, nor where states are kept.

Axes in shape comments: T rows of the micro-batch, N streams, E hidden size, C columns of a state's
row: N x E inputs of the convolution, and the digits of a token id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shardnet.model.config.model_config import N_DIGITS, DeltaNet
from shardnet.model.devices.device_states import DeviceState
from shardnet.model.devices.mixer_device import LINE, MixerDevice, StepBuffers
from shardnet.model.drivers.driver import THREADS, Array, Buffer
from shardnet.model.kernels.linear import Linear
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.mixers.short_conv import Features, NgramFeatures
from shardnet.types import DType


def why_no_ngrams(own: Features, is_multiplied: Callable[[Linear], bool]) -> str:
    """Say what the text does not compute of features, "" for nothing."""
    if not isinstance(own, NgramFeatures):
        return "n-gram tables of this kind"
    width = own.norm_key.weight.shape[1]
    if width > LINE:
        return f"n-gram embeddings of {width} columns"
    if not (is_multiplied(own.key_proj) and is_multiplied(own.value_proj)):
        return "linears whose weights do not stay packed in memory"
    return ""


class DeviceNgrams:
    """The features of one layer, of which `why_no_ngrams` says nothing."""

    def __init__(self, own: Features, on: MixerDevice, index: int, behind: DeltaNet) -> None:
        """Upload those of layer `index` within the stage. Raises CapacityError.

        In its state they stand behind what the recurrence has.
        """
        assert isinstance(own, NgramFeatures)
        self.own, self._on, self._index, config = own, on, index, own.hashes.config
        self._keys, self._values = on.make(own.key_proj), on.make(own.value_proj)
        norms = own.norm_key, own.norm_query, own.norm_conv
        self._norms = on.put(np.stack([norm.weight.float().numpy() for norm in norms]))
        self._eps, self._taps = np.float32(own.norm_key.eps), on.put(own.taps.numpy())
        self._count, self._width = own.norm_key.weight.shape
        n_kept, self.n_columns = config.state(self._count * self._width)
        n_before = behind.state.size_bytes(DType.FLOAT32) // 4
        self._sizes = len(own.taps), config.longest, n_kept, n_before
        self.n_beside = n_kept * self.n_columns
        """Numbers in a state."""

    def made(self, n_rows: int) -> Buffer:
        """Return the scratch of what rows [T, C] have made of themselves for states."""
        return self._on.scratch.of("n-grams", 4 * n_rows * self.n_columns)

    def add(self, streams: Buffer, step: StepBuffers) -> None:
        """Add what n-grams of rows give to streams [T, N x E]."""
        on, of, n_rows, wide = self._on, self._on.scratch.of, step.n_rows, self._keys.shape[0]
        keys, gated = (of(f"{kind} of n-grams", 4 * n_rows * wide) for kind in ("keys", "gated"))
        values = of("values of n-grams", 4 * n_rows * self._width)
        given = step.more[f"n-grams {self._index}"]
        self._keys(given, n_rows, keys)
        self._values(given, n_rows, values, behind=self._keys)
        on.launch(
            "gate_ngrams",
            (n_rows, self._count),
            [streams, keys, values, self._norms, step.more["ids"], gated, self.made(n_rows)],
            *(self._width, self._count, N_DIGITS, np.float32(self._width**0.5), self._eps),
        )
        self.convolve(self.made(n_rows), step.runs, n_rows, self.n_columns, (gated, streams))

    def convolve(
        self,
        rows: Buffer,
        runs: Buffer,
        n_rows: int,
        stride: int,
        adds: tuple[Buffer, Buffer] | None = None,
    ) -> None:
        """Make states of the last columns of `rows`, `stride` each.

        `adds` are what is gated, and the streams that it goes to with what is convolved.
        """
        gated, streams = adds or (rows, rows)
        self._on.launch(
            "convolve_ngrams",
            (-(-self.n_columns // THREADS), n_rows),
            [rows, gated, self._taps, runs, self._on.states_of(self._index), streams],
            *(stride, stride - self.n_columns, self.n_columns, self._count * self._width),
            *(*self._sizes, int(adds is not None)),
        )


class StageNgrams:
    """What the host looks up for a stage, whose layers with n-grams are `of`, by index."""

    def __init__(self, of: dict[int, DeviceNgrams]) -> None:
        self._of = of

    def look_up(self, step: ForwardStep) -> tuple[dict[str, Array], list[Tensor]]:
        """Return what to upload for a step, and the last token ids of each span.

        Raises CheckpointError, LostShardError.
        """
        if not self._of:
            return {}, []
        (index, first), *_ = self._of.items()
        n_before = first.own.hashes.config.longest - 1
        texts = []
        for span in step.spans:
            state = step.kv.state(span.slot, index).at_end
            cell = state.cell if isinstance(state, DeviceState) else None
            before = None if cell is None else cell.last_ids
            if before is None:
                before = first.own.text(state.last_features(n_before))
            texts.append(torch.cat((before, step.token_ids[span.start : span.end])))
        found = {f"n-grams {index}": own.own.look_up(texts) for index, own in self._of.items()}
        found["ids"] = first.own.digits(step.token_ids, torch.empty(0))
        arrays = {name: rows.numpy() for name, rows in found.items()}
        return arrays, [text[-n_before:] for text in texts]

    def note(self, step: ForwardStep, ends: Sequence[Tensor]) -> None:
        """Note the last token ids of each span with the state behind it."""
        for span, ids in zip(step.spans, ends, strict=True) if ends else ():
            state = step.kv.state(span.slot, next(iter(self._of)))
            assert isinstance(state, DeviceState)
            assert state.cell is not None
            state.cell.last_ids = ids
