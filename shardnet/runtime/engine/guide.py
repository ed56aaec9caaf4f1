"""The masks of a request whose output is constrained, made beside the ring's steps.

Knows when a mask is made on the event loop and when on a thread: most take some microseconds, which
a thread would double, and a few take milliseconds, for which no other request should wait. Must not
know grammars, the scheduler or the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from shardnet.constraints import TokenMask
from shardnet.errors import ShardnetError, internal_error
from shardnet.runtime.engine.thoughts import Thoughts
from shardnet.runtime.scheduling.drafting import FORCED, MAX_DRAFT_TOKENS, AdaptiveDrafter
from shardnet.runtime.scheduling.sequences import Drafter
from shardnet.runtime.scheduling.step_cost import StepCost
from shardnet.runtime.stage.executor import Executor
from shardnet.threads import contained

SLOW_NS = 500_000
"""A mask that takes longer is made on the thread, and so are those after it."""
SLOW_FOR = 64
"""How many: what was slow once is slow again."""
DRAFTS_NS = 1_000_000
"""The masks of drafts may take so long together: they are made on the event loop."""


class Matcher(Protocol):
    """Follows one output (tokenizers/grammar/matcher.py). For one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""

    def advance(self, token_id: int) -> None:
        """Take the next token of the output."""

    def mask(self) -> TokenMask:
        """Return which tokens may come next; kept until the matcher advances."""

    def masks(self, drafts: Sequence[int]) -> Sequence[TokenMask]:
        """Return which tokens may come next, and after each draft up to the first forbidden one."""

    def forced(self, limit: int) -> list[int]:
        """Return at most `limit` tokens that write what must follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constrained:
    """What a request's output has to match: its matcher, with the first mask made.

    `thread` makes masks that take long.
    """

    matcher: Matcher
    thread: Executor


class Guide:
    """Makes the masks of one request (sequences.Guide). All calls are made on the event loop.

    They are those of what is `constrained`, with what `thoughts` force, either of which may be
    None. `cost` says what drafts of forced text cost. `ready` is called when a mask that was
    waited for is there, `ended` when the output turned out to be complete, or failed with an error.
    None is called before the call of this guide has returned.
    """

    def __init__(
        self,
        constrained: Constrained | None,
        thoughts: Thoughts | None = None,
        *,
        cost: StepCost,
        clock_ns: Callable[[], int],
        soon: Callable[[Callable[[], None]], object],
        ready: Callable[[], None],
        ended: Callable[[ShardnetError | None], None],
    ) -> None:
        self._constrained = constrained
        self._thoughts = thoughts
        self._clock_ns = clock_ns
        self._soon = soon
        self._ready = ready
        self._ended = ended
        self._tokens: list[int] = []
        """Those of the output that the matcher has not taken."""
        self._is_made = constrained is None
        """Whether the matcher, if any, has the mask of the next token."""
        self._spent_ns = 0
        """Time that the tokens since the last mask have taken."""
        self._n_slow = 0
        self._mask_ns = 0.0
        self._is_busy = False
        self._is_over = False
        self.drafts = AdaptiveDrafter(
            draft_source=_ForcedText(self._forced), name=FORCED, cost=cost, acceptance=0.95
        )

    @property
    def _matcher(self) -> Matcher:
        assert self._constrained is not None
        return self._constrained.matcher

    @property
    def may_fly(self) -> bool:
        """See sequences.Guide."""
        return self._constrained is None

    @property
    def forced(self) -> Drafter:
        """See sequences.Guide."""
        return self.drafts

    def take(self, token_id: int) -> bool:
        """Take a token of the output; return whether it is complete.

        Where masks are slow that turns out later. Raises what Matcher.advance raises.
        """
        if self._constrained is None:
            return False
        self._is_made = False
        self._tokens.append(token_id)
        return not self._n_slow and self.settle()

    def settle(self) -> bool:
        """Take the tokens so far now; return whether the output is complete."""
        if self._is_busy or self._constrained is None:
            return False
        started_ns = self._clock_ns()
        self._advance()
        self._spent_ns += self._clock_ns() - started_ns
        return self._matcher.is_complete

    def prepare(self) -> bool:
        """See sequences.Guide."""
        if self._is_made or self._is_busy or self._is_over or self._constrained is None:
            return self._is_made
        try:
            if self._n_slow:
                self._is_busy = True
                self._constrained.thread.post(self._timed, self._on_made, self._on_failed)
            else:
                self._note(self._timed())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of llguidance ends this request alone
            self._end(contained(error))
        return self._is_made

    def masks(self, drafts: Sequence[int], ahead: Sequence[int] = ()) -> Sequence[TokenMask | None]:
        """See sequences.Guide. Few drafts count where masks are slow."""
        free = [None] * (1 + len(drafts))
        masks = free if self._constrained is None else self._constraint(drafts)
        return masks if self._thoughts is None else self._thoughts.masks(masks, drafts, ahead)

    def _constraint(self, drafts: Sequence[int]) -> Sequence[TokenMask]:
        most = 0 if self._n_slow else int(DRAFTS_NS / max(1.0, self._mask_ns))
        started_ns = self._clock_ns()
        try:
            masks = self._matcher.masks(drafts[:most])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._end(contained(error))
            return [self._matcher.mask()]
        if len(masks) > 1:
            took_ns = (self._clock_ns() - started_ns) / len(masks)
            self._mask_ns += 0.1 * (took_ns - self._mask_ns)
        return masks

    def _forced(self, limit: int) -> list[int]:
        if self._n_slow or self._constrained is None:
            return []
        try:
            return self._matcher.forced(limit)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as in `prepare`
            self._end(contained(error))
            return []

    def _timed(self) -> int:
        """Take the tokens so far and make the next mask; return how long it took."""
        started_ns = self._clock_ns()
        self._advance()
        self._matcher.mask()
        return self._clock_ns() - started_ns

    def _advance(self) -> None:
        while self._tokens:
            self._matcher.advance(self._tokens.pop(0))

    def _note(self, took_ns: int) -> None:
        """Take note of a mask that was made, and of its time."""
        took_ns += self._spent_ns
        self._spent_ns = 0
        self._n_slow = SLOW_FOR if took_ns > SLOW_NS else max(0, self._n_slow - 1)
        if self._matcher.is_complete:
            self._end(None)
        else:
            self._is_made = True

    def _on_made(self, took_ns: int) -> None:
        self._is_busy = False
        self._note(took_ns)
        self._ready()

    def _on_failed(self, error: Exception) -> None:
        self._is_busy = False
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._is_over, self._is_made = True, False
        if error is not None and not isinstance(error, ShardnetError):
            error = internal_error("the constraint of a request", error)
        self._soon(partial(self._ended, error))


class _ForcedText:
    """Drafts what a constraint forces (drafting.DraftSource)."""

    kinds: Sequence[int] = range(MAX_DRAFT_TOKENS)
    flies = False

    def __init__(self, forced: Callable[[int], list[int]]) -> None:
        self._forced = forced

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Return True: the matcher is where the tokens are."""
        return True

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """See DraftSource."""
        return self._forced(limit)

    def close(self) -> None:
        """Do nothing: it holds nothing."""
