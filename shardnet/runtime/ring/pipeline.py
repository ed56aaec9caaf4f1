"""The ring as its head sees it: steps in flight, their answers, stuck stages.

Knows the steps in flight, when each was sent, and when a stage counts as stuck. It is the source of
the head's own stage and receives the answers of the tail, over a link or, in a ring of one stage,
directly. Must not know texts, why a step was scheduled, or how nodes are found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec
from msgspec.structs import asdict, replace

from shardnet.errors import RemoteProtocolError, ShardnetError
from shardnet.output_params import OutputKind, RoutingShape
from shardnet.runtime.stage.compute import (
    Activations,
    Samples,
    StageInput,
    StageOutput,
    StepArrived,
    StepComputed,
    StepFailed,
)
from shardnet.runtime.stage.routing import join_routing
from shardnet.runtime.stage.worker import StageInputs, StageSink
from shardnet.sampling_params import TokenLogprobs
from shardnet.slot_operations import SlotOperation
from shardnet.types import Epoch, MicroBatch, StepId
from shardnet.wire.messages.extras import StageTiming

STUCK_FACTOR = 10
STUCK_AT_LEAST_S = 60.0
"""A step older than 10 times the longest one, and than this, means a stuck stage."""
STUCK_UNMEASURED_S = 600.0
"""The same limit where the time of a prompt chunk was not measured."""


class StepAnswer(Samples, frozen=True, kw_only=True):
    """The tail's answer to one step, as it came: ids and logprobs in row order, then the rest.

    `routing` has the parts of all stages; the pipeline joins them to rows in `blocks`.
    """

    epoch: Epoch
    step: StepId
    timings: tuple[StageTiming, ...]


class StuckStage(msgspec.Struct, frozen=True, kw_only=True):
    """The stage of `rank` has had `step` for `age_s`; no step should take `limit_s`."""

    rank: int
    step: StepId
    age_s: float
    limit_s: float


class StepAnswered(msgspec.Struct, frozen=True, kw_only=True):
    """A step was answered `round_trip_us` after `sent_ns`, by the head's clock."""

    batch: MicroBatch
    answer: StepAnswer
    round_trip_us: int
    sent_ns: int = 0


class _InFlight(msgspec.Struct, frozen=True, kw_only=True):
    batch: MicroBatch
    sent_ns: int


@dataclass(kw_only=True, eq=False, repr=False)
class Pipeline:
    """Sends steps into the ring's first stage and matches answers to them.

    `vocab_size` bounds the ids that an answer may hold. `routing` is the shape of routed experts,
    None for a dense model. `clock_ns` is a monotonic clock. `chunk_s` is the predicted time of a
    whole prompt chunk, None if not measured: without it the first chunk could count as stuck,
    because no step before it took as long.
    """

    epoch: Epoch
    vocab_size: int
    clock_ns: Callable[[], int]
    on_answered: Callable[[StepAnswered], None]
    on_failed: Callable[[StepFailed], None]
    routing: RoutingShape | None = None
    chunk_s: float | None = None
    read_ahead: Callable[[Sequence[int], int], Coroutine[Any, Any, None]] | None = None
    """Has stages read what a prompt looks up in files behind its first so many positions."""

    def __post_init__(self) -> None:
        self._inputs = StageInputs()
        self._in_flight: dict[StepId, _InFlight] = {}
        self._longest_ns = 0 if self.chunk_s is None else int(self.chunk_s * 1e9)
        self._at_least_s = STUCK_UNMEASURED_S if self.chunk_s is None else STUCK_AT_LEAST_S
        self._is_abandoned = False
        self.dropped: Counter[str] = Counter()
        """Answers that were dropped, by reason."""

    def abandon(self) -> float:
        """Forget the steps in flight, and drop whatever answers still come: the ring is gone.

        Returns how many seconds the oldest of the steps has waited, 0 if there is none.
        """
        self._is_abandoned = True
        oldest = next(iter(self._in_flight.values()), None)
        self._in_flight.clear()
        return (self.clock_ns() - oldest.sent_ns) / 1e9 if oldest is not None else 0.0

    def send(self, batch: MicroBatch) -> None:
        """Send a step. The scheduler's credit bounds how many are queued here."""
        now = self.clock_ns()
        self._in_flight[batch.step] = _InFlight(batch=batch, sent_ns=now)
        self._inputs.put(StepArrived(batch=batch, activations=None, timings=(), arrived_ns=now))

    def operate(self, operation: SlotOperation) -> None:
        """Send a slot operation, in data order with the steps."""
        self._inputs.put(operation)

    async def receive(self) -> StageInput:
        """Hand the next input to the head's own stage (StageSource)."""
        return await self._inputs.receive()

    def offer(self, has_room: Callable[[], bool], take: Callable[[StageInput], None]) -> None:
        """See StageSource."""
        self._inputs.offer(has_room, take)

    def answer(self, answer: StepAnswer | StepFailed) -> None:
        """Handle an answer of the tail.

        Answers of an old epoch are dropped and counted. Raises RemoteProtocolError if the step is
        not in flight, the number of ids is wrong, an id is outside the vocabulary, or the routing
        of a stage is missing.
        """
        if self._is_abandoned:
            self.dropped["abandoned"] += 1
            return
        if isinstance(answer, StepFailed):
            if self._in_flight.pop(answer.step, None) is None:
                raise RemoteProtocolError(f"the tail failed step {answer.step}, not in flight")
            self.on_failed(answer)
            return
        if answer.epoch != self.epoch:
            self.dropped["old epoch"] += 1
            return
        sent = self._in_flight.pop(answer.step, None)
        if sent is None:
            raise RemoteProtocolError(f"the tail answered step {answer.step}, not in flight")
        if answer.routing:
            blocks = join_routing(sent.batch, answer.routing, self.routing)
            answer = replace(answer, blocks=[*answer.blocks, *blocks], routing=())
        self._check(sent.batch, answer)
        took_ns = self.clock_ns() - sent.sent_ns
        self._longest_ns = max(self._longest_ns, took_ns)
        self.on_answered(
            StepAnswered(
                batch=sent.batch,
                answer=answer,
                round_trip_us=took_ns // 1000,
                sent_ns=sent.sent_ns,
            )
        )

    def stuck_stage(self, completed: Sequence[int]) -> StuckStage | None:
        """Return the first stage that has not completed the oldest step in flight, once that step
        is older than 10 times the longest one and 60 s.

        `completed` holds the last step that each stage completed, in ring order.
        """
        if not self._in_flight:
            return None
        step, oldest = next(iter(self._in_flight.items()))
        age_s = (self.clock_ns() - oldest.sent_ns) / 1e9
        limit_s = max(self._at_least_s, STUCK_FACTOR * self._longest_ns / 1e9)
        if age_s < limit_s:
            return None
        behind = (rank for rank, last in enumerate(completed) if last < step)
        rank = next(behind, len(completed) - 1)
        return StuckStage(rank=rank, step=step, age_s=age_s, limit_s=limit_s)

    def _check(self, batch: MicroBatch, answer: StepAnswer) -> None:
        if len(answer.token_ids) != batch.n_sampled:
            raise RemoteProtocolError(
                f"step {batch.step} sampled {batch.n_sampled} rows, the tail answered with "
                f"{len(answer.token_ids)} tokens"
            )
        for token_id in answer.token_ids:
            if token_id >= self.vocab_size:
                raise RemoteProtocolError(
                    f"the tail sampled token {token_id}, the vocabulary has {self.vocab_size}"
                )
        for logprobs in answer.logprobs:
            if logprobs is not None:
                self._check_logprobs(logprobs)
        if answer.prompt_logprobs or answer.blocks:
            self._check_outputs(batch, answer)
        if answer.drafts:
            self._check_drafts(batch, answer)

    def _check_drafts(self, batch: MicroBatch, answer: StepAnswer) -> None:
        """Check that drafts are tokens of the model, for sequences of the step."""
        sampled = {group.sequence_id for group in batch.groups if group.n_sampled}
        for drafts in answer.drafts:
            if drafts.sequence_id not in sampled:
                raise RemoteProtocolError(
                    f"the tail drafted for sequence {drafts.sequence_id} in step {batch.step}, "
                    "which samples none of its rows"
                )
            if max(drafts.token_ids, default=0) >= self.vocab_size:
                raise RemoteProtocolError(
                    f"the tail drafted token {max(drafts.token_ids)}, the vocabulary has "
                    f"{self.vocab_size}"
                )

    def _check_outputs(self, batch: MicroBatch, answer: StepAnswer) -> None:
        """Check that logprobs and rows of an answer belong to rows of its step."""
        for scored in answer.prompt_logprobs:
            self._check_logprobs(scored.logprobs)
        rows = {
            group.sequence_id: range(group.position, group.position + group.n_rows)
            for group in batch.groups
        }
        spans = [(scored.sequence_id, scored.position, 1) for scored in answer.prompt_logprobs]
        spans += [(block.sequence_id, block.position, block.n_rows) for block in answer.blocks]
        for sequence_id, position, n_rows in spans:
            inside = rows.get(sequence_id, range(0))
            if position not in inside or position + n_rows - 1 not in inside:
                raise RemoteProtocolError(
                    f"the tail sent outputs of sequence {sequence_id} at positions {position} to "
                    f"{position + n_rows - 1} for step {batch.step}, which has no such rows"
                )
        for block in answer.blocks:
            if block.kind is OutputKind.LOGITS and block.width != self.vocab_size:
                raise RemoteProtocolError(
                    f"the tail sent logits {block.width} wide, the vocabulary has {self.vocab_size}"
                )

    def _check_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Check that every token of a row's logprobs is in the vocabulary."""
        highest = max(logprobs.token_id, *(token_id for token_id, _ in logprobs.top), 0)
        if highest >= self.vocab_size:
            raise RemoteProtocolError(
                f"the tail sent a logprob of token {highest}, the vocabulary has {self.vocab_size}"
            )


class LocalSink(StageSink):
    """The sink of a stage that is head and tail: answers go directly to the pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def send(self, output: StageOutput) -> None:
        """Hand an answer to the pipeline; slot operations end here."""
        answer = step_answer(output)
        if answer is not None:
            self._pipeline.answer(answer)


def step_answer(output: StageOutput) -> StepAnswer | StepFailed | None:
    """Convert an output of the last stage to the answer for the head; None for slot operations."""
    if isinstance(output, SlotOperation):
        return None
    match output:
        case StepComputed(batch=batch, result=result, timings=timings):
            if isinstance(result, Activations):
                raise ShardnetError(
                    f"the last stage returned activations for step {batch.step}, not samples"
                )
            given = asdict(result) | {"blocks": output.blocks, "routing": output.routing}
            return StepAnswer(epoch=batch.epoch, step=batch.step, timings=timings, **given)
        case StepFailed():
            return output
        case _:
            assert_never(output)
