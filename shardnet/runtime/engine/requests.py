"""What the engine is asked for, and what it tells of it: requests in, events out.

Knows their fields. Must not know how a request is carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shardnet.errors import SamplingError
from shardnet.runtime.engine.outputs import OutputEvent
from shardnet.runtime.scheduling.drafting import MAX_DRAFT_TOKENS, Guesser
from shardnet.runtime.scheduling.sequences import FinishReason
from shardnet.types import (
    MAX_STOP_IDS,
    NO_OUTPUTS,
    LiveState,
    OutputParams,
    SamplingParams,
    TokenLogprobs,
)
from shardnet.wire.messages.generation import Timing


class TextAssembler(Protocol):
    """Turns a sequence's tokens into text that may be shown (tokenizers/detokenizer.py)."""

    def push(self, token_id: int) -> tuple[str, bool]:
        """Return the text that is certain now, and whether a stop string was met."""

    def finish(self) -> str:
        """Return what was held back; nothing follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Guess tokens ahead and have the ring verify several at once (design decision 5).

    `make_guesser` gives a request its own guesser, which calls what it is given when it has become
    ready; `most` caps the tokens of one guess.
    """

    make_guesser: Callable[[Callable[[], None]], Guesser]
    most: int = MAX_DRAFT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue. `stop_ids` end it and their text is not shown.

    A larger `priority` goes first. A request that has not ended after `deadline_s` fails.
    `deterministic` is design decision 4's.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]
    text: TextAssembler
    priority: int = 0
    deadline_s: float | None = None
    speculation: Speculation | None = None
    deterministic: bool = False
    outputs: OutputParams = NO_OUTPUTS

    def check(self) -> None:
        """Raise SamplingError that names what cannot be asked for."""
        self.sampling.check()
        self.outputs.check()
        if self.sampling.min_tokens and len(self.stop_ids) > MAX_STOP_IDS:
            raise SamplingError(
                f"min-tokens can hold back {MAX_STOP_IDS} stop ids, not {len(self.stop_ids)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMoved:
    """A request waits behind `ahead` others, or runs, or is paused for want of room.

    The first `n_kept` positions of its prompt were there already when it began to run.
    """

    state: LiveState
    ahead: int = 0
    n_kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGenerated:
    """One more token, and the text that became certain with it."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinished:
    """The end of a request. `text` is what was held back until now.

    `timing.load_s` is 0: loading came before the engine.
    """

    reason: FinishReason
    text: str
    timing: Timing


GenerationEvent = RequestMoved | TokenGenerated | OutputEvent | GenerationFinished
