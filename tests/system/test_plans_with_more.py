"""Plans of real nodes with machines that are not there, and without nodes that are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.system.nodes import Machine
from support.system.parrot import make_parrot
from support.system.weighing import shape_here

MIB = 2**20


def test_a_cluster_is_told_what_a_machine_would_bring_and_who_is_not_needed(
    machine: Machine, tmp_path: Path
) -> None:
    """A model fits with a machine that is not there. Then a second node comes, and is left out and
    added again by its figures: the plan is of the same machines, and no node has loaded anything.
    """
    model = make_parrot(tmp_path / "model", "abc", ends=False, layers=8, intermediate=2048)
    shape = shape_here(model, 512)
    mib = int(0.7 * shape.memory_bytes(shape.whole)) // MIB
    memory = ["--memory", f"{mib}MiB"]
    ask = ["plan", "--model", str(model), "--context", "512", "--nodes-per-stage", "1"]

    def names(plan: dict[str, Any]) -> set[str]:
        return {stage["name"] for stage in plan["stages"]}

    [anna] = machine.start_nodes("anna", arguments=memory)
    assert machine.run(*ask).code == 1
    then = machine.run(*ask, "--add", "RTX 3060 12GB, 32 GB", "--json").json
    assert then["now"] is None
    assert "anna" in then["why_not_now"]
    assert "RTX 3060 12GB, 32 GB" in names(then)

    [bert] = machine.start_nodes("bert", arguments=[*memory, "--peer", anna.address])
    anna.stderr.wait_for("node bert (")
    added = f"cleo:20:{mib / 1024}"
    changed = machine.run(*ask, "--without", "bert", "--add", added, "--json").json
    assert names(changed["now"]) == {"anna", "bert"}
    assert names(changed) == {"anna", "cleo"}
    assert changed["predicted_tok_s"] > 0
    assert {out["name"] for out in changed["left_out"]} == set()
    unknown = machine.run(*ask, "--without", bert.ready["node"], "--without", "dora").error
    assert unknown.endswith("--without dora: there is no such node; name one of anna, bert")
    listed = machine.nodes_with("anna", "bert")
    assert listed.keys() == {"anna", "bert"}
    assert [node["stage"] for node in listed.values()] == [None, None]
