"""Nodes whose CPUs compute unlike: one has no vector instructions, as far as it is told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.system.nodes import Crew, Machine

from shardnet.cluster.machine import kernels
from shardnet.cluster.machine.profile import find_isa

PROMPT = ["generate", "It is a truth", "--max-tokens", "6", "--logprobs", "3", "--json"]


@pytest.mark.skipif(
    find_isa(os.environ) not in kernels.VECTORS, reason="this machine computes without vectors"
)
def test_portable_arithmetic_gives_the_same_bits_on_unlike_cpus(trio: Crew, tmp_path: Path) -> None:
    """One node alone, and two of which one computes in plain C; 16 bits on the wire and in memory.

    Without the flag torch computes in place of plain C, and the plan says that bits differ.
    """
    environment = {"SHARDNET_NO_MDNS": "1", "SHARDNET_ISA": "portable"}
    machine = Machine(tmp_path / "plain", environment=environment)
    try:
        [plain] = machine.start_nodes("plain")
        both = ["--nodes", f"{trio.addresses(0)},{plain.address}", "--layers", "0-6,6-8"]

        def said(*arguments: str) -> Any:
            answer = trio.machine.call(*PROMPT, *arguments).json
            return answer["token_ids"], answer["logprobs"]

        portably = ["--arith", "portable"]
        assert said(*both, *portably) == said("--nodes", trio.addresses(0), *portably)
        plans = [
            trio.machine.call("plan", *both, "--arith", arith, "--json").json
            for arith in ("portable", "auto")
        ]
    finally:
        machine.close()
    for plan in plans:
        assert {plan["dtype"], plan["wire_dtype"], plan["stages"][0]["wire_dtype"]} == {"bfloat16"}
    portable, auto = plans
    assert portable["arith"] == "portable"
    assert (portable["exact"]["split"], portable["exact"]["batch"]) == (True, True)
    assert [stage["weight_dtype"] for stage in portable["stages"]] == ["bfloat16"] * 2
    assert auto["exact"]["split"] is False
    assert "compute unlike" in auto["exact"]["why"]
