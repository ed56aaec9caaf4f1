"""Tables that not every disk has room for: other nodes give their rows, and nobody sees it."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.rings.stage_chain import random_prompt
from support.system.nodes import Machine, NodeProcess
from support.system.sites import meet

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.replica import range_tensors, table_tensors
from shardnet.types import LayerRange

MODEL = "/proc/self/cwd/model"
OWN = LayerRange(1, 4)
"""Layers of the node without room for their two tables."""
MOST_BYTES = 3 << 20
LIMITED = ("--cache-limit", str(MOST_BYTES))

pytestmark = pytest.mark.skipif(
    not Path(MODEL).parent.exists(), reason="this system has no /proc/self/cwd"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"ple_layer_ids": [2, 3], "ngram_vocab_size_base": 30_000}
    sizes |= {"max_position_embeddings": 1024}
    sizes |= {"layer_types": ["linear_attention"] * 3 + ["indexed_attention"]}
    folder = tmp_path_factory.mktemp("rows")
    return make_decoder(folder / "model", "qwen4_exp_text", **CASES["qwen4_exp_text"] | sizes)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Three machines, each with a home of its own."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()
            made.append(Machine(tmp_path / name))
            stack.callback(made[-1].close)
        yield made


def table_bytes(model: Path, layers: LayerRange = OWN) -> tuple[int, int]:
    """The bytes of the tables of layers, and of their other tensors."""
    checkpoint = Checkpoint.open(model)
    tables = sum(table.size_bytes for table in table_tensors(checkpoint, layers).values())
    whole = sum(checkpoint.stored[name].size_bytes for name in range_tensors(checkpoint, layers))
    return tables, whole - tables


def start(machine: Machine, name: str, *more: str, model: Path | None = None) -> NodeProcess:
    """Start a node, which has the `model`, or room for the weights of OWN alone."""
    if model is not None:
        (machine.folder / "model").symlink_to(model)
    [node] = machine.start_nodes(name, arguments=more, cwd=machine.folder)
    return node


def ask(ids: list[int], *nodes: NodeProcess, layers: str = "0-1,1-4") -> tuple[str, ...]:
    ring = ("--nodes", ",".join(node.address for node in nodes), "--layers", layers)
    tokens = ",".join(map(str, ids))
    said = ("--token-ids", tokens, "--max-tokens", "12", "--ignore-eos", "--logprobs", "1")
    return ("generate", *said, "--json", "--model", MODEL, *ring)


def test_rows_of_another_node_give_the_same_bits_and_the_plan_says_whose_they_are(
    machines: list[Machine], model: Path
) -> None:
    tables, others = table_bytes(model)
    anna = start(machines[0], "anna", model=model)
    bert = start(machines[1], "bert", "--peer", anna.address, *LIMITED)
    meet(anna, bert)
    prompt = random_prompt(600, 90, seed=4)
    alone = machines[0].call(*ask(prompt, anna, layers="0-4")).json
    ring = ("--nodes", f"{anna.address},{bert.address}", "--layers", "0-1,1-4", "--model", MODEL)
    [_, stage] = machines[0].call("plan", "--json", *ring).json["stages"]
    assert (stage["rows_from"], stage["fetch_bytes"]) == (["anna"], others)
    together = machines[0].call(*ask(prompt, anna, bert)).json
    assert together["token_ids"] == alone["token_ids"]
    assert together["logprobs"] == alone["logprobs"]
    assert "their rows are asked for at other nodes" in bert.log
    [_, stage] = machines[0].call("plan", "--json", *ring).json["stages"]
    assert (stage["rows_from"], stage["fetch_bytes"]) == (["anna"], 0)
    [replica] = (machines[1].folder / "cache" / "models").glob("*/replica.jsonl")
    held = Checkpoint.open(replica.parent)
    assert {*held.missing(range_tensors(held, OWN))} == table_tensors(held, OWN).keys()
    assert others < MOST_BYTES < tables


def test_a_node_that_shares_a_stage_asks_the_other_one(
    machines: list[Machine], model: Path
) -> None:
    _, others = table_bytes(model, LayerRange(0, 4))
    anna = start(machines[0], "anna", model=model)
    bert = start(machines[1], "bert", "--peer", anna.address, *LIMITED)
    meet(anna, bert)
    prompt = random_prompt(300, 90, seed=6)
    alone = machines[0].call(*ask(prompt, anna, layers="0-4")).json
    both = ("--nodes-per-stage", "2")
    for nodes in ((anna, bert), (bert, anna)):
        ring = ("--nodes", ",".join(node.address for node in nodes), *both)
        [stage] = machines[0].call("plan", "--json", *ring, "--model", MODEL).json["stages"]
        assert (stage["rows_from"], stage["fetch_from"]) == (["anna"], ["anna"])
        assert stage["fetch_bytes"] == others
    together = machines[0].call(*ask(prompt, bert, anna, layers="0-4"), *both).json
    assert together["token_ids"] == alone["token_ids"]
    assert together["logprobs"] == alone["logprobs"]
    assert "their rows are asked for at other nodes" in bert.log


def test_a_ring_that_loses_the_only_node_with_its_tables_says_so_and_is_planned_anew(
    machines: list[Machine], model: Path
) -> None:
    cleo = start(machines[2], "cleo", model=model)
    anna, bert = (
        start(machine, name, "--peer", cleo.address, *LIMITED)
        for machine, name in zip(machines, ("anna", "bert"), strict=False)
    )
    meet(anna, bert, cleo)
    assert machines[0].call(*ask([5, 6, 7], anna, bert)).json["token_ids"]
    cleo.kill()
    anna.stderr.wait_for("node cleo is gone")
    running = machines[0].begin(*ask(random_prompt(40, 90, seed=5), anna, bert))
    broke = (
        r"no node gives rows of .*, for which this node's disk has no "  # either may say it first
    )
    running.stderr.wait_for("asking who is left")
    assert re.search(rf"{broke}room \(.*\); start a node that has the whole", anna.log)
    running.signal(signal.SIGINT)
    assert running.wait().code == 130
