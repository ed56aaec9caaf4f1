"""A TCP proxy on loopback that delays, stalls, cuts and garbles, for tests of real connections.

It runs in a thread with a loop of its own, so that tests with and without asyncio can use it:

    with Proxy("127.0.0.1", node_port) as proxy:
        ...connect to proxy.port...
        proxy.stall()
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 64 * 1024


class Proxy:
    """Forwards connections to `host` and `port`, each byte `delay_s` later.

    `stall_after_bytes` stalls by itself as soon as so many bytes were forwarded, both ways counted.
    """

    def __init__(
        self, host: str, port: int, *, delay_s: float = 0.0, stall_after_bytes: int | None = None
    ) -> None:
        self.port = 0
        self._target = (host, port)
        self._delay_s = delay_s
        self._bytes_left = stall_after_bytes
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._call(self._stop.set)
        self._thread.join()

    def stall(self) -> None:
        """Forward nothing any more; the connections stay."""
        self._call(self._flowing.clear)

    def resume(self) -> None:
        """Forward again, what has waited first."""
        self._call(self._flowing.set)

    def cut(self) -> None:
        """Reset all connections. New ones are accepted."""
        self._call(partial(self._reset, self._writers))

    def change(self, how: Callable[[bytes], bytes]) -> None:
        """Pass on `how` of each piece from now on, on the way that has carried most: among those
        between nodes that share layers, that of parts, of which a piece is one.
        """
        self._call(partial(self._change_busiest, how))

    def garble(self) -> None:
        """Change the first byte of the next piece, and of those that follow on the same way: on an
        idle link a header's, on a busy one perhaps a number of a payload, which nobody notices.
        """
        self._call(self._set_garble)

    # --- in the proxy's thread

    def _call(self, action: Callable[[], None]) -> None:
        """Run `action` in the proxy's loop and wait until it is done."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            action()
            done.set_result(None)

        self._loop.call_soon_threadsafe(run)
        done.result()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._garble_next = False
        self._garbled: asyncio.StreamWriter | None = None
        self._n_carried: Counter[asyncio.StreamWriter] = Counter()
        self._changes: dict[asyncio.StreamWriter, Callable[[bytes], bytes]] = {}
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set_result(None)
        await self._stop.wait()
        server.close()
        self._reset(self._writers)
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        both = {writer}
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            both.add(far_writer)
            self._writers.add(far_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer))
                group.create_task(self._pump(far_reader, writer))
            await asyncio.sleep(self._delay_s)
        except* (OSError, asyncio.CancelledError):
            self._reset(both)
        finally:
            self._writers -= both
            for one in both:
                one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            for piece in self._pieces(data):
                await self._flowing.wait()
                self._loop.call_later(self._delay_s, self._forward, writer, piece)
                if self._bytes_left is not None:
                    self._bytes_left -= len(piece)
                    if self._bytes_left == 0:
                        self._bytes_left = None
                        self._flowing.clear()
            await writer.drain()
        await self._flowing.wait()
        self._loop.call_later(self._delay_s, self._forward_eof, writer)

    def _pieces(self, data: bytes) -> list[bytes]:
        """Split `data` where the proxy is to stall."""
        n = len(data) if self._bytes_left is None else self._bytes_left
        return [piece for piece in (data[:n], data[n:]) if piece]

    def _forward(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if self._garble_next:
            self._garble_next, self._garbled = False, writer
        if writer is self._garbled:
            data = bytes([data[0] ^ 0xFF]) + data[1:]
        self._n_carried[writer] += len(data)
        if writer in self._changes:
            data = self._changes[writer](data)
        if not writer.is_closing():
            writer.write(data)

    def _forward_eof(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # it was reset meanwhile
            if not writer.is_closing():
                writer.write_eof()

    def _reset(self, writers: Iterable[asyncio.StreamWriter]) -> None:
        for writer in writers:
            writer.transport.abort()

    def _change_busiest(self, how: Callable[[bytes], bytes]) -> None:
        [(busiest, _)] = self._n_carried.most_common(1)
        self._changes[busiest] = how

    def _set_garble(self) -> None:
        self._garble_next = True


@contextmanager
def slow_link(port: int, delay_s: float = 0.01) -> Iterator[str]:
    """Give an address that leads to `port` of this machine, and takes its time.

    A ring over it makes some dozens of tokens in a second: one of a tiny model would make thousands
    and keep the cores busy, for as long as a test has something else to wait for.
    """
    with Proxy("127.0.0.1", port, delay_s=delay_s) as proxy:
        yield f"127.0.0.1:{proxy.port}"
