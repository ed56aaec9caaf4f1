"""What the planner predicts, held against what loading and computing really take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from itertools import combinations, product
from pathlib import Path

import pytest
from support.models.checkpoints import make_decoder, make_gpt2
from support.models.family_cases import CASES
from support.models.pictured_model import make_pictured
from support.needs import HAS_VECTORS
from support.own_process import END_S, ROOT, figures_of, make_large
from support.rings.stage_chain import CPU, StageChain, probed
from support.rings.stage_forms import form_of
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.planning.model_shape import model_shape
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.panel_form import Quantization
from shardnet.model.families.registry import FAMILIES, family_of
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.model.fused.decoder import DecoderStage
from shardnet.model.kernels.codec import torch_dtype
from shardnet.runtime.loading import loading
from shardnet.runtime.loading.loading import load
from shardnet.runtime.loading.model_facts import tower_of
from shardnet.runtime.stage.stage_order import StageOrder
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    activation_peak_bytes,
    embedding_weight_bytes,
    head_weight_bytes,
    kv_block_bytes,
    layer_weight_bytes,
    layers_weight_bytes,
    least_state_bytes,
    read_bytes_per_step,
    rotary_bytes,
    stage_weight_bytes,
)
from shardnet.types import DType, KvDType, LayerRange, SlotId

LARGEST = ("deepseek_v4", "glm5_next_text", "qwen4_exp_text", "hy_v4")
"""Families whose layers cache in several ways."""
TIED = ("llama", "gpt2", "gemma3_text", "qwen3_moe", "deepseek_v3", "qwen3_next", "lfm2")
USUAL = [*product(FAMILIES, ["own-head"]), *product(TIED, ["tied"])]
OTHERS = [each for each in product(FAMILIES, ["tied"]) if each not in USUAL]


@pytest.fixture(scope="module", params=cases(USUAL, OTHERS), ids="-".join)
def stored_and_tied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, bool]:
    """A checkpoint of each family, and whether its head is the embedding again."""
    family, head = request.param
    make = make_gpt2 if family == "gpt2" else partial(make_decoder, family=family)
    folder = tmp_path_factory.mktemp(family)
    # whatever is asked
    has_own = ("nemotron_h", "kimi_linear", "bailing_hybrid", "deepseek_v41_text")
    tied: bool = head == "tied" and family not in has_own
    return Checkpoint.open(make(folder, with_tokenizer=False, tie_word_embeddings=tied)), tied


def test_weights_add_up(stored_and_tied: tuple[Checkpoint, bool]) -> None:
    for dtype in DType:
        check_sums(*stored_and_tied, dtype)


def check_sums(checkpoint: Checkpoint, tied: bool, dtype: DType) -> None:
    config = checkpoint.config
    ignored = re.compile(family_of(config).ignored_tensors)
    tables = stage_tensors(config, LayerRange(0, config.n_layers)).looked_up
    named = checkpoint.tensors.items()
    used = [info for name, info in named if not ignored.fullmatch(name) and name not in tables]
    n_stored = sum(info.size_bytes // (2 if info.dtype == "I64" else 1) for info in used)
    stored = n_stored // 4 * dtype.size_bytes
    table = config.vocab_size * config.hidden_size * dtype.size_bytes
    form = WeightForm(dtype=dtype)
    whole = stage_weight_bytes(config, LayerRange(0, 4), form)
    assert whole == stored + (table if tied else 0)
    parts = [LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4)]
    assert sum(stage_weight_bytes(config, part, form) for part in parts) == whole
    assert whole == (
        embedding_weight_bytes(config, form)
        + sum(layers_weight_bytes(config, form))
        + head_weight_bytes(config, form)
    )
    read = sum(read_bytes_per_step(config, part, form) for part in parts)
    n_sparse = 0 if config.experts is None else len(config.experts.layers)
    assert read == whole - embedding_weight_bytes(config, form) - n_sparse * unvisited(
        config, dtype
    )
    if config.experts is not None:
        assert 0 < unvisited(config, dtype) < layer_weight_bytes(config, form)


def test_of_unlike_layers_the_largest_is_planned_with(tmp_path: Path) -> None:
    """The first layer has no experts, and the others have more weights than it."""
    folder = make_decoder(tmp_path, "deepseek_v3", with_tokenizer=False, first_k_dense_replace=1)
    config, dtype = Checkpoint.open(folder).config, DType.FLOAT32
    form = WeightForm(dtype=dtype)
    layers = [stage_weight_bytes(config, LayerRange(n, n + 1), form) for n in (1, 2)]
    assert layer_weight_bytes(config, form) == layers[0] == layers[1]
    dense = stage_weight_bytes(config, LayerRange(0, 1), form)
    assert dense - embedding_weight_bytes(config, form) < layers[0]


def test_one_streamed_layer_has_one_buffer(tmp_path: Path) -> None:
    """So it takes as much as two, whose buffers are theirs alone."""
    config = Checkpoint.open(make_decoder(tmp_path, "llama", with_tokenizer=False)).config
    layers, form = LayerRange(0, 4), WeightForm(dtype=DType.FLOAT32)
    one, two, three, four = (stage_weight_bytes(config, layers, form, n) for n in range(1, 5))
    assert one == two > three > four


def unvisited(config: ModelConfig, dtype: DType) -> int:
    """Bytes of a layer's experts that one row does not visit: gate, up and down each; Nemotron's
    have no gate."""
    if config.experts is None:
        return 0
    n_left = config.experts.n_experts - config.experts.top_k
    hidden, inner = config.hidden_size, config.experts.intermediate_size
    biases = 2 * inner + hidden if config.family == "gpt_oss" else 0
    n_matrices = 2 if config.family == "nemotron_h" else 3
    return n_left * (n_matrices * hidden * inner + biases) * dtype.size_bytes


def test_a_block_has_room_for_entries_of_several_positions(tmp_path: Path) -> None:
    """Of GLM-5.3, in layers that choose: 16 columns of every 4 positions."""
    sizes = {"layer_types": ["linear_attention", *["indexed_attention"] * 3], "index_kpool": 4}
    more = {"index_topk": 40, "indexer_types": ["full", "full", "shared", "full"]}
    folder = make_decoder(tmp_path, "glm5_next_text", with_tokenizer=False, **sizes, **more)
    config = Checkpoint.open(folder).config
    latents, keys, entries = 3 * 16, 2 * 2 * 16, 2 * 16 // 4
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        planned = kv_block_bytes(config, LayerRange(0, 4), dtype)
        assert planned == 256 * (latents + keys + entries) * dtype.size_bytes


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma4_text"])
@pytest.mark.parametrize("dtype", list(DType), ids=lambda d: d.value)
@pytest.mark.parametrize("kv_dtype", list(KvDType), ids=lambda d: d.value)
def test_a_block_costs_what_the_cache_says(
    family: str, dtype: DType, kv_dtype: KvDType, tmp_path: Path
) -> None:
    config = Checkpoint.open(make_decoder(tmp_path, family, with_tokenizer=False)).config
    usual = config.usual_heads
    cache = KvCache(
        3,
        usual.n_kv_heads,
        usual.key_size,
        torch_dtype(dtype),
        CPU,
        4,
        value_size=usual.value_size,
        kv_dtype=kv_dtype,
        heads=config.uneven_heads(range(1, 4)),
    )
    cache.ensure(SlotId(0), 1)
    held = sum(tensor.nbytes for layer in range(3) for tensor in cache.layer(SlotId(0), layer))
    planned = kv_block_bytes(config, LayerRange(1, 4), dtype, kv_dtype)
    assert planned == cache.block_bytes == held


@pytest.mark.parametrize("case", [*LARGEST, "falcon_h1", "llama"])
def test_a_plan_counts_keys_values_and_states_layer_by_layer(case: str, tmp_path: Path) -> None:
    """As the stage does that has just these layers; layers need not be alike."""
    folder = make_decoder(tmp_path, case, with_tokenizer=False, **CASES.get(case, {}))
    config, dtype = Checkpoint.open(folder).config, DType.BFLOAT16
    for context in (256, 512):
        shape, n = model_shape(config, dtype, context), config.n_layers
        for layers in (LayerRange(*ends) for ends in combinations(range(n + 1), 2)):
            blocks = context // 256 * kv_block_bytes(config, layers, dtype)
            assert shape.kv_bytes(layers) == blocks + least_state_bytes(config, layers, dtype)
            needed = shape.memory_bytes(layers)
            if layers.start > 0 and layers.end < n:
                assert needed <= shape.most_memory_bytes(len(layers))
                assert shape.most_memory_bytes(len(layers)) <= needed + shape.memory_bytes(layers)


@pytest.mark.parametrize("family", [*LARGEST, "llama", "gemma3_text", "smollm3"])
def test_tables_of_rotary_positions_are_counted(family: str, tmp_path: Path) -> None:
    """Of each kind that layers have; only GLM's latents are not rotated at all."""
    make_decoder(tmp_path, family, with_tokenizer=False, **CASES.get(family, {}))
    choice = probed(CPU, DType.FLOAT32, None)
    n_layers = Checkpoint.open(tmp_path).config.n_layers
    [stage] = StageChain.load(tmp_path, [LayerRange(0, n_layers)], choice).stages
    assert isinstance(stage.family, DecoderStage)
    held = sum(table.cos.nbytes + table.sin.nbytes for table in stage.family._tables)
    assert rotary_bytes(stage.config, DType.FLOAT32, stage.context) == held


@pytest.mark.parametrize("case", LARGEST)
def test_what_chooses_positions_bounds_what_a_chunk_takes(case: str, tmp_path: Path) -> None:
    """No scores of all positions for each head, which would be as large as a model."""
    more = {"max_position_embeddings": 1 << 20}
    folder = make_decoder(tmp_path, case, with_tokenizer=False, **CASES.get(case, {}) | more)
    config, one = Checkpoint.open(folder).config, LayerRange(1, 2)
    most = activation_peak_bytes(config, one, 256, DType.BFLOAT16, 1 << 20)
    assert most < (1 << 20) * 4096


@pytest.mark.skipif(sys.platform != "linux" or not HAS_VECTORS, reason="reads /proc")
@pytest.mark.parametrize(
    "model",
    cases([], ["qwen3.8-flash-next", "deepseek-v4-flash", "glm-5.3-flash", "hy4-preview"]),
)
def test_layers_times_their_number_take_what_a_plan_says(model: str, tmp_path: Path) -> None:
    """Narrow layers of every kind; docs/benchmarks.md has those of published sizes."""
    script = str(ROOT / "scripts/benchmarks/bench_memory.py")
    command = [sys.executable, script, model, "--small", "--json", "--folder", str(tmp_path)]
    command += ["--contexts", "16384"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=END_S)
    [row] = json.loads(done.stdout)
    caches = row["keys, values and states of 16384"]
    assert 0.97 < caches["planned / taken"] < 1.03
    # beside some 60 MB of weights in each layer, a last large page shows
    assert 0.95 < row["weights"]["planned / taken"] < 1.03


MEASURE = """
import ctypes, json, sys, torch
from pathlib import Path
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.stage.estimate.stored_dtype import weight_form
from shardnet.model.kernels.linear import probe
from shardnet.model.config.panel_form import Quantization
from shardnet.stage.load import load_stage
from shardnet.types import DType, LayerRange

def private_bytes():
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed counts, until loading gives it back
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

def load(layers, progress):
    return load_stage(checkpoint, layers, choice=choice, device=cpu, room_blocks=8,
                      progress=progress)

torch.set_num_threads(1)
cpu = torch.device("cpu")
checkpoint = Checkpoint.open(sys.argv[1])
quant = Quantization.named(sys.argv[2])
dtype = "auto" if sys.argv[3] == "auto" else DType(sys.argv[3])
choice = probe(cpu, dtype, checkpoint.config.checkpoint_dtype, quant)
load(LayerRange(7, 8), lambda done, total: None)  # what the libraries take once, some 30 MB
idle = private_bytes()
read = sum(checkpoint.bytes_read.values())
during = []
stage = load(LayerRange(0, 8), lambda done, total: during.append(private_bytes() - idle))
loaded = private_bytes()
print(json.dumps({
    "dtype": choice.dtype.value,
    "stored": weight_form(checkpoint, choice).linear_dtype.value,
    "counted": stage.weight_bytes,
    "loaded": loaded - idle,
    "most": max(during),
    "read": sum(checkpoint.bytes_read.values()) - read,
}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that weighs more than what the libraries take now and then."""
    return make_large(tmp_path_factory.mktemp("large"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("quant", "asked"), cases([("none", "auto")], [("int4", "auto"), ("none", "float32")])
)
def test_private_memory_is_that_of_the_range(quant: str, asked: str, large: Path) -> None:
    """At most 1.15 times the bytes of the range after loading, and one layer more on the way.

    In float32 the compiled library keeps the weights of products in bfloat16.
    """
    figures = figures_of(MEASURE, str(large), quant, asked)
    config = Checkpoint.open(large).config
    dtype = DType(figures["dtype"])
    kind = Quantization.named(quant)
    stored = DType(figures["stored"])
    wide = WeightForm(dtype=dtype)
    form = WeightForm(dtype=dtype, quant=kind, linear_dtype=stored)
    predicted = stage_weight_bytes(config, LayerRange(0, 8), form)
    assert figures["counted"] == predicted
    if HAS_VECTORS:
        assert stored is DType.BFLOAT16
    if dtype is DType.BFLOAT16:
        assert figures["read"] == stage_weight_bytes(config, LayerRange(0, 8), wide)
    assert 0.9 * predicted <= figures["loaded"] <= 1.15 * predicted
    assert figures["most"] <= 1.15 * predicted + layer_weight_bytes(config, wide)


def test_the_room_for_keys_and_values_is_beside_the_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_pictured(tmp_path)
    checkpoint, memory_bytes = Checkpoint.open(folder), 1 << 25
    order = StageOrder(
        form=form_of(folder, context=256),
        folder=folder,
        layers=LayerRange(0, checkpoint.config.n_layers),
        is_tail=True,
    )
    tower = tower_of(checkpoint)
    assert tower is not None

    def room_blocks(memory_bytes: int) -> int:
        return load(order, memory_bytes, lambda *_: None).room_blocks

    found = room_blocks(memory_bytes)
    monkeypatch.setattr(loading, "tower_of", lambda *_: None)
    assert found < room_blocks(memory_bytes)
    assert found == room_blocks(memory_bytes - tower.weight_bytes(order.form.dtype))
