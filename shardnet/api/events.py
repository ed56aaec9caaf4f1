"""Events, states and results of requests, as programs receive them.

Values only, no wire messages: programs rely on these while the protocol grows.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from shardnet.errors import ShardnetError
from shardnet.wire.messages.diagnostics import Drafted, waiting_words
from shardnet.wire.messages.generation import StageEnergy

if TYPE_CHECKING:  # most programs ask for no rows
    import numpy as np
    from numpy.typing import NDArray

    from shardnet.api.traces import RequestTrace


class RequestState(enum.Enum):
    """The state of a request. Each request ends once, in one of the last three."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    RESUMED = "resumed"
    RECOVERING = "recovering"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether the request has ended."""
        return self in (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)


class LikelyToken(NamedTuple):
    """One of the most likely tokens at a position, with its text."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's log-probability, and those of the most likely tokens at its position (`top`).

    Log-softmax of the raw float32 logits, before penalties and temperature.
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    top: tuple[LikelyToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowData:
    """Consecutive rows of a request, one per token; the first is the row of `position`."""

    ELEMENT_BYTES: ClassVar[int]

    position: int
    width: int
    data: bytes | bytearray

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.ELEMENT_BYTES * self.width

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.data) // self.row_bytes

    @property
    def end(self) -> int:
        """Position after the last row (half-open)."""
        return self.position + self.n_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(RowData):
    """Logits or hidden states.

    `data` is float32, little-endian, row after row of `width` elements, those of `n_states` hidden
    states one behind the other: after each of the requested numbers of layers, then the last.
    """

    ELEMENT_BYTES = 4

    n_states: int = 1

    def array(self) -> NDArray[np.float32]:
        """Return them as an array [n_rows, width], which shares their memory."""
        import numpy as np

        return np.frombuffer(self.data, "<f4").reshape(-1, self.width)

    def states(self) -> NDArray[np.float32]:
        """Return hidden states [n_states, n_rows, hidden size], which share their memory."""
        return self.array().reshape(self.n_rows, self.n_states, -1).swapaxes(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing(RowData):
    """The `top_k` experts that each token was routed to in each layer, the best first.

    `data` is int16, little-endian, -1 in layers without experts; `width` is layers times `top_k`.
    """

    ELEMENT_BYTES = 2

    top_k: int

    def array(self) -> NDArray[np.int16]:
        """Return them as an array [n_rows, n_layers, top_k], which shares their memory."""
        import numpy as np

        return np.frombuffer(self.data, "<i2").reshape(self.n_rows, -1, self.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Time of a mean decode step in one stage, in milliseconds.

    `wire_ms` is its share of the hops. The wire's MeanStageTime as a dataclass.
    """

    rank: int
    compute_ms: float
    queue_ms: float
    wire_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTiming:
    """Timing of a request by the head's clock, in seconds; `load_s` is part of `total_s`.

    `n_accepted` of the `n_drafted` draft tokens were accepted; `drafters` say whose they were. The
    stages took `joules_per_token` together, None where one of them does not know; `energy` has each
    that does. The wire's Timing as a dataclass.
    """

    load_s: float
    ttft_s: float
    decode_tok_s: float
    total_s: float
    per_stage: tuple[StageTime, ...]
    n_drafted: int = 0
    n_accepted: int = 0
    drafters: Sequence[Drafted] = ()
    joules_per_token: float | None = None
    energy: Sequence[StageEnergy] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts. The first `n_reused` of the prompt were in the KV cache already."""

    n_prompt: int
    n_generated: int
    n_reused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The result of a finished request.

    `index` is the prompt's number in the list, `sample` the number of its sample. `seed` and
    `sample_index` reproduce it. `token_ids` are all new tokens, a stop id included; `text` contains
    neither that nor a stop string. `logprobs`, `prompt_logprobs`, `logits`, `hidden`, `routing` and
    `trace` are None unless they were requested; a prompt's first token has no log-probability.
    """

    model: str
    index: int
    sample: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    text: str
    finish_reason: str
    seed: int
    sample_index: int
    logprobs: tuple[TokenLogprob, ...] | None
    usage: Usage
    timing: GenerationTiming
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    logits: Rows | None = None
    hidden: Rows | None = None
    routing: Routing | None = None
    trace: RequestTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEvent:
    """A change of one request.

    `request_id` is unique in its client. While it is QUEUED, `ahead` requests run before it. When
    it begins to run its prompt has `n_prompt` tokens, elsewhere this is 0. While
    it is RECOVERING its ring is being replaced: `why` says what happened or what is waited for,
    `expected_s` how long that may take, 0 if not known; while it runs again and has no new token
    yet, how many are read before it goes on. Tokens come in events that are RUNNING or RESUMED;
    `tokens` are their own texts ("" without a tokenizer), `text` is what they complete and may be
    empty.
    `prompt_logprobs`, `logits`, `hidden` and `routing` continue those of earlier events; the
    prompt's first token has no log-probability. `prompt_tail` comes with states before the first
    token: the text of the prompt's last tokens, special ones too. The FINISHED event has the rest
    of the text and the `result`, the FAILED one the `error`.
    """

    request_id: int
    index: int
    sample: int
    state: RequestState
    ahead: int = 0
    n_prompt: int = 0
    prompt_tail: str = ""
    why: str = ""
    expected_s: float = 0.0
    token_ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    logits: Rows | None = None
    hidden: Rows | None = None
    routing: Routing | None = None
    result: GenerationResult | None = None
    error: ShardnetError | None = None

    @property
    def waits(self) -> str:
        """What it waits for behind a lost ring, and about how long, in words."""
        if self.state is RequestState.RECOVERING:
            return f"{waiting_words('recovering', self.expected_s)}: {self.why}"
        return waiting_words(self.why, self.expected_s)


@dataclass(slots=True, kw_only=True)
class ActiveRequest:
    """A request that has not ended, with its output so far: the argument of `should_stop`."""

    request_id: int
    index: int
    sample: int
    state: RequestState = RequestState.QUEUED
    text: str = ""
    token_ids: Sequence[int] = field(default_factory=tuple)
