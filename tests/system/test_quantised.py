"""`--quant` on real nodes: the same text on any split, its place in plans, and what is kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.soak import is_soak
from support.system.nodes import COMMAND_S, Crew, Machine, Result
from support.system.parrot import Parrots, make_parrot


def test_a_ring_with_rounded_weights_says_what_one_stage_says(trio: Crew, parrots: Parrots) -> None:
    model = ["--model", str(parrots.alphabet), "--quant", "int4", "--max-tokens", "5"]
    where = [["--nodes", trio.addresses(0)], ["--nodes", trio.addresses(0, 1, 2)]]
    texts = [trio.machine.call("generate", "a", *model, *nodes).stdout for nodes in where]
    assert texts == ["bcdef\n", "bcdef\n"]
    plain = trio.machine.call("generate", "a", *model[:2], "--max-tokens", "5", *where[1])
    assert plain.stdout == "bcdef\n"
    assert "(bfloat16," in plain.stderr or "(float32," in plain.stderr
    again = trio.machine.call("generate", "a", *model, *where[1])
    assert " with int4 weights" in again.stderr


def test_a_plan_names_rounding_where_it_makes_a_model_fit(tmp_path: Path) -> None:
    """With memory for int4 in float32, and not for int8 in bfloat16: the same on every CPU."""
    model = make_parrot(tmp_path / "model", "abc", ends=False, layers=8, intermediate=2048)
    folder = tmp_path / "machine"
    folder.mkdir()
    machine = Machine(folder, environment={"SHARDNET_NO_MDNS": "1"})
    try:
        machine.start_nodes("anna", arguments=["--memory", "22MiB"])
        arguments = ["--model", str(model), "--context", "256"]
        refused = machine.call("plan", *arguments)
        assert refused.code == 1
        assert "use --quant int4 (needs " in refused.error_line
        told = machine.call("plan", *arguments, "--quant", "int4", "--json").json
        assert told["quant"] == "int4"
        assert told["stages"][0]["weight_bytes"] < 16 * 2**20
        text = machine.call("generate", "a", *arguments, "--quant", "int4", "--max-tokens", "4")
        assert text.stdout == "bcab\n", text.stderr
        kept = kept_packs(machine)
        assert "int4" in kept.stdout
        assert "1 quantised model in" in kept.stderr
        gone = machine.call("cache", "rm", kept.stdout.split()[0])
        assert "deleted quantised weights" in gone.stderr
        assert machine.call("cache", "ls").stdout == ""
    finally:
        machine.close()


def kept_packs(machine: Machine) -> Result:
    """List the cache once the node has begun to write what it packed, which it does at leisure."""
    end = time.monotonic() + COMMAND_S
    while not (kept := machine.call("cache", "ls")).stdout:
        assert time.monotonic() < end, kept.stderr
    return kept


def test_bench_measures_a_ring(trio: Crew, parrots: Parrots) -> None:
    where = ["--model", str(parrots.alphabet), "--nodes", trio.addresses(0, 1)]
    few = ["--prompt", "20", "--tokens", "5", "--rounds", "1"]
    told = trio.machine.call("bench", *where, *few, "--parallel", "3", "--json").json
    [speed] = told["speeds"]
    assert (speed["sequences"], speed["n_prompt"], speed["n_tokens"]) == (3, 20, 5)
    assert min(speed["ttft_s"], speed["prefill_tok_s"], speed["decode_tok_s"]) > 0
    assert len(told["stages"]) == 2
    shown = trio.machine.call("bench", *where, *few)
    assert [line.split()[:2] for line in shown.stdout.splitlines()] == [
        *(["1", "sequence:"], ["4", "sequences:"])
    ]


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_bench_scores_a_text(trio: Crew, parrots: Parrots, tmp_path: Path) -> None:
    """The parrot is sure of the letters' order, and of nothing else."""
    where = ["--model", str(parrots.alphabet), "--nodes", trio.addresses(0, 1)]

    def ask(text: str, *more: str) -> dict[str, Any]:
        file = tmp_path / "text"
        file.write_text(text)
        told = trio.machine.run("bench", *where, "--perplexity", str(file), "--json", *more).json
        quality: dict[str, Any] = told["perplexity"]
        assert (quality["text"], quality["n_bytes"]) == (str(file), len(text))
        return quality

    def score(text: str, *more: str) -> float:
        return float(ask(text, *more)["perplexity"])

    def count(text: str, *more: str) -> int:
        return int(ask(text, *more)["n_tokens"])

    in_order, out_of_order = "abcdefghijklmnopqrstuvw", "qpzmalxkwosjdncbfhgiryu"
    assert score(in_order) < 1.2
    assert score(in_order, "--quant", "int8") < 1.2
    assert score(out_of_order) > 100
    assert [count(in_order * 10, "--piece", n) for n in ("230", "115")] == [229, 228]
    halves = ask(in_order * 10, "--piece", "115")
    assert (halves["n_pieces"], halves["most_tokens"]) == (2, 115)
    missing = trio.machine.run("bench", *where, "--perplexity", str(tmp_path / "none"))
    assert missing.code == 2
    assert "none" in missing.stderr


def test_a_name_that_is_none_is_wrong_usage(trio: Crew) -> None:
    result = trio.machine.call("generate", "a", "--quant", "int3")
    assert result.code == 2
    assert "choose none, int8 or int4" in result.stderr
