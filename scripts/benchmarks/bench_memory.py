"""What a plan says of memory beside what loading takes, for models larger than this machine.

Of each model a checkpoint is written at its published sizes, whose files are holes. It is planned
over four nodes of 128 GB. Then one layer of each kind, and both ends, get noise for weights and are
loaded, each in a process of its own, with keys and values of one long sequence and the states that
a stage has room for. What these take of memory, times their number, stands beside what the plan
says. What drafts would add to states is left out of both.

    python scripts/benchmarks/bench_memory.py
    python scripts/benchmarks/bench_memory.py glm-5.3-flash --contexts 131072 --json

A layer takes up to 8 GB of memory, and its file up to 4 GB of the disk while it is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from memory_shapes import FP8_BLOCK, MODELS, SMALL, Published

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.machine.profile import Device, find_devices
from shardnet.cluster.planning.placing import make_plan
from shardnet.cluster.planning.plan import Plan
from shardnet.errors import PlanError
from shardnet.model.families.registry import family_of, parse_config
from shardnet.model.families.stage_tensors import layer_tensors, stage_tensors
from shardnet.runtime.loading.model_facts import identify
from shardnet.stage.estimate.memory_estimate import draft_bytes, kv_block_bytes, state_bytes
from shardnet.stage_form import StageForm
from shardnet.types import (
    BLOCK_POSITIONS,
    LEAST_STATES,
    Arith,
    DType,
    LayerRange,
    SlotId,
    blocks_for,
)
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice

if TYPE_CHECKING:
    from torch import Tensor

    from shardnet.model.cache.kv_cache import KvCache
    from shardnet.model.kernels.linear import KernelChoice

N_NODES: Final = 4
NODE_BYTES: Final = 128 * 10**9
NOISE_BYTES: Final = 4 << 30
"""Of each file at most: the rest of a layer is zeros, which take as much memory."""
RETURNED: Final = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_ARENA_MAX": "1"}
"""Gives the system back what is freed at once; the C library keeps some by what came before."""
TOUCHED_POSITIONS: Final = 512
"""Positions of which entries are made at a time, as in prompts."""


def main() -> None:
    """Measure and print; the process that loads a layer is this program too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--contexts", type=int, nargs="+", default=[131072, 1048576])
    parser.add_argument("--small", action="store_true", help="the same kinds of layers, narrow")
    parser.add_argument("--folder", type=Path, help="where to write: as much as the largest layer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--load", metavar="JOB", help="of the processes that load: a job as JSON")
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(json.loads(options.load))))
        return
    rows = []
    for name in options.models or MODELS:
        shape = SMALL[name] if options.small else MODELS[name]
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            own, is_small = Path(folder), options.small
            rows.append(row_of(name, shape, own, options.contexts, is_small=is_small))
        if not options.json:
            print("\n".join(f"{key}: {value}" for key, value in rows[-1].items()), "\n", flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))


def row_of(
    name: str, shape: Published, folder: Path, contexts: list[int], *, is_small: bool
) -> dict[str, Any]:
    """Plan a model with each context, load its kinds of layers, and compare."""
    write_holes(shape, folder)
    checkpoint = Checkpoint.open(folder)
    config, n = checkpoint.config, checkpoint.config.n_layers
    contexts = [min(context, config.max_positions) for context in contexts]
    plans = {context: planned(folder, shape, context) for context in contexts}
    kinds = Counter(kind_of(checkpoint, layer) for layer in range(1, n - 1))
    wanted = {0: 1, n - 1: 1}
    for layer in range(1, n - 1):
        wanted[layer] = kinds.pop(kind_of(checkpoint, layer), 0)
    layers = [layer for layer in sorted(wanted) if wanted[layer]]
    weights, caches = 0, dict.fromkeys(contexts, 0)
    for some in [layers] if is_small else [[layer] for layer in layers]:
        for layer, told in zip(some, measured(folder, shape, some, plans), strict=True):
            weights += wanted[layer] * told["weights"]
            for context in contexts:
                caches[context] += wanted[layer] * told[str(context)]
    row: dict[str, Any] = {"model": name, "stored": checkpoint.form}
    plan = plans[contexts[0]]
    row["weights"] = _beside(sum(s.weight_bytes for s in plan.placement.stages), weights)
    for context, plan in plans.items():
        drafts = draft_bytes(config, LayerRange(0, n), plan.forms[0].dtype)
        kv_bytes = sum(s.kv_bytes for s in plan.placement.stages) - drafts
        row[f"keys, values and states of {context}"] = _beside(kv_bytes, caches[context])
        row[f"stages with {context}"] = [len(stage.layers) for stage in plan.placement.stages]
    return row


def _beside(planned_bytes: int, taken_bytes: int) -> dict[str, float]:
    return {
        "planned GB": round(planned_bytes / 1e9, 3),
        "taken GB": round(taken_bytes / 1e9, 3),
        "planned / taken": round(planned_bytes / max(1, taken_bytes), 4),
    }


def planned(folder: Path, shape: Published, context: int) -> Plan:
    """Plan over nodes that are as this machine, but for memory: four, or as many as it takes."""
    [device, *_] = find_devices("cpu")
    choice = ModelChoice(model=str(folder), context=context, quant=shape.quant)
    facts = identify(folder)
    for n_nodes in count(N_NODES):
        with contextlib.suppress(PlanError):
            return make_plan(choice, facts, [_node(device, number) for number in range(n_nodes)])
    raise AssertionError


def _node(device: Device, number: int) -> NodeInfo:
    return NodeInfo(
        node=f"node-{number}",
        name=f"node-{number}",
        address=f"10.0.0.{number + 1}:1",
        version="0",
        device=device.description,
        memory_bytes=NODE_BYTES,
        memory_free_bytes=NODE_BYTES,
        cores=8,
        threads=8,
        dtypes=[dtype.value for dtype in device.dtypes],
        host_id=f"host-{number}",
        isa=device.isa,
        arithmetic=device.arithmetic,
    )


def kind_of(checkpoint: Checkpoint, layer: int) -> tuple[object, ...]:
    """Return what is equal of layers that take equal memory."""
    config, one = checkpoint.config, LayerRange(layer, layer + 1)
    tables = (layer_tensors(config, layer), family_of(config).looked_up_tensors(config, layer))
    shapes = [
        (name.replace(f".{layer}.", ".", 1), shape)
        for table in tables
        for name, shape in table.items()
    ]
    wide = DType.FLOAT32
    caches = kv_block_bytes(config, one, wide), state_bytes(config, one, wide)
    return hash(tuple(shapes)), len(shapes), *caches


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor of a file: its name, safetensors' name of its dtype, its shape, its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        widths = {"F32": 4, "BF16": 2, "I64": 8, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
        return math.prod(self.shape) * widths[self.dtype]


def write_holes(shape: Published, folder: Path) -> None:
    """Write a checkpoint: a file for each layer and one for the ends, headers and nothing else."""
    (folder / "config.json").write_text(json.dumps(shape.config))
    plain = {k: v for k, v in shape.config.items() if k != "quantization_config"}
    config = parse_config(plain, "config.json")
    tensors = stage_tensors(config, LayerRange(0, config.n_layers))
    files = {"ends": tensors.embedding | tensors.head, "tables": tensors.looked_up}
    files |= {str(layer): table for layer, table in tensors.layers.items()}
    where: dict[str, str] = {}
    for name, table in files.items():
        stored = [one for own, size in table.items() for one in stored_as(shape, own, size)]
        if stored:
            write_file(folder / f"model-{name}.safetensors", stored)
        where |= {one.name: f"model-{name}.safetensors" for one in stored}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_file(path: Path, stored: list[Stored]) -> None:
    """Write the header of a file, which then has its full size and is a hole."""
    header, end = {}, 0
    for one in stored:
        begin, end = end, end + one.size_bytes
        header[one.name] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def stored_as(shape: Published, name: str, size: tuple[int, ...]) -> Iterator[Stored]:
    """List what a maker stores of a parameter: its weights, and the scales of blocks of them."""
    n_out, n_in = size if len(size) == 2 else (0, 0)
    is_linear = len(size) == 2 and (".mlp." in name or "attn." in name) and name.endswith(".weight")
    if name.endswith(".tid2eid"):
        yield Stored(name=name, dtype="I64", shape=size)
    elif ".ngram_embedding.shard_" in name and shape.form == "fp8":
        yield Stored(name=name, dtype="F8_E4M3", shape=size)
        if ".shard_0." in name:
            scale = name.partition(".shard_0.")[0] + ".weight_scale"
            yield Stored(name=scale, dtype="BF16", shape=(1,))
    elif shape.form != "bf16" and name.endswith(
        "_hc.scale"
    ):  # which is called otherwise beside the scales of weights
        stem, _, kind = name.removesuffix("_hc.scale").rpartition(".")
        yield Stored(name=f"{stem}.hc_{kind}_scale", dtype="BF16", shape=size)
    elif shape.form == "fp4" and ".experts." in name:
        yield Stored(name=name, dtype="I8", shape=(n_out, n_in // 2))
        scale = f"{name}_scale_inv"
        yield Stored(name=scale, dtype="F8_E8M0", shape=(n_out, n_in // 32))
    elif shape.form != "bf16" and is_linear and not n_out % FP8_BLOCK and not n_in % FP8_BLOCK:
        yield Stored(name=name, dtype="F8_E4M3", shape=size)
        dtype = "F8_E8M0" if shape.form == "fp4" else "F32"
        blocks = (n_out // FP8_BLOCK, n_in // FP8_BLOCK)
        yield Stored(name=f"{name}_scale_inv", dtype=dtype, shape=blocks)
    else:
        yield Stored(name=name, dtype="BF16", shape=size)


def fill(path: Path) -> None:
    """Write noise over the first NOISE_BYTES of a file, no value of which is infinite."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for entry in header.values():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            if begin > min(size, NOISE_BYTES):
                break
            file.seek(begin)
            noise = _noise(entry["dtype"])
            for done in range(0, end - begin, len(noise)):
                file.write(noise[: end - begin - done])


@cache
def _noise(dtype: str) -> bytes:
    """Return some values of about 0.02."""
    random = np.random.default_rng(0)
    if dtype == "I64":
        return bytes(1 << 20)
    if dtype == "F8_E8M0":
        return bytes([120]) * (1 << 20)
    if not dtype.startswith(("F32", "BF16")):  # codes, none of which is infinite
        return (random.integers(0, 256, 1 << 20, np.uint8) & 0xF7).tobytes()
    values = np.abs(0.02 * random.standard_normal(1 << 20, np.float32))
    if dtype == "BF16":
        return bytes((values.view(np.uint32) >> 16).astype(np.uint16))
    return bytes(values)


def empty(path: Path) -> None:
    """Make a hole again of what a file has behind its header."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        file.truncate(8 + length)
        file.truncate(size)


def measured(
    folder: Path, shape: Published, layers: list[int], plans: dict[int, Plan]
) -> list[dict[str, int]]:
    """Load layers in a process of their own, one after the other; return the bytes of each."""
    paths = [folder / f"model-{layer}.safetensors" for layer in layers]
    for path in paths if not shape.quant else ():  # else zeros are quantised as well
        fill(path)
    plan = next(iter(plans.values()))
    job = {"folder": str(folder), "layers": layers, "contexts": [*plans], "quant": shape.quant}
    command = [sys.executable, __file__, "--load", json.dumps(job | {"dtype": plan.dtype.value})]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ | RETURNED)
    for path in paths:
        empty(path)
    return list(json.loads(done.stdout))


def load(job: dict[str, Any]) -> list[dict[str, int]]:
    """Load the layers of a job; return what weights take, and caches with each context."""
    import torch

    from shardnet.stage.load import choose_kernels

    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(job["folder"])
    form = StageForm(
        model=job["folder"],
        quant=job["quant"],
        model_id="0" * 64,
        dtype=DType(job["dtype"]),
        context=max(job["contexts"]),
    )
    choice = choose_kernels(checkpoint, form, Arith.FAST, torch.device("cpu"))
    layers = job["layers"]
    if len(layers) > 1:  # narrow ones, beside which what libraries take once would show
        _taken(checkpoint, layers[0], choice, job["contexts"])
    return [_taken(checkpoint, layer, choice, job["contexts"]) for layer in layers]


def _taken(
    checkpoint: Checkpoint, layer: int, choice: KernelChoice, contexts: list[int]
) -> dict[str, int]:
    import torch

    from shardnet.stage.load import load_stage

    idle = _private_bytes()
    stage = load_stage(
        checkpoint,
        LayerRange(layer, layer + 1),
        choice=choice,
        device=torch.device("cpu"),
        room_blocks=blocks_for(max(contexts)) + LEAST_STATES,
        context=BLOCK_POSITIONS,  # rotary tables are those of a stage
        progress=lambda done, total: None,
    )
    taken, kv = {"weights": _private_bytes() - idle}, stage.kv
    del stage  # so that both are never in memory at once
    own = checkpoint.config.indexer
    idle = _private_bytes()
    for context in contexts:
        for slot in range(LEAST_STATES):
            _touch(kv, SlotId(slot), context if slot == 0 else 0)
        if own is not None and own.n_pooled > 1 and layer in own.layers:
            _make_entries(kv, context, own.n_pooled, own.head_size)
        taken[str(context)] = _private_bytes() - idle
        kv.clear()
    return taken


def _touch(kv: KvCache, slot: SlotId, n_positions: int) -> None:
    """Write all of a slot that has so many positions, and its state; memory counts once written."""
    kv.ensure(slot, max(1, n_positions), max(1, n_positions))
    for part in kv.layer(slot, 0) if n_positions else ():
        part.fill_(1)
    with contextlib.suppress(KeyError):
        state = kv.state(slot, 0)
        for part in (state.recent, state.recurrent, state.features):
            part.fill_(1)


def _make_entries(kv: KvCache, context: int, n_pooled: int, n_columns: int) -> None:
    """Make the entries of a slot by a stand-in for the layer's own pool, as a prompt grows."""

    def pool(values: Tensor) -> Tensor:
        return values.new_ones(len(values) // n_pooled, n_columns)

    for end in range(TOUCHED_POSITIONS, context + 1, TOUCHED_POSITIONS):
        kv.entries(SlotId(0), 0, end // n_pooled, n_pooled, pool)


def _private_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


if __name__ == "__main__":
    main()
