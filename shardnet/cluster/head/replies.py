"""Events of the engine as the messages that a client gets, and the trace of its request. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from shardnet.cluster.head.lead import Lead
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.cluster.peers.peer_links import ClockOffset, ahead_at
from shardnet.output_params import OutputKind
from shardnet.runtime.engine.outputs import PromptLogprobsReady, RowsReady
from shardnet.runtime.engine.requests import GenerationFinished, StepTrace, TokenGenerated
from shardnet.sampling_params import TokenLogprobs
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet.wire.framing.schema import Phase
from shardnet.wire.messages.activity import MAX_PIECE_STEPS, TracedStep, TracePiece
from shardnet.wire.messages.extras import StageTiming
from shardnet.wire.messages.generation import (
    Finished,
    Generate,
    RowsPiece,
    TextPiece,
    Timing,
    TokenDetail,
    TopToken,
)
from shardnet.wire.messages.plans import NodeProgress

_PIECE_BYTES = 1 << 20
_PIECE_LOGPROBS = 64
"""The most that one message carries of rows, and of prompt logprobs with their texts."""


def report_progress(
    control: ControlLink, request: int, rank: int, phase: Phase, done_bytes: int, total_bytes: int
) -> None:
    """Send a client the progress of a node in bytes, unless the client has gone."""
    told = NodeProgress(request=request, rank=rank, done_bytes=done_bytes, total_bytes=total_bytes)
    control.tell(replace(told, phase=phase))


def token_piece(message: Generate, event: TokenGenerated, tokenizer: Tokenizer | None) -> TextPiece:
    """Make the message of one generated token."""
    detail = None if event.logprobs is None else [_detail(event.logprobs, tokenizer)]
    return TextPiece(
        request=message.request,
        token_ids=[event.token_id],
        tokens=[_token_text(event.token_id, tokenizer)],
        text=event.text,
        logprobs=detail,
    )


def output_pieces(
    message: Generate, event: PromptLogprobsReady | RowsReady, lead: Lead
) -> Iterator[TextPiece | RowsPiece]:
    """Cut prompt logprobs or rows into messages of at most _PIECE_LOGPROBS or _PIECE_BYTES."""
    if isinstance(event, PromptLogprobsReady):
        for start in range(0, len(event.logprobs), _PIECE_LOGPROBS):
            part = event.logprobs[start : start + _PIECE_LOGPROBS]
            details = [_detail(logprobs, lead.tokenizer) for logprobs in part]
            yield TextPiece(
                request=message.request, token_ids=[], tokens=[], text="", prompt_logprobs=details
            )
        return
    shape, width = lead.ring.spec.config.routing, lead.plan.facts.config.hidden_size
    top_k = shape.top_k if shape and event.block.kind is OutputKind.ROUTING else 0
    kind = event.block.kind
    assert kind is not OutputKind.STATES, "they are for drafters alone"
    for block in event.block.parts(_PIECE_BYTES):
        yield RowsPiece(
            request=message.request,
            kind=kind.value,
            position=block.position,
            width=block.width,
            top_k=top_k,
            n_states=block.width // width if block.kind is OutputKind.HIDDEN else 1,
            data=bytes(block.payload),
        )


def _detail(logprobs: TokenLogprobs, tokenizer: Tokenizer | None) -> TokenDetail:
    raw = tokenizer.token_bytes(logprobs.token_id) if tokenizer else b""
    return TokenDetail(
        token_id=logprobs.token_id,
        token=_token_text(logprobs.token_id, tokenizer),
        bytes=list(raw),
        logprob=logprobs.logprob,
        top=[
            TopToken(token_id=token_id, token=_token_text(token_id, tokenizer), logprob=logprob)
            for token_id, logprob in logprobs.top
        ],
    )


def _token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    return tokenizer.token_text(token_id) if tokenizer else ""


def finished(
    message: Generate, event: GenerationFinished, prompt: Sequence[int], load_s: float
) -> Finished:
    """Make the last message of a request. `load_s` is what loading took for it, in seconds."""
    return Finished(
        request=message.request,
        finish_reason=event.reason.value,
        prompt_token_ids=list(prompt),
        text=event.text,
        timing=timing_reply(event.timing, load_s),
    )


def timing_reply(timing: Timing, load_s: float) -> Timing:
    """Add to a request's timing the `load_s` seconds that its ring took to load."""
    return replace(timing, load_s=load_s, total_s=load_s + timing.total_s)


def trace_pieces(
    message: Generate,
    trace: StepTrace,
    nodes: Sequence[str],
    before: Sequence[ClockOffset],
    after: Sequence[ClockOffset],
) -> Iterator[TracePiece]:
    """Cut the trace of a request into messages, one at least.

    `nodes` are the names of the ring's nodes, `before` and `after` how far their clocks were ahead
    of the head's when the request began and ended.
    """
    within_us = [int(max(a.within_us, b.within_us)) for a, b in zip(before, after, strict=True)]
    steps = [_aligned(step, before, after) for step in trace.steps]
    for start in range(0, max(1, len(steps)), MAX_PIECE_STEPS):
        yield TracePiece(
            request=message.request,
            nodes=list(nodes),
            clocks_within_us=within_us,
            submitted_us=trace.submitted_us,
            steps=steps[start : start + MAX_PIECE_STEPS],
            n_left_out=trace.n_left_out,
        )


def _aligned(
    step: TracedStep, before: Sequence[ClockOffset], after: Sequence[ClockOffset]
) -> TracedStep:
    """Move the moments of the stages to the head's clock."""

    def moved(timing: StageTiming) -> StageTiming:
        if timing.rank >= len(before):
            return timing
        ahead_us = ahead_at(step.sent_us, before[timing.rank], after[timing.rank])
        return replace(timing, arrived_us=max(0, round(timing.arrived_us - ahead_us)))

    return replace(step, timings=[moved(timing) for timing in step.timings])
