"""A ring that loses a node, a link or a client: one named error, and nodes that serve again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import Command, Machine, Trio, open_machine
from parrot import Parrots
from proxy import Proxy

SILENCE_S = 30.0
"""Three times the silence after which a peer is given up."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Two more nodes, for tests that wait for two silences at once."""
    with open_machine(tmp_path_factory.mktemp("pair") / "machine") as machine:
        yield Trio(machine=machine, nodes=machine.start_nodes("karl", "lena"))


def begin(trio: Trio, model: Path, addresses: str) -> Command:
    """Start a generation that goes on for long, and wait until it is under way."""
    running = trio.machine.begin(
        *("generate", "a", "--model", str(model), "--nodes", addresses, "--max-tokens", "8000")
    )
    running.stdout.wait_for("xyz")
    return running


def test_a_killed_node_is_named_and_the_others_serve_on(machine: Machine, parrots: Parrots) -> None:
    """First the tail, which is replaced, then the middle, then the head."""
    nodes = machine.start_nodes("emil", "fred", "gina")
    for victim, left in ((2, (0, 1)), (1, (0, 2)), (0, (2,))):
        crew = Trio(machine=machine, nodes=nodes)
        running = begin(crew, parrots.alphabet, crew.addresses())
        nodes[victim].kill()
        result = running.wait(SILENCE_S)
        assert result.code == 1
        named = (nodes[victim].ready["name"], nodes[victim].address)
        assert any(name in result.error_line for name in named)
        assert crew.says("m", parrots.alphabet, *left) == "nop"
        if victim:
            [nodes[victim]] = machine.start_nodes(nodes[victim].ready["name"])


def test_a_frozen_node_is_named_and_serves_again_when_it_wakes(
    trio: Trio, pair: Trio, parrots: Parrots
) -> None:
    """The middle of one ring and the tail of another, at once since both take their time."""
    rings = [(trio, trio.nodes[1]), (pair, pair.nodes[1])]
    running = [begin(ring, parrots.alphabet, ring.addresses()) for ring, _ in rings]
    try:
        for _, frozen in rings:
            frozen.freeze()
        for command, (_, frozen) in zip(running, rings, strict=True):
            result = command.wait(SILENCE_S)
            assert result.code == 1
            assert frozen.ready["name"] in result.error_line
            assert "frozen" in result.error_line
        for ring, _ in rings:
            assert ring.says("m", parrots.alphabet, 0) == "nop"
    finally:
        for _, frozen in rings:
            frozen.thaw()
    for ring, _ in rings:
        assert ring.says("m", parrots.alphabet) == "nop"


def test_a_stalled_link_and_a_frozen_client_are_given_up(
    trio: Trio, pair: Trio, parrots: Parrots
) -> None:
    """The data link to the middle of one ring stalls, the client of another one freezes."""
    client = begin(pair, parrots.alphabet, pair.addresses())
    client.signal(signal.SIGSTOP)
    middle = trio.nodes[1]
    with Proxy("127.0.0.1", middle.ready["port"]) as proxy:
        addresses = f"{trio.addresses(0)},127.0.0.1:{proxy.port},{trio.addresses(2)}"
        running = begin(trio, parrots.alphabet, addresses)
        proxy.stall()
        result = running.wait(SILENCE_S)
    assert result.code == 1
    assert "bert" in result.error_line
    assert trio.says("m", parrots.alphabet) == "nop"
    # The head gives the client up after the same silence; until then its ring is busy.
    while "still run" in (unloading := unload(pair)):
        pass
    assert unloading == ""
    client.kill()


def unload(trio: Trio) -> str:
    """Unload what the first node holds; return why not, "" when done."""
    result = trio.machine.run("unload", "--nodes", trio.nodes[0].address)
    return result.error if result.code else ""


@pytest.mark.parametrize("how", ["cut", "garble"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_damaged_link_ends_the_ring_by_name(
    trio: Trio, parrots: Parrots, how: str, rank: int
) -> None:
    """Rank 0's links are the client's and the tail's."""
    node = trio.nodes[rank]
    with Proxy("127.0.0.1", node.ready["port"]) as proxy:
        addresses = [other.address for other in trio.nodes]
        addresses[rank] = f"127.0.0.1:{proxy.port}"
        running = begin(trio, parrots.alphabet, ",".join(addresses))
        getattr(proxy, how)()
        result = running.wait(SILENCE_S)
    assert result.code == 1
    assert any(name in result.error_line for name in ("anna", "bert", "cleo")), result.error_line
    assert trio.says("m", parrots.alphabet) == "nop"


def test_a_client_that_is_killed_frees_its_ring(trio: Trio, parrots: Parrots) -> None:
    running = begin(trio, parrots.big, trio.addresses())
    running.kill()
    assert trio.says("m", parrots.alphabet) == "nop"


def test_interrupting_a_client_frees_its_ring(trio: Trio, parrots: Parrots) -> None:
    running = begin(trio, parrots.big, trio.addresses())
    running.signal(signal.SIGINT)
    result = running.wait(10)
    assert result.code == 130
    assert "Traceback" not in result.stderr
    assert trio.says("m", parrots.alphabet) == "nop"


def test_a_node_that_leaves_says_goodbye(trio: Trio, parrots: Parrots, machine: Machine) -> None:
    """SIGTERM to a node in the middle of a request: the request ends at once, by name."""
    [leaving] = machine.start_nodes("paul")
    addresses = f"{trio.addresses(0)},{leaving.address}"
    running = begin(trio, parrots.alphabet, addresses)
    leaving.stop()
    result = running.wait(SILENCE_S)
    assert result.code == 1
    assert "paul" in result.error_line
    assert trio.says("m", parrots.alphabet) == "nop"
