"""What programs are told of their requests: events, the state of each, and its result.

Knows values only. Nothing here is a message of the wire: programs keep these, the protocol grows.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from shardnet.errors import ShardnetError

if TYPE_CHECKING:  # most programs ask for no rows
    import numpy as np
    from numpy.typing import NDArray


class RequestState(enum.Enum):
    """How a request stands. The last three are its end; each request gets exactly one of them."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    RESUMED = "resumed"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether nothing follows."""
        return self in (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)


class LikelyToken(NamedTuple):
    """One of the likeliest tokens of a place, with its text."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's logprob and those of the likeliest in its place.

    Log-softmax of the raw float32 logits, before penalties and temperature.
    """

    token_id: int
    token: str
    bytes: bytes
    logprob: float
    top: tuple[LikelyToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Logits or hidden states of consecutive rows, the first that of the token at `position`.

    `data` is float32, little-endian, row after row of `width` elements.
    """

    position: int
    width: int
    data: bytes | bytearray

    @property
    def n_rows(self) -> int:
        """How many rows these are."""
        return len(self.data) // (4 * self.width)

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.position + self.n_rows

    def array(self) -> NDArray[np.float32]:
        """Return them as an array [n_rows, width], which shares their memory."""
        import numpy as np

        return np.frombuffer(self.data, "<f4").reshape(-1, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Where the time of a mean decode step went, for one stage."""

    rank: int
    compute_ms: float
    queue_ms: float
    wire_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a request took, by the head's clock. `load_s` is part of `total_s`.

    `n_accepted` of `n_drafted` tokens that were guessed ahead were right.
    """

    load_s: float
    ttft_s: float
    decode_tok_s: float
    total_s: float
    per_stage: tuple[StageTime, ...]
    n_drafted: int = 0
    n_accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a request. The first `n_reused` of the prompt were computed for another one."""

    n_prompt: int
    n_generated: int
    n_reused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What came of a request that finished.

    `index` is the prompt's number in the list, `sample` which of its samples this is. With `seed`
    and `sample_index` it can be had again. `token_ids` are all new tokens, a stop id included;
    `text` has neither that nor a stop string. `logprobs`, `prompt_logprobs`, `logits` and `hidden`
    are None unless they were asked for; a prompt's first token has no logprob.
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
    timing: Timing
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    logits: Rows | None = None
    hidden: Rows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEvent:
    """News of one request.

    `request_id` is unique in its client. While it is QUEUED, `ahead` requests go before it. Tokens
    come in events that are RUNNING or RESUMED; `text` is what became certain with them and may be
    empty. `prompt_logprobs`, `logits` and `hidden` are the next ones; the prompt's first token has
    no logprob. The FINISHED event has the text that was held back and the `result`, the FAILED one
    the `error`.
    """

    request_id: int
    index: int
    sample: int
    state: RequestState
    ahead: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    logits: Rows | None = None
    hidden: Rows | None = None
    result: GenerationResult | None = None
    error: ShardnetError | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """A request that has not ended, as far as it has come: what `should_stop` judges by."""

    request_id: int
    index: int
    sample: int
    state: RequestState = RequestState.QUEUED
    text: str = ""
    token_ids: Sequence[int] = field(default_factory=tuple)
