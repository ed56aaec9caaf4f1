"""What a decode step asks of a GPU's driver, counted: each call is time in which the GPU waits."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.devices import HAS_VECTORS, compared
from support.recorded_gpu import RecordedDevice, hollow_stage

from shardnet.model.families.registry import parse_config

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "benchmarks"))
from bench_device_host import SHAPES
from bench_steps import make_step

pytestmark = [
    compared,
    pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler here"),
    pytest.mark.skipif(not HAS_VECTORS, reason="routers are not packed here"),
]
TINY = {"num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 256}


@pytest.mark.parametrize(("shape", "n_launches"), [("Llama-8B", 30), ("Qwen3-30B-A3B", 36)])
def test_a_decode_step_is_one_graph_between_one_upload_and_one_download(
    shape: str, n_launches: int
) -> None:
    device = RecordedDevice()
    raw = SHAPES[shape] | TINY
    raw |= {name: 16 for name in ("num_experts",) if name in raw}
    stage = hollow_stage(parse_config(raw, shape), device, 1024)
    for position in range(256, 260):
        device.driver.calls.clear()
        n_before = device.driver.n_launches
        rows = stage.run(make_step([(0, position, [7])]), None)
        assert stage.best(rows) is not None
    kinds = Counter(call.kind for call in device.driver.calls if not call.is_in_graph)
    recorded = [call for call in device.driver.calls if call.is_in_graph]
    assert not recorded  # at a position before
    assert kinds == {"upload": 1, "graph": 1, "download": 1}
    assert device.driver.n_launches - n_before == n_launches
