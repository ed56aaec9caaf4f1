"""How often a step of each kind of model waits for the other shards, and that its bits stay."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.needs import needs_library
from support.rings.shard_threads import CountingGroup, on_each_shard
from support.rings.stage_chain import CPU, Rows, StageChain, probed, random_prompt
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import Quantization
from shardnet.model.fused.decoder import DecoderStage
from shardnet.model.kernels.linear import Kernel, KernelChoice
from shardnet.model.shards import cut
from shardnet.stage.estimate.gather_estimate import (
    embedding_gathers,
    head_gathers,
    layer_gathers,
)
from shardnet.types import Arith, DType, LayerRange

pytestmark = needs_library

STEPS = (70, 1, 5)
"""Rows of each step."""
THREE_LAYERS = {"num_hidden_layers": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a checkpoint is made with, and the gathers of a step in two shards.

    `n_small` more come where small linears are cut too, and `n_visits` more in a prompt whose
    visits of experts do not fit one batch.
    """

    family: str
    n_gathers: int
    n_small: int
    n_visits: int = 0
    is_joined: bool = True
    """Whether the library computes all its layers in one call."""
    config: dict[str, Any] = field(default_factory=lambda: THREE_LAYERS)


MODELS = {
    # small linears: embedding and head
    "dense": Model(family="llama", n_gathers=3 * 4, n_small=2),
    "mixture": Model(family="qwen3_moe", n_gathers=3 * 4, n_small=2),
    # a shared expert as wide as the others
    "shared": Model(family="glm4_moe", n_gathers=3 * 4, n_small=2),
    # one that is wider, and four experts for each of 70 rows: more than 256 visits
    "wider": Model(
        family="qwen2_moe",
        n_gathers=3 * 5,
        n_small=2,
        n_visits=3,
        config=THREE_LAYERS | {"num_experts_per_tok": 4, "shared_expert_intermediate_size": 48},
    ),
    # a router and an MLP beside it that torch computes; heads that no shard has by itself
    "parallel": Model(
        family="gemma4_text",
        n_gathers=3 * 4,
        n_small=2 + 3 * 2,
        is_joined=False,
        config=CASES["gemma4_text-moe"],
    ),
    # three DeltaNets, whose projections are small, behind each a mixture with a wider expert
    "hybrid": Model(
        family="qwen3_next", n_gathers=4 * 3 + 2, n_small=2 + 3 * 2, config={"num_hidden_layers": 4}
    ),
    # the first layer is dense; small are the down-projections of queries, keys and values
    "latents": Model(
        family="deepseek_v3",
        n_gathers=3 * 4,
        n_small=2 + 3 * 2,
        is_joined=False,
        config=THREE_LAYERS | {"first_k_dense_replace": 1},
    ),
}
FORMS = [(DType.FLOAT32, None), (DType.BFLOAT16, None), (DType.FLOAT32, Quantization.INT4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What the steps of a model have given."""

    logits: torch.Tensor
    n_gathers: list[int]
    is_joined: bool


def by_library(dtype: DType, kind: Quantization | None) -> KernelChoice:
    """Have the library compute, in plain C where it must."""
    arith = Arith.FAST if dtype is DType.BFLOAT16 else Arith.PORTABLE
    choice = probed(CPU, dtype, dtype, kind, arith)
    if choice.kernel is not Kernel.NATIVE:
        pytest.skip("torch computes in bfloat16 here")
    return choice


def run(folder: Path, choice: KernelChoice, group: CountingGroup | None = None) -> Made:
    """Run a prompt, one row and five of them."""
    layers = [LayerRange(0, Checkpoint.open(folder).config.n_layers)]
    stages = StageChain.load(folder, layers, choice, group=group)
    logits, counts, position = [], [], 0
    for n_rows in STEPS:
        before = 0 if group is None else group.n_gathers
        ids = random_prompt(n_rows, 290, seed=n_rows)
        logits.append(stages.step(Rows(slot=0, position=position, ids=ids, n_sampled=n_rows)))
        counts.append(0 if group is None else group.n_gathers - before)
        position += n_rows
    [stage] = stages.stages
    assert isinstance(stage.family, DecoderStage)
    is_joined = stage.family._joined is not None
    return Made(logits=torch.cat(logits), n_gathers=counts, is_joined=is_joined)


def estimated(folder: Path) -> int:
    """What a plan takes for the gathers of one row."""
    config = Checkpoint.open(folder).config
    layers = [layer_gathers(config, layer) for layer in range(config.n_layers)]
    return len([*chain(*layers), *embedding_gathers(config), *head_gathers(config)])


def check(folder: Path, model: Model, choice: KernelChoice, n_shards: int, n_gathers: int) -> None:
    """Compare every shard with the whole stage, and count its gathers."""
    whole = run(folder, choice)
    assert whole.is_joined == model.is_joined
    assert estimated(folder) == n_gathers
    for made in on_each_shard(n_shards, partial(run, folder, choice), CountingGroup):
        assert torch.equal(made.logits, whole.logits)
        assert made.n_gathers == [n_gathers + model.n_visits, n_gathers, n_gathers]
        assert made.is_joined == model.is_joined


@pytest.mark.parametrize("name", MODELS)
def test_small_linears_are_whole_in_every_shard(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    folder = make_decoder(tmp_path, model.family, **model.config)
    check(folder, model, by_library(DType.FLOAT32, None), 2, model.n_gathers)


EACH = [(name, *form, n) for name in MODELS for form in FORMS for n in (2, 3)]
HALF = [
    (name, *form, 2 + (row + column) % 2)
    for row, name in enumerate(MODELS)
    for column, form in enumerate(FORMS)
]
"""Every pair of a model, a form and a number of shards."""


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "n_shards"), cases(HALF, [one for one in EACH if one not in HALF])
)
def test_no_layer_waits_more_often_than_its_sublayers_do(
    name: str,
    dtype: DType,
    kind: Quantization | None,
    n_shards: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads of three shards do not divide: attention is whole, its linears are cut all the same."""
    monkeypatch.setattr(cut, "WHOLE_WEIGHTS", 0)
    model = MODELS[name]
    own = torch.bfloat16 if dtype is DType.BFLOAT16 else torch.float32
    folder = make_decoder(tmp_path, model.family, dtype=own, **model.config)
    choice = by_library(dtype, kind)
    check(folder, model, choice, n_shards, model.n_gathers + model.n_small)


BY_THEMSELVES = {"nemotron_h", "cohere2_moe", "cohere2_moe-centred", "kolibri1"}
"""Mixtures that torch computes: a shared expert gathers once more than a plan takes it to."""


USUAL = (
    *("mistral", "olmo2", "gemma4_text-moe", "lfm2", "kimi_linear", "nemotron_h"),
    *("deepseek_v4", "hy_v4"),
)
OTHERS = [name for name in CASES if name not in USUAL]


@pytest.mark.parametrize("name", cases(USUAL, OTHERS))
def test_a_plan_knows_how_often_each_family_gathers(name: str, tmp_path: Path) -> None:
    folder = make_decoder(tmp_path, name.split("-")[0], **CASES[name])
    config = Checkpoint.open(folder).config
    choice = by_library(DType.FLOAT32, None)

    def gathers(group: CountingGroup) -> int:
        stages = StageChain.load(folder, [LayerRange(0, config.n_layers)], choice, group=group)
        ids = random_prompt(1, config.vocab_size, seed=1)
        stages.step(Rows(slot=0, position=0, ids=ids, n_sampled=1))
        return group.n_gathers

    n_more = len(config.sparse_layers) if name in BY_THEMSELVES else 0
    if config.late_limits:  # torch computes experts that are clamped behind their activation
        n_more += sum(any(config.late_limits[layer]) for layer in config.sparse_layers)
    assert on_each_shard(2, gathers, CountingGroup) == [estimated(folder) + n_more] * 2
