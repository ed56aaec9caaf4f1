"""The runners of one node: further nodes in its process, one for each model of a household.

They have ports of their own, and compute on the threads of the node: steps of several rings take
turns. Knows what each may take of the node's memory. Must not know which models there are, nor why
a runner gets how much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Final, Protocol

from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.errors import CapacityError, internal_error
from shardnet.types import NodeId
from shardnet.wire.messages.household import (
    MAX_HOUSEHOLD,
    OpenRunner,
    RunnerOpened,
)
from shardnet.wire.messages.plans import ModelChoice

NOTICED_S: Final = 3.0
"""How long a node that drains waits before its runners do: whoever divides memory looks meanwhile,
and gives others what they need to do without it."""


class Runner(Protocol):
    """What a node needs of its runners."""

    @property
    def node(self) -> NodeId:
        """Its id."""

    @property
    def address(self) -> str:
        """Where it listens."""

    @property
    def held_bytes(self) -> int:
        """What its stage has of the memory."""

    @property
    def is_needed(self) -> bool:
        """Whether requests would miss it."""

    def limit(self, memory_bytes: int, leader: str) -> None:
        """Have its stages take at most so much, from the next one on, by the word of a leader."""

    async def meet(self, addresses: Sequence[str]) -> None:
        """Link it with other runners of its model."""

    async def leave(self, deadline_s: float) -> None:
        """Have its ring do without it."""


OpenNode = Callable[[str, ModelChoice], AbstractAsyncContextManager[Runner]]
"""Runs a runner, for the model of a household that is called so."""


@dataclass(slots=True, eq=False)
class _Opened:
    choice: ModelChoice
    runner: asyncio.Future[Runner]
    memory_bytes: int = 0
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def there(self) -> Runner | None:
        """The runner, None while it is opened, or could not be."""
        is_there = self.runner.done() and self.runner.exception() is None
        return self.runner.result() if is_there else None


@dataclass(kw_only=True, eq=False, repr=False)
class Runners:
    """Opens and ends runners in `tasks`, a group that outlives them.

    `free_bytes` are what this node could give to one more stage; with `is_limited` what runners
    have loaded is not seen in it.
    """

    open_node: OpenNode
    tasks: asyncio.TaskGroup
    free_bytes: Callable[[], int]
    is_limited: bool
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._opened: dict[str, _Opened] = {}

    def register(self, handlers: MessageHandlers) -> None:
        """Register what whoever leads a household orders."""
        handlers.register(OpenRunner, self._open_for)

    @property
    def promised_bytes(self) -> int:
        """What of this node's memory is promised to runners and looks free still."""
        return sum(
            one.memory_bytes if self.is_limited else max(0, one.memory_bytes - runner.held_bytes)
            for one in self._opened.values()
            if (runner := one.there) is not None
        )

    @property
    def is_needed(self) -> bool:
        """Whether requests would miss one of them."""
        return any(one.there is not None and one.there.is_needed for one in self._opened.values())

    async def leave(self, deadline_s: float) -> None:
        """Have their rings do without them, since this node leaves."""
        there = [one.there for one in self._opened.values() if one.there is not None]
        if any(runner.is_needed for runner in there):
            await asyncio.sleep(min(NOTICED_S, deadline_s))
        await asyncio.gather(*(runner.leave(deadline_s) for runner in there))

    async def close(self, but: Collection[str] = ()) -> None:
        """End them all `but` those of some models."""
        await asyncio.gather(*(self._end(name) for name in self._opened.keys() - {*but}))

    async def _open_for(self, control: ControlLink, message: OpenRunner) -> None:
        """Open a runner, or give it other memory and peers, or say what it has.

        Raises CapacityError where this node has not got as much memory.
        """
        opened = self._opened.get(message.model)
        if opened is not None and opened.choice != message.choice:
            await self._end(message.model)
            opened = None
        if opened is None and message.memory_bytes is None:
            reply = RunnerOpened(request=message.request, node="", address="", memory_bytes=0)
            control.send(reply)
            return
        had_bytes = opened.memory_bytes if opened is not None else 0
        memory_bytes = had_bytes if message.memory_bytes is None else message.memory_bytes
        if memory_bytes > had_bytes + self.free_bytes():
            raise CapacityError(
                f"{message.model}: this node has {had_bytes + self.free_bytes()} bytes for it, not "
                f"{memory_bytes}",
                remedy="ask again",
            )
        if opened is None:
            if len(self._opened) >= MAX_HOUSEHOLD:
                raise CapacityError(f"this node has {MAX_HOUSEHOLD} runners already")
            opened = self._opened[message.model] = _Opened(message.choice, asyncio.Future())
            run = self._run(message.model, message.choice, opened)
            opened.task = self.tasks.create_task(run)
        opened.memory_bytes = memory_bytes
        runner = await asyncio.shield(opened.runner)
        runner.limit(memory_bytes, control.link.peer.node)
        await runner.meet(message.peers)
        reply = RunnerOpened(
            request=message.request,
            node=runner.node,
            address=runner.address,
            memory_bytes=memory_bytes,
        )
        control.send(reply)

    async def _run(self, model: str, choice: ModelChoice, opened: _Opened) -> None:
        """Run a runner until it is to end. A failure of it ends nothing else."""
        try:
            async with self.open_node(model, choice) as runner:
                opened.runner.set_result(runner)
                await opened.is_over.wait()
        except Exception as error:
            told = internal_error("a runner", error)
            self.log(f"the runner of {model} has ended: {told}")
            if not opened.runner.done():
                opened.runner.set_exception(told)
                opened.runner.exception()  # who waits for it has it
            if self._opened.get(model) is opened:
                del self._opened[model]

    async def _end(self, model: str) -> None:
        opened = self._opened.pop(model, None)
        if opened is not None and opened.task is not None:
            opened.is_over.set()
            await asyncio.wait([opened.task])
