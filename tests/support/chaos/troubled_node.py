"""A `shardnet node` to which things can be done from outside that no signal does.

    CHAOS_NODE='{"number": 2, "switch": ["127.0.0.1", 4711], "control": "/tmp/x/2"}' \
        python -m support.chaos.troubled_node node --port 7001 ...

Its links go through a switch (switch.py), and a thread takes orders at a Unix socket, one JSON
object a connection: block the GIL, have the clock jump or run at half speed, have another address,
keep steps, compute no numbers, hold the compute thread, find no room in /tmp, count what it has
open. All else is the command as users start it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import json
import os
import runpy
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from support.chaos.switch import PREFACE, REACHED, VARIABLE

from shardnet.cluster.machine.addresses import Interface
from shardnet.cluster.member.ring_membership import RingMembership
from shardnet.cluster.peers import advertisement
from shardnet.runtime.engine.engine import Engine
from shardnet.runtime.ring.links import LinkSink
from shardnet.runtime.stage.compute import Activations, Samples, StageOutput, StepComputed
from shardnet.runtime.stage.torch_compute import TorchCompute
from shardnet.transport import loop as loops
from shardnet.transport import tcp
from shardnet.transport.link import LinkOptions
from shardnet.types import MicroBatch
from shardnet.wire.framing.frames import Frame

WHOLE_TIME, WHOLE_MONOTONIC = time.time, time.monotonic
LOOK_S = 0.01


class Trouble:
    """What is done to this process."""

    def __init__(self, control: str) -> None:
        self._control = control
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ahead_s = 0.0
        self._late_s = 0.0
        self._slow_since_s: float | None = None
        self._on: set[str] = set()
        """What lasts until it is lifted, by the name of its order."""

    def install(self) -> None:
        """Take orders from now on, and hand out the time that they say."""
        time.time = lambda: WHOLE_TIME() + self._ahead_s - self._lag_s()
        time.monotonic = lambda: WHOLE_MONOTONIC() - self._lag_s()
        self._patch()
        run = loops.run

        def remember_and_run(main: Coroutine[Any, Any, Any]) -> Any:
            async def remembered() -> Any:
                self._loop = asyncio.get_running_loop()
                return await main

            return run(remembered())

        loops.run = remember_and_run
        server = socket.socket(socket.AF_UNIX)
        server.bind(self._control)
        server.listen()
        threading.Thread(target=self._serve, args=(server,), name="trouble", daemon=True).start()

    def _lag_s(self) -> float:
        """Seconds that the clocks have lost."""
        since_s = self._slow_since_s
        return self._late_s + (0.0 if since_s is None else (WHOLE_MONOTONIC() - since_s) / 2)

    def _patch(self) -> None:
        """Have the stage and temporary files do what they are told to."""
        frames, compute, make = LinkSink._frames, TorchCompute.compute, tempfile._mkstemp_inner

        def sent(sink: LinkSink, output: StageOutput) -> Sequence[Frame]:
            is_kept = "swallow" in self._on and isinstance(output, StepComputed)
            return () if is_kept else frames(sink, output)

        def computed(
            stage: TorchCompute, batch: MicroBatch, activations: Activations | None
        ) -> Activations | Samples:
            while "stand still" in self._on:
                time.sleep(LOOK_S)
            result = compute(stage, batch, activations)
            if "overflow" in self._on and isinstance(result, Activations):
                return replace(result, payload=b"\xff" * len(result.payload))  # NaN in any dtype
            return result

        def made(*some: Any) -> Any:
            if "fill" in self._on:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return make(*some)

        tempfile._mkstemp_inner = made
        LinkSink._frames = sent  # type: ignore[method-assign]
        TorchCompute.compute = computed  # type: ignore[method-assign]

    def _serve(self, server: socket.socket) -> None:
        while True:
            asker, _ = server.accept()
            with asker:
                order = json.loads(asker.recv(4096))
                try:
                    answer = {"answer": self._obey(**order)}
                except Exception as error:  # things end while they are counted
                    answer = {"error": repr(error)}
                asker.sendall(json.dumps(answer).encode())

    def _obey(self, do: str, seconds: float = 0.0) -> Any:
        match do:
            case "block":  # PyDLL keeps the GIL
                return ctypes.PyDLL(None).poll(None, 0, int(seconds * 1000))
            case "jump":
                self._ahead_s += seconds
                return self._ahead_s
            case "slow":
                self._late_s, began = self._lag_s(), WHOLE_MONOTONIC()
                self._slow_since_s = began if seconds > 0 else None
                return self._late_s
            case "swallow" | "overflow" | "stand still" | "fill":
                (self._on.add if seconds > 0 else self._on.discard)(do)
                return seconds > 0
            case "move":
                host = Interface(name="eth0", is_up=True, addresses=(f"10.9.0.{seconds:.0f}/24",))
                advertisement.read_interfaces = lambda: (host,)  # type: ignore[attr-defined]
                return seconds
            case "count":
                return self._count()
            case _:
                raise ValueError(do)

    def _count(self) -> dict[str, Any]:
        """What the process has open, by kind, and names of its tasks."""
        opened: Counter[str] = Counter()
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
            except FileNotFoundError:
                continue
            opened["sockets" if target.startswith("socket:") else "files"] += 1
        tasks = asyncio.all_tasks(self._loop) if self._loop is not None else set()
        children = (
            Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="utf-8").split()
        )
        return {
            "sockets": opened["sockets"],
            "files": opened["files"],
            "threads": len(os.listdir("/proc/self/task")),
            "processes": len(children),
            "tasks": len(tasks),
            **_living(),
            "names": Counter(task.get_coro().__qualname__ for task in tasks),
        }


def _living() -> dict[str, int]:
    """Stages and engines that nobody has let go of, and the sequences open on them."""
    gc.collect()
    found: dict[str, int] = dict.fromkeys(("stages", "engines", "sequences"), 0)
    for thing in gc.get_objects():
        if isinstance(thing, RingMembership):
            found["stages"] += 1
            found["sequences"] += thing.n_open
        found["engines"] += isinstance(thing, Engine)
    return found


def go_through(number: int, host: str, port: int) -> None:
    """Have every link that this process opens go through the switch at `host` and `port`."""
    dial = tcp._dial

    async def dial_switch(_: str, wanted: int, options: LinkOptions) -> socket.socket:
        loop = asyncio.get_running_loop()
        sock = await dial(host, port, options)
        try:
            await loop.sock_sendall(sock, PREFACE.pack(number, wanted))
            answer = await loop.sock_recv(sock, 1)
        except BaseException:
            sock.close()
            raise
        if answer != REACHED:
            sock.close()
            raise ConnectionRefusedError(f"nothing listens at port {wanted}")
        return sock

    tcp._dial = dial_switch


def main() -> None:
    """Become the command."""
    about = json.loads(os.environ[VARIABLE])
    go_through(about["number"], *about["switch"])
    Trouble(about["control"]).install()
    sys.argv[0] = "shardnet_cli"
    runpy.run_module("shardnet_cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
