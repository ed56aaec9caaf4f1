"""A request of a call: sent on a link, and its answers turned into events and a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from dataclasses import replace as changed

from msgspec import convert
from msgspec.structs import replace

from shardnet.api.events import (
    ActiveRequest,
    GenerationEvent,
    GenerationResult,
    GenerationTiming,
    LikelyToken,
    RequestState,
    Routing,
    RowData,
    Rows,
    TokenLogprob,
    Usage,
)
from shardnet.api.requests import Request
from shardnet.api.traces import RequestTrace
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.errors import (
    BusyError,
    LinkError,
    PeerFailedError,
    RemoteProtocolError,
    ShardnetError,
    UsageError,
)
from shardnet.types import LiveState
from shardnet.wire.framing.schema import Numbered
from shardnet.wire.messages import generation as wire
from shardnet.wire.messages.activity import TracePiece
from shardnet.wire.messages.control import Failed, reported_error
from shardnet.wire.messages.deputies import CopiedTo, Resume
from shardnet.wire.messages.generation import Generate


class SendAgain:
    """Comes when a request is to be sent again."""


Answer = Numbered | ShardnetError | SendAgain


@dataclass(slots=True, kw_only=True, eq=False)
class RunningRequest:
    """A request that has not ended: the link it was sent on, and its output so far."""

    request: Request
    view: ActiveRequest
    address: str = ""
    """Where it was redirected to, "" for the node of the client."""
    control: ControlLink | None = None
    number: int = 0
    is_answered: bool = False
    resumes: bool = False
    """Whether it is sent as Resume: another node may have made the first part of its answer."""
    copied_to: str = ""
    """The node that goes on if its link ends, "" for none."""
    until_s: float | None = None
    """When to stop asking that node, None while nothing is wrong."""
    is_repeated: bool = False
    """Whether it was sent twice, since the first link ended before any output."""
    unreached: ShardnetError | None = None
    """Why it could not be sent where it was redirected to."""
    n_redirects: int = 0
    n_reused: int = 0
    token_ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    rows: dict[str, Rows] = field(default_factory=dict)
    routing: Routing | None = None
    trace: RequestTrace | None = None

    def __post_init__(self) -> None:
        self.view.token_ids = self.token_ids
        self.resumes = self.request.resumes

    @property
    def may_repeat(self) -> bool:
        """Whether nothing is lost by sending it again as it was sent first."""
        if self.is_repeated:
            return False
        has_output = self.token_ids or self.rows or self.routing or len(self.prompt_logprobs) > 1
        return not self.is_answered or not (self.copied_to or self.resumes or has_output)

    def send(self, control: ControlLink, on_answer: Callable[[Answer], None]) -> None:
        """Send the request on this link. Raises LinkError when that has ended, VersionMismatchError
        for what the peer does not know.

        One that was sent on after its first tokens goes on behind them.
        """
        message = self.request.message
        made = [*message.made, *self.token_ids]
        asked = replace(message, made=made)
        if (thought := message.thought) and (thought.budget, thought.until) == (None, None):
            asked = replace(asked, thought=None)  # its marks are kept for `end_thought`
        control.link.peer.require(*asked.needed)
        request: Generate | Resume = asked
        if self.resumes:
            request = Resume(request=0, key=message.key, n_tokens=len(self.token_ids))
        self.number = control.begin(request, on_answer)
        self.control = control

    def end_thought(self) -> None:
        """Send it from now on as one whose reasoning ends behind the tokens so far.

        Raises UsageError where it was sent without marks of reasoning.
        """
        message = self.request.message
        if message.thought is None:
            raise UsageError("this request was sent without marks of reasoning")
        ended = replace(message.thought, until=len(self.token_ids))
        self.request = changed(self.request, message=replace(message, thought=ended))
        self.resumes = False

    def detach(self, *, give_up: bool) -> None:
        """Stop receiving answers; with `give_up` also cancel the request on the node."""
        if self.control is not None:
            self.control.end(self.number, cancel=give_up)
            self.control = None

    def take(self, answer: Answer, peer: str) -> GenerationEvent | None:
        """Turn an answer of the node named `peer` into an event, and store its output.

        None where it is no event.
        """
        if not isinstance(answer, ShardnetError | Failed) and not _says_it_waits(answer):
            self.until_s = None
        match answer:
            case wire.StateChanged(state=state, ahead=ahead, n_kept=n_kept, prompt_tail=tail):
                self.view.state = RequestState(state.value)
                if self.view.state is RequestState.RUNNING:
                    self.n_reused = n_kept
                return changed(
                    self._event(),
                    ahead=ahead,
                    n_prompt=answer.n_prompt,
                    prompt_tail=tail,
                    why=answer.why,
                    expected_s=answer.expected_s,
                )
            case wire.TextPiece():
                return self._take_text(answer)
            case CopiedTo(address=address):
                self.copied_to = address
                return None
            case wire.RowsPiece():
                return self._take_rows(answer)
            case TracePiece():
                return self._take_trace(answer)
            case wire.Finished():
                return self._finished(answer)
            case Failed():
                return self.failed(reported_error(answer, peer))
            case ShardnetError():
                return self.failed(answer)
            case _:
                what = type(answer).__name__
                return self.failed(
                    RemoteProtocolError(f"{peer} answered Generate with an unexpected {what}")
                )

    def failed(self, error: ShardnetError) -> GenerationEvent:
        """Make the event of a request that failed."""
        self.view.state = RequestState.FAILED
        return changed(self._event(), error=error)

    def recovering(self, error: ShardnetError) -> GenerationEvent:
        """Make the event of a request that goes on elsewhere."""
        self.view.state = RequestState.RECOVERING
        return changed(self._event(), why=str(error))

    def lost(self, answer: Answer, peer: str) -> ShardnetError | None:
        """Return why nothing more comes from where it was sent, None unless others may go on."""
        if not (self.copied_to or self.resumes):
            return None
        error = reported_error(answer, peer) if isinstance(answer, Failed) else answer
        if isinstance(error, LinkError | PeerFailedError | BusyError):
            return error
        return error if isinstance(error, UsageError) and self.resumes else None

    def cancelled(self) -> GenerationEvent:
        """Make the event of a request that the hook cancelled."""
        self.view.state = RequestState.CANCELLED
        return self._event()

    def _event(self) -> GenerationEvent:
        view = self.view
        return GenerationEvent(
            request_id=view.request_id, index=view.index, sample=view.sample, state=view.state
        )

    def _take_text(self, piece: wire.TextPiece) -> GenerationEvent:
        logprobs = None
        if piece.logprobs is not None:
            logprobs = tuple(map(_logprob, piece.logprobs))
            self.logprobs += logprobs
        scored = None
        if piece.prompt_logprobs is not None:
            scored = tuple(map(_logprob, piece.prompt_logprobs))
            self.prompt_logprobs += scored
        self.token_ids += piece.token_ids
        self.tokens += piece.tokens
        self.view.text += piece.text
        return changed(
            self._event(),
            token_ids=tuple(piece.token_ids),
            tokens=tuple(piece.tokens),
            text=piece.text,
            logprobs=logprobs,
            prompt_logprobs=scored,
        )

    def _take_rows(self, piece: wire.RowsPiece) -> GenerationEvent:
        """Append logits or hidden states to those of the result; return them as an event."""
        if piece.kind == "routing":
            return self._take_routing(piece)
        rows = Rows(
            position=piece.position, width=piece.width, n_states=piece.n_states, data=piece.data
        )
        held = self.rows.setdefault(piece.kind, changed(rows, data=bytearray()))
        is_shape = held.n_states == rows.n_states and rows.width % rows.n_states == 0
        if not is_shape or not _append(held, rows):
            return self._out_of_order(piece)
        if piece.kind == "logits":
            return changed(self._event(), logits=rows)
        return changed(self._event(), hidden=rows)

    def _take_routing(self, piece: wire.RowsPiece) -> GenerationEvent:
        """Append routing to that of the result; return it as an event."""
        rows = Routing(
            position=piece.position, width=piece.width, top_k=piece.top_k, data=piece.data
        )
        self.routing = self.routing or changed(rows, data=bytearray())
        is_shape = 0 < rows.top_k == self.routing.top_k and rows.width % rows.top_k == 0
        if not is_shape or not _append(self.routing, rows):
            return self._out_of_order(piece)
        return changed(self._event(), routing=rows)

    def _take_trace(self, piece: TracePiece) -> GenerationEvent | None:
        """Keep steps for the result; they are no event."""
        if self.trace is None:
            self.trace = RequestTrace.of(piece)
        else:
            self.trace.add(piece)
        return None

    def _out_of_order(self, piece: wire.RowsPiece) -> GenerationEvent:
        return self.failed(
            RemoteProtocolError(f"{piece.kind} of position {piece.position} came out of order")
        )

    def _finished(self, finished: wire.Finished) -> GenerationEvent:
        self.view.state = RequestState.FINISHED
        self.view.text += finished.text
        message, sampling = self.request.message, self.request.message.sampling
        n_prompt = len(finished.prompt_token_ids)
        result = GenerationResult(
            model=message.choice.model,
            index=self.view.index,
            sample=self.view.sample,
            prompt_token_ids=tuple(finished.prompt_token_ids),
            token_ids=tuple(self.token_ids),
            tokens=tuple(self.tokens),
            text=self.view.text,
            finish_reason=finished.finish_reason,
            seed=sampling.seed,
            sample_index=sampling.sample_index,
            logprobs=None if sampling.n_logprobs is None else tuple(self.logprobs),
            usage=Usage(n_prompt=n_prompt, n_generated=len(self.token_ids), n_reused=self.n_reused),
            timing=convert(finished.timing, GenerationTiming, from_attributes=True),
            prompt_logprobs=None
            if message.outputs.n_prompt_logprobs is None
            else tuple(self.prompt_logprobs),
            logits=self.rows.get("logits"),
            hidden=self.rows.get("hidden"),
            routing=self.routing,
            trace=self.trace,
        )
        return changed(self._event(), text=finished.text, result=result)


def _says_it_waits(answer: Answer) -> bool:
    """Whether an answer says only that its node has not gone on with the request yet."""
    return isinstance(answer, wire.StateChanged) and answer.state is LiveState.RECOVERING


def _append(held: RowData, rows: RowData) -> bool:
    """Append `rows` to `held`; return False unless they continue them."""
    is_whole = rows.width > 0 and len(rows.data) % rows.row_bytes == 0
    if not is_whole or rows.width != held.width or rows.position != held.end:
        return False
    assert isinstance(held.data, bytearray)
    held.data.extend(rows.data)
    return True


def _logprob(detail: wire.TokenDetail) -> TokenLogprob:
    return TokenLogprob(
        token_id=detail.token_id,
        token=detail.token,
        bytes=bytes(detail.bytes),
        logprob=detail.logprob,
        top=tuple(LikelyToken(top.token_id, top.token, top.logprob) for top in detail.top),
    )
