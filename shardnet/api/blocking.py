"""The client for programs without an event loop: the same calls, blocking.

Knows how to reach a loop in its own thread. Must not know what the calls do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from shardnet.api import connections
from shardnet.api.client import GREEDY, Client
from shardnet.api.events import GenerationEvent, GenerationResult
from shardnet.api.generation import OnLoading, OnPlan, ShouldStop
from shardnet.api.requests import GenerationOptions, Prompts
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.errors import LinkClosedError
from shardnet.sampling_params import SamplingParams
from shardnet.transport.loop import run
from shardnet.wire.messages.membership import StatusReply
from shardnet.wire.messages.plans import ModelChoice, PlanReply

if TYPE_CHECKING:
    from shardnet.runtime.stage.compute import ComputePlugin

T = TypeVar("T")


class BlockingClient:
    """`shardnet.api.Client` without async. Threads may share it.

    Hooks run in the thread of the loop: they must not block, and must not call the client.
    """

    def __init__(self, client: Client, loop: _LoopThread) -> None:
        self._client = client
        self._loop = loop

    @property
    def address(self) -> str:
        """Address of the node, host:port."""
        return self._client.address

    @property
    def choice(self) -> ModelChoice:
        """The model, with its nodes, for calls that name none."""
        return self._client.choice

    def status(self, *, with_peers: bool = False) -> StatusReply:
        """Return the node's own status and, `with_peers`, those of the nodes it knows."""
        return self._loop.call(self._client.status(with_peers=with_peers))

    def plan(
        self, model: str | ModelChoice | None = None, on_progress: OnLoading | None = None
    ) -> PlanReply:
        """Return the plan that `model` would get; see `shardnet.api.Client.plan`."""
        return self._loop.call(self._client.plan(model, on_progress))

    def unload(self) -> None:
        """Free the model on every node of the ring. Raises BusyError while requests run."""
        self._loop.call(self._client.unload())

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams = GREEDY,
        *,
        n: int = 1,
        model: str | ModelChoice | None = None,
        should_stop: ShouldStop | None = None,
        on_plan: OnPlan | None = None,
        on_loading: OnLoading | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Generator[GenerationEvent, None, None]:
        """Generate continuations and yield events; see `shardnet.api.Client.generate`.

        Closing the iterator, or dropping it, cancels the requests that have not ended.
        """
        events = self._client.generate(
            prompts,
            sampling,
            n=n,
            model=model,
            should_stop=should_stop,
            on_plan=on_plan,
            on_loading=on_loading,
            **options,
        )
        return self._loop.iterate(events)

    def complete(
        self,
        prompts: Prompts,
        sampling: SamplingParams = GREEDY,
        *,
        n: int = 1,
        model: str | ModelChoice | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[GenerationResult]:
        """Generate continuations and return the results; see `shardnet.api.Client.complete`."""
        return self._loop.call(
            self._client.complete(prompts, sampling, n=n, model=model, **options)
        )


def connect(
    address: str,
    *,
    model: str | ModelChoice = DEFAULT_MODEL_NAME,
    key_file: str = "",
    insecure: bool = False,
) -> AbstractContextManager[BlockingClient]:
    """Connect to the node at `address`; see `shardnet.api.connect`."""
    return opened(connections.connect(address, model=model, key_file=key_file, insecure=insecure))


def in_process(
    *,
    model: str | ModelChoice = DEFAULT_MODEL_NAME,
    threads: int = 0,
    device: str | ComputePlugin = "auto",
) -> AbstractContextManager[BlockingClient]:
    """Run a node inside this process; see `shardnet.api.in_process`."""
    return opened(connections.in_process(model=model, threads=threads, device=device))


def local_ring(
    n_nodes: int, *, model: str | ModelChoice = DEFAULT_MODEL_NAME, threads: int = 0
) -> AbstractContextManager[BlockingClient]:
    """Start node processes on this machine; see `shardnet.api.local_ring`."""
    return opened(connections.local_ring(n_nodes, model=model, threads=threads))


@contextmanager
def opened(opening: AbstractAsyncContextManager[Client]) -> Iterator[BlockingClient]:
    """Open an asynchronous client in a loop of its own; yield a blocking client of it."""
    loop = _LoopThread(opening)
    try:
        yield BlockingClient(loop.open(), loop)
    finally:
        loop.close()


class _LoopThread:
    """An event loop in a thread of its own, with one client open in it."""

    def __init__(self, opening: AbstractAsyncContextManager[Client]) -> None:
        self._opening = opening
        self._client: Future[Client] = Future()
        self._loop: asyncio.AbstractEventLoop
        self._stop: Callable[[], object]
        self._thread = 0
        has_loop = threading.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="shardnet-client")
        self._ended = self._executor.submit(run, self._main(has_loop))
        has_loop.wait()

    def open(self) -> Client:
        """Wait for the client. Raises the error that opening it raised."""
        either: list[Future[Any]] = [self._client, self._ended]
        wait(either, return_when=FIRST_COMPLETED)
        return self._client.result() if self._client.done() else self._failed()

    def close(self) -> None:
        """Close the client and end the thread. Calls that still wait are cancelled."""
        if not self._ended.done():
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._stop)
        self._executor.shutdown()
        if self._client.done():
            self._ended.result()

    def call(self, asked: Coroutine[Any, Any, T]) -> T:
        """Run a call in the loop and wait for its result. Raises LinkClosedError after the end."""
        if self._ended.done():
            asked.close()
            raise LinkClosedError("the client is closed", remedy="call it inside its `with` block")
        future: Future[T] | None = None
        try:
            future = asyncio.run_coroutine_threadsafe(asked, self._loop)
            return future.result()
        finally:  # Ctrl-C may come at any point
            if future is None:
                asked.close()
            else:
                future.cancel()

    def iterate(
        self, events: AsyncGenerator[GenerationEvent, None]
    ) -> Generator[GenerationEvent, None, None]:
        """Iterate over `events` from this thread."""
        in_use = asyncio.Lock()
        try:
            while (event := self.call(_next(events, in_use))) is not None:
                yield event
        finally:
            self._leave(events, in_use)

    def _leave(self, events: AsyncGenerator[GenerationEvent, None], in_use: asyncio.Lock) -> None:
        if self._ended.done():
            return  # the loop has closed it
        if threading.get_ident() == self._thread:  # dropped by a hook: waiting would deadlock
            asyncio.run_coroutine_threadsafe(_close(events, in_use), self._loop)
        else:
            self.call(_close(events, in_use))

    def _failed(self) -> Client:
        self._ended.result()
        raise AssertionError("the client's loop ended without a client and without a reason")

    async def _main(self, has_loop: threading.Event) -> None:
        """Keep the client open until `_stop` is called. One task opens and closes it."""
        task, stopping = asyncio.current_task(), asyncio.Event()
        assert task is not None
        self._loop, self._stop = asyncio.get_running_loop(), task.cancel
        self._thread = threading.get_ident()
        has_loop.set()
        async with self._opening as client:
            self._stop = stopping.set
            self._client.set_result(client)
            await stopping.wait()


async def _next(
    events: AsyncGenerator[GenerationEvent, None], in_use: asyncio.Lock
) -> GenerationEvent | None:
    async with in_use:
        return await anext(events, None)


async def _close(events: AsyncGenerator[GenerationEvent, None], in_use: asyncio.Lock) -> None:
    """Close the iterator once a cancelled wait for its next event has ended."""
    async with in_use:
        await events.aclose()
