"""Has the ring load the model that requests ask for, one after another, and unloads it again.

Whose turn it is stands in turns.py.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Final

from shardnet.api.client import Client
from shardnet.api.generation import OnLoading
from shardnet.api.switching.turns import Ticket, Turns
from shardnet.errors import BusyError, LinkError, PeerFailedError, ShardnetError, ShortageError
from shardnet.transport.loop import cancel_all
from shardnet.wire.messages.plans import ModelChoice, NodeProgress

PATIENCE_S: Final = 240.0
"""A request whose client hears nothing waits so long for its model: JavaScript gives up at 300."""
PROMISE_S: Final = 30.0
"""A client that was refused keeps its place for so long beyond the wait it was given."""
RETRY_S: Final = 5
MOST_RETRY_S: Final = 60
"""The longest wait, in seconds, that clients are asked for: programs do not accept more."""
BUSY_S: Final = (0.25, 2.0)
"""The first and the longest pause before nodes are asked again that work for another program."""
REBUILDS: Final = 3
"""How often a ring that broke is built again before its requests fail."""
LEAST_KEPT_S: Final = 5.0
"""A model that another program uses is not unloaded; it is tried again after so long at least."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How long a model stays loaded that no request uses, None for ever."""

    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A request that waits: `granted` is set when it may run, `note` takes what it waits for.

    `on_progress` takes what the nodes tell while its model is loaded.
    """

    granted: asyncio.Future[None]
    note: Callable[[str], None]
    on_progress: OnLoading
    keep: Keep


@dataclass(slots=True, kw_only=True)
class _Opening:
    """A model that is being loaded, and how far that is."""

    model: str
    began_s: float
    task: asyncio.Task[None] | None = None
    doing: str = "loading"
    done: float = 0.0
    has_progressed: bool = False


@dataclass(eq=False, repr=False)
class ModelSwitch:
    """Admits requests to the ring, and has it loaded and unloaded.

    A model that no request has used for as long as `keep` says is unloaded; a request may say
    otherwise for its own model. `log` takes one line.
    """

    client: Client
    _: KW_ONLY
    keep: Keep = Keep(None)
    log: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._usual = self.keep
        self._turns = Turns()
        self._waiting: dict[Ticket, _Waiting] = {}
        self._choices: dict[str, ModelChoice] = {}
        self._opening: _Opening | None = None
        self._took_s: dict[str, float] = {}
        self.is_rebuilding = False
        """Whether a ring that broke is being built again."""
        self._due: asyncio.TimerHandle | None = None
        self._idle_since_s: float | None = None
        self._unload_due: asyncio.TimerHandle | None = None
        self._unloading: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def model(self) -> str:
        """The model whose turn it is, loaded or not, "" for none."""
        return self._turns.model

    @property
    def doing(self) -> str:
        """What is done to have a model loaded, "" if that is not going on."""
        return _told(self._opening) if self._opening is not None else ""

    @property
    def n_waiting(self) -> int:
        """Requests that wait for their model."""
        return len(self._waiting)

    @property
    def expires_s(self) -> float | None:
        """In how many seconds the model is unloaded unless somebody asks, None for never."""
        if self.keep.seconds is None or not self._turns.model:
            return None
        since_s = self.clock() if self._idle_since_s is None else self._idle_since_s
        return max(0.0, since_s + self.keep.seconds - self.clock())

    async def admit(
        self,
        choice: ModelChoice,
        *,
        note: Callable[[str], None] = lambda text: None,
        on_progress: OnLoading = lambda progress: None,
        patience_s: float | None = None,
        promise_s: float = PROMISE_S,
        keep: Keep | None = None,
    ) -> Ticket:
        """Wait until the ring has the model, and keep it there until `leave` is called.

        `note` gets what the request waits for, `on_progress` what nodes tell of loading the model;
        `keep` counts for the model from now on, None is the usual. Who gives up while the model
        loads keeps its place for `promise_s` seconds. Raises BusyError after `patience_s` seconds,
        at once while a ring that broke is built again, never for None; and what loading raises.
        """
        if patience_s is not None and self.is_rebuilding and self._turns.model == choice.model:
            raise self._not_ready(choice.model)
        self._rest(None)
        self._choices[choice.model] = choice
        ticket = self._turns.arrive(choice.model, self.clock())
        granted = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = _Waiting(
            granted=granted, note=note, on_progress=on_progress, keep=keep or self._usual
        )
        self._move()
        try:
            async with asyncio.timeout(patience_s):
                await granted
        except TimeoutError:
            error = self._not_ready(choice.model)
            self._go(ticket, promise_s=error.retry_s + PROMISE_S)
            raise error from None
        except BaseException:
            # The client may have a shorter patience than loading takes, and will ask again.
            is_loading = self._opening is not None and self._opening.model == choice.model
            self._go(ticket, promise_s=promise_s if is_loading else 0.0)
            if granted.done() and not granted.cancelled():
                granted.exception()  # it has come too late
            raise
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Note that a request has ended."""
        self._go(ticket)

    def lost(self, model: str, *, is_broken: bool) -> None:
        """Note that the ring has not got the model any more, and have it loaded again.

        `is_broken` says that a node was lost, not that another program has changed the model.
        """
        if self._turns.model != model or not self._turns.is_open:
            return
        self._turns.reopen()
        self.is_rebuilding = is_broken
        self._move()

    async def unload(self, model: str) -> None:
        """Unload a model as soon as nobody uses it, if the ring has it.

        Raises what unloading raises, but BusyError: then it is tried again.
        """
        if self._turns.model == model and self._turns.is_wanted:
            self.keep = Keep(0.0)
        elif self._turns.model in ("", model):
            await self._unload(model, 0.0)

    async def close(self) -> None:
        """End all that is going on. No request may wait any more."""
        self._is_closed = True
        opening, self._opening = self._opening, None
        loading = opening.task if opening is not None else None
        tasks = [task for task in (loading, self._unloading) if task is not None]
        for timer in (self._due, self._unload_due):
            if timer is not None:
                timer.cancel()
        await cancel_all(*tasks)

    def _go(self, ticket: Ticket, *, promise_s: float = 0.0) -> None:
        self._waiting.pop(ticket, None)
        self._turns.leave(ticket, self.clock(), promise_s=promise_s)
        self._move()

    def _move(self) -> None:
        """Let those run whose turn it is, and have the model loaded whose turn begins."""
        if self._is_closed:
            return
        now_s, turns, model = self.clock(), self._turns, self._turns.model
        for ticket in turns.take(now_s):
            waiting = self._waiting.pop(ticket)
            self.keep = waiting.keep
            if not waiting.granted.done():
                waiting.granted.set_result(None)
        if turns.model != model:
            self.is_rebuilding, self.keep = False, self._usual
        if self._opening is not None and self._opening.model != turns.model:
            assert self._opening.task is not None
            self._opening.task.cancel()
            self._opening = None
        if turns.model and not turns.is_open and self._opening is None:
            self._open(self._choices[turns.model])
        if self._due is not None:
            self._due.cancel()
        due_s = turns.due_s(now_s)
        loop = asyncio.get_running_loop()
        self._due = None if due_s is None else loop.call_later(due_s, self._move)
        if not turns.is_wanted and turns.is_open:
            self._rest(now_s)
        self._tell()

    def _tell(self) -> None:
        """Say to all who wait what they wait for."""
        if not self._waiting:
            return
        doing = self.doing
        for ticket, waiting in self._waiting.items():
            n_ahead = self._turns.n_ahead(ticket)
            requests = "request" if n_ahead == 1 else "requests"
            ahead = f"waiting for {n_ahead} {requests} to {self._turns.model}" if n_ahead else ""
            waiting.note(doing or ahead or f"waiting for the turn of {ticket.model}")

    def _open(self, choice: ModelChoice) -> None:
        """Begin to have a model loaded."""
        opening = self._opening = _Opening(model=choice.model, began_s=self.clock())
        opening.task = asyncio.create_task(self._load(choice, opening))
        opening.task.add_done_callback(lambda task: self._opened(opening, task))

    async def _load(self, choice: ModelChoice, opening: _Opening) -> None:
        """Have the ring built for a model; wait while other programs use the nodes."""

        def progressed(progress: NodeProgress) -> None:
            opening.doing, opening.has_progressed = progress.phase, True
            opening.done = progress.done_bytes / max(1, progress.total_bytes)
            for ticket, waiting in self._waiting.items():
                if ticket.model == opening.model:
                    waiting.on_progress(progress)
            self._tell()

        pause_s, longest_s = BUSY_S
        n_left = REBUILDS if self.is_rebuilding else 1
        while True:
            try:
                # Needs no tokenizer, and is answered at once if the ring stands.
                await self.client.tokenize([0], model=choice, on_progress=progressed)
            except ShortageError:  # no other program that will end
                raise
            except BusyError as error:
                opening.doing, opening.done = error.message, 0.0
            except (LinkError, PeerFailedError):
                n_left -= 1
                if not n_left:
                    raise
            else:
                return
            self._tell()
            await asyncio.sleep(pause_s)
            pause_s = min(longest_s, 2 * pause_s)

    def _opened(self, opening: _Opening, task: asyncio.Task[None]) -> None:
        """Take the end of loading, whatever it is."""
        error = None if task.cancelled() else task.exception()
        if self._opening is not opening:
            return
        self._opening, self.is_rebuilding = None, False
        if task.cancelled() or error is not None:
            for ticket in self._turns.end():
                granted = self._waiting.pop(ticket).granted
                if not granted.done():
                    granted.set_exception(error or _stopped())
        else:
            now_s = self.clock()
            took_s = now_s - opening.began_s
            self._turns.opened(now_s, took_s)
            if opening.has_progressed:  # otherwise it stood already
                self._took_s[opening.model] = took_s
                self.log(f"{opening.model} was loaded in {took_s:.1f} s")
        self._move()

    def _not_ready(self, model: str) -> BusyError:
        """Make the error of a request that waits no longer for its model."""
        opening = self._opening
        retry_s = float(RETRY_S)
        if opening is not None and opening.model == model:
            spent_s = self.clock() - opening.began_s
            if opening.done:
                retry_s = spent_s * (1 - opening.done) / opening.done
            else:
                retry_s = self._took_s.get(model, spent_s) - spent_s
        why = "a node of its ring was lost: " if self.is_rebuilding else ""
        doing = self.doing or f"requests to {self._turns.model} run"
        error = BusyError(f"{model} is not ready: {why}{doing}", remedy="ask again")
        error.retry_s = min(MOST_RETRY_S, max(1, round(retry_s)))
        return error

    def _rest(self, since_s: float | None) -> None:
        """Note since when no request uses the model, None for that one does."""
        if since_s is not None and self._idle_since_s is not None:
            return
        self._idle_since_s = since_s
        if self._unload_due is not None:
            self._unload_due.cancel()
            self._unload_due = None
        if since_s is not None and self.keep.seconds is not None:
            self._unload_in(self.keep.seconds, self._turns.model, self.keep.seconds)

    def _unload_in(self, seconds: float, model: str, idle_s: float) -> None:
        def begin() -> None:
            self._unload_due = None
            self._unloading = asyncio.create_task(self._unload_logged(model, idle_s))

        self._unload_due = asyncio.get_running_loop().call_later(seconds, begin)

    async def _unload_logged(self, model: str, idle_s: float) -> None:
        try:
            await self._unload(model, idle_s)
        except ShardnetError as error:
            self.log(f"warning: {model} could not be unloaded: {error}")

    async def _unload(self, model: str, idle_s: float) -> None:
        """Unload the model, unless another program has used it meanwhile; then try again later."""
        if self._turns.model == model:
            self._turns.end()  # who asks meanwhile has it loaded again
            self._move()
        try:
            await self.client.unload(model=model, idle_s=idle_s)
        except BusyError:
            if not self._turns.is_wanted and not self._is_closed:
                self._unload_in(max(LEAST_KEPT_S, idle_s / 2), model, idle_s)
        else:
            self.log(f"{model} was unloaded")


def _told(opening: _Opening) -> str:
    share = f" {100 * opening.done:.0f} %" if opening.done else ""
    return f"{opening.model}: {opening.doing}{share}"


def _stopped() -> PeerFailedError:
    return PeerFailedError("loading was stopped", remedy="ask again")


MOST_S: Final = 366 * 86400.0
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)")
_NUMBER: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?")
MOST_CHARACTERS: Final = 64


def parse_duration(text: str) -> float:
    """Return a duration in seconds, at most MOST_S; a number without a unit is seconds.

    Raises ValueError for what is none.
    """
    written = text.strip()
    parts = _PART.findall(written) if len(written) <= MOST_CHARACTERS else []
    if parts and "".join(number + unit for number, unit in parts) == written:
        seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    elif _NUMBER.fullmatch(written):
        seconds = float(written)
    else:
        raise ValueError(f"{written[:MOST_CHARACTERS]!r} is no duration such as 30m, 1h30m or 90")
    return min(seconds, MOST_S)
