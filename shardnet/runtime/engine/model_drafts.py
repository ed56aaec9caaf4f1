"""Drafts of one model for several sequences: what it is asked for each of them, and when.

Knows tokens, hidden states as they travel, and how long a draft is waited for. Must not know where
the model computes, nor which drafts are accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardnet.errors import RemoteProtocolError, ShardnetError
from shardnet.runtime.engine.outputs import joined_rows
from shardnet.runtime.scheduling.drafting import MAX_DRAFT_TOKENS
from shardnet.runtime.scheduling.kv_block_manager import common_prefix
from shardnet.types import PREFILL_CHUNK_ROWS, SlotId
from shardnet.wire.messages.drafting import Draft
from shardnet.wire.payloads.rows import RowBlock

log = logging.getLogger(__name__)

MAX_DRAFTED_SEQUENCES = 8
"""Sequences that it drafts for at the same time; others get no drafts."""
_MOST_AHEAD: Final = 4 * MAX_DRAFT_TOKENS
_STATES_BYTES: Final = 2 << 20
"""Hidden states that an ask has at most; the rest of a long text follows in others."""
_MOST_UNREAD: Final = 4096
"""Positions whose states are kept for a drafter that is not asked."""
_READ_AT_ONCE: Final = 1024
"""Tokens of a long text that a draft model reads at once."""
_PIECE: Final = 4
"""Drafts that nobody waits for and that are made at once: behind them another text has its turn."""
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.25, 1.0
"""A draft is waited for until it takes far longer than others did, within these bounds. While it
is late nobody waits for any."""


@runtime_checkable
class TakesStates(Protocol):
    """A draft source that reads hidden states of the ring."""

    def take_states(self, blocks: Sequence[RowBlock]) -> None:
        """Take the states of rows that a step computed, a block for each number of layers.

        A row counts once the token behind it is known; before, it may come again in its place.
        """


@dataclass(slots=True, kw_only=True, eq=False)
class Ask:
    """What a drafter is to do. Once it `is_over` no more than the reading is wanted."""

    draft: Draft
    is_over: bool = False

    @property
    def token_ids(self) -> list[int]:
        """The tokens that are read."""
        ids: list[int] = np.frombuffer(self.draft.token_ids, "<u4").tolist()
        return ids


def _ask(
    slot: SlotId,
    position: int,
    token_ids: Sequence[int],
    limit: int,
    states: bytes = b"",
    n_drafts: int = 0,
) -> Ask:
    return Ask(
        draft=Draft(
            request=0,
            drafter=0,
            slot=slot,
            position=position,
            token_ids=np.array(token_ids, "<u4").tobytes(),
            limit=limit,
            states=states,
            n_drafts=n_drafts,
        )
    )


class DraftHost:
    """A loaded drafter, wherever it is, on the event loop. Asks are carried out in their order.

    It reads hidden states after so many layers as each of `layers` says, () for a model of its own,
    and makes at most `most` drafts at once.
    """

    def __init__(self, layers: Sequence[int] = (), most: int = MAX_DRAFT_TOKENS) -> None:
        self.layers, self.most = tuple(layers), most
        self.is_closed = False
        self.n_long = 0
        """Texts of which more than a chunk is to be read now: nobody waits for drafts meanwhile."""
        self.is_late = False
        self.usual_s = 0.0
        """What it has taken to answer lately."""
        self._free_slots = [*map(SlotId, range(MAX_DRAFTED_SEQUENCES))]

    def ask(self, ask: Ask) -> asyncio.Future[list[int]]:
        """Have it draft; the future has the drafts, and fails where the drafter is lost."""
        raise NotImplementedError

    def free(self, slot: SlotId) -> asyncio.Future[None]:
        """Have it forget a slot."""
        raise NotImplementedError

    def close(self) -> None:
        """Unload it. Draft sources that are in use draft nothing more."""
        self.is_closed = True

    def draft_source(self, wake: Callable[[], None]) -> ModelDrafts:
        """Make the draft source of one sequence; it proposes nothing if all slots are taken."""
        slot = self._free_slots.pop() if self._free_slots else None
        return ModelDrafts(self, slot, wake)

    def give_back(self, slot: SlotId) -> None:
        """Release a slot when its last draft is done."""

        def freed(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._free_slots.append(slot)

        if not self.is_closed:
            self.free(slot).add_done_callback(freed)

    @property
    def patience_s(self) -> float:
        """How long a draft is waited for."""
        expected_s = 8 * self.usual_s or _MOST_PATIENCE_S
        return min(max(expected_s, _LEAST_PATIENCE_S), _MOST_PATIENCE_S)

    def note(self, took_s: float, *, is_long: bool) -> None:
        """Note how long an answer took."""
        if not is_long:
            self.is_late = took_s > self.patience_s
            self.usual_s = 0.8 * (self.usual_s or took_s) + 0.2 * took_s


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """An ask under way: `before` it had tokens of the text and these drafts."""

    ask: Ask
    n_tokens: int
    before: list[int]
    is_long: bool
    began_s: float
    answer: asyncio.Future[list[int]] = field(init=False)


class ModelDrafts:
    """Drafts for one sequence (drafting.DraftSource), made while the ring does other work.

    While the ring verifies drafts, further ones are made behind them, as many as the frames in
    flight and the next one may take. After a wrong one no more than the next frame takes.
    """

    flies = True

    def __init__(self, host: DraftHost, slot: SlotId | None, wake: Callable[[], None]) -> None:
        self._host, self._slot, self._wake = host, slot, wake
        self._job: _Job | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._text: Sequence[int] = ()
        self._n_tokens = 0
        """Tokens of the text that drafts were compared with."""
        self._drafts: list[int] = []
        """Those behind them."""
        self._depth = 0
        """Tokens since the hidden states that the first of them was made of."""
        self._agrees = True
        self._limit = self._n_ahead = self._n_prepared = 0
        self._n_sure = 0
        """Positions of the text that the drafter has read for sure, the last one aside."""
        self._held: list[int] = []
        """Tokens that it has read behind them."""
        self._states = _States(host.layers)
        self.kinds: Sequence[int] = ()

    def take_states(self, blocks: Sequence[RowBlock]) -> None:
        """See TakesStates."""
        if self._slot is not None and not self._host.is_closed:
            try:
                self._states.take(blocks)
            except RemoteProtocolError as error:
                log.warning("the drafter stops drafting for this text: %s", error)
                self.close()

    def prepare(self, tokens: Sequence[int], limit: int) -> bool:
        """Start drafting; see DraftSource.

        While the drafter reads a long text, as a prompt is, or is late, sequences do not wait.
        """
        if self._slot is None or self._host.is_closed:
            return True
        self._limit, self._n_prepared = limit, len(tokens)
        self._follow(tokens)
        self._go_on()
        host, job = self._host, self._job
        if job is None or len(self._drafts) >= min(limit, host.most):
            return True
        if host.n_long or host.is_late:
            return True
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(host.patience_s, self._note_late)
        return False

    def draft(self, tokens: Sequence[int], limit: int, ahead: Sequence[int] = ()) -> list[int]:
        """Return the drafts that are there behind the tokens and the drafts `ahead`."""
        self.kinds = ()
        if self._slot is None:
            return []
        self._follow(tokens)
        n_ahead = self._n_ahead = len(ahead)
        if self._drafts[:n_ahead] != [*ahead]:
            return []
        drafts = self._drafts[n_ahead : n_ahead + limit]
        self.kinds = range(self._depth + n_ahead, self._depth + n_ahead + len(drafts))
        if n_ahead or self._n_prepared == len(tokens):  # else none are wanted
            self._go_on()
        return drafts

    def close(self) -> None:
        """Release the slot."""
        self._stop_waiting()
        if self._slot is not None:
            self._drop_job()
            self._host.give_back(self._slot)
            self._slot = None

    def _follow(self, tokens: Sequence[int]) -> None:
        """Compare the drafts with the tokens that have come; drop them after a wrong one."""
        self._text, n_new = tokens, len(tokens) - self._n_tokens
        if not n_new:
            return
        came = tokens[self._n_tokens :] if self._n_tokens else ()
        n_right = common_prefix(self._drafts, came, min(len(self._drafts), len(came)))
        self._agrees = n_right == min(len(self._drafts), len(came))
        self._n_tokens = len(tokens)
        self._depth += n_new if self._host.layers else 0
        self._drafts = self._drafts[n_new:] if self._agrees else []
        job = self._job
        if job is not None and not self._agrees_with(job.before):
            self._drop_job()

    def _agrees_with(self, drafts: Sequence[int]) -> bool:
        """Say whether drafts behind the first tokens of the running job are right so far."""
        assert self._job is not None
        came = self._text[self._job.n_tokens :]
        n_both = min(len(drafts), len(came))
        return common_prefix(drafts, came, n_both) == n_both and (
            self._agrees or len(came) <= len(drafts)
        )

    def _drop_job(self) -> None:
        if self._job is not None:
            self._job.ask.is_over = True
            self._job = None
        self._stop_waiting()

    def _go_on(self) -> None:
        """Ask for what is missing, unless that is under way."""
        slot, host, n_drafts = self._slot, self._host, len(self._drafts)
        if slot is None or self._job is not None or host.is_closed or not self._text:
            return
        wanted = self._n_ahead + (2 * (self._limit + 1) if self._agrees else self._limit)
        wanted = min(wanted, _MOST_AHEAD)
        if host.layers:
            n_known = self._n_tokens - 1
            states = self._states.read(n_known)
            if states is None:
                return
            position, rows = states
            behind = self._text[position + 1 : position + 1 + len(rows)]
            limit = max(1, min(wanted, host.most)) if position + len(rows) == n_known else 0
            self._begin(_ask(slot, position, behind, limit, rows.tobytes()), [])
        elif self._n_tokens - self._n_sure > 2 * _READ_AT_ONCE:
            start = self._n_sure
            piece = self._text[start : start + _READ_AT_ONCE]
            self._n_sure, self._held = start + len(piece), []
            self._begin(_ask(slot, start, piece, 0), [])
        elif n_drafts < wanted:
            text = [*self._text[self._n_sure :], *self._drafts]
            n_held = common_prefix(self._held, text, min(len(self._held), len(text) - 1))
            missing = self._limit - n_drafts
            limit = missing if missing > 0 else min(_PIECE, wanted - n_drafts)
            position = self._n_sure + n_held
            ask = _ask(slot, position, text[n_held:], limit, n_drafts=n_drafts)
            self._note_held(self._begin(ask, [*self._drafts]), [])

    def _begin(self, ask: Ask, before: list[int]) -> _Job:
        loop = asyncio.get_running_loop()
        job = _Job(
            ask=ask,
            n_tokens=self._n_tokens,
            before=before,
            is_long=len(ask.draft.token_ids) > 4 * PREFILL_CHUNK_ROWS or not ask.draft.limit,
            began_s=loop.time(),
        )
        self._host.n_long += job.is_long
        self._job = job
        job.answer = self._host.ask(ask)
        job.answer.add_done_callback(lambda _: self._take(job))
        return job

    def _take(self, job: _Job) -> None:
        """Keep the drafts of a job. After a failure the drafter is not asked again."""
        host, answer = self._host, job.answer
        host.n_long -= job.is_long
        error = None if answer.cancelled() else answer.exception()
        if not answer.cancelled() and error is None:
            took_s = asyncio.get_running_loop().time() - job.began_s
            host.note(took_s, is_long=job.is_long)
        if job is not self._job:
            return
        self._stop_waiting()
        if answer.cancelled():  # the drafter was unloaded
            self.close()
        elif isinstance(error, ShardnetError):
            log.warning("the drafter stops drafting for this text: %s", error)
            self.close()
        elif error is not None:  # our own bug: the ring continues without drafts
            log.error("the drafter failed", exc_info=error)
            self.close()
        elif bool(answer.result()) != bool(job.ask.draft.limit):
            log.warning("the drafter stops drafting for this text: it made no drafts")
            self.close()
        else:
            self._keep(job, answer.result())
        self._wake()

    def _keep(self, job: _Job, drafts: list[int]) -> None:
        """Put what a job has made behind the tokens that have come meanwhile."""
        self._job = None
        if not job.ask.draft.limit:  # a part of a long text was read
            self._go_on()
            return
        known, n_came = [*job.before, *drafts], self._n_tokens - job.n_tokens
        came = self._text[job.n_tokens :]
        n_both = min(len(known), n_came)
        self._note_held(job, drafts[:-1])
        if common_prefix(known, came, n_both) == n_both:
            self._drafts = known[n_came:]
            self._depth = n_came if self._host.layers else 0
        self._go_on()

    def _note_held(self, job: _Job, drafts: Sequence[int]) -> None:
        """Note what is read once a job is done: its text, and these of its drafts."""
        self._n_sure = job.n_tokens - 1
        self._held = [self._text[self._n_sure], *job.before, *drafts]

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note_late(self) -> None:
        """Have nobody wait any more until the drafter answers in time."""
        self._timer = None
        self._host.is_late = True
        self._wake()


class _States:
    """Hidden states of consecutive positions that a drafter has not read yet."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._parts: deque[tuple[int, NDArray[np.uint16]]] = deque()
        """The position of the first row of each part, and bfloat16 [T, width]."""
        self._n_read = 0

    def take(self, blocks: Sequence[RowBlock]) -> None:
        """Keep what came, in place of what was there of these positions and behind them.

        The oldest are forgotten where they are not read. Raises RemoteProtocolError for layers of
        different rows.
        """
        by_layer: dict[int | None, list[RowBlock]] = {}
        for block in blocks:
            by_layer.setdefault(block.layer, []).append(block)
        if not self._layers or not all(number in by_layer for number in self._layers):
            return
        tables = [joined_rows(by_layer[number], "<u2") for number in self._layers]
        position, first = tables[0]
        if any((at, len(rows)) != (position, len(first)) for at, rows in tables):
            raise RemoteProtocolError("hidden states for drafts came of different rows")
        parts = self._parts
        while parts and parts[-1][0] >= position:
            parts.pop()
        if parts:
            at, rows = parts.pop()
            if at + len(rows) < position:
                parts.clear()
            else:
                parts.append((at, rows[: position - at]))
        parts.append((position, np.concatenate([rows for _, rows in tables], 1)))
        while parts[0][0] + len(parts[0][1]) + _MOST_UNREAD < position:
            parts.popleft()

    def read(self, end: int) -> tuple[int, NDArray[np.uint16]] | None:
        """Return the position of the first row before `end` that was not read, and the rows."""
        found: list[NDArray[np.uint16]] = []
        first = None
        while self._parts and self._parts[0][0] + len(self._parts[0][1]) <= self._n_read:
            self._parts.popleft()
        for at, rows in self._parts:
            unread = rows[max(0, self._n_read - at) : max(0, end - at)]
            if len(unread):
                first = max(at, self._n_read) if first is None else first
                found.append(unread)
        if first is None:
            return None
        joined = np.concatenate(found)
        joined = joined[: max(1, _STATES_BYTES // joined[0].nbytes)]
        self._n_read = first + len(joined)
        return first, joined


def stored_bytes(path: Path) -> int:
    """Return what the weights of a drafter take on disk, about what they take in memory."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)
