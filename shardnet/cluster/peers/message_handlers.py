"""The table from the type of a control message to its handler; each room registers its own.

Must not know what handlers do, nor which messages there are: a test checks that every one that a
node can receive is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from shardnet.cluster.peers.control_link import ControlLink, Incoming

M = TypeVar("M", bound=Incoming)


class MessageHandlers:
    """The handlers of one node, by message type."""

    def __init__(self) -> None:
        self._by_type: dict[type[object], Callable[..., Coroutine[Any, Any, None]]] = {}

    @property
    def types(self) -> frozenset[type[object]]:
        """Message types that have a handler."""
        return frozenset(self._by_type)

    def register(
        self, kind: type[M], handler: Callable[[ControlLink, M], Coroutine[Any, Any, None]]
    ) -> None:
        """Register `handler` for messages of type `kind`, which must have none yet."""
        assert kind not in self._by_type, f"{kind.__name__} has a handler already"
        self._by_type[kind] = handler

    async def handle(self, control: ControlLink, message: Incoming) -> None:
        """Handle one message of `control`. The request fails with the ShardnetError this raises."""
        await self._by_type[type(message)](control, message)
