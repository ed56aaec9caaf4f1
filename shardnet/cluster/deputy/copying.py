"""Copies what requests with a key make to the deputy of this head, as it is made.

Knows which node that is, and that a new one is told everything. Must not know what a deputy does,
nor how requests run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shardnet.cluster.deputy.copied_requests import CopiedRequest, CopiedRequests, End, written
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.errors import LinkError, ShardnetError, SupersededError
from shardnet.runtime.engine.requests import MadeToken
from shardnet.types import NodeId
from shardnet.wire.messages.deputies import (
    MAX_COPIED_ROWS,
    MAX_COPIED_TOKENS,
    CopiedTokens,
    RequestCopied,
    StandBy,
    TokensCopied,
)
from shardnet.wire.messages.generation import Generate

AGAIN_S: Final = 60.0
"""When a node that does not stand by is asked again."""
MAX_APPOINTED: Final = 64
"""Deputies, former ones too, that are remembered."""

Describe = Callable[[], StandBy]
"""Describes the present ring to its deputy; makes the description of each ring once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deputy:
    """The node that is the deputy, the link to it, and the description sent last."""

    node: NodeId
    address: str
    control: ControlLink
    told: StandBy


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
        self._rows: list[CopiedTokens] = []
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
        request = self.requests.open(generate, now_s)
        if request is None or not self.requests.add(generate.key, 0, made, "", now_s):
            return None
        self._describe = describe
        if (deputy := self._standing_by()) is not None and deputy is self.deputy:
            self._tell_request(deputy.control, request)
        self.deputy = deputy
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
        except SupersededError:
            raise  # the present head has it
        except BaseException as error:
            if copy is not None:
                is_over = isinstance(error, ShardnetError) and not control.link.closed
                copy.end("failed" if is_over else "left")
            raise
        if copy is not None:
            copy.end("complete")

    def add(self, row: CopiedTokens, made: Sequence[MadeToken]) -> bool:
        """Keep tokens, and send them with all others of this turn of the event loop.

        Returns whether the request is still kept; the deputy is told where it is not.
        """
        is_kept = self.requests.add(row.key, row.first, made, row.end, time.monotonic())
        if not is_kept:
            row = CopiedTokens(row.key, 0, [], "failed")
        self._rows.append(row)
        if not self._is_posted:
            self._is_posted = True
            asyncio.get_running_loop().call_soon(self.flush)
        return is_kept

    def flush(self) -> None:
        """Send what was kept since the last time."""
        self._is_posted = False
        rows, self._rows = self._rows, []
        deputy = self._standing_by()
        if deputy is not None and deputy is self.deputy:
            self._send(deputy.control, rows)
        self.deputy = deputy

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
        control.send(RequestCopied(generate=request.generate))
        for first in range(0, len(request.tokens), MAX_COPIED_TOKENS):
            part = request.tokens[first : first + MAX_COPIED_TOKENS]
            row = CopiedTokens(request.generate.key, first, written(part), request.end)
            control.send(TokensCopied(rows=[row]))

    def _send(self, control: ControlLink, rows: Sequence[CopiedTokens]) -> None:
        for first in range(0, len(rows), MAX_COPIED_ROWS):
            try:
                control.send(TokensCopied(rows=list(rows[first : first + MAX_COPIED_ROWS])))
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
        row = CopiedTokens(self._key, self._n_tokens, written([token]), "")
        self._n_tokens += 1
        self._add(row, [token])

    def end(self, end: End) -> None:
        """Note how the request has ended."""
        self._add(CopiedTokens(self._key, self._n_tokens, [], end), [])

    def _add(self, row: CopiedTokens, made: Sequence[MadeToken]) -> None:
        if self._is_kept:
            self._is_kept = self._copying.add(row, made)
