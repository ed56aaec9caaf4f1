"""`--kv-dtype int8` on real nodes: the same text on any split, its place in plans and refusals."""

from __future__ import annotations

from pathlib import Path

from support.soak import cases
from support.system.nodes import Crew, Machine
from support.system.parrot import make_parrot

PROMPT = "She had been so long in the habit of thinking well of him, that"


def test_a_ring_with_rounded_keys_and_values_says_what_one_stage_says(trio: Crew) -> None:
    """The bundled model: with a parrot, attention would not matter."""
    asked = ["--kv-dtype", "int8", "--max-tokens", "24", "--deterministic"]
    rings = [trio.addresses(0), trio.addresses(0, 1, 2), *cases([], [trio.addresses(1, 2)])]
    said = [trio.machine.call("generate", PROMPT, *asked, "--nodes", nodes) for nodes in rings]
    assert all(result.code == 0 for result in said), said[0].stderr
    assert len({result.stdout for result in said}) == 1
    assert len(said[0].stdout) > 24
    assert " with int8 KV" in said[1].stderr
    plain = trio.machine.call("generate", PROMPT, "--max-tokens", "2", "--nodes", rings[1])
    assert "ring: " in plain.stderr, "a ring that rounds must not serve who did not ask for it"
    assert "int8 KV" not in plain.stderr


def test_plans_weigh_it_and_name_it_where_it_makes_a_model_fit(tmp_path: Path) -> None:
    model = make_parrot(tmp_path / "model", "abc", ends=False, layers=12)
    folder = tmp_path / "machine"
    folder.mkdir()
    machine = Machine(folder, environment={"SHARDNET_NO_MDNS": "1"})
    try:
        machine.start_nodes("anna", arguments=["--memory", "34MiB"])
        arguments = ["--model", str(model), "--context", "4096", "--dtype", "float32"]
        refused = machine.call("plan", *arguments)
        assert refused.code == 1
        assert "use --kv-dtype int8 (needs " in refused.error_line, refused.error_line
        assert "--quant" not in refused.error_line
        told = machine.call("plan", *arguments, "--kv-dtype", "int8", "--json").json
        assert told["kv_dtype"] == "int8"
        assert told["stages"][0]["kv_bytes"] == 12 * 4096 * 2 * (64 + 2 * 2)
        text = machine.call("generate", "a", *arguments, "--kv-dtype", "int8", "--max-tokens", "4")
        assert text.stdout == "bcab\n", text.stderr
    finally:
        machine.close()


def test_a_name_that_is_none_is_wrong_usage(trio: Crew) -> None:
    result = trio.machine.call("generate", "a", "--kv-dtype", "int4")
    assert result.code == 2
    assert "choose auto or int8" in result.stderr
