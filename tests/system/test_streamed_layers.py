"""`--stream-layers` on a node with too little --memory: planned, told, and the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.system.nodes import Machine
from support.system.parrot import make_parrot

from shardnet.model.kernels.linear import probe
from shardnet.types import DType


@pytest.mark.skipif(
    probe(torch.device("cpu"), DType.BFLOAT16, DType.BFLOAT16).stored_dtype is not DType.BFLOAT16,
    reason="this machine computes with weights of float32, and the checkpoint is bfloat16",
)
def test_a_model_larger_than_the_memory_of_its_node_runs(tmp_path: Path) -> None:
    model = make_parrot(tmp_path / "model", "abc", ends=False, layers=8, intermediate=2048)
    folder = tmp_path / "machine"
    folder.mkdir()
    machine = Machine(folder, environment={"SHARDNET_NO_MDNS": "1"})
    try:
        machine.start_nodes("anna", arguments=["--memory", "30MiB"])
        where = ["--model", str(model), "--context", "256"]
        refused = machine.run("plan", *where)
        assert refused.code == 1
        assert "use --stream-layers auto (anna streams " in refused.error_line
        told = machine.run("plan", *where, "--stream-layers", "auto", "--json").json
        [stage] = told["stages"]
        assert 3 <= stage["streamed_layers"] < 8
        assert stage["weight_bytes"] < 30 * 2**20
        assert told["predicted_tok_s"] > 0
        shown = machine.run("plan", *where, "--stream-layers", "auto").stdout
        assert f"anna streams {stage['streamed_layers']} of 8 layers from disk" in shown
        assert f", {stage['streamed_layers']} layers streamed from disk" in shown
        ask = ["generate", "a", *where, "--max-tokens", "4", "--stream-layers"]
        for wanted in ("auto", str(stage["streamed_layers"] + 1)):
            text = machine.run(*ask, wanted)
            assert text.stdout == "bcab\n", text.stderr
            assert "from disk" in text.stderr
        small = machine.run(*ask[:-1], "--quant", "int8", "--stream-layers", "8")
        assert small.stdout == "bcab\n", small.stderr
        (model / "model.safetensors").touch()
        assert machine.run(*ask, "auto").stdout == "bcab\n"
        assert machine.run("plan", *where, "--stream-layers", "many").code == 2
    finally:
        machine.close()
