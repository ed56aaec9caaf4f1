"""Rounds of requests with faults in the middle, and what is checked after each.

Every text is compared with what the same request says undisturbed; when all has come back, nothing
may be left that was not there before. Bounds are on silence, not on speed: a busy machine is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace
from support.chaos.faults import DRAINS, Fault, Moment, Round
from support.chaos.lab import Lab, Place, differences
from support.chaos.ledger import DIFFERS, EQUAL, NAMED, SILENT, Entry
from support.chaos.streams import Heard, listen, listen_to_all

from shardnet.api import Client, ModelChoice, Prompt
from shardnet.api.client import connect
from shardnet.errors import ShardnetError
from shardnet.wire.messages.membership import StatusReply

SILENCE_S = 120.0
"""How long nothing at all may come, of any request, before they count as hanging."""
WHOLE_S = 120.0
"""How long all nodes may take to be linked and to have a ring again."""
RETURN_S = 6.0
"""How long a node that is back for the first time may take to be used again by itself; those that
are lost again and again wait longer than anybody waits for here."""
HEADLESS_S = 10.0
"""How long clients of a head that has ended may wait for a named error, and its slots be taken."""
REST_S = 30.0
"""How long what is left of a recovery may take to be gone."""
BACK_S = 1.0
"""When a node that is killed twice is back the first time."""
SLACK = {
    "sockets": 6,
    "files": 3,
    "threads": 6,
    "processes": 1,
    "tasks": 12,
    "stages": 1,
    "engines": 1,
    "sequences": 0,
}
"""What a node may have open beyond what it had at first: links come and go, pools fill, and threads
of up to four disks are kept."""
PARTS = re.compile(r"recovered in [0-9.]+ s \((?P<parts>[^)]*)\)")
PART = re.compile(r"(?P<name>notice|plan|load|replay) (?P<value>[0-9.]+)")


@dataclass(slots=True, kw_only=True)
class Watch:
    """What is seen of a round while it runs."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    loading: asyncio.Event = field(default_factory=asyncio.Event)
    recovering: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    n_tokens: int = 0
    n_accepted: int = 0
    after_tokens: int = 0
    after_accepted: int = 0
    heard_at: float = field(default_factory=time.monotonic)

    def on_event(self, state: str, n_tokens: int, is_first: bool) -> None:
        self.heard_at = time.monotonic()
        self.n_tokens += n_tokens
        self.n_accepted += is_first
        if self.n_tokens >= self.after_tokens and self.n_accepted >= self.after_accepted:
            self.begun.set()
        if state == "recovering":
            self.recovering.set()

    def on_loading(self) -> None:
        self.heard_at = time.monotonic()
        self.loading.set()

    async def until(self, event: asyncio.Event) -> None:
        """Wait for an event, or until all requests have ended."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self.over.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


class Rounds:
    """Runs rounds over the nodes of a lab with a request for each of `prompts`.

    They run within its context.
    """

    _client: Client

    def __init__(
        self,
        lab: Lab,
        seed: int,
        *,
        model: str,
        prompts: Sequence[Prompt],
        return_s: float = RETURN_S,
        standby: Literal["", "kv", "auto"] = "",
        nodes_per_stage: int = 1,
        most_pause_s: float | None = None,
    ) -> None:
        self._return_s = return_s
        self._most_pause_s = most_pause_s
        self._lab = lab
        self._connection = contextlib.AsyncExitStack()
        self._seed = seed
        self._prompts = prompts
        context = max(len(one.content) + one.options["max_tokens"] for one in prompts)
        self._choice = ModelChoice(
            model=model,
            nodes=lab.addresses,
            standby=standby,
            nodes_per_stage=nodes_per_stage,
            context=context,
        )
        self.undisturbed: list[Heard] = []
        self._n_asked = 0
        self._opened: dict[tuple[int, int], dict[str, int]] = {}

    async def __aenter__(self) -> Rounds:
        await self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.aclose()

    async def _connect(self) -> None:
        """Connect to the head, which may be another process than before."""
        with contextlib.suppress(ShardnetError):
            await self._connection.aclose()
        connecting = connect(self._lab.places[0].address)
        self._client = await self._connection.enter_async_context(connecting)

    async def record_undisturbed(self) -> None:
        """Have every request's text without any fault, twice, and what nodes have open then."""
        await self._make_whole()
        for _ in range(2):
            heard, _ = await self._listen(Watch(), lambda watch: asyncio.sleep(0))
            for one, before in zip(heard, self.undisturbed or heard, strict=True):
                if one.error is not None:
                    raise AssertionError(f"a request failed undisturbed: {one.error}")
                if difference := one.difference(before):
                    raise AssertionError(f"undisturbed texts differ: {difference}")
            self.undisturbed = heard
        await self._leaks()

    async def run(self, drawn: Round, *, has_deputy: bool = False) -> Entry:
        """Run one round; afterwards all nodes are there and in one ring.

        If it `has_deputy` its answers are copied to one, and no end of the head is to be seen.
        """
        if drawn.faults[0].moment is Moment.LOADING:
            with contextlib.suppress(ShardnetError):
                await self._client.unload()
        inflicted: list[float] = []
        watch = Watch(after_tokens=drawn.after_tokens)
        if has_deputy:  # it has what the head has accepted
            watch.after_accepted = len(self._prompts)
        log_before = len(self._head_log)
        self._n_asked += 1
        heard, is_silent = await self._listen(
            watch,
            lambda watch: self._inflict(drawn, watch, inflicted),
            key=f"{self._seed}-{self._n_asked}" if has_deputy else "",
        )
        wrong: list[str] = []
        outcomes: Counter[str] = Counter()
        for number, (one, before) in enumerate(zip(heard, self.undisturbed, strict=True)):
            difference = one.difference(before)
            if difference:
                wrong.append(f"request {number}: {difference}")
            if one.error is not None and not isinstance(one.error, ShardnetError):
                wrong.append(f"request {number}: {one.error!r}")
            outcome = EQUAL if one.error is None else NAMED
            outcomes[DIFFERS if difference else outcome] += 1
        if is_silent:
            outcomes = Counter({SILENT: len(heard)})
            wrong.append(f"nothing came for {SILENCE_S:g} s")
        first = min(inflicted, default=0.0)
        is_headless = drawn.loses_head and not has_deputy
        if is_headless and inflicted:
            wrong += await self._headless(heard, first)
        else:
            errors = Counter(str(one.error) for one in heard if one.error is not None)
            wrong += [f"{n} times: {error}" for error, n in errors.items()]
        told = [at for one in heard for at in one.recovering_at if at >= first]
        told += [one.ended_at for one in heard if one.error is not None]
        log = self._head_log[log_before:]
        await self._lab.until_lifted()
        started = [place.n_starts for place in self._lab.places]
        wrong += await self._lab.until_drained()
        if drawn.ends_head and inflicted and not is_headless:
            await self._end_other_rings()
        whole_s, returned = await self._heal(wrong, is_anew=drawn.freezes_head)
        for fault in drawn.faults if inflicted else ():
            place = self._lab.places[fault.victim]
            if fault.kind in DRAINS and place.n_starts == started[fault.victim]:
                wrong.append(f"{place.name} has not ended by its drain")
        wrong += await self._leaks()
        pauses = [
            (len(prompt.content), one.longest_gap(first))
            for prompt, one in zip(self._prompts, heard, strict=True)
        ]
        pause_s = max(pause_s for _, pause_s in pauses)
        lasted_s = sum(fault.seconds for fault in drawn.faults)
        if self._most_pause_s is not None and pause_s > lasted_s + self._most_pause_s:
            wrong.append(f"a text paused for {pause_s:.1f} s")
        return Entry(
            seed=self._seed,
            number=drawn.number,
            faults=tuple(str(fault) for fault in drawn.faults),
            moments=tuple(fault.moment.value for fault in drawn.faults),
            victims=tuple(self._lab.places[fault.victim].name for fault in drawn.faults),
            outcomes=dict(outcomes),
            notice_s=min(told) - first if told and inflicted else None,
            pause_s=pause_s,
            pauses=tuple(pauses),
            n_recoveries=len(PARTS.findall(log)),
            parts=read_parts(log),
            whole_s=whole_s,
            returned=returned,
            is_headless=is_headless,
            wrong=tuple(wrong),
        )

    # --- requests and faults

    @property
    def _head_log(self) -> str:
        head = self._lab.places[0].process
        return head.log if head is not None else ""

    async def _listen(
        self, watch: Watch, inflict: Callable[[Watch], Awaitable[None]], key: str = ""
    ) -> tuple[list[Heard], bool]:
        """Run all requests, with faults beside them; return what came, and whether they hung."""
        asking = asyncio.create_task(
            listen_to_all(
                self._client, self._prompts, self._choice, watch.on_event, watch.on_loading, key
            )
        )
        inflicting = asyncio.ensure_future(inflict(watch))
        while not asking.done() and time.monotonic() - watch.heard_at < SILENCE_S:
            await asyncio.wait([asking], timeout=1.0)
        watch.over.set()
        await inflicting
        if asking.done():
            return asking.result(), False
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        return [Heard() for _ in self._prompts], True

    async def _inflict(self, drawn: Round, watch: Watch, inflicted: list[float]) -> None:
        """Wait for each fault's moment, and inflict it unless all requests have ended before."""
        for fault in drawn.faults:
            await self._moment(fault, watch)
            if watch.over.is_set():
                return
            inflicted.append(time.monotonic())
            if fault.moment is Moment.DRAINING:
                await self._lab.drain(fault.other or fault.victim)
            await self._lab.inflict(fault)

    async def _moment(self, fault: Fault, watch: Watch) -> None:
        match fault.moment:
            case Moment.LOADING:
                await watch.until(watch.loading)
            case Moment.RUNNING | Moment.DRAINING:
                await watch.until(watch.begun)
            case Moment.RECOVERING:
                await watch.until(watch.recovering)
            case Moment.AGAIN:
                await asyncio.sleep(BACK_S)
                await self._lab.start_node(fault.victim)
                await asyncio.sleep(BACK_S)
            case Moment.BESIDE:
                pass

    # --- afterwards

    async def _headless(self, heard: Sequence[Heard], ended_at: float) -> list[str]:
        """What is wrong once the head has ended: its nodes are free, and another one leads them."""
        wrong = []
        waited_s = max(one.ended_at for one in heard) - ended_at
        if waited_s > HEADLESS_S:
            wrong.append(f"clients were told {waited_s:.1f} s after the head had ended")
        others = self._lab.places[1:]
        while n_taken := await self._n_sequences(others):
            if time.monotonic() > ended_at + HEADLESS_S:
                wrong.append(f"{n_taken} sequences of a head that has ended are still open")
                break
            await asyncio.sleep(0.1)
        addresses = [one.address for one in others]
        per_stage = min(self._choice.nodes_per_stage, len(others))
        choice = replace(self._choice, nodes=addresses, standby="", nodes_per_stage=per_stage)
        async with connect(addresses[0]) as client:
            told = await listen(client, self._prompts[0], choice)
            difference = told.difference(self.undisturbed[0])
            if told.error is not None or difference:
                wrong.append(f"another head: {told.error or difference}")
            with contextlib.suppress(ShardnetError):
                await client.unload()
        self._opened.pop((others[0].number, others[0].n_starts), None)  # a head has more threads
        return wrong

    async def _end_other_rings(self) -> None:
        """Have nodes that went on without the head free their ring."""
        others = [place for place in self._lab.places[1:] if place.lives]
        for place in others:
            self._opened.pop((place.number, place.n_starts), None)  # a head has more threads
        async with connect(others[0].address) as client:
            with contextlib.suppress(ShardnetError):
                await client.unload()

    async def _n_sequences(self, places: Sequence[Place]) -> int:
        """Sequences that are open on the stages of some nodes."""
        counts = [await self._lab.order(place.number, "count") for place in places]
        return sum(count["sequences"] for count in counts)

    async def _heal(self, wrong: list[str], *, is_anew: bool) -> tuple[float, str]:
        """Start what was killed; have all nodes in one ring. Returns seconds, and who saw to it.

        A head that was frozen does not know yet what it has lost: a ring `is_anew` then.
        """
        began = time.monotonic()
        ended = [place for place in self._lab.places if not place.lives]
        for place in ended:
            if place.process is not None:  # nobody ended it
                wrong.append(f"{place.name} ended by itself: {place.process.log[-2000:]}")
                await self._lab.kill(place.number)
            await self._lab.start_node(place.number)
        if self._lab.places[0] in ended:
            await self._connect()
        is_first = max(place.n_starts for place in self._lab.places) <= 2
        patience_s = self._return_s if is_first else 0.0
        is_whole = not is_anew and await self._is_whole(patience_s)
        returned = "by itself" if is_whole else "by a new ring"
        if returned != "by itself":
            await self._make_whole()
        return time.monotonic() - began, returned

    async def _is_whole(self, patience_s: float) -> bool:
        """Whether every node has a stage of the ring, or a part of one, within some seconds."""
        until = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(ShardnetError, TimeoutError):
                async with asyncio.timeout(SILENCE_S):
                    ring = await self._client.activity()
                stages = ring.plan.stages if ring.plan and not ring.is_broken else []
                if sum(1 + len(stage.shards) for stage in stages) == len(self._lab.places):
                    return True
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.2)

    async def _make_whole(self) -> None:
        """Have a new ring of all nodes, however often that takes."""
        until = time.monotonic() + WHOLE_S
        while True:
            with contextlib.suppress(ShardnetError, TimeoutError):
                async with asyncio.timeout(WHOLE_S):
                    await self._client.unload()
                    await self._client.complete("so", model=self._choice, max_tokens=2)
                if await self._is_whole(5.0):
                    return
            if time.monotonic() > until:
                raise AssertionError("the nodes have no ring any more")
            await asyncio.sleep(0.5)

    async def _status(self) -> StatusReply | None:
        try:
            async with asyncio.timeout(SILENCE_S):
                return await self._client.status(with_peers=True)
        except (ShardnetError, TimeoutError):
            return None

    async def _leaks(self) -> list[str]:
        """What nodes hold that they did not hold when they were new, once they are at rest."""
        until = time.monotonic() + REST_S
        while True:
            found = await self._slots()
            for place in self._lab.places:
                now = await self._lab.order(place.number, "count")
                names = now.pop("names")
                before = self._opened.setdefault((place.number, place.n_starts), now)
                left = differences(before, now, SLACK)
                found += [f"{place.name}: {line}" for line in left]
                if any(line.startswith("tasks") for line in left):
                    found.append(f"{place.name}: {names}")
            if not found or time.monotonic() > until:
                return found
            await asyncio.sleep(0.5)

    async def _slots(self) -> Sequence[str]:
        status = await self._status()
        load = status.load if status is not None else None
        if load is None:
            return ["the head says nothing of its ring"]
        if load.running or load.waiting or load.paused:
            return [f"{load.running} running, {load.waiting} waiting, {load.paused} paused"]
        if load.used_blocks != load.warm_blocks:
            return [f"{load.used_blocks} blocks used, {load.warm_blocks} of them warm"]
        return []


def read_parts(log: str) -> dict[str, float]:
    """The parts (s) of the recoveries in a head's log, added up."""
    parts: dict[str, float] = {}
    for found in PARTS.finditer(log):
        for part in PART.finditer(found["parts"]):
            parts[part["name"]] = parts.get(part["name"], 0.0) + float(part["value"])
    return parts
