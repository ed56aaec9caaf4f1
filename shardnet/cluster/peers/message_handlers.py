"""A table from the type of a control message to its handler, which each room fills for itself.

Knows nothing of what handlers do. Must not know which messages there are: a test holds that every
one that a node can receive is registered.
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
        """Have messages of type `kind` handled by `handler`. One handler for each type."""
        assert kind not in self._by_type, f"{kind.__name__} has a handler already"
        self._by_type[kind] = handler

    async def handle(self, control: ControlLink, message: Incoming) -> None:
        """Handle one message of `control`. Raises ShardnetError: the request fails with it."""
        await self._by_type[type(message)](control, message)
