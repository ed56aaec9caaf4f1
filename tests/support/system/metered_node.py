"""A `shardnet node` that asks its socket's plug without a pause, on a machine of its own name.

    python -m support.system.metered_node node --name anna --power-command 'echo 30' ...

Nodes of one machine have one plug. All else is the command as users start it.
"""

from __future__ import annotations

import runpy
import sys

from shardnet.cluster.machine import power
from shardnet.cluster.node import pressure


def main() -> None:
    """Become the command."""
    name = sys.argv[sys.argv.index("--name") + 1]
    setattr(power, "PLUG_S", 0.1)  # noqa: B010  # it is final for all but tests
    setattr(pressure, "make_host_id", lambda: name)  # noqa: B010
    sys.argv[0] = "shardnet_cli"
    runpy.run_module("shardnet_cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
