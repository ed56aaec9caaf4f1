"""A narrower wire on real nodes: named, measured, exactly rounded, and only where asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.rings.stage_chain import CPU, RoundingChain, StageChain, probed
from support.system.nodes import Crew, Machine

from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.model.sampling.sampler import Sampler, SampleRow
from shardnet.sampling_params import SamplingParams
from shardnet.types import DType, LayerRange, WireDType

PROMPT = ["It is a truth universally acknowledged", "--threads", "1", "--json"]
N_TOKENS = 12


def run_of(trio: Crew, *arguments: str) -> dict[str, Any]:
    """Generate greedily with the bundled model over three nodes."""
    command = ["generate", *PROMPT, "--max-tokens", str(N_TOKENS), "--logprobs", "2"]
    result = trio.machine.run(*command, "--nodes", trio.addresses(), *arguments)
    answer: dict[str, Any] = result.json
    assert ("wire int8" in result.stderr) == ("int8" in arguments)
    return answer


def test_nodes_make_what_a_model_that_rounds_says(trio: Crew) -> None:
    """Token by token and logprob by logprob, bit for bit."""
    answer = run_of(trio, "--wire-dtype", "int8")
    ranges = [LayerRange(*stage["layers"]) for stage in answer["stages"]]
    assert len(ranges) == 3
    choice = probed(CPU, DType.BFLOAT16, DType.BFLOAT16)  # as a node, whatever its CPU computes in
    stages = StageChain.load(DEFAULT_MODEL_PATH, ranges, choice).stages
    prompt = answer["prompt_token_ids"]
    (logits,) = RoundingChain(stages, WireDType.INT8).generate([prompt], N_TOKENS)
    (exact,) = StageChain(stages).generate([prompt], N_TOKENS)
    for logits_of, is_equal in ((logits, True), (exact, False)):
        params = SamplingParams(n_logprobs=2)
        rows = [SampleRow(params=params, position=len(prompt) - 1 + n) for n in range(N_TOKENS)]
        said = Sampler(4096).sample(logits_of[-N_TOKENS:], rows).logprobs
        logprobs = [one.logprob for one in said if one is not None]
        assert ([entry["logprob"] for entry in answer["logprobs"]] == logprobs) is is_equal


def test_a_ring_rounds_only_when_asked_and_keeps_its_weights(trio: Crew) -> None:
    """Another wire is another ring, of the same stages; a link may have its own.

    The layers are named: figures taken while busy may divide them otherwise.
    """
    where = ["--nodes", trio.addresses(), "--layers", "0-3,3-6,6-8"]
    where += ["--max-tokens", "3", "--logprobs", "1", "--json"]
    began = [len(node.log) for node in trio.nodes]
    exact = trio.machine.call("generate", "She had", *where).json
    for node, before in zip(trio.nodes, began, strict=True):
        node.stderr.wait_for(re.compile(r"(loaded|kept) layer.*\n"), after=before)
    logs = [len(node.log) for node in trio.nodes]
    int8 = trio.machine.call("generate", "She had", *where, "--wire-dtype", "int8").json
    again = trio.machine.call("generate", "She had", *where, "--wire-dtype", "int8").json
    one = trio.machine.call("generate", "She had", *where, "--wire-dtype", "bert-cleo=int8").json
    assert one["logprobs"] not in (exact["logprobs"], int8["logprobs"])
    same = trio.machine.call("generate", "She had", *where, "--wire-dtype", "1-2=int8").json
    assert (same["logprobs"], same["timing"]["load_s"]) == (one["logprobs"], 0)
    back = trio.machine.call("generate", "She had", *where).json
    assert again["timing"]["load_s"] == 0
    assert again["logprobs"] == int8["logprobs"] != exact["logprobs"]
    assert back["logprobs"] == exact["logprobs"]
    for node, before in zip(trio.nodes, logs, strict=True):
        node.stderr.wait_for(re.compile("(?s)kept layer.*kept layer"), after=before)
        assert "loaded layer" not in node.log[before:]


def test_plan_measures_what_it_changes_and_keeps_that(trio: Crew) -> None:
    """It keeps that of a division of the layers: figures taken while busy may change it."""
    where = ["--nodes", trio.addresses(0, 1), "--layers", "0-4,4-8"]
    first = trio.machine.run("plan", *where, "--wire-dtype", "int8", "--json")
    assert "measuring the error of wire dtype int8" in first.stderr
    plan = first.json
    assert plan["wire_dtype"] == "int8"
    assert plan["wire_error"]["n_rows"] == 64
    assert plan["wire_error"]["max_error"] > 0
    assert isinstance(plan["wire_saves_ms"], float)
    assert plan["wire_why"] == ""
    second = trio.machine.run("plan", *where, "--wire-dtype", "int8")
    assert "measuring" not in second.stderr
    assert "logits off by at most" in second.stdout
    alone = trio.machine.run("plan", "--nodes", trio.addresses(0), "--wire-dtype", "int8")
    assert "one stage, so nothing crosses a wire" in alone.stdout
    plain = trio.machine.run("plan", *where, "--json").json
    assert plain["wire_dtype"] == plain["dtype"]
    assert (plain["wire_error"], plain["wire_saves_ms"]) == (None, None)


@pytest.mark.parametrize("command", [["generate", "a"], ["plan"]])
@pytest.mark.parametrize("name", ["int4", "float32", "auto"])
def test_an_unknown_wire_dtype_is_wrong_usage(
    machine: Machine, command: list[str], name: str
) -> None:
    result = machine.call(*command, "--wire-dtype", name)
    assert result.code == 2
    assert name in result.stderr
    assert "int8" in result.stderr
