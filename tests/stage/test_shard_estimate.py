"""What a shard of a stage really holds, against what the estimate says that it has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.rings.shard_threads import CountingGroup, on_each_shard
from support.rings.stage_chain import CPU, StageChain, probed
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.cluster.placement.figures import HeldModel
from shardnet.cluster.planning.model_shape import model_shape
from shardnet.model.shards import cut
from shardnet.runtime.loading.loading import cut_of
from shardnet.stage.estimate.gather_estimate import stage_division
from shardnet.stage.estimate.memory_estimate import WeightForm, stage_weight_bytes
from shardnet.stage.load import ShardWeights
from shardnet.types import Arith, DType, LayerRange

HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 512}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128}
MODELS: dict[str, dict[str, Any]] = {
    "llama": HEADS | {"num_key_value_heads": 2},
    "lfm2": HEADS | {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "qwen3_5_text": HEADS,
    "qwen3_next": HEADS | EXPERTS | {"shared_expert_intermediate_size": 128},
    "qwen3_moe": HEADS | EXPERTS,
    "deepseek_v3": HEADS | EXPERTS | {"num_key_value_heads": 8},
}


def size_of(made: Any) -> int:
    """Return the bytes of what a source gave; of linears without biases."""
    own = getattr(made, "own", getattr(made, "_own", made))  # what is gathered around it aside
    if isinstance(own, torch.Tensor):
        return own.nbytes
    return 4 * math.prod(own.shape) if hasattr(own, "shape") else own.table.nbytes


def held_bytes(
    folder: Path, layers: LayerRange, n_shards: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Load shards; return the bytes of what each was given, norms and biases aside."""
    held: Counter[int] = Counter()

    def counting(plain: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: ShardWeights, *names: str, **options: Any) -> Any:
            made = plain(self, *names, **options)
            held[self._cut.index] += size_of(made)  # of one thread each
            return made

        return counted

    choice = probed(CPU, DType.FLOAT32, DType.FLOAT32, None, Arith.PORTABLE)
    with monkeypatch.context() as patched:
        for method in ("linear", "table", "matrix", "parameter"):
            patched.setattr(ShardWeights, method, counting(getattr(ShardWeights, method)))

        def load(group: CountingGroup) -> None:
            StageChain.load(folder, [layers], choice, group=group)

        on_each_shard(n_shards, load, CountingGroup)
    return [held[index] for index in range(n_shards)]


def check(folder: Path, n_shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what is told of the whole model, and of a stage without the embedding."""
    config, equal = Checkpoint.open(folder).config, (1,) * n_shards
    form, shape = WeightForm(dtype=DType.FLOAT32), model_shape(config, DType.FLOAT32, 256)
    model = HeldModel(shape=shape, memory_bytes=0)
    share = max(share for share, _ in model.parts(equal))
    joined = model.shared_by(equal, [0] * n_shards).shape
    for layers in (shape.whole, LayerRange(1, config.n_layers)):
        division = stage_division(config, layers, form)
        whole = stage_weight_bytes(config, layers, form)
        for index, held in enumerate(held_bytes(folder, layers, n_shards, monkeypatch)):
            told = whole * cut_of(config, index, n_shards).share(division)
            planned = share * joined.weight_bytes(layers)
            assert held <= 1.01 * told <= 1.03 * held
            assert held <= 1.01 * planned <= 1.03 * held


@pytest.mark.parametrize("whole_weights", [10_000, cut.WHOLE_WEIGHTS])
@pytest.mark.parametrize("n_shards", [2, 4])
@pytest.mark.parametrize("family", MODELS)
def test_a_shard_holds_what_is_told(
    family: str,
    n_shards: int,
    whole_weights: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some small linears are whole in every shard, or all."""
    monkeypatch.setattr(cut, "WHOLE_WEIGHTS", whole_weights)
    folder = make_decoder(tmp_path, family, **WIDE, **MODELS[family])
    check(folder, n_shards, monkeypatch)


USUAL = ("gpt_neox", "lfm2", "olmo_hybrid", "kimi_linear", "nemotron_h")
OTHERS = [name for name in CASES if name not in USUAL]


@pytest.mark.parametrize("name", cases(USUAL, OTHERS))
def test_no_familys_shards_hold_more_than_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards together: panels of so few columns are cut unevenly."""
    monkeypatch.setattr(cut, "WHOLE_WEIGHTS", 6000)
    folder = make_decoder(tmp_path, name.split("-")[0], **CASES[name])
    config, form = Checkpoint.open(folder).config, WeightForm(dtype=DType.FLOAT32)
    layers = LayerRange(0, config.n_layers)
    division = stage_division(config, layers, form)
    shares = sum(cut_of(config, index, 2).share(division) for index in range(2))
    told = stage_weight_bytes(config, layers, form) * shares
    held = sum(held_bytes(folder, layers, 2, monkeypatch))
    assert held <= 1.01 * told <= 1.08 * held
