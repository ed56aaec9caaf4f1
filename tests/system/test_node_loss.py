"""A ring that loses a node, a link or a client: it goes on, or ends with one named error."""

from __future__ import annotations

import signal

import pytest
from support.servers.proxy import Proxy, slow_link
from support.soak import cases
from support.system.nodes import Command, Crew, Machine, NodeProcess
from support.system.parrot import LONG, Parrots


def goes_on(running: Command, head: NodeProcess, n_said: int) -> None:
    """Wait until a generation says that its ring is lost, until its head, which had said `n_said`
    characters, has another one, and until more text comes after that. What is waited for in turn
    is said too.
    """
    running.stderr.wait_for("recovering")
    for what in ("asking who is left, and planning", "recovered in"):
        head.stderr.wait_for(what, after=n_said)
    running.stderr.wait_for(" tokens again")
    waits = [line.split(", about ")[0] for line in running.stderr.text.splitlines()]
    planned = waits.index("recovering", waits.index("recovering") + 1)
    again, *_ = [line for line in waits[planned:] if line.startswith("reading ")]
    assert again.endswith(" tokens again")
    assert int(again.split()[1].replace(",", "")) > 1
    running.stdout.wait_for("xyz", after=len(running.stdout.text))
    running.kill()


@pytest.mark.parametrize("rank", cases([0, 1], [2]), ids=["head", "middle", "tail"].__getitem__)
def test_a_killed_node_can_be_replaced(
    trio: Crew, machine: Machine, parrots: Parrots, rank: int
) -> None:
    """A fourth node takes a place in the ring and dies. One that leads takes its requests along;
    without another one they go on. Then one of the three takes its place.
    """
    [victim] = machine.start_nodes("vera")
    with slow_link(trio.nodes[1].ready["port"]) as to_bert:
        addresses = [trio.addresses(0), to_bert]
        addresses.insert(rank, victim.address)
        running = trio.begin(parrots.alphabet, ",".join(addresses))
        n_said = len(trio.nodes[0].log)
        victim.kill()
        if rank == 0:
            result = running.wait()
            assert result.code == 1
            assert "vera" in result.error_line or victim.address in result.error_line
        else:
            goes_on(running, trio.nodes[0], n_said)
    numbers = [0, 1]
    numbers.insert(rank, 2)
    assert trio.says("m", parrots.alphabet, *numbers) == "nop"


@pytest.mark.parametrize("how", cases(["killed"], ["told to leave"]))
def test_a_node_that_goes_while_it_loads_is_done_without(
    trio: Crew, machine: Machine, parrots: Parrots, how: str
) -> None:
    """One that leaves does so at once."""
    [victim] = machine.start_nodes("vera")
    running = trio.machine.begin_copy(
        *("generate", "a", "--model", str(parrots.big)),
        *("--nodes", f"{trio.addresses(0)},{victim.address}"),
        *("--context", str(LONG), "--max-tokens", str(LONG - 1)),
    )
    running.stderr.wait_for("ring: ")
    if how == "killed":
        victim.kill()
    else:
        victim.stop()
    running.stdout.wait_for("bcd")
    assert running.stderr.text.count("ring: ") == 2
    running.kill()
    assert trio.says("z", parrots.signs, 0, 1) == "."


def test_a_node_that_leaves_a_ring_is_done_without(
    trio: Crew, machine: Machine, parrots: Parrots
) -> None:
    [victim] = machine.start_nodes("vera")
    with slow_link(victim.ready["port"]) as to_vera:
        running = trio.begin(parrots.alphabet, f"{trio.addresses(0)},{to_vera}")
        n_said = len(trio.nodes[0].log)
        victim.stop()
        trio.nodes[0].stderr.wait_for("replaced the ring (node vera leaves)", after=n_said)
        running.stdout.wait_for("xyz", after=len(running.stdout.text))
        running.kill()
    assert trio.says("z", parrots.signs, 0, 1) == "."


@pytest.mark.parametrize(
    ("how", "rank"),
    cases([("cut", 0), ("garble", 1)], [("cut", 1), ("cut", 2), ("garble", 2)]),
)
def test_a_damaged_link_ends_no_request_but_that_of_its_client(
    trio: Crew, parrots: Parrots, how: str, rank: int
) -> None:
    """Rank 0's links are the client's and the tail's: one piece there may be of either."""
    node = trio.nodes[rank]
    slow = trio.nodes[2 if rank < 2 else 1]
    with (
        Proxy("127.0.0.1", node.ready["port"]) as proxy,
        slow_link(slow.ready["port"]) as to_slow,
    ):
        addresses = [to_slow if other is slow else other.address for other in trio.nodes]
        addresses[rank] = f"127.0.0.1:{proxy.port}"
        running = trio.begin(parrots.alphabet, ",".join(addresses))
        n_said = len(trio.nodes[0].log)
        getattr(proxy, how)()
        if rank:
            goes_on(running, trio.nodes[0], n_said)
        else:
            result = running.wait()
            assert result.code == 1
            said = result.error_line
            assert any(name in said for name in ("anna", "bert", "cleo")), said
    assert trio.says("m", parrots.alphabet) == "nop"


def test_a_client_that_is_killed_frees_its_ring(trio: Crew, parrots: Parrots) -> None:
    """Another model can be loaded at once."""
    with slow_link(trio.nodes[2].ready["port"]) as to_cleo:
        running = trio.begin(parrots.alphabet, f"{trio.addresses(0, 1)},{to_cleo}")
        running.kill()
        assert trio.says("z", parrots.signs) == "."


def test_interrupting_a_client_frees_its_ring(trio: Crew, parrots: Parrots) -> None:
    with slow_link(trio.nodes[2].ready["port"]) as to_cleo:
        running = trio.begin(parrots.alphabet, f"{trio.addresses(0, 1)},{to_cleo}")
        running.signal(signal.SIGINT)
        result = running.wait()
    assert result.code == 130
    assert "Traceback" not in result.stderr
    assert trio.says("z", parrots.signs) == "."


def test_interrupting_a_client_stops_its_loading(trio: Crew, parrots: Parrots) -> None:
    running = trio.machine.begin_copy(
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
    """And its stages are freed, although a request was under way: it was told twice."""
    [leaving] = machine.start_nodes("paul")
    with slow_link(trio.nodes[0].ready["port"]) as to_anna:
        running = trio.begin(parrots.alphabet, f"{leaving.address},{to_anna}")
        leaving.signal(signal.SIGTERM)
        leaving.stderr.wait_for("draining")
        leaving.stop()
        result = running.wait()
    assert result.code == 1
    assert "paul" in result.error_line
    assert "leaving" in result.error_line
    trio.machine.state(trio.nodes[0], until=lambda told: told["stage"] is None)
    assert trio.says("m", parrots.alphabet) == "nop"
