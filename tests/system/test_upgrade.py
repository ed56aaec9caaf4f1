"""A cluster whose nodes are upgraded one after the other: unlike versions refuse each other."""

from __future__ import annotations

import signal

from support.system.nodes import Machine
from support.system.older_node import MODULE, PREVIOUS
from support.system.parrot import Parrots

from shardnet.wire.framing.frames import PROTOCOL_VERSION

N_TOKENS = 300


def test_a_node_of_the_previous_version_is_refused_by_name_until_it_is_upgraded(
    machine: Machine, parrots: Parrots
) -> None:
    """Both sides name both versions, the ring beside it goes on, and nothing of it is used."""
    anna, bert = machine.start_nodes("anna", "bert")
    where = ["--max-tokens", str(N_TOKENS), "--model", str(parrots.alphabet), "--nodes"]
    ring = f"{anna.address},{bert.address}"
    undisturbed = machine.call("generate", "a", *where, ring)
    running = machine.begin_copy("generate", "a", *where, ring)
    [cleo] = machine.start_nodes("cleo", arguments=["--peer", anna.address], module=MODULE)
    anna.stderr.wait_for(f"speaks protocol version {PREVIOUS}, we speak {PROTOCOL_VERSION}")
    cleo.stderr.wait_for(f"speaks protocol version {PROTOCOL_VERSION}, we speak {PREVIOUS}")
    assert running.wait().stdout == undisturbed.stdout
    for nodes in (f"{anna.address},{cleo.address}", cleo.address):
        error = machine.call("generate", "a", *where, nodes).error
        assert cleo.address in error
        for part in (f"version {PREVIOUS}", str(PROTOCOL_VERSION), "update the older one"):
            assert part in error
    assert machine.nodes_with("anna", "bert").keys() == {"anna", "bert"}
    shortly = ["--max-tokens", "5", *where[2:]]
    assert machine.call("generate", "a", *shortly, ring).stdout == "bcdef\n"
    cleo.signal(signal.SIGTERM)
    assert cleo.wait().code == 0
    [cleo] = machine.start_nodes("cleo", arguments=["--peer", anna.address])
    upgraded = machine.call("generate", "a", *shortly, f"{anna.address},{cleo.address}")
    assert upgraded.stdout == "bcdef\n"
