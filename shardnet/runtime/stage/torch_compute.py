"""A stage's compute in torch: layers and KV cache of a StageModel, and on the last stage the tail.

Knows how to go from wire values to tensors and back. Must not know links, rings or threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, assert_never

import torch
from msgspec.structs import astuple, replace

from shardnet.errors import (
    CapacityError,
    RemoteProtocolError,
    ShardnetError,
    UsageError,
    WrongValuesError,
    without_frames,
)
from shardnet.model.cache.picture_rows import PictureRows
from shardnet.model.kernels.codec import pack_rows, torch_dtype, unpack_rows
from shardnet.model.kernels.devices import is_out_of_memory
from shardnet.model.sampling.sampler import Sampler
from shardnet.runtime.stage.compute import Activations, Samples, StepArrived, StepResult
from shardnet.runtime.stage.mtp_drafts import MtpDrafts
from shardnet.runtime.stage.picture_inputs import (
    blocks_for_later,
    rows_of_blocks,
    rows_of_store,
)
from shardnet.runtime.stage.picture_store import PictureStore
from shardnet.runtime.stage.position_choices import blocks_of_choice, choice_of_blocks
from shardnet.runtime.stage.routing import routing_table
from shardnet.runtime.stage.row_outputs import SamplingStage, layer_blocks
from shardnet.slot_operations import (
    CloseSequence,
    DropStates,
    FreeSlot,
    KeepState,
    OpenSequence,
    SlotOperation,
)
from shardnet.stage.file_table import RecentTokens
from shardnet.stage.moves.slot_moves import SlotMoves
from shardnet.stage.prefixes.stage_prefixes import StagePrefixes
from shardnet.stage.runs import Run
from shardnet.stage.stage_model import StageModel
from shardnet.types import (
    BLOCK_POSITIONS,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StateId,
    WireDType,
)
from shardnet.wire.messages.extras import StageExperts
from shardnet.wire.payloads.rows import RowBlock

if TYPE_CHECKING:  # which imports transformers
    from shardnet.model.vision.picture import PictureEncoder
    from shardnet.stage.module_stage import ModuleStage


class HeldActivations(Activations, frozen=True, kw_only=True):
    """Activations [T, E] that stay on their device: they never leave the process.

    They are in `dtype`, and the payload is empty.
    """

    hidden: torch.Tensor


class TorchCompute:
    """StageCompute over a loaded StageModel. `sampler` is None but on the tail.

    Activations travel in the wire dtype, and are rounded to it at the stage's border where it is
    not the one that the stage computes in.
    """

    def __init__(
        self,
        model: StageModel | ModuleStage,
        sampler: Sampler | None,
        wire_dtype: WireDType,
        prefixes: StagePrefixes | None = None,
    ) -> None:
        self._model = model
        self.prefixes = prefixes
        """What this stage keeps on disk, None for nothing."""
        self._own = self._received = wire_dtype
        self._sent: WireDType | None = wire_dtype
        self.pictures: PictureStore | None = None
        """Where the first stage finds the rows of pictures."""
        self.given: Sequence[RowBlock] | None = None
        """What another shard of a first stage says of pictures in the next step, None for none."""
        self._owners: dict[SlotId, OpenSequence] = {}
        self._unopened: dict[SequenceId, CapacityError] = {}
        """Sequences for whose beginning there was no memory: their steps fail."""
        ngrams = model.config.ngrams if isinstance(model, StageModel) else None
        self._recent = RecentTokens(ngrams.longest - 1 if ngrams is not None else 0)
        self._tail: SamplingStage | None = None
        if sampler is not None:
            drafts = None
            if isinstance(model, StageModel) and model.has_mtp:
                drafts = MtpDrafts(model, sampler)
            self._tail = SamplingStage(model, sampler, self._owners, drafts)
            if isinstance(model, StageModel):
                self._tail.best = model.best
        self.moves: SlotMoves | None = None
        """What sequences have in other stages, on its way here, and from here; None for nothing."""
        if isinstance(model, StageModel):
            self.moves = SlotMoves(model.kv, model.caching, self._owners, model.own_heads)

    @property
    def used_blocks(self) -> int:
        """KV blocks that slots hold now; see StageCompute."""
        return self._model.kv.blocks_used

    @property
    def on_any_thread(self) -> bool:
        """See AnyThreadCompute. Not with several threads: each caller's would be others."""
        model = self._model
        if not isinstance(model, StageModel):
            return False  # a step of these is never short
        is_plain = model.device.type == "cpu" and not model.streams and model.group is None
        is_plain = is_plain and not model.choice.by_text  # one thread uses a device
        is_plain = is_plain and not model.tables  # which may wait for a disk
        return is_plain and torch.get_num_threads() == 1

    @property
    def reads_ahead(self) -> bool:
        """Whether something is looked up in files for each token."""
        return isinstance(self._model, StageModel) and bool(self._model.tables)

    def read_ahead(self, batch: MicroBatch) -> None:
        """Have files read what a step will need; see AheadCompute."""
        assert isinstance(self._model, StageModel)
        texts = [*self._recent.texts(batch)]
        for table in self._model.tables:
            table.read_ahead(texts)

    @property
    def is_lost(self) -> bool:
        """Whether a shard of the stage is lost, so that it cannot compute any more."""
        return self._model.is_lost

    @property
    def encoder(self) -> PictureEncoder | None:
        """The tower of the first stage, None without one."""
        return self._model.encoder if isinstance(self._model, StageModel) else None

    def use_wire(self, sent: WireDType, received: WireDType) -> None:
        """Give activations in `sent` from now on, and take none but those in `received`."""
        self._sent, self._received = sent, received

    def hand_over(self, received: WireDType) -> None:
        """Give activations as tensors from now on; see PartCompute."""
        self._sent, self._received = None, received

    def operate(self, operation: SlotOperation) -> None:
        """Open or close a sequence, or free a slot; see StageCompute.

        What is said of a slot that another sequence owns is ignored: its opening was lost with a
        ring. A sequence for whose beginning no memory is left fails with its first step.
        """
        try:
            try:
                self._operate(operation)
            except (RuntimeError, MemoryError) as error:
                raise self._named("the beginning of a sequence", error) from None
        except CapacityError as error:
            if isinstance(operation, OpenSequence):
                self._owners.pop(operation.slot, None)
                self._keep(operation.slot, 0, None)
                self._unopened[operation.sequence_id] = without_frames(error)

    def _operate(self, operation: SlotOperation) -> None:
        match operation:
            case OpenSequence(is_restored=True):
                self._restore(operation)
                self._owners[operation.slot] = operation
            case OpenSequence(slot=slot, n_kept=n_kept, source=source, state=state):
                self._keep(slot, n_kept, source, state)
                self._owners[slot] = operation
            case CloseSequence(sequence_id=sequence_id, slot=slot, n_kept=n_kept):
                self._unopened.pop(sequence_id, None)
                owner = self._owners.get(slot)
                if owner is not None and owner.sequence_id == sequence_id:
                    del self._owners[slot]
                    self._keep(slot, n_kept, None)
                    self._model.kv.rest(slot)
                    if self.prefixes is not None and operation.stored:
                        n_blocks = n_kept // BLOCK_POSITIONS
                        wanted = dict(map(astuple, operation.stored_states))
                        states = {n: state for n, state in wanted.items() if n <= n_blocks}
                        self.prefixes.save(slot, operation.stored[:n_blocks], states)
            case FreeSlot(slot=slot):
                if slot not in self._owners:
                    self._keep(slot, 0, None)
            case KeepState(slot=slot, n_positions=n_positions, state=state):
                self._model.kv.keep_state(slot, n_positions, state)
            case DropStates(states=states):
                self._model.kv.drop_states(states)
            case _:
                assert_never(operation)

    def compute(self, batch: MicroBatch, activations: Activations | None) -> Activations | Samples:
        """Run the layers; see StageCompute.

        Raises RemoteProtocolError for rows of no owner, CapacityError where no memory is left.
        """
        try:
            run = self._prepare(batch, activations)
            return self._finish(run, self._model.run_alone(run))
        except (RuntimeError, MemoryError) as error:
            raise self._named(f"step {batch.step}", error) from None

    def _named(self, what: str, error: RuntimeError | MemoryError) -> Exception:
        """Return CapacityError where `error` is for lack of memory, else `error` itself."""
        if not is_out_of_memory(error):
            return error
        layers = self._model.layers
        return CapacityError(
            f"no memory is left for {what} on the node with layers {layers.start}-{layers.end}",
            remedy="start that node with less --memory, or end other programs there",
        )

    def _prepare(self, batch: MicroBatch, activations: Activations | None) -> Run:
        """Hold rows against their owners, and turn what came with them into tensors."""
        for group in batch.groups:
            owner = self._owners.get(group.slot)
            if group.sequence_id in self._unopened:
                raise self._unopened[group.sequence_id]
            if owner is None or owner.sequence_id != group.sequence_id:
                raise RemoteProtocolError(
                    f"step {batch.step} has rows of sequence {group.sequence_id} in slot "
                    f"{group.slot}, which that sequence does not own"
                )
        owners = [self._owners[group.slot] for group in batch.groups]
        kept = (each.outputs.hidden_layers + each.draft_layers for each in owners)
        return Run(
            batch=batch,
            hidden=self._hidden(batch, activations),
            experts={} if any(each.outputs.routing for each in owners) else None,
            kept_states=frozenset(chain.from_iterable(kept)),
            adapters=tuple(each.adapters for each in owners),
            pictures=self._picture_rows(batch, activations),
            choices=self._choices(batch, activations),
        )

    def _choices(
        self, batch: MicroBatch, activations: Activations | None
    ) -> list[torch.Tensor | None]:
        """Return the positions that the layer before this stage has chosen, if it needs them."""
        model, layer = self._model, self._model.layers.start
        if activations is None or not isinstance(model, StageModel):
            return []
        if not model.config.takes_choice(layer):
            return []
        return [choice_of_blocks(batch, activations.deep, model.config, layer, model.device)]

    @property
    def _hands_choice_on(self) -> bool:
        """Whether the layer behind this stage takes the choice of one before it."""
        model = self._model
        return isinstance(model, StageModel) and model.config.takes_choice(model.layers.end)

    def _picture_rows(
        self, batch: MicroBatch, activations: Activations | None
    ) -> PictureRows | None:
        """Return what the rows have of pictures, None for nothing."""
        pictures = [self._owners[group.slot].pictures for group in batch.groups]
        model = self._model
        if not any(pictures) or not isinstance(model, StageModel):
            return None
        has_axes, device = model.has_position_axes, model.device
        given = self.given if activations is None else activations.deep
        if given is None:
            return rows_of_store(batch, pictures, self.pictures, has_axes=has_axes, device=device)
        return rows_of_blocks(
            batch,
            pictures,
            given,
            width=model.config.hidden_size,
            has_axes=has_axes,
            device=device,
            embeds=activations is None,
        )

    def shared(self, batch: MicroBatch) -> Sequence[RowBlock]:
        """Return what the other shards of a first stage need to know of a step's pictures."""
        owned = (self._owners.get(group.slot) for group in batch.groups)
        if not any(owner is not None and owner.pictures for owner in owned):
            return ()
        return blocks_for_later(batch, self._picture_rows(batch, None), 0, embeds=True)

    def _finish(self, run: Run, output: torch.Tensor) -> Activations | Samples:
        """Turn what the layers gave into what leaves the stage."""
        batch = run.batch
        routing: tuple[StageExperts, ...] = ()
        if run.experts is not None:
            owners = self._owners
            asking = [g.sequence_id for g in batch.groups if owners[g.slot].outputs.routing]
            routing = tuple(self._routing(batch, asking, run.experts))
        blocks = layer_blocks(batch, self._owners, run.states) if run.states else []
        deep: Sequence[RowBlock] = ()
        if run.pictures is not None:
            deep = blocks_for_later(batch, run.pictures, self._model.layers.end)
        if self._tail is None and self._hands_choice_on:
            deep = [*deep, *blocks_of_choice(batch, run.choices[-1])]
        if self._tail is not None:
            try:
                answer = self._tail.answer(batch, output)
            except WrongValuesError as error:
                if error.sequence is None:
                    sampled = [group.n_sampled for group in batch.groups]
                    error.sequence = _owner(batch.groups, error.rows[0], sampled)
                raise
            return replace(answer, routing=routing, blocks=[*blocks, *answer.blocks])
        if self._sent is None:
            return self._held(output, routing, blocks, deep)
        payload = pack_rows(output, self._sent)
        return Activations(
            payload=payload,
            dtype=self._sent,
            width=self._model.width,
            routing=routing,
            blocks=blocks,
            deep=deep,
        )

    def _held(
        self,
        output: torch.Tensor,
        routing: tuple[StageExperts, ...],
        blocks: Sequence[RowBlock],
        deep: Sequence[RowBlock],
    ) -> HeldActivations:
        """Round what the layers gave to the ring's dtype, and leave it where it is."""
        plain = self._own.plain
        assert plain is not None, "a ring's own dtype is plain"
        hidden = output.to(torch_dtype(plain))
        if hidden.is_cuda:
            hidden = hidden.clone()  # the next replay of a graph writes to the same memory
        return HeldActivations(
            payload=b"",
            dtype=self._own,
            width=self._model.width,
            hidden=hidden,
            routing=routing,
            blocks=blocks,
            deep=deep,
        )

    def reset(self) -> None:
        """Forget all sequences and free all slots; keep the weights."""
        self._model.kv.clear()
        self._owners.clear()
        self._unopened.clear()
        if self.prefixes is not None:
            self.prefixes.clear()
        if self._tail is not None:
            self._tail.clear()

    def _routing(
        self, batch: MicroBatch, asking: Sequence[SequenceId], experts: Mapping[int, torch.Tensor]
    ) -> Sequence[StageExperts]:
        """Tell of the stage's layers. Raises UsageError for a model without experts."""
        shape = self._model.routing
        if shape is None:
            raise UsageError("the model has no experts: ask without routing")
        chosen = {index: ids.cpu().numpy() for index, ids in experts.items()}
        return routing_table(batch, asking, self._model.layers, shape.top_k, chosen)

    def _keep(
        self, slot: SlotId, n_positions: int, source: SlotId | None, state: StateId | None = None
    ) -> None:
        """Keep the first positions of the slot, its own or copied from `source`, and no others.

        Its states become what was kept as `state`, if any.
        """
        if source is not None or state is not None:
            self._model.kv.copy(slot if source is None else source, slot, n_positions, state)
        self._model.kv.trim(slot, n_positions)
        if self._tail is not None:
            self._tail.keep(slot, n_positions, source)

    def _restore(self, opened: OpenSequence) -> None:
        """Let the slot of a sequence hold what was moved or read from disk for it, and no other."""
        if self.moves is not None and self.moves.has(opened.sequence_id):
            token_ids = self.moves.adopt(opened.sequence_id, opened.slot, opened.n_kept)
        elif self.prefixes is not None:
            token_ids = self.prefixes.adopt(opened.sequence_id, opened.slot, opened.n_kept)
        else:
            raise RemoteProtocolError(
                f"sequence {opened.sequence_id} should begin with a prefix from disk, and none are "
                "kept here, nor was it moved"
            )
        if self._tail is not None:
            self._tail.keep(opened.slot, 0, None)
            self._tail.restore(opened.slot, token_ids)

    def _hidden(self, batch: MicroBatch, activations: Activations | None) -> torch.Tensor | None:
        """Turn rows into a tensor. Raises WrongValuesError for what the stage before got wrong."""
        if activations is None:
            return None
        if activations.width != self._model.width:
            raise WrongValuesError.received(
                f"step {batch.step} came {activations.width} wide, the model is {self._model.width}"
            )
        if activations.dtype is not self._received:
            raise WrongValuesError.received(
                f"step {batch.step} came in {activations.dtype.value}, this ring's wire is "
                f"{self._received.value} here"
            )
        if isinstance(activations, HeldActivations):
            return activations.hidden.to(self._model.device, self._model.dtype)
        try:
            hidden = unpack_rows(
                activations.payload,
                activations.dtype,
                batch.n_rows,
                activations.width,
                self._model.device,
            )
        except RemoteProtocolError as error:
            raise WrongValuesError.received(f"step {batch.step}: {error.message}") from None
        if not math.isfinite(hidden.sum(dtype=torch.float32)):
            wrong = hidden.sum(1, dtype=torch.float32).isfinite().logical_not()
            raise WrongValuesError.received(
                f"step {batch.step} came with values that are no number",
                _owner(batch.groups, int(wrong.int().argmax()), [g.n_rows for g in batch.groups]),
            )
        return hidden.to(self._model.dtype)


def _owner(groups: Sequence[RowGroup], row: int, n_rows: Sequence[int]) -> SequenceId:
    """Return the sequence of a row, where each group has so many."""
    ends = accumulate(n_rows)
    return next(group.sequence_id for group, end in zip(groups, ends, strict=True) if row < end)


class StreamingCompute(TorchCompute):
    """The same where layers are streamed: each serves all rows that wait, once read."""

    def compute_pass(self, steps: Sequence[StepArrived]) -> list[StepResult]:
        """Run the layers over the rows of several steps; see PassCompute."""
        assert isinstance(self._model, StageModel), "no others stream"
        results: list[StepResult] = []
        runs: dict[int, Run] = {}
        for place, step in enumerate(steps):
            try:
                runs[place] = self._prepare(step.batch, step.activations)
            except ShardnetError as error:
                results.append(error.with_traceback(None))
            else:
                results.append(_NOT_YET)
        try:
            outputs = self._model.run_together([*runs.values()])
        except (RuntimeError, MemoryError) as error:
            raise self._named(f"step {steps[0].batch.step}", error) from None
        for (place, run), output in zip(runs.items(), outputs, strict=True):
            if isinstance(output, ShardnetError):
                results[place] = output
                continue
            try:
                results[place] = self._finish(run, output)
            except ShardnetError as error:
                results[place] = error.with_traceback(None)
        return results


_NOT_YET = ShardnetError("not computed")
