"""A `shardnet node` whose parts of layers travel as over a slower network than this machine's.

    DELAYED_NODE='{"delay_us": 50, "rate_mbit": 1000, "report": "/tmp/x"}' \\
        python -m support.system.delayed_node node --port 7001 ...

No proxy takes the cores that compute: what is sent over a connection for parts says when it began
to leave, by the clock that all processes of a machine share, and the receiving node hands bytes on
once they would have come. All connections of a node share what it may send. At its end it writes
how long its gathers of one row took, waiting included, as its compute thread saw them. All else is
the command as users start it.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import statistics
import struct
import sys
import time
from pathlib import Path
from typing import Any

from shardnet.runtime.ring.shard_links import ShardLinks
from shardnet.transport import tcp_link
from shardnet.transport.direct_connection import DirectConnection
from shardnet.wire.framing.frames import Buffer

VARIABLE = "DELAYED_NODE"
"""Tells a node's process, as JSON, the network that it is to have, and where to report."""
_STAMP = struct.Struct("<dI")
"""What stands before all that is sent at once: when it began to leave (s), and its bytes."""
_SEGMENT_BYTES = 1448
_AROUND_BYTES = 90
"""What Ethernet, IP and TCP have around the bytes of each segment."""


class DelayedConnection(DirectConnection):
    """A connection that takes `delay_s`, and `byte_s` for each byte on the cable."""

    delay_s = byte_s = 0.0
    free_at_s = 0.0
    """When all that this node has sent before will have left."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._head = memoryview(bytearray(_STAMP.size))
        self._n_head = 0
        self._began_s, self._n_bytes, self._n_left = 0.0, 0, 0

    def send(self, *buffers: Buffer) -> None:
        """Send bytes behind when they began to leave."""
        n_bytes, network = sum(map(len, buffers)), DelayedConnection
        begin_s = max(time.monotonic(), network.free_at_s)
        network.free_at_s = begin_s + self._on_cable(n_bytes) * self.byte_s
        super().send(_STAMP.pack(begin_s, n_bytes), *buffers)

    def receive(self, into: memoryview) -> int:
        """Take bytes that would have come by now."""
        while not self._n_left:
            n = super().receive(self._head[self._n_head :])
            self._n_head += n
            if not n:
                return 0
            if self._n_head == _STAMP.size:
                self._began_s, self._n_bytes = _STAMP.unpack(self._head)
                self._n_left, self._n_head = self._n_bytes, 0
        n = super().receive(into[:n]) if (n := self._n_ready(len(into))) else 0
        self._n_left -= n
        return n

    def _n_ready(self, n_most: int) -> int:
        """Count the bytes of the message under way that have come, and were not taken yet."""
        past_s = time.monotonic() - self._began_s - self.delay_s
        n_most = min(n_most, self._n_left)
        if past_s < 0 or not self.byte_s:
            return n_most if past_s >= 0 else 0
        n_came = self._n_bytes * past_s / (self._on_cable(self._n_bytes) * self.byte_s)
        return max(0, min(n_most, int(n_came) - (self._n_bytes - self._n_left)))

    @staticmethod
    def _on_cable(n_bytes: int) -> int:
        return n_bytes + -(-n_bytes // _SEGMENT_BYTES) * _AROUND_BYTES


def time_gathers(report: Path) -> None:
    """Write the median of gathers of one row, in µs, to a file of this process at its end."""
    taken_us: list[float] = []
    began_ns: list[int] = []
    send_part, await_parts = ShardLinks.send_part, ShardLinks.await_parts

    def send(links: ShardLinks, dtype: Any, n_rows: int, *rest: Any) -> None:
        began_ns[:] = [time.perf_counter_ns()] if n_rows == 1 else []
        send_part(links, dtype, n_rows, *rest)

    def wait(links: ShardLinks, n_left: int) -> None:
        await_parts(links, n_left)
        if began_ns:
            taken_us.append((time.perf_counter_ns() - began_ns.pop()) / 1e3)

    def write() -> None:
        if taken_us:
            (report / f"{os.getpid()}.json").write_text(json.dumps(statistics.median(taken_us)))

    for before, now in ((send_part, send), (await_parts, wait)):
        setattr(ShardLinks, before.__name__, now)
    atexit.register(write)


def reports(folder: Path) -> list[float]:
    """Return what nodes have written there."""
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


def main() -> None:
    """Become the command."""
    about = json.loads(os.environ[VARIABLE])
    if about["delay_us"] or about["rate_mbit"]:
        DelayedConnection.delay_s = about["delay_us"] / 1e6
        DelayedConnection.byte_s = 8 / (about["rate_mbit"] * 1e6) if about["rate_mbit"] else 0.0
        setattr(tcp_link, DirectConnection.__name__, DelayedConnection)
    time_gathers(Path(about["report"]))
    sys.argv[0] = "shardnet_cli"
    runpy.run_module("shardnet_cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
