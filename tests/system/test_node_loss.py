"""A ring that loses a node, a link or a client: one named error, and nodes that serve on."""

from __future__ import annotations

import signal

import pytest
from support.servers.proxy import Proxy
from support.soak import cases
from support.system.nodes import Crew, Machine
from support.system.parrot import LONG, Parrots


@pytest.mark.parametrize("rank", cases([0, 1], [2]), ids=["head", "middle", "tail"].__getitem__)
def test_a_killed_node_is_named_and_can_be_replaced(
    trio: Crew, machine: Machine, parrots: Parrots, rank: int
) -> None:
    """A fourth node takes a place in the ring, dies, and one of the three takes it over."""
    [victim] = machine.start_nodes("vera")
    addresses = trio.addresses(0, 1).split(",")
    addresses.insert(rank, victim.address)
    running = trio.begin(parrots.alphabet, ",".join(addresses))
    victim.kill()
    result = running.wait()
    assert result.code == 1
    assert "vera" in result.error_line or victim.address in result.error_line
    numbers = [0, 1]
    numbers.insert(rank, 2)
    assert trio.says("m", parrots.alphabet, *numbers) == "nop"


@pytest.mark.parametrize(
    ("phase", "how"),
    cases([("loading", "killed"), ("generating", "told to leave")], [("loading", "told to leave")]),
)
def test_a_node_that_goes_is_named_and_can_be_done_without(
    trio: Crew, machine: Machine, parrots: Parrots, phase: str, how: str
) -> None:
    """Whatever the ring is at; one that leaves does so at once."""
    [victim] = machine.start_nodes("vera")
    addresses = f"{trio.addresses(0)},{victim.address}"
    if phase == "generating":
        running = trio.begin(parrots.alphabet, addresses)
    else:
        running = trio.machine.begin(
            *("generate", "a", "--model", str(parrots.big), "--nodes", addresses),
            *("--context", str(LONG), "--max-tokens", str(LONG - 1)),
        )
        running.stderr.wait_for("ring: ")
    if how == "killed":
        victim.kill()
    else:
        victim.stop()
    result = running.wait()
    assert result.code == 1
    assert "vera" in result.error_line or victim.address in result.error_line
    assert trio.says("z", parrots.signs, 0, 1) == "."


@pytest.mark.parametrize(
    ("how", "rank"),
    cases([("cut", 0), ("garble", 1), ("cut", 2)], [("garble", 0), ("cut", 1), ("garble", 2)]),
)
def test_a_damaged_link_ends_the_ring_by_name(
    trio: Crew, parrots: Parrots, how: str, rank: int
) -> None:
    """Rank 0's links are the client's and the tail's."""
    node = trio.nodes[rank]
    with Proxy("127.0.0.1", node.ready["port"]) as proxy:
        addresses = [other.address for other in trio.nodes]
        addresses[rank] = f"127.0.0.1:{proxy.port}"
        running = trio.begin(parrots.alphabet, ",".join(addresses))
        getattr(proxy, how)()
        result = running.wait()
    assert result.code == 1
    assert any(name in result.error_line for name in ("anna", "bert", "cleo")), result.error_line
    assert trio.says("m", parrots.alphabet) == "nop"


def test_a_client_that_is_killed_frees_its_ring(trio: Crew, parrots: Parrots) -> None:
    """Another model can be loaded at once."""
    running = trio.begin(parrots.alphabet)
    running.kill()
    assert trio.says("z", parrots.signs) == "."


def test_interrupting_a_client_frees_its_ring(trio: Crew, parrots: Parrots) -> None:
    running = trio.begin(parrots.alphabet)
    running.signal(signal.SIGINT)
    result = running.wait()
    assert result.code == 130
    assert "Traceback" not in result.stderr
    assert trio.says("z", parrots.signs) == "."


def test_interrupting_a_client_stops_its_loading(trio: Crew, parrots: Parrots) -> None:
    running = trio.machine.begin(
        *("generate", "a", "--model", str(parrots.big), "--nodes", trio.addresses()),
        *("--context", str(LONG), "--max-tokens", str(LONG - 1)),
    )
    running.stderr.wait_for("ring: ")
    running.signal(signal.SIGINT)
    assert running.wait().code == 130
    assert trio.says("z", parrots.signs) == "."


def test_a_head_that_leaves_tells_its_clients(
    trio: Crew, parrots: Parrots, machine: Machine
) -> None:
    """And its stages are freed, although a request was under way."""
    [leaving] = machine.start_nodes("paul")
    running = trio.begin(parrots.alphabet, f"{leaving.address},{trio.addresses(0)}")
    leaving.stop()
    result = running.wait()
    assert result.code == 1
    assert "paul" in result.error_line
    assert "leaving" in result.error_line
    trio.machine.state(trio.nodes[0], until=lambda told: told["stage"] is None)
    assert trio.says("m", parrots.alphabet) == "nop"
