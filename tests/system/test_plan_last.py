"""`shardnet plan --last`: what was predicted beside what was, wherever the run was led."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import make_decoder
from support.soak import cases
from support.system.nodes import Machine, open_machine
from support.system.parrot import Parrots

from shardnet.cluster.measuring.figure_cache import FOLDER


def generate(machine: Machine, parrots: Parrots, *arguments: str) -> None:
    command = ["generate", "a", "--model", str(parrots.alphabet), "--max-tokens", "5"]
    result = machine.call(*command, "--context", "256", *arguments)
    assert result.stdout == "bcdef\n", result.stderr


def last(machine: Machine, *arguments: str) -> dict[str, Any]:
    told: dict[str, Any] = machine.call("plan", "--last", "--json", *arguments).json
    return told


def test_without_a_run_it_says_so(machine: Machine) -> None:
    assert "no run is known on this machine" in machine.call("plan", "--last").error
    [node] = machine.start_nodes("anna")
    assert "no run is known on this machine" in machine.call("plan", "--last").error
    named = machine.call("plan", "--last", "--nodes", node.address)
    assert "this node has led no generation yet" in named.error


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine that does not know yet how fast it is."""
    with open_machine(tmp_path / "machine", is_measured=False) as machine:
        yield machine


@pytest.mark.parametrize("local", cases([0], [2]))
def test_a_run_without_a_node_is_kept_on_the_machine(
    machine: Machine, parrots: Parrots, local: int
) -> None:
    generate(machine, parrots, "--local", str(local))
    told = last(machine)
    assert told["n_tokens"] == 5
    assert told["decode_tok_s"] > 0
    assert [stage["rank"] for stage in told["stages"]] == list(range(local or 1))
    assert all(stage["compute_ms"] > 0 for stage in told["stages"])
    predicted = [stage["predicted_compute_ms"] for stage in told["stages"]]
    assert all(ms > 0 for ms in predicted) if local else predicted == [None]
    text = machine.call("plan", "--last").stdout
    assert text.splitlines()[1].split() == ["predicted", "measured"]


def test_a_run_that_streams_experts_says_how_often_they_were_in_memory(
    machine: Machine, tmp_path: Path
) -> None:
    """Of two nodes, by stage: a prompt of one row and three rows more use each layer's."""
    model = make_decoder(tmp_path, "qwen3_moe", num_hidden_layers=4)
    top_k = json.loads((model / "config.json").read_text())["num_experts_per_tok"]
    nodes = machine.start_nodes("anna", "bert")
    where = ["--nodes", ",".join(node.address for node in nodes), "--layers", "0-1,1-4"]
    asked = ["--token-ids", "5", "--model", str(model), "--ignore-eos", "--max-tokens", "4"]
    machine.call("generate", *asked, *where, "--stream-layers", "4")
    told = last(machine, "--nodes", nodes[0].address)["experts"]
    assert [(one["rank"], one["n_used"]) for one in told] == [(0, 4 * top_k), (1, 12 * top_k)]
    assert all(0 < one["n_read"] <= one["n_used"] for one in told)
    shown = machine.call("plan", "--last", "--nodes", nodes[0].address).stdout
    assert f"of {4 * top_k} used" in shown


def test_a_single_node_knows_its_figures_and_a_generation_corrects_them(
    machine: Machine, parrots: Parrots
) -> None:
    """Figures as of a machine so busy that they are 300 times too slow."""
    model = ("--model", str(parrots.alphabet))
    [node] = machine.call("plan", *model, "--json").json["measured"]["nodes"]
    [file] = (machine.folder / "cache" / FOLDER).iterdir()
    written = json.loads(file.read_text())
    for name in ("layer_s", "layer_256_s", "embed_s", "head_s"):
        written["figure"]["stage"][name] *= 300
    file.write_text(json.dumps(written))
    machine.call("generate", "a", *model, "--context", "256", "--max-tokens", "20")
    run = last(machine)
    whole_ms = 4 * node["layer_ms"] + node["embed_ms"] + node["head_ms"]
    assert run["stages"][0]["predicted_compute_ms"] == pytest.approx(300 * whole_ms)
    corrected = machine.call("plan", *model, "--json").json["predicted_tok_s"]
    assert corrected > 5 * run["predicted_tok_s"]


def test_a_node_tells_of_its_last_run_and_sends_on_to_the_head(
    machine: Machine, parrots: Parrots
) -> None:
    anna, bert = machine.start_nodes("anna", "bert")
    generate(machine, parrots, "--nodes", f"{bert.address},{anna.address}")
    for asked in ([], ["--nodes", anna.address], ["--nodes", bert.address]):
        told = last(machine, *asked)
        assert [stage["name"] for stage in told["stages"]] == ["bert", "anna"]
        assert all(stage["hop_ms"] >= 0 for stage in told["stages"])
        assert all(stage["predicted_hop_ms"] > 0 for stage in told["stages"])
        assert told["predicted_tok_s"] > 0
