"""A `shardnet node` of the version before: it speaks the previous protocol, as far as links tell.

python -m support.system.older_node node --port 7001 ...
"""

from __future__ import annotations

import runpy
import sys

from shardnet.api import diagnostics
from shardnet.cluster.node import reporter
from shardnet.cluster.peers import advertisement
from shardnet.wire.connection import connection
from shardnet.wire.framing import frames

MODULE = "support.system.older_node"
PREVIOUS = frames.PROTOCOL_VERSION - 1


def be_older() -> None:
    """Have this process speak, advertise and report the previous version."""
    for module in (frames, connection, advertisement, reporter, diagnostics):
        module.PROTOCOL_VERSION = PREVIOUS  # type: ignore[attr-defined]
    preamble = frames.PREAMBLE_MAGIC + PREVIOUS.to_bytes(2, "little")
    frames.PREAMBLE = connection.PREAMBLE = preamble  # type: ignore[misc, attr-defined]


if __name__ == "__main__":
    be_older()
    sys.argv[0] = "shardnet"
    runpy.run_module("shardnet_cli", run_name="__main__", alter_sys=True)
