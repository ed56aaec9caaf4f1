"""The loss of a narrower wire: a model's logits, computed exactly and with rounded activations.

Knows how to run a checkpoint layer by layer, so that one layer's memory is enough for a model of
any size, and how two sets of logits are compared. Runs on a low-priority thread, on the CPU. Must
not know nodes, plans or messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError, NumericalError
from shardnet.model.config.model_config import ModelConfig
from shardnet.runtime.loading.model_facts import ModelFacts
from shardnet.types import (
    DType,
    Epoch,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    WireDType,
)
from shardnet.wire.messages.plans import WireError

if TYPE_CHECKING:
    from torch import Tensor

    from shardnet.model.kernels.linear import KernelChoice
    from shardnet.model.shards.group import ShardGroup
    from shardnet.stage.stage_model import StageModel

N_ROWS = 64
"""Positions that are compared, from the first one on: the first are where magnitudes are odd."""

TEXT = """A long line of cottages stood along the river, and in each of them somebody was
awake. The baker had lit his oven before three; his neighbour, who repaired clocks, said that he
could tell the hour by the smell of the bread. "When the wind comes from the east," he would add,
"I am always ten minutes late." Nobody believed him, but everybody bought 2 loaves on Saturdays."""
"""The text of the rows if the checkpoint has a tokenizer."""

_CODEC_REPEATS = 20

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes); an error that it raises ends the measurement."""


def measure_wire_loss(
    facts: ModelFacts,
    dtype: DType,
    borders: Mapping[int, WireDType],
    progress: Progress,
    gathers: Mapping[int, tuple[WireDType, tuple[int, ...]]] = MappingProxyType({}),
) -> WireError:
    """Compare the model in `dtype` with itself when rows are rounded before the layers `borders`.

    Each has the dtype of its wire. In each of the layers `gathers` parts are rounded, too, as they
    travel in a dtype between nodes with such weights. Takes the memory of one layer, or of the
    embedding or LM head with one, twice where parts are rounded, and reads the whole checkpoint as
    often.

    Raises CheckpointError when the checkpoint is not here or not that of `facts`, NumericalError
    for logits that are not finite or activations that do not fit the wire, and what `progress`
    raises.
    """
    import torch

    from shardnet.model.kernels.linear import probe

    checkpoint = Checkpoint.open(facts.path, ignore_unknown_config=True)
    with torch.inference_mode():
        if checkpoint.model_id != facts.model_id:
            raise CheckpointError(
                f"{facts.path} has changed since the plan was made", remedy="ask again"
            )
        choice = probe(torch.device("cpu"), dtype, checkpoint.config.checkpoint_dtype)
        rows = _rows(facts.path, checkpoint.config)
        exact, rounded = _both(checkpoint, choice, rows, borders, gathers, progress)
        return compare_logits(exact, rounded)


def compare_logits(exact: Tensor, rounded: Tensor) -> WireError:
    """Compare two sets of float32 logits [R, V].

    The error of a row whose exact logits are all equal counts as it is. Raises NumericalError
    unless all logits are finite.
    """
    for logits, which in ((exact, "without"), (rounded, "with")):
        if not bool(logits.isfinite().all()):
            raise NumericalError(f"the model's logits are not finite {which} the narrower wire")
    squares, largest, divergence = 0.0, 0.0, 0.0
    for row, other in zip(exact.double(), rounded.double(), strict=True):
        spread = float(row.std())
        error = (other - row) / (spread if spread > 0 else 1.0)
        squares += float(error.square().mean())
        largest = max(largest, float(error.abs().max()))
        expected, found = row.log_softmax(-1), other.log_softmax(-1)
        divergence += max(0.0, float((expected.exp() * (expected - found)).sum()))
    n_rows = exact.shape[0]
    return WireError(
        n_rows=n_rows,
        n_changed=int((exact.argmax(-1) != rounded.argmax(-1)).sum()),
        max_error=largest,
        rms_error=(squares / n_rows) ** 0.5,
        kl=divergence / n_rows,
    )


def measure_rounding_s(width: int, dtype: DType, wire_dtype: WireDType) -> float:
    """Measure the extra seconds of a hop of one row for packing and unpacking a narrower wire.

    The best of several tries, compared with the wire that rounds nothing.
    """
    import torch

    from shardnet.model.kernels.codec import pack_rows, torch_dtype, unpack_rows

    cpu, row = torch.device("cpu"), torch.ones(1, width, dtype=torch_dtype(dtype))

    def hop_s(wire: WireDType) -> float:
        best_s = float("inf")
        for _ in range(_CODEC_REPEATS):
            began = time.perf_counter()
            unpack_rows(pack_rows(row, wire), wire, 1, width, cpu).to(row.dtype)
            best_s = min(best_s, time.perf_counter() - began)
        return best_s

    return hop_s(wire_dtype) - hop_s(WireDType.own(dtype))


def _both(
    checkpoint: Checkpoint,
    choice: KernelChoice,
    rows: list[int],
    borders: Mapping[int, WireDType],
    gathers: Mapping[int, tuple[WireDType, tuple[int, ...]]],
    progress: Progress,
) -> tuple[Tensor, Tensor]:
    """Return the logits [R, V], exact and with rounding at the borders and of parts."""
    from shardnet.model.kernels.codec import pack_rows, unpack_rows
    from shardnet.runtime.shards.spanning_stage import RoundedGroup

    read = _BytesRead(checkpoint, progress, 2 if gathers else 1)
    exact: Tensor | None = None
    rounded: Tensor | None = None
    for layer in range(checkpoint.config.n_layers):
        if layer in borders:
            assert exact is not None
            parted, wire_dtype = exact if rounded is None else rounded, borders[layer]
            payload = pack_rows(parted, wire_dtype)
            wide = unpack_rows(payload, wire_dtype, len(rows), parted.shape[1], parted.device)
            rounded = wide.to(parted.dtype)
        stage = _load_layer(checkpoint, choice, layer, len(rows), read.progress)
        before = exact
        exact = stage.forward(_batch(rows, slot=0), exact)
        if layer in gathers:
            group = RoundedGroup(*gathers[layer])
            del stage  # before the next one is loaded
            stage = _load_layer(checkpoint, choice, layer, len(rows), read.progress, group)
            rounded = before if rounded is None else rounded
            rounded = stage.forward(_batch(rows, slot=1), rounded)
        elif rounded is not None:
            rounded = stage.forward(_batch(rows, slot=1), rounded)
        del stage
    assert exact is not None
    return exact, exact if rounded is None else rounded


class _BytesRead:
    """Adds up the progress of the layers."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress, n_times: int) -> None:
        self._progress = progress
        n_bytes = sum(tensor.size_bytes for tensor in checkpoint.tensors.values())
        self._total_bytes = n_bytes * n_times
        self._before_bytes = 0

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Take one layer's progress. A tied table that is read twice counts up to the total."""
        done = min(self._before_bytes + done_bytes, self._total_bytes)
        if done_bytes == total_bytes:
            self._before_bytes += total_bytes
        self._progress(done, self._total_bytes)


def _load_layer(
    checkpoint: Checkpoint,
    choice: KernelChoice,
    layer: int,
    n_rows: int,
    progress: Progress,
    group: ShardGroup | None = None,
) -> StageModel:
    import torch

    from shardnet.stage.load import load_stage

    return load_stage(
        checkpoint,
        LayerRange(layer, layer + 1),
        choice=replace(choice, exact_rows=1),  # nothing relies on exact rows here
        device=torch.device("cpu"),
        room_blocks=2,
        progress=progress,
        context=n_rows,
        group=group,
    )


def _batch(rows: list[int], *, slot: int) -> MicroBatch:
    """Make the rows a prompt of their own, all of them sampled."""
    group = RowGroup(
        sequence_id=SequenceId(slot),
        slot=SlotId(slot),
        position=0,
        n_rows=len(rows),
        n_sampled=len(rows),
    )
    return MicroBatch(epoch=Epoch(1), step=StepId(1), groups=(group,), token_ids=rows)


def _rows(path: Path, config: ModelConfig) -> list[int]:
    """The token ids of TEXT, or where there is no tokenizer some that are spread over all."""
    from shardnet.tokenizers.tokenizer import Tokenizer

    n_rows = min(N_ROWS, config.max_positions)
    tokenizer = Tokenizer.load_optional(path)
    if tokenizer is None:
        return [(place * 7919 + 13) % config.vocab_size for place in range(n_rows)]
    with tokenizer:
        ids = tokenizer.encode(TEXT)
    return [ids[place % len(ids)] for place in range(n_rows)]
