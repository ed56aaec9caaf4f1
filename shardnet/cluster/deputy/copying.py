"""Copies at another node: what requests with a key make, and the values that programs have kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, TypeVar

from shardnet.cluster.deputy.copied_requests import CopiedRequest, CopiedRequests, End, written
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.errors import LinkError, ShardnetError, SupersededError
from shardnet.runtime.engine.requests import MadeToken
from shardnet.types import NodeId
from shardnet.wire.messages import deputies
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.handshake import PeerRole

AGAIN_S: Final = 60.0
"""When a node that does not stand by is asked again."""
MAX_APPOINTED: Final = 64
"""Deputies, former ones too, that are remembered."""

Describe = Callable[[], deputies.StandBy]
"""Describes the present ring to its deputy; makes the description of each ring once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deputy:
    """The node that is the deputy, the link to it, and the description sent last."""

    node: NodeId
    address: str
    control: ControlLink
    told: deputies.StandBy


@dataclass(kw_only=True, eq=False, repr=False)
class Copying:
    """What one head keeps of its requests, and sends to its deputy. `link_of` gives its links."""

    link_of: Callable[[NodeId], ControlLink | None]
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self.requests = CopiedRequests()
        """The requests that this node leads, or has taken over."""
        self.deputy: Deputy | None = None
        self.appointed: deque[NodeId] = deque(maxlen=MAX_APPOINTED)
        """The last that stood by, lost or not: any of them may have taken over."""
        self._refused: dict[NodeId, float] = {}
        """Nodes that do not stand by for this one, and until when they are not asked again."""
        self._describe: Describe | None = None
        self._rows: list[deputies.CopiedTokens] = []
        self._is_posted = False

    @property
    def address(self) -> str:
        """Where the deputy is, "" without one."""
        return self.deputy.address if self.deputy is not None else ""

    def begin(
        self, generate: Generate, made: Sequence[MadeToken], describe: Describe
    ) -> Copy | None:
        """Begin to copy a request that has its prompt as ids, and `made` so far.

        None if it has no key, or cannot be copied: another one with its key runs, there is no room,
        or rows of the model were asked for.
        """
        outputs, now_s = generate.outputs, time.monotonic()
        known = self.requests.find(generate.key, now_s)
        if not generate.key or outputs.asks or (known is not None and not known.end):
            return None
        request = self.requests.open(generate, describe().model_id, now_s)
        if request is None or not self.requests.add(generate.key, 0, made, "", now_s):
            return None
        self._describe = describe
        if (deputy := self._standing_by()) is not None and deputy is self.deputy:
            self._tell_request(deputy.control, request)
        self._settle_on(deputy)
        return Copy(self, generate.key, len(made))

    @contextlib.contextmanager
    def copied(
        self,
        control: ControlLink,
        generate: Generate,
        made: Sequence[MadeToken],
        describe: Describe,
    ) -> Iterator[Copy | None]:
        """Have a request of the client on `control` copied within the context; see `begin`."""
        copy = self.begin(generate, made, describe)
        try:
            yield copy
        except BaseException as error:
            has_moved = isinstance(error, SupersededError) and error.address
            if copy is not None and not has_moved:  # else the present head has it
                is_over = isinstance(error, ShardnetError) and not control.link.closed
                copy.end("failed" if is_over else "left")
            raise
        if copy is not None:
            copy.end("complete")

    def add(self, row: deputies.CopiedTokens, made: Sequence[MadeToken]) -> bool:
        """Keep tokens, and send them with all others of this turn of the event loop.

        Returns whether the request is still kept; the deputy is told where it is not.
        """
        is_kept = self.requests.add(row.key, row.first, made, row.end, time.monotonic())
        if not is_kept:
            row = deputies.CopiedTokens(row.key, 0, [], "failed")
        self._rows.append(row)
        if not self._is_posted:
            self._is_posted = True
            asyncio.get_running_loop().call_soon(self.flush)
        return is_kept

    def flush(self) -> None:
        """Send what was kept since the last time."""
        self._is_posted = False
        deputy = self._standing_by()
        if deputy is not None and deputy is self.deputy:
            self._send(deputy.control, self._rows)
        self._settle_on(deputy)
        self._rows = []

    def stop(self) -> None:
        """Send what was kept, and nothing of what comes: this head ends.

        That requests fail with it says nothing about them: the deputy goes on with them.
        """
        self.flush()
        self.let_go()

    def let_go(self) -> None:
        """Forget everything: another node leads."""
        self.requests, self.deputy, self._describe = CopiedRequests(), None, None

    def refused_by(self, node: NodeId, why: str) -> None:
        """Note that a node does not stand by for this one; the next turn another one is asked."""
        self._refused[node] = time.monotonic() + AGAIN_S
        if self.deputy is not None and self.deputy.node == node:
            self.log(f"{self.deputy.control.link.peer.name} does not stand by as deputy: {why}")
            self.deputy = None

    def _standing_by(self) -> Deputy | None:
        """Return the deputy; a new one has to be sent everything. It is not noted yet."""
        if self._describe is None:
            return None
        told, deputy = self._describe(), self.deputy
        if deputy is not None and (deputy.told is told or deputy.told == told):
            is_same = self.link_of(deputy.node) is deputy.control
            if is_same and not deputy.control.link.closed:
                return deputy
        for place in told.nodes[1:]:
            control = self.link_of(NodeId(place.node))
            is_asked = time.monotonic() >= self._refused.get(NodeId(place.node), 0.0)
            if control is None or control.link.closed or not is_asked:
                continue
            new = Deputy(node=NodeId(place.node), address=place.address, control=control, told=told)
            try:
                self._appoint(new)
            except LinkError:
                continue
            return new
        if deputy is not None:
            self.log("no node of the ring can stand by as deputy")
        return None

    def _settle_on(self, deputy: Deputy | None) -> None:
        """Note who the deputy is. One that is it no more forgets what runs: it would take over."""
        former, self.deputy = self.deputy, deputy
        if former is None or (deputy is not None and deputy.node == former.node):
            return
        control = self.link_of(former.node)
        if control is not None:
            running = (request.generate.key for request in self.requests.running)
            over = [deputies.CopiedTokens(key, 0, [], "failed") for key in running]
            self._send(control, [*self._rows, *over])

    def _appoint(self, deputy: Deputy) -> None:
        """Tell a deputy everything. Raises LinkError."""
        if self.deputy is None or self.deputy.node != deputy.node:
            self.log(f"{deputy.control.link.peer.name} stands by as deputy")
        if deputy.node not in self.appointed:
            self.appointed.append(deputy.node)
        deputy.control.send(deputy.told)
        for request in self.requests.running:
            self._tell_request(deputy.control, request)

    def _tell_request(self, control: ControlLink, request: CopiedRequest) -> None:
        """Send a request; one whose pictures would have to wait on the link is copied no more, nor
        one that the deputy, of an older release, does not know.

        The link ends where too much waits, and the ring with it.
        """
        lacking = control.link.peer.lacking(*request.generate.needed)
        if lacking or (request.picture_bytes and control.link.is_full):
            self.requests.forget(request.generate.key)
            return
        control.send(deputies.RequestCopied(generate=request.generate))
        for first in range(0, len(request.tokens), deputies.MAX_COPIED_TOKENS):
            part = request.tokens[first : first + deputies.MAX_COPIED_TOKENS]
            row = deputies.CopiedTokens(request.generate.key, first, written(part), request.end)
            control.send(deputies.TokensCopied(rows=[row]))

    def _send(self, control: ControlLink, rows: Sequence[deputies.CopiedTokens]) -> None:
        for first in range(0, len(rows), deputies.MAX_COPIED_ROWS):
            try:
                control.send(
                    deputies.TokensCopied(rows=list(rows[first : first + deputies.MAX_COPIED_ROWS]))
                )
            except LinkError:  # the next one is sent everything
                return


class Copy:
    """The copy of one request."""

    def __init__(self, copying: Copying, key: str, n_tokens: int) -> None:
        self._copying = copying
        self._key = key
        self._n_tokens = n_tokens
        self._is_kept = True

    @property
    def address(self) -> str:
        """Where it is, "" for nowhere but here."""
        return self._copying.address if self._is_kept else ""

    def add(self, token: MadeToken) -> None:
        """Add the next token."""
        row = deputies.CopiedTokens(self._key, self._n_tokens, written([token]), "")
        self._n_tokens += 1
        self._add(row, [token])

    def end(self, end: End) -> None:
        """Note how the request has ended."""
        self._add(deputies.CopiedTokens(self._key, self._n_tokens, [], end), [])

    def _add(self, row: deputies.CopiedTokens, made: Sequence[MadeToken]) -> None:
        if self._is_kept:
            self._is_kept = self._copying.add(row, made)


MOST_VALUES: Final = 4096
MOST_BYTES: Final = 128 << 20
"""In the memory of one node."""
PEER_S: Final = 3.0
"""How long another node may take."""

Answer = TypeVar("Answer", Done, deputies.ValueFound, deputies.ValuesListed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    value: bytes
    came_s: float


@dataclass(eq=False)
class KeptValues:
    """Values by owner and name; the least recently used make room. `linked` are other nodes."""

    linked: Callable[[], Sequence[ControlLink]]
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic
    most: int = MOST_VALUES
    most_bytes: int = MOST_BYTES

    def __post_init__(self) -> None:
        self._n_bytes = 0
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()

    def register(self, handlers: MessageHandlers) -> None:
        """Register the messages about values."""
        handlers.register(deputies.KeepValue, self.keep)
        handlers.register(deputies.FindValue, self.find)
        handlers.register(deputies.ListValues, self.list_values)
        handlers.register(deputies.DropValue, self.drop)

    async def keep(self, control: ControlLink, message: deputies.KeepValue) -> None:
        """Keep a value; one of a client on another node too, if there is one that answers."""
        self._take(message)
        for peer in self._others(control):
            if await peer.try_to_ask(message, Done, PEER_S) is not None:
                break
        control.send(Done(request=message.request))

    async def find(self, control: ControlLink, message: deputies.FindValue) -> None:
        """Answer with a value; where this node has none, with another's."""
        place = (message.of.owner, message.of.name)
        held = self._held.get(place)
        if held is not None:
            self._held.move_to_end(place)
            control.send(deputies.ValueFound(request=message.request, value=held.value))
            return
        found = await _all_asked(self._others(control), message, deputies.ValueFound)
        value = next((one.value for one in found if one.value is not None), None)
        control.send(deputies.ValueFound(request=message.request, value=value))

    async def list_values(self, control: ControlLink, message: deputies.ListValues) -> None:
        """Answer with an owner's small values, of each name the latest."""
        others = await _all_asked(self._others(control), message, deputies.ValuesListed)
        now_s = self.clock()  # after theirs, so that an older one of ours never looks younger
        own = [
            deputies.ListedValue(name, now_s - held.came_s, held.value)
            for (owner, name), held in self._held.items()
            if owner == message.of.owner and name.startswith(message.of.name)
        ]
        values = [*own, *(value for answer in others for value in answer.values)]
        control.send(deputies.ValuesListed(request=message.request, values=_latest(values)))

    async def drop(self, control: ControlLink, message: deputies.DropValue) -> None:
        """Keep a value no longer, nor on any other node that answers."""
        self._forget((message.of.owner, message.of.name))
        await _all_asked(self._others(control), message, Done)
        control.send(Done(request=message.request))

    def _others(self, control: ControlLink) -> Sequence[ControlLink]:
        """Return the nodes to ask, too: none for what another node asks."""
        return self.linked() if control.link.peer.role is PeerRole.CLIENT else ()

    def _take(self, message: deputies.KeepValue) -> None:
        place = (message.of.owner, message.of.name)
        self._forget(place)
        self._held[place] = _Held(value=message.value, came_s=self.clock())
        self._n_bytes += len(message.value)
        while len(self._held) > self.most or self._n_bytes > self.most_bytes:
            self._forget(next(iter(self._held)))

    def _forget(self, place: tuple[str, str]) -> None:
        gone = self._held.pop(place, None)
        self._n_bytes -= len(gone.value) if gone is not None else 0


def _latest(values: Iterable[deputies.ListedValue]) -> list[deputies.ListedValue]:
    """Return the latest value of each name, the latest first, as many as one answer takes."""
    found: dict[str, deputies.ListedValue] = {}
    n_bytes = 0
    for value in sorted(values, key=lambda value: value.age_s):
        if value.name in found or len(value.value) > deputies.MAX_LISTED_VALUE:
            continue
        n_bytes += len(value.value)
        if len(found) == deputies.MAX_VALUES_LISTED or n_bytes > deputies.MAX_LISTED_BYTES:
            break
        found[value.name] = value
    return [*found.values()]


async def _all_asked(
    peers: Iterable[ControlLink],
    message: deputies.FindValue | deputies.ListValues | deputies.DropValue,
    expected: type[Answer],
) -> list[Answer]:
    answers = await asyncio.gather(*(peer.try_to_ask(message, expected, PEER_S) for peer in peers))
    return [answer for answer in answers if answer is not None]
