"""A stage of a model that transformers' own modules compute, with a cache for each slot.

Knows how it is loaded, and what it has room for. Has what TorchCompute asks of a StageModel. Rows
of several sequences are computed one sequence after the other. Must not know wire or sampling.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CapacityError, RemoteProtocolError, UnsupportedModelError
from shardnet.model.cache.kv_cache import missing_rows
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.model.kernels.devices import capacity_error_for, is_out_of_memory
from shardnet.model.modules.cut_model import CutModel
from shardnet.model.modules.meta_model import MODULE_ERRORS, one_line
from shardnet.model.modules.slot_cache import LayerStates, SlotCache
from shardnet.output_params import RoutingShape
from shardnet.stage.runs import Run
from shardnet.stage.stage_model import keep_state
from shardnet.stage.tensor_reader import Progress, TensorReader
from shardnet.types import LayerRange, SlotId, StateId, blocks_for

_TRIAL_ROWS: Final = 8
_FIRST_ROWS: Final = 5
"""Of the rows of a trial, those that the first of two calls has."""
_CLOSE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""How far the outputs of two calls may lie from those of one, as a share of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRoom:
    """What a stage has room for: positions of one sequence, and KV blocks of 256 positions."""

    context: int
    room_blocks: int


class ModuleSlots:
    """The caches of a stage's slots."""

    def __init__(self, model: CutModel, room: ModuleRoom) -> None:
        self._model = model
        self._room = room
        self._slots: dict[SlotId, SlotCache] = {}
        self._kept: dict[StateId, tuple[int, LayerStates]] = {}

    @property
    def blocks_used(self) -> int:
        """KV blocks that slots hold."""
        return sum(blocks_for(cache.length) for cache in [*self._slots.values()])

    def clear(self) -> None:
        """Free all slots."""
        self._slots.clear()
        self._kept.clear()

    def keep_state(self, slot: SlotId, n_positions: int, state: StateId) -> None:
        """Keep a copy of the slot's states as `state`; see KvCache."""
        held = self._slots.get(slot)
        if held is not None and held.length == n_positions:
            self._kept[state] = n_positions, held.states()

    def drop_states(self, states: Sequence[StateId]) -> None:
        """Give kept states back."""
        for state in states:
            self._kept.pop(state, None)

    def rest(self, slot: SlotId) -> None:
        """Keep what the slot has: its states are what it goes on from without a kept one."""

    def copy(
        self, source: SlotId, slot: SlotId, n_positions: int, state: StateId | None = None
    ) -> None:
        """Copy the first positions of `source` to `slot`, with what was kept as `state` if any.

        Raises as `trim`, CapacityError where that is not here.
        """
        held = self._slots.get(source)
        if held is None or not n_positions:
            self._slots.pop(slot, None)
            return
        if state is None:
            _check_cut(held, source, n_positions)
            self._slots[slot] = held.copied(n_positions)
            return
        end, states = self._kept.get(state, (0, {}))
        if end != n_positions or held.length < n_positions:
            raise missing_rows(
                f"the state {state} after {n_positions} positions is not here any more"
            )
        copied = held if source == slot else held.copied(n_positions)
        copied.crop(n_positions)
        copied.put(states)
        self._slots[slot] = copied

    def trim(self, slot: SlotId, n_positions: int) -> None:
        """Keep the first positions of a slot.

        Raises RemoteProtocolError where a state would have to be rewound.
        """
        held = self._slots.get(slot)
        if held is None or n_positions >= held.length:
            return
        if n_positions == 0:
            del self._slots[slot]
            return
        _check_cut(held, slot, n_positions)
        held.crop(n_positions)

    def at(self, slot: SlotId, position: int, n_rows: int) -> SlotCache:
        """Return a slot that holds `position` positions and has room for `n_rows` more.

        Raises CapacityError without room, RemoteProtocolError where positions are missing.
        """
        end = position + n_rows
        if end > self._room.context:
            raise CapacityError(f"position {end} is beyond the context of {self._room.context}")
        self.trim(slot, position)
        held = self._slots.get(slot)
        length = held.length if held is not None else 0
        if length != position:
            raise RemoteProtocolError(
                f"slot {slot} holds {length} positions, and rows came for position {position}"
            )
        if self.blocks_used + blocks_for(end) - blocks_for(length) > self._room.room_blocks:
            raise CapacityError(f"the KV cache is full: {self._room.room_blocks} blocks are in use")
        if held is None:
            held = self._slots[slot] = self._model.new_slot()
        return held

    def drop(self, slot: SlotId) -> None:
        """Free a slot whose layers may hold different positions: a step failed in it."""
        self._slots.pop(slot, None)


def _check_cut(held: SlotCache, slot: SlotId, n_positions: int) -> None:
    """Raise RemoteProtocolError where a state would have to be rewound."""
    if n_positions < held.length and not held.can_crop:
        raise RemoteProtocolError(
            f"slot {slot} should be cut to {n_positions} of its {held.length} positions, and "
            "its state cannot be rewound"
        )


class ModuleStage:
    """A loaded stage. Not thread-safe: the compute thread owns it."""

    routing: RoutingShape | None = None
    has_mtp = False
    streams = False
    group = None
    is_lost = False

    def __init__(
        self,
        model: CutModel,
        checkpoint: Checkpoint,
        layers: LayerRange,
        dtype: torch.dtype,
        device: torch.device,
        room: ModuleRoom,
    ) -> None:
        self._model = model
        self.layers = self.caching = layers
        self.dtype = dtype
        self.device = device
        self.width = checkpoint.config.row_width
        self.vocab_size = checkpoint.config.vocab_size
        self.kv = ModuleSlots(model, room)
        self.takes_chunks = self._try()
        """Whether rows may follow a slot's first ones several at a time."""

    @torch.inference_mode()
    def run_alone(self, run: Run) -> Tensor:
        """Run the rows of a micro-batch through the layers: [T, width], on the last stage too.

        Raises CapacityError for a position beyond the context or if the KV cache is full,
        UsageError for a token id outside the vocabulary, UnsupportedModelError for a model whose
        modules are not called as they were when it was loaded.
        """
        batch = run.batch
        batch.check_token_ids(self.vocab_size)
        own = range(self.layers.start + (self.layers.start > 0), self.layers.end + 1)
        kept = run.kept_states & {*own}
        outputs, start = [], 0
        for group in batch.groups:
            slot = self.kv.at(group.slot, group.position, group.n_rows)
            end = start + group.n_rows
            hidden = None if run.hidden is None else run.hidden[start:end]
            try:
                outputs.append(self._run(batch.token_ids[start:end], hidden, slot, kept))
            except BaseException:
                self.kv.drop(group.slot)
                raise
            start = end
        if not outputs:
            return torch.empty(0, self.width, dtype=self.dtype, device=self.device)
        for number in kept:
            keep_state(run, number, torch.cat([states[number] for states in outputs]))
        return torch.cat([states[self.layers.end] for states in outputs])

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Apply final norm and LM head, on the last stage: [R, width] to float32 [R, V].

        Row by row: torch's products of several would depend on how many there are.
        """
        if rows.shape[0] == 0:
            return torch.empty(0, self.vocab_size, device=self.device)
        return torch.cat([self._model.logits(row[None]) for row in rows])

    @torch.inference_mode()
    def normed(self, rows: Tensor) -> Tensor:
        """Apply the final norm, on the last stage: [R, width] to [R, E]."""
        return self._model.normed(rows)

    def _run(
        self,
        token_ids: Sequence[int],
        hidden: Tensor | None,
        slot: SlotCache,
        kept: Collection[int],
    ) -> dict[int, Tensor]:
        """Run rows of a sequence: in one call, or one by one where layers cannot continue."""
        if slot.length == 0 or self.takes_chunks or len(token_ids) == 1:
            return self._model.run(token_ids, hidden, slot, kept)
        steps = [
            self._model.run(
                [token_id], None if hidden is None else hidden[row : row + 1], slot, kept
            )
            for row, token_id in enumerate(token_ids)
        ]
        return {number: torch.cat([states[number] for states in steps]) for number in steps[0]}

    @torch.inference_mode()
    def _try(self) -> bool:
        """Run a few rows at once and in two calls; return whether the second call gives the same.

        Raises UnsupportedModelError where no numbers come out, or rows look at those behind them.
        """
        token_ids = [row % self.vocab_size for row in range(_TRIAL_ROWS)]
        hidden = None
        if self.layers.start > 0:
            chance = torch.Generator().manual_seed(0)
            hidden = torch.randn(_TRIAL_ROWS, self.width, generator=chance)
            hidden = hidden.to(self.device, self.dtype)

        def run(rows: slice, slot: SlotCache) -> Tensor:
            given = None if hidden is None else hidden[rows]
            return self._model.run(token_ids[rows], given, slot)[self.layers.end].float()

        try:
            whole, slot = run(slice(None), self._model.new_slot()), self._model.new_slot()
        except MODULE_ERRORS as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            raise _cannot_be_cut(one_line(error)) from error
        if not bool(whole.isfinite().all()):
            raise _cannot_be_cut("they need more than the hidden state and the token ids")
        first, rest = slice(0, _FIRST_ROWS), slice(_FIRST_ROWS, None)
        if not self._is_close(run(first, slot), whole[first]):
            raise _cannot_be_cut("rows look at those behind them")
        return self._is_close(run(rest, slot), whole[rest])

    def _is_close(self, rows: Tensor, wanted: Tensor) -> bool:
        return bool((rows - wanted).norm() < _CLOSE[self.dtype] * wanted.norm())


def _cannot_be_cut(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the layers of this model cannot be computed here: {why}",
        remedy="use a checkpoint of another model",
    )


@torch.inference_mode()
def load_module_stage(
    checkpoint: Checkpoint,
    layers: LayerRange,
    *,
    dtype: torch.dtype,
    hidden_dtype: torch.dtype | None,
    device: torch.device,
    room: ModuleRoom,
    progress: Progress,
) -> ModuleStage:
    """Load `layers` onto `device`, with the embedding in the first stage and the head in the last.

    What layers return is rounded to `hidden_dtype`, None for `dtype`. `progress` is called with
    (bytes done, bytes in total); an exception it raises aborts loading.

    Raises CheckpointError for tensors that do not match the model, UnsupportedModelError for layers
    that cannot be cut from the others, CapacityError if memory runs out.
    """
    outline = checkpoint.config.outline
    assert outline is not None, "others are loaded by load_stage"
    shared = outline.shared_kv_from
    if shared is not None and shared < layers.start:
        raise UnsupportedModelError(
            f"layers {shared} to {checkpoint.config.n_layers - 1} of this {outline.model_type} "
            f"model read the keys and values of layers {shared} and up, so one node needs them all",
            remedy=f"give the last node at least the layers from {shared} on with --layers",
        )
    if (looped := outline.together(layers)) is not None:
        raise UnsupportedModelError(
            f"{looped.words} of this {outline.model_type} model run several times, so one node "
            "needs them all",
            remedy="give one node at least these layers with --layers",
        )
    with capacity_error_for(
        f"{device} has no memory for {layers.words}", remedy="give the node fewer layers"
    ):
        model = CutModel(outline, layers, dtype, device, hidden_dtype)
        tensors = stage_tensors(checkpoint.config, layers)
        reader = TensorReader(checkpoint, tensors, dtype, progress)
        model.load([*tensors.all], lambda name, own: reader.own(name, device, own))
        return ModuleStage(model, checkpoint, layers, dtype, device, room)
