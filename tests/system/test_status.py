"""`shardnet status`: what a node holds, for which ring, in one look."""

from __future__ import annotations

from typing import Any

from support.system.nodes import Crew, Machine
from support.system.parrot import Parrots
from support.system.strangers import unused_address

from shardnet import __version__


def test_a_node_tells_its_stage_its_ring_and_its_head(trio: Crew, parrots: Parrots) -> None:
    arguments = ["--nodes", trio.addresses(2, 1), "--layers", "0-1,1-4", "--max-tokens", "3"]
    assert trio.generate("a", parrots.alphabet, *arguments).code == 0
    node = trio.nodes[1]
    told = trio.machine.state(node, until=lambda told: _is_idle(told) and "cleo" in told["peers"])
    assert (told["name"], told["node"], told["address"], told["version"]) == (
        "bert",
        node.ready["node"],
        node.address,
        __version__,
    )
    assert told["cluster"] is None
    assert told["threads"] == 1
    assert 0 < told["memory_free_bytes"] < told["memory_bytes"]
    stage = told["stage"]
    assert (stage["model"], stage["layers"]) == (str(parrots.alphabet), [1, 4])
    assert (stage["rank"], stage["stages"], stage["head"]) == (1, 2, "cleo")
    assert stage["weight_bytes"] > 0

    head = trio.machine.status("--nodes", trio.nodes[2].address)
    assert "rank 0 of 2, head cleo" in head
    assert f"layer 0 of {parrots.alphabet}" in head
    assert "0 requests, 0 sequences open" in head


def _is_idle(told: dict[str, Any]) -> bool:
    """Whether its stage knows that the last sequence is over: that travels behind the text."""
    return not told["stage"]["sequences"] and not told["stage"]["kv_used_positions"]


def test_a_request_that_runs_is_counted_on_every_stage(trio: Crew, parrots: Parrots) -> None:
    running = trio.begin(parrots.alphabet, trio.addresses(0, 1))
    head, tail = (
        trio.machine.state(node, until=lambda told: told["stage"]["sequences"] == 1)
        for node in trio.nodes[:2]
    )
    running.kill()
    assert head["requests"] == 1
    assert tail["requests"] == 0
    assert head["reused_positions"].keys() == {"memory", "disk"}
    assert tail["reused_positions"] is None
    for told in (head, tail):
        assert 0 < told["stage"]["kv_used_positions"] <= told["stage"]["kv_positions"]


def test_the_node_of_this_machine_is_asked(machine: Machine) -> None:
    machine.start_nodes("anna")
    lines = machine.status().splitlines()
    assert lines[0].startswith("node     anna (")
    assert lines[-1] == "stage    none: nothing is loaded"


def test_without_a_node_that_answers_there_is_one_line(machine: Machine) -> None:
    assert "no node runs on this machine" in machine.run("status").error
    nobody = unused_address()
    assert nobody in machine.run("status", "--nodes", nobody).error
