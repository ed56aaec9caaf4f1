"""The ring's data links: frames to what a stage takes in, what a stage gives to frames.

The only place in `runtime` that knows both. Must not compute, nor decide what to send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from msgspec.structs import replace

from shardnet.errors import RemoteProtocolError, WrongValuesError, error_for_code
from shardnet.runtime.ring.pipeline import StepAnswer
from shardnet.runtime.stage.compute import (
    Activations,
    Samples,
    ScoredToken,
    StageInput,
    StageOutput,
    StepArrived,
    StepComputed,
    StepFailed,
)
from shardnet.sampling_params import TokenLogprobs
from shardnet.transport.link import Link
from shardnet.types import Epoch, SequenceId, StepId
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.extras import (
    Extras,
    PromptLogprobs,
    RowLogprobs,
    extras_frame,
    mask_rows,
    read_extras,
    read_masks,
    read_sequence,
    sequence_frame,
)
from shardnet.wire.messages.handshake import error_frame, read_error
from shardnet.wire.payloads.data import (
    StepData,
    data_frame,
    read_answer_timings,
    read_data,
    read_tokens,
    tokens_frame,
)
from shardnet.wire.payloads.rows import RowBlock, read_rows, rows_frames

T = TypeVar("T")

_NO_EXTRAS = Extras()

MAX_STEP_ROWS_BYTES = 1 << 29
"""Logits and hidden states of one step that the head takes: 256 rows of half a million columns."""


def _do_nothing() -> None:
    """Take no notice."""


class _Incoming(Generic[T]):
    """Reads the frames of a link, of which some only go with the next."""

    def __init__(
        self, link: Link, epoch: Epoch, on_arrival: Callable[[], None] = _do_nothing
    ) -> None:
        """`on_arrival` is called when a step or its answer has come, before it is read."""
        self._link = link
        self._epoch = epoch
        self._on_arrival = on_arrival
        self._extras = _PendingExtras(link)
        self._rows = _PendingRows(link)

    async def receive(self) -> T:
        """Return what comes next. Raises LinkError when the link ends or breaks the protocol."""
        while True:
            arrived = self._read(await self._link.receive())
            if arrived is not None:
                return arrived

    def offer(self, has_room: Callable[[], bool], take: Callable[[T], None]) -> None:
        """Give `take` what comes while `receive` waits, at once, where it `has_room`."""

        def offered(frame: Frame) -> bool:
            if not has_room():
                return False
            arrived = self._read(frame)
            if arrived is not None:
                take(arrived)
            return True

        self._link.offer(offered)

    def _read(self, frame: Frame) -> T | None:
        """Read a frame; None for one that only goes with the next."""
        raise NotImplementedError


class LinkSource(_Incoming[StageInput]):
    """What the previous stage sends, as a stage takes it in."""

    _last_step = 0

    def _read(self, frame: Frame) -> StageInput | None:
        check_epoch(frame, self._epoch, self._link)
        extras = self._extras.before(frame)
        if frame.kind in (FrameKind.DATA, FrameKind.ERROR):
            # A stage may join when the ring has computed already: any step may be the first.
            if self._last_step and frame.step != self._last_step + 1:
                raise RemoteProtocolError(
                    f"{peer_name(self._link)} sent step {frame.step} after step {self._last_step}"
                )
            self._last_step = frame.step
        match frame.kind:
            case FrameKind.DATA:
                self._on_arrival()
                blocks = self._rows.before(frame) if self._rows.blocks else []
                return self._step(read_data(frame), extras, blocks)
            case FrameKind.SEQUENCE:
                return read_sequence(frame)
            case FrameKind.ERROR:
                self._rows.before(frame)
                return _step_failed(frame)
            case FrameKind.EXTRAS:
                self._extras.keep(frame)
                return None
            case FrameKind.ROWS:
                self._rows.keep(frame)
                last = self._rows.blocks[-1]
                if last.layer is None and not last.is_deep:  # only the tail gives the last ones
                    raise unexpected(frame, self._link)
                return None
            case _:
                raise unexpected(frame, self._link)

    def _step(self, step: StepData, extras: Extras, blocks: Sequence[RowBlock]) -> StepArrived:
        batch = step.batch
        if extras.masks:
            batch = replace(batch, masks=read_masks(extras.masks, batch.n_sampled))
        return StepArrived(
            batch=batch,
            activations=Activations(
                payload=step.payload,
                dtype=step.dtype,
                width=step.width,
                deep=[block for block in blocks if block.is_deep] if blocks else (),
            ),
            timings=step.timings,
            arrived_ns=self._link.arrived_ns,
            routing=tuple(extras.routing),
            blocks=[block for block in blocks if not block.is_deep] if blocks else blocks,
        )


class TailLink(_Incoming[StepAnswer | StepFailed]):
    """What the tail sends to the head."""

    def _read(self, frame: Frame) -> StepAnswer | StepFailed | None:
        extras = self._extras.before(frame)
        match frame.kind:
            case FrameKind.TOKENS:
                self._on_arrival()
                blocks = self._rows.before(frame) if self._rows.blocks else []
                return _answer(frame, extras, blocks)
            case FrameKind.ERROR:
                self._rows.before(frame)
                return _step_failed(frame)
            case FrameKind.EXTRAS:
                self._extras.keep(frame)
            case FrameKind.ROWS:
                self._rows.keep(frame)
                if self._rows.blocks[-1].is_deep:  # it is for stages
                    raise unexpected(frame, self._link)
            case _:
                raise unexpected(frame, self._link)
        return None


class LinkSink:
    """What a stage gives, as frames to the next stage or, from the tail, to the head."""

    def __init__(self, link: Link, epoch: Epoch) -> None:
        self._link = link
        self._epoch = epoch

    def send(self, output: StageOutput) -> None:
        """Send one output. Raises LinkError when the link has ended."""
        self._link.send(*self._frames(output))

    def send_now(self, output: StageOutput) -> bool:
        """See StageSink."""
        return self._link.send_now(*self._frames(output))

    @property
    def is_full(self) -> bool:
        """Whether `drain` would wait."""
        return self._link.is_full

    def _frames(self, output: StageOutput) -> Sequence[Frame]:
        match output:
            case StepComputed():
                extras = self._extras(output)
                if output.blocks or (isinstance(output.result, Activations) and output.result.deep):
                    return (*_rows(output), *extras, self._result(output))
                return (*extras, self._result(output))
            case StepFailed(step=step, error=error):
                return (error_frame(error, epoch=self._epoch, step=step),)
            case _:
                return (sequence_frame(output, epoch=self._epoch),)

    async def drain(self) -> None:
        """Wait until the link has room. Raises LinkError when it ends meanwhile."""
        await self._link.drain()

    def _result(self, computed: StepComputed) -> Frame:
        batch, result = computed.batch, computed.result
        if isinstance(result, Samples):
            return tokens_frame(
                result.token_ids, epoch=batch.epoch, step=batch.step, timings=computed.timings
            )
        return data_frame(
            StepData(
                batch=batch,
                dtype=result.dtype,
                width=result.width,
                payload=result.payload,
                timings=computed.timings,
            )
        )

    def _extras(self, computed: StepComputed) -> Sequence[Frame]:
        """Make the frame of what goes with a step, for the steps with which something does."""
        result, masks = computed.result, computed.batch.masks
        if isinstance(result, Samples):
            has_outputs = computed.routing or result.prompt_logprobs or result.drafts
            if not has_outputs and not any(result.logprobs):
                return ()
            extras = Extras(
                logprobs=_logprob_rows(result),
                prompt_logprobs=_prompt_rows(result) if result.prompt_logprobs else [],
                routing=list(computed.routing),
                drafts=list(result.drafts),
            )
        else:
            extras = Extras(routing=list(computed.routing), masks=mask_rows(masks) if masks else [])
        if extras == _NO_EXTRAS:
            return ()
        return (extras_frame(extras, epoch=self._epoch, step=computed.batch.step),)


class _PendingExtras:
    """The extras that came and whose own step must come next."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._step = 0
        self._extras = _NO_EXTRAS

    def keep(self, frame: Frame) -> None:
        """Keep what came for the step that follows."""
        self._step, self._extras = frame.step, read_extras(frame)

    def before(self, frame: Frame) -> Extras:
        """Give what came before `frame`, once.

        Raises RemoteProtocolError when extras came for another step.
        """
        step, extras = self._step, self._extras
        self._step, self._extras = 0, _NO_EXTRAS
        if step and (step != frame.step or frame.kind in (FrameKind.EXTRAS, FrameKind.ROWS)):
            raise RemoteProtocolError(
                f"{peer_name(self._link)} sent EXTRAS of step {step} and then {frame.kind.name} of "
                f"step {frame.step}"
            )
        return extras


class _PendingRows:
    """The logits and hidden states that came and whose own step must come next."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._step = 0
        self.blocks: list[RowBlock] = []
        self._n_bytes = 0

    def keep(self, frame: Frame) -> None:
        """Keep what came for the step that follows.

        Raises RemoteProtocolError when it is of another step than the last, or too much.
        """
        if self.blocks and frame.step != self._step:
            raise self._out_of_turn(frame)
        self._n_bytes += len(frame.payload)
        if self._n_bytes > MAX_STEP_ROWS_BYTES:
            raise RemoteProtocolError(
                f"{peer_name(self._link)} sent more than {MAX_STEP_ROWS_BYTES} bytes of ROWS for "
                f"step {frame.step}"
            )
        self._step = frame.step
        self.blocks.append(read_rows(frame))

    def before(self, frame: Frame) -> list[RowBlock]:
        """Give what came before `frame`, once. Raises RemoteProtocolError for another step's."""
        blocks, self.blocks, self._n_bytes = self.blocks, [], 0
        if blocks and frame.step != self._step:
            raise self._out_of_turn(frame)
        return blocks

    def _out_of_turn(self, frame: Frame) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"{peer_name(self._link)} sent ROWS of step {self._step} and then {frame.kind.name} of "
            f"step {frame.step}"
        )


class TailSink(LinkSink):
    """The tail's sink: answers go to the head; slot operations have reached everyone and end."""

    def send(self, output: StageOutput) -> None:
        """Send one answer."""
        if isinstance(output, StepComputed | StepFailed):
            super().send(output)

    def send_now(self, output: StageOutput) -> bool:
        """See StageSink."""
        return not isinstance(output, StepComputed | StepFailed) or super().send_now(output)


def _answer(frame: Frame, extras: Extras, blocks: list[RowBlock]) -> StepAnswer:
    token_ids = read_tokens(frame, n_sampled=len(frame.payload) // 4)
    return StepAnswer(
        epoch=Epoch(frame.epoch),
        step=StepId(frame.step),
        token_ids=token_ids,
        logprobs=_logprobs(extras, len(token_ids)),
        timings=read_answer_timings(frame),
        prompt_logprobs=_prompt_logprobs(extras) if extras.prompt_logprobs else (),
        blocks=blocks,
        routing=extras.routing,
        drafts=extras.drafts,
    )


def peer_name(link: Link) -> str:
    """Name the peer of a link and its address."""
    return f"{link.peer.name} ({link.peer_address})"


def check_epoch(frame: Frame, epoch: Epoch, link: Link) -> None:
    """Raise RemoteProtocolError if a frame is of another epoch than its link."""
    if frame.epoch != epoch:
        raise RemoteProtocolError(
            f"{peer_name(link)} sent {frame.kind.name} of epoch {frame.epoch} on a link of epoch "
            f"{epoch}"
        )


def unexpected(frame: Frame, link: Link) -> RemoteProtocolError:
    """Make the error of a frame that has no place on a link."""
    return RemoteProtocolError(
        f"{peer_name(link)} sent {frame.kind.name}, which does not travel this way round the ring"
    )


def _step_failed(frame: Frame) -> StepFailed:
    report = read_error(frame)
    error = error_for_code(report.code, report.message, remedy=report.remedy or "")
    if isinstance(error, WrongValuesError):
        error.rank, error.sequence = report.rank or 0, report.sequence
    return StepFailed(step=StepId(frame.step), error=error)


def _logprob_rows(samples: Samples) -> list[RowLogprobs]:
    return [
        RowLogprobs(row, logprobs.token_id, logprobs.logprob, logprobs.top)
        for row, logprobs in enumerate(samples.logprobs)
        if logprobs is not None
    ]


def _prompt_rows(samples: Samples) -> list[PromptLogprobs]:
    return [
        PromptLogprobs(
            sequence_id=scored.sequence_id,
            position=scored.position,
            token_id=scored.logprobs.token_id,
            logprob=scored.logprobs.logprob,
            top=scored.logprobs.top,
        )
        for scored in samples.prompt_logprobs
    ]


def _prompt_logprobs(extras: Extras) -> list[ScoredToken]:
    return [
        ScoredToken(
            sequence_id=SequenceId(entry.sequence_id),
            position=entry.position,
            logprobs=_token_logprobs(entry),
        )
        for entry in extras.prompt_logprobs
    ]


def _rows(computed: StepComputed) -> list[Frame]:
    batch, result = computed.batch, computed.result
    deep = result.deep if isinstance(result, Activations) else ()
    return [
        frame
        for block in (*computed.blocks, *deep)
        for frame in rows_frames(block, epoch=batch.epoch, step=batch.step)
    ]


def _logprobs(extras: Extras, n_rows: int) -> list[TokenLogprobs | None]:
    """Put the rows' logprobs at their places. Raises RemoteProtocolError for a row of none."""
    rows: list[TokenLogprobs | None] = [None] * n_rows
    for entry in extras.logprobs:
        if entry.row >= n_rows:
            raise RemoteProtocolError(f"logprobs of row {entry.row} came with {n_rows} tokens")
        rows[entry.row] = _token_logprobs(entry)
    return rows


def _token_logprobs(entry: RowLogprobs | PromptLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token_id=entry.token_id, logprob=entry.logprob, top=entry.top)
