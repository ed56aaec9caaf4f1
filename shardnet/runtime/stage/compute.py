"""The protocol between a stage and its compute, and computes that packages add beside torch's.

docs/extending.md shows how, with an example.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from shardnet.errors import ConfigurationError, ShardnetError
from shardnet.plugins import COMPUTES, installed, installed_names
from shardnet.sampling_params import TokenLogprobs
from shardnet.slot_operations import SlotOperation
from shardnet.types import LEAST_STATES, DType, MicroBatch, SequenceId, StepId, WireDType
from shardnet.wire.messages.extras import Drafts, StageExperts, StageTiming
from shardnet.wire.payloads.rows import RowBlock

if TYPE_CHECKING:
    from shardnet.checkpoint.checkpoint import Checkpoint
    from shardnet.model.sampling.sampler import Sampler
    from shardnet.runtime.stage.stage_order import StageOrder
    from shardnet.stage.moves.slot_moves import Moves


Buffer = bytes | bytearray | memoryview


class Activations(msgspec.Struct, frozen=True, kw_only=True):
    """The hidden states of a micro-batch: `rows x width`, encoded in the wire `dtype`.

    `routing` holds the routed experts of this stage's layers, for the sequences that asked for
    them, `blocks` their hidden states after its layers. `deep` is what later layers add to the rows
    of pictures.
    """

    payload: Buffer
    dtype: WireDType
    width: int
    routing: Sequence[StageExperts] = ()
    blocks: Sequence[RowBlock] = ()
    deep: Sequence[RowBlock] = ()


class ScoredToken(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of the prompt token at `position`, computed from the row before it."""

    sequence_id: SequenceId
    position: int
    logprobs: TokenLogprobs


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """The tail's result of a step: one token id per sampled row, and the requested outputs.

    `prompt_logprobs` and `blocks` are ordered by position within each sequence. `routing` holds the
    routed experts of this stage's layers. `drafts` are for sequences that asked for some.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]
    prompt_logprobs: Sequence[ScoredToken] = ()
    blocks: Sequence[RowBlock] = ()
    routing: Sequence[StageExperts] = ()
    drafts: Sequence[Drafts] = ()


class StageCompute(Protocol):
    """One stage's layers, KV cache and, on the tail, sampler. Called from the compute thread only.

    Calls come in data order: a step sees the KV cache as the calls before it left it.
    """

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """Give activations in `sent`, and accept them in `received`, from now on."""

    def operate(self, operation: SlotOperation) -> None:
        """Open or close a sequence, or free a slot."""

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Activations | Samples:
        """Run the stage's layers over the rows of `batch`.

        `activations` is None on the first stage, which embeds the token ids. The last stage
        returns Samples. Raises CapacityError if the KV cache is full, ShardnetError for inputs
        that do not fit the model.
        """

    def reset(self) -> None:
        """Forget all sequences and free all slots; keep the weights."""

    @property
    def used_blocks(self) -> int:
        """KV blocks that slots hold now. May be read from any thread."""


# Inputs and outputs of a stage, decoded. A stage forwards what it does not consume.


class StepArrived(msgspec.Struct, frozen=True, kw_only=True):
    """Rows to compute, received at `arrived_ns` (time.perf_counter_ns).

    `timings`, `routing` and `blocks` come from the stages before.
    """

    batch: MicroBatch
    activations: Activations | None
    timings: tuple[StageTiming, ...]
    arrived_ns: int
    routing: tuple[StageExperts, ...] = ()
    blocks: Sequence[RowBlock] = ()


class StepComputed(msgspec.Struct, frozen=True, kw_only=True):
    """A stage's result of one step; `timings`, `routing` and `blocks` are of all stages so far."""

    batch: MicroBatch
    result: Activations | Samples
    timings: tuple[StageTiming, ...]
    routing: tuple[StageExperts, ...] = ()
    blocks: Sequence[RowBlock] = ()


class StepFailed(msgspec.Struct, frozen=True, kw_only=True):
    """A step that a stage could not compute; forwarded to the head in place of its rows."""

    step: StepId
    error: ShardnetError


StepResult = Activations | Samples | ShardnetError
"""The result of one step, or the error that it failed with."""


@runtime_checkable
class AheadCompute(Protocol):
    """A StageCompute that looks tokens up in files, which are read sooner for steps that wait."""

    @property
    def reads_ahead(self) -> bool:
        """Whether it has such files."""

    def read_ahead(self, batch: MicroBatch) -> None:
        """Have files read what a step needs. On one thread, in the steps' order; never waits."""


@runtime_checkable
class PassCompute(Protocol):
    """A StageCompute that computes several steps in one pass, as layers from disk want it."""

    def compute_pass(self, steps: Sequence[StepArrived]) -> list[StepResult]:
        """Run the stage's layers once over the rows of consecutive steps.

        Returns for each step what `compute` would return or raise if called in this order.
        """


@runtime_checkable
class AnyThreadCompute(Protocol):
    """A StageCompute that the loop's thread may call too, while the compute thread is idle."""

    @property
    def on_any_thread(self) -> bool:
        """Whether that is so now: asked on the loop's thread."""


@runtime_checkable
class PartCompute(Protocol):
    """A StageCompute that another one of the same process may follow."""

    def hand_over(self, received: WireDType) -> None:
        """Give activations as they are in memory, in the ring's dtype; accept them in `received`.

        From now on, in place of what `use_wire` has said.
        """


StageInput = StepArrived | SlotOperation | StepFailed
StageOutput = StepComputed | SlotOperation | StepFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class StageJob:
    """A stage that a plug-in is to load; what `order` says of the model has been checked.

    `checkpoint` is open. `sampler` is the tail's, None on other stages. Weights and KV cache may
    take `memory_bytes`, of which another stage holds `held_bytes` until this one is in use.
    `progress` is to be called with (bytes done, bytes in all), each 30 s at
    the least; what it raises ends the loading.
    """

    order: StageOrder
    checkpoint: Checkpoint
    sampler: Sampler | None
    memory_bytes: int
    progress: Callable[[int, int], None]
    held_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PluggedStage:
    """A stage that a plug-in has loaded.

    `weight_bytes` is the memory of its weights, `room_blocks` how many KV blocks of 256 positions
    it has room for: the head books no more. Where layers keep a state it has room for
    `room_states` of them. `kernel` says to people what computes. Up to `exact_rows` rows in one
    step are computed with the same bits as each alone.
    """

    compute: StageCompute
    weight_bytes: int
    room_blocks: int
    kernel: str
    exact_rows: int = 1
    room_states: int = LEAST_STATES
    moves: Moves | None = None
    """What moves sequences in and out, None where nothing can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlugin:
    """Another compute. `description` is what people see as a node's device.

    `dtypes` are those it computes in without falling back to another, best first. `load` runs on
    the loading thread; it raises CapacityError where the stage or one context does not fit,
    UnsupportedModelError for a model that it cannot compute. `free_bytes` returns the free memory
    of the device, None where that is the machine's own.
    """

    name: str
    description: str
    dtypes: tuple[DType, ...]
    load: Callable[[StageJob], PluggedStage]
    free_bytes: Callable[[], int] | None = None


def installed_compute(name: str) -> ComputePlugin:
    """Return the plug-in that an installed package adds under `name`. Raises ConfigurationError."""
    found = installed(COMPUTES, name)
    if isinstance(found, ComputePlugin):
        return found
    raise ConfigurationError(
        f"{name!r} of {COMPUTES} should be a ComputePlugin, and is a {type(found).__name__}",
        remedy="uninstall the package that adds it, or tell its makers",
    )


def installed_computes() -> list[str]:
    """List the names of the plug-ins that installed packages add."""
    return installed_names(COMPUTES)
