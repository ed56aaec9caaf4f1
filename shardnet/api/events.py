"""What programs are told of their requests: events, the state of each, and its result.

Knows values only. Nothing here is a message of the wire: programs keep these, the protocol grows.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

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
class RowData:
    """Consecutive rows of a request, the first that of the token at `position`."""

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
        """How many rows these are."""
        return len(self.data) // self.row_bytes

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.position + self.n_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(RowData):
    """Logits or hidden states.

    `data` is float32, little-endian, row after row of `width` elements.
    """

    ELEMENT_BYTES = 4

    def array(self) -> NDArray[np.float32]:
        """Return them as an array [n_rows, width], which shares their memory."""
        import numpy as np

        return np.frombuffer(self.data, "<f4").reshape(-1, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing(RowData):
    """The experts that rows visited in each layer, `top_k` of them, the best first.

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
    """Where the time of a mean decode step went, for one stage.

    The wire's MeanStageTime as a dataclass, like all results of this package.
    """

    rank: int
    compute_ms: float
    queue_ms: float
    wire_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTiming:
    """How long a request took, by the head's clock. `load_s` is part of `total_s`.

    `n_accepted` of `n_drafted` tokens that were guessed ahead were right. The wire's Timing as a
    dataclass, like all results of this package.
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
    `text` has neither that nor a stop string. `logprobs`, `prompt_logprobs`, `logits`, `hidden` and
    `routing` are None unless they were asked for; a prompt's first token has no logprob.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEvent:
    """News of one request.

    `request_id` is unique in its client. While it is QUEUED, `ahead` requests go before it. Tokens
    come in events that are RUNNING or RESUMED; `text` is what became certain with them and may be
    empty. `prompt_logprobs`, `logits`, `hidden` and `routing` are the next ones; the prompt's first
    token has no logprob. The FINISHED event has the text that was held back and the `result`, the
    FAILED one the `error`.
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
    routing: Routing | None = None
    result: GenerationResult | None = None
    error: ShardnetError | None = None


@dataclass(slots=True, kw_only=True)
class ActiveRequest:
    """A request that has not ended, as far as it has come: what `should_stop` judges by."""

    request_id: int
    index: int
    sample: int
    state: RequestState = RequestState.QUEUED
    text: str = ""
    token_ids: Sequence[int] = field(default_factory=tuple)
