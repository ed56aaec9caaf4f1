"""A node that computes by the kernel text in a ring with one that computes by the library."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.chaos.models import made_model
from support.devices import DEVICE, HAS_VECTORS, HOST, compared, device_of, path_of_once
from support.soak import cases
from support.system.nodes import Crew, Machine, NodeProcess

from shardnet.assets import DEFAULT_MODEL_NAME

PROMPT = ["generate", "It is a truth universally acknowledged", "--json", "--arith", "portable"]
LONG = ["--max-tokens", "96", "--ignore-eos"]


MODELS = (DEFAULT_MODEL_NAME, "hybrid", "latents")
USUAL = [(HOST, "hybrid")]
"""It has keys and values, and states."""
MORE = [(kind, model) for kind in (HOST, DEVICE) for model in MODELS]


@compared
@pytest.mark.parametrize(
    ("device", "model"), cases(USUAL, [case for case in MORE if case not in USUAL])
)
def test_a_ring_of_a_device_and_a_cpu_says_what_cpus_say(
    device: str, model: str, trio: Crew, machine: Machine, tmp_path: Path
) -> None:
    """Word by word, with equal log-probabilities; also when the device's node leaves meanwhile, and
    its keys and values, or states, move to the CPU, and when it is killed.
    """
    device_of(device)
    prompt = [*PROMPT, "--model", made_model(model, tmp_path)]
    machine.environment["PATH"] = path_of_once(tmp_path / "compiled")
    [node] = machine.start_nodes("odette", arguments=["--device", device])
    alone, both = trio.addresses(0), f"{node.address},{trio.addresses(0)}"

    def said(nodes: str, *arguments: str) -> Any:
        answer = trio.machine.call(*prompt, "--nodes", nodes, *arguments).json
        return answer["token_ids"], answer["logprobs"]

    asked = ["--max-tokens", "8", "--logprobs", "2"]
    layers = ["--layers", "0-3,3-8"]
    assert said(both, *asked, *layers) == said(alone, *asked)
    plan = trio.machine.call("plan", "--model", prompt[-1], "--nodes", both, *layers, "--json").json
    assert plan["exact"]["split"] == HAS_VECTORS
    assert plan["exact"]["batch"] == HAS_VECTORS
    expected, _ = said(alone, *LONG)

    def lose(node: NodeProcess, end: Callable[[], None]) -> None:
        running = trio.machine.begin_copy(*prompt, "--nodes", f"{alone},{node.address}", *LONG)
        running.stderr.wait_for("ring: ")
        end()
        assert running.wait().json["token_ids"] == expected

    if HAS_VECTORS:
        assert "the CPU does" not in node.stderr.text
    lose(node, partial(node.signal, signal.SIGTERM))
    node.stop()
    [another] = machine.start_nodes("odile", arguments=["--device", device])
    lose(another, another.kill)
