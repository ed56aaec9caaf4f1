"""Joules of a token by nodes whose plugs are asked: where they are told, and what a plan says."""

from __future__ import annotations

import json
import urllib.request

import pytest
from support.system.nodes import Machine
from support.system.parrot import Parrots

WATTS = {"anna": 30.0, "bert": 12.0}


def test_what_tokens_take_is_told_and_predicted(machine: Machine, parrots: Parrots) -> None:
    """Of two machines that draw so much whatever they do: one alone takes less for a token."""
    nodes = [
        machine.start_nodes(
            name,
            arguments=["--power-command", f"echo {watts}", "--http", "127.0.0.1:0"],
            module="support.system.metered_node",
        )[0]
        for name, watts in WATTS.items()
    ]
    ring = ["--nodes", ",".join(node.address for node in nodes), "--layers", "0-1,1-4"]
    ring += ["--model", str(parrots.big), "--context", "512"]
    drawn, expected = None, pytest.approx(0)
    while drawn is None or drawn != expected:  # a busy node tells late, or the text is held up
        result = machine.run("generate", "a", "--max-tokens", "150", "--json", *ring)
        timing = result.json["timing"]
        drawn = timing["joules_per_token"]
        expected = pytest.approx(42 / timing["decode_tok_s"], rel=0.2)
    for stage, watts in zip(timing["energy"], WATTS.values(), strict=True):
        assert stage["source"] == "plug"
        assert stage["joules_per_token"] == pytest.approx(timing["joules_per_token"] * watts / 42)

    named = ["--nodes", nodes[0].address]
    [meter] = machine.state(nodes[0])["power"]
    assert (meter["source"], meter["watts"], meter["busy_w"]) == ("plug", 30, 30)
    assert meter["joules"] > 0
    assert "power    30 W (plug)" in machine.status(*named)
    listed = machine.nodes_with(*WATTS)
    assert [listed[name]["power"][0]["watts"] for name in WATTS] == [*WATTS.values()]

    with urllib.request.urlopen(f"{nodes[0].ready['http']}/metrics", timeout=60) as answer:
        metrics = answer.read().decode()
    assert 'shardnet_node_power_watts{node="bert",source="plug"} 12.0' in metrics
    assert 'shardnet_node_energy_joules_total{node="anna",source="plug"}' in metrics
    assert 'shardnet_ring_joules_per_token{node="anna",rank="0"}' in metrics

    told = machine.call("plan", "--json", *ring).json
    energy = told["energy"]
    assert energy["joules_per_token"] == pytest.approx(42 / told["predicted_tok_s"])
    assert energy["sources"] == ["anna: plug", "bert: plug"]
    without = {ring["name"]: ring for ring in energy["without"]}
    for name, left in zip(WATTS, ("bert", "anna"), strict=True):
        joules = WATTS[left] / without[name]["predicted_tok_s"]
        assert without[name]["joules_per_token"] == pytest.approx(joules)
    text = machine.call("plan", *ring).stdout
    assert "J a token (anna: plug, bert: plug); without anna, switched off: " in text


def test_a_command_that_prints_no_watts_is_named_by_the_doctor(machine: Machine) -> None:
    [node] = machine.start_nodes("cleo", arguments=["--power-command", "echo off"])
    node.stderr.wait_for("warning: --power-command: it printed 'off', and no watts")
    assert machine.state(node)["power"] == []
    findings = json.loads(machine.run("doctor", "--json").stdout)
    [found] = [each for each in findings if each["topic"] == "power"]
    assert found["severity"] == "info"
    assert "its --power-command prints no watts" in found["what"]
    wrong = machine.call("node", "--power-command", "echo 'never ended")
    assert wrong.code == 2
    assert "--power-command" in wrong.stderr
