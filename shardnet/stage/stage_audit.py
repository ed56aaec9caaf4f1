"""Audits a loaded stage from within: its weights, what decides its bits, and whether they stay so.

Knows that one stage and the same rows give the same bits every time, where its arithmetic promises
that. Must not know wire, threads, or who asks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from shardnet.errors import CHECK_MACHINE, ChangedMemoryError, UsageError, WrongValuesError
from shardnet.model.kernels.codec import pack_rows, to_bytes, torch_dtype, unpack_rows
from shardnet.model.kernels.devices import capacity_error_for
from shardnet.model.kernels.library import KERNELS_VERSION, native_kernels
from shardnet.stage.stage_model import StageModel
from shardnet.types import ANY_ROWS, DType, WireDType

BITS: Final = 1
"""Counts up in a release that computes other bits than the one before for the same model: it does
not take over keys and values of the other, on disk or in a ring."""

TRIAL_ROWS: Final = 4
"""Rows that a stage computes again and again: they take little longer than one."""


class StageAudit:
    """Audits the stage `model` of a ring of `dtype`. The compute thread owns it, as it does that.

    Raises WrongValuesError from where something is found on: the stage is to be loaded anew.
    """

    def __init__(self, model: StageModel, dtype: DType) -> None:
        self.is_wrong = False
        """Whether something was found: then nothing of it is used again."""
        self._model = model
        self._wire = WireDType.own(dtype)
        self._n_rows = min(TRIAL_ROWS, model.context)
        self._hidden = None if model.first else _some_rows(model, self._n_rows, dtype)
        self._known: list[int] = []
        """Digests of what the rows were in the first trial, before, between and after layers."""

    @property
    def promises_bits(self) -> bool:
        """Whether the compiled library computes all of it, so that its bits depend on nothing.

        Layers that are read for every pass promise them too, but would be read for this alone.
        """
        return self._model.exact_rows >= ANY_ROWS and not self._model.streams

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that are looked at, each in its turn."""
        return self._model.digests.size_bytes if self._model.digests is not None else 0

    def look_at_memory(self) -> int:
        """Look at a piece of the weights and a block of keys and values; return their bytes.

        Raises ChangedMemoryError.
        """
        try:
            n_bytes = self._model.digests.look() if self._model.digests is not None else 0
            return n_bytes + self._model.kv.look()
        except ChangedMemoryError:
            self.is_wrong = True
            raise

    def compute(self, layer: int) -> tuple[bytes, bytes]:
        """Compute some rows as always; return those before and after a layer of the model.

        They are in the ring's dtype, which loses nothing; those before the model's first layer are
        b"": the same token ids are embedded everywhere. Raises WrongValuesError, which names the
        first layer at fault, if any of them are not what they were the first time; that is a
        ChangedMemoryError where weights have changed. CapacityError where no memory is left.
        """
        with capacity_error_for("no memory is left for an audit", remedy="lower --memory there"):
            states = self._model.trial(self._hidden, self._n_rows)
        digests = [xxh3_64_intdigest(to_bytes(state)) for state in states]
        if not self._known:
            self._known = digests
        for place, pair in enumerate(zip(digests, self._known, strict=True)):
            if pair[0] != pair[1]:
                self.is_wrong = True
                if self._model.digests is not None:
                    self._model.digests.look_at_all()  # they say better what it is
                raise self._unlike_before(place)
        at = layer - self._model.layers.start
        before, after = (bytes(pack_rows(state, self._wire)) for state in states[at : at + 2])
        return (b"" if not layer else before), after

    def _unlike_before(self, place: int) -> WrongValuesError:
        layers = self._model.layers
        where = f"layer {layers.start + place - 1}" if place else "the embedding"
        if place > len(layers):
            where = "the LM head"
        return WrongValuesError(
            f"{where} gave other bits for the same rows than before", remedy=CHECK_MACHINE
        )


def rows_after(model: StageModel, before: bytes, dtype: DType) -> bytes:
    """Compute what a stage of one layer makes of rows that `StageAudit.compute` has returned.

    Raises RemoteProtocolError if these are not rows of the model, UsageError where the bits could
    be others than elsewhere.
    """
    if model.exact_rows < ANY_ROWS:
        raise UsageError("the library does not compute all of this layer: its bits say nothing")
    wire, hidden = WireDType.own(dtype), None
    n_rows = min(TRIAL_ROWS, model.context)
    if before or not model.first:
        hidden = unpack_rows(before, wire, n_rows, model.width, model.device).to(model.dtype)
    return bytes(pack_rows(model.trial(hidden, n_rows)[1], wire))


def _some_rows(model: StageModel, n_rows: int, dtype: DType) -> Tensor:
    """Make rows [T, E] of about 1, rounded to the ring's dtype."""
    noise = torch.randn(n_rows, model.width, generator=torch.Generator().manual_seed(0))
    return noise.to(torch_dtype(dtype)).to(model.device, model.dtype)


def arithmetic_of(model: StageModel) -> str:
    """Return a digest of a stage's arithmetic, 64 hexadecimal digits."""
    choice, device = model.choice, model.device
    native = native_kernels() if device.type == "cpu" else None
    facts = [
        BITS,
        torch.__version__,
        choice.kernel.value,
        replace(choice, by_text="").name,  # whose bits are those of the library
        choice.dtype.value,
        choice.native_dtype.value,
        choice.kv_dtype.value,
        choice.exact_rows,
        choice.min_rows,
        native.isa.name if native is not None else "torch",
        KERNELS_VERSION,
        (native.has_pairs, native.has_tiles) if native is not None else None,
        torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
