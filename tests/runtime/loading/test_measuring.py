"""Measuring a model without its checkpoint, within the memory there is."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES as FAMILIES
from support.needs import needs_vectors
from support.rings.stage_chain import probed

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CapacityError, CheckpointError, UnsupportedModelError
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.kernels.linear import Linear, make_linear
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.layers.attention import ForwardStep, plan_step
from shardnet.runtime.loading import measuring
from shardnet.runtime.loading.measuring import (
    Windows,
    in_a_row,
    measure_disk,
    measure_stage,
    read_config,
    rounded,
)
from shardnet.runtime.processors.processor_use import ProcessorUse
from shardnet.stage import synthetic_model
from shardnet.stage.estimate.memory_estimate import WeightForm, layer_weight_bytes
from shardnet.stage.synthetic_model import (
    CONTEXT,
    MAX_HEAD_BYTES,
    UNCACHED_BYTES,
    StepTimes,
    SyntheticModel,
    synthetic_bytes,
    synthetic_config,
)
from shardnet.types import DType, KvDType

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "attention_bias": True,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 300,
}
QWEN3_MOE: dict[str, Any] = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [0],
    "attention_bias": False,
}
GIB = 2**30


def config(raw: dict[str, Any] = LLAMA, **changes: Any) -> ModelConfig:
    return read_config(json.dumps(raw | changes), "config.json")


def no_tick() -> None:
    """Nobody waits."""


@pytest.mark.parametrize("kv_dtype", KvDType, ids=lambda d: d.value)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda d: d.value)
@pytest.mark.parametrize(
    "raw", [LLAMA, LLAMA | {"tie_word_embeddings": True}, GPT2], ids=["own-head", "tied", "gpt2"]
)
def test_every_figure_is_a_time_of_two_digits(
    raw: dict[str, Any], dtype: DType, kv_dtype: KvDType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "WINDOW_S", 0.005)  # how long it takes is not looked at here
    monkeypatch.setattr(measuring, "READ_BYTES", 2**20)
    ticks = []
    figures = measure_stage(
        config(raw),
        dtype,
        None,
        kv_dtype,
        device="cpu",
        threads=1,
        memory_bytes=GIB,
        tick=lambda: ticks.append(1),
    )
    for time_s in (figures.layer_s, figures.layer_256_s, figures.embed_s, figures.head_s):
        assert time_s == float(f"{time_s:.2g}") > 0
    rate = figures.read_bytes_per_s
    assert rate is not None
    assert rate == rounded(rate) > 0
    choice = probed(torch.device("cpu"), dtype, None)
    assert figures.kernel == choice.name
    assert len(ticks) > 10


UNEVEN = {
    "num_hidden_layers": 2,
    "head_dim": 8,
    "global_head_dim": 12,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 0,
}


@needs_vectors
def test_products_are_measured_with_weights_as_narrow_as_loaded_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a bfloat16 checkpoint in float32."""
    made: list[Linear] = []

    def make(*arguments: Any) -> Linear:
        made.append(make_linear(*arguments))
        return made[-1]

    monkeypatch.setattr(synthetic_model, "make_linear", make)
    model = config(QWEN3_MOE, torch_dtype="bfloat16")
    choice = probed(torch.device("cpu"), DType.FLOAT32, DType.BFLOAT16)
    SyntheticModel(model, choice, torch.device("cpu"), no_tick)
    assert made
    assert all(isinstance(product, PanelLinear) for product in made)


def test_tokens_that_are_measured_with_have_classes_without_a_tokenizer(tmp_path: Path) -> None:
    """Where a slice of the vocabulary is taken, too, behind which a text's beginning may be."""
    path = make_decoder(tmp_path, "deepseek_v41", num_hidden_layers=4, engram_pad_token_id=290)
    sample = replace(Checkpoint.open(path).config, vocab_size=100, max_positions=CONTEXT)
    choice = probed(torch.device("cpu"), DType.FLOAT32, None)
    model = SyntheticModel(sample, choice, torch.device("cpu"), no_tick)
    assert model.step(3).layers_s > 0


def windows_of(durations_s: Iterable[float]) -> list[float]:
    """Measure steps that take so long, on a clock of their own."""
    now_s = 0.0
    rest = iter(durations_s)

    def step() -> StepTimes:
        nonlocal now_s
        duration_s = next(rest)
        now_s += duration_s
        return StepTimes(plan_s=0.0, embed_s=0.0, layers_s=duration_s, head_s=0.0, sample_s=0.0)

    taken = Windows(step, at_least=3, clock=lambda: now_s)
    in_a_row(taken.step)
    return [times.layers_s for times in taken.means]


@pytest.mark.parametrize("period_s", [0.01, 0.05])
@pytest.mark.parametrize("step_s", [0.0001, 0.002, 0.009])
def test_a_limited_share_of_the_processor_counts(step_s: float, period_s: float) -> None:
    """A fifth of each period computes, then the process stands: most steps do not notice."""
    share, worked_s = 0.2, 0.0

    def durations() -> Iterator[float]:
        nonlocal worked_s
        while True:
            before = worked_s // (share * period_s)
            worked_s += step_s
            n_pauses = worked_s // (share * period_s) - before
            yield step_s + n_pauses * (1 - share) * period_s

    means = windows_of(durations())
    assert statistics.median(means) == pytest.approx(step_s / share, rel=0.35)


def test_what_comes_once_does_not_count() -> None:
    once = chain(repeat(0.001, 120), [0.3], repeat(0.001))
    assert statistics.median(windows_of(once)) == pytest.approx(0.001)


def test_slow_steps_are_measured_three_times() -> None:
    assert windows_of(repeat(2.0)) == [2.0] * 3


def test_the_threads_of_a_loaded_stage_stay_as_they_were() -> None:
    before = torch.get_num_threads()
    seen = []

    def tick() -> None:
        seen.append(torch.get_num_threads())
        raise CapacityError("enough")

    with pytest.raises(CapacityError, match="enough"):
        measure_stage(config(), DType.FLOAT32, device="cpu", threads=2, memory_bytes=GIB, tick=tick)
    assert seen == [2]
    assert torch.get_num_threads() == before


def experts_of_steps(
    sample: ModelConfig, n_steps: int, monkeypatch: pytest.MonkeyPatch
) -> list[dict[int, torch.Tensor]]:
    """The experts of each row, by layers, in steps of one row."""
    chosen: list[dict[int, torch.Tensor]] = []

    def plan(*arguments: Any) -> ForwardStep:
        chosen.append({})
        return plan_step(*arguments, experts=chosen[-1])

    monkeypatch.setattr(synthetic_model, "plan_step", plan)
    cpu = torch.device("cpu")
    model = SyntheticModel(sample, probed(cpu, DType.FLOAT32, None), cpu, no_tick)
    for _ in range(n_steps):
        model.step(1)
    return chosen


def test_steps_of_a_sample_visit_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always the same few would stay in the cache, and the layer would look fast."""
    sample = synthetic_config(config(QWEN3_MOE), WeightForm(dtype=DType.FLOAT32), GIB)
    assert sample is not None
    chosen = experts_of_steps(sample, 80, monkeypatch)
    visited = {
        layer: {expert for step in chosen for expert in step[layer].flatten().tolist()}
        for layer in chosen[0]
    }
    assert {layer: len(experts) for layer, experts in visited.items()} == {1: 16, 2: 16}


def test_a_token_of_a_sample_has_several_experts_where_a_table_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library does not take a table that names an expert twice, as none of DeepSeek-V4 does."""
    make_decoder(tmp_path, "deepseek_v4", with_tokenizer=False, **FAMILIES["deepseek_v4"])
    sample = read_config((tmp_path / "config.json").read_text(), "config.json")
    assert sample.experts is not None
    for step in experts_of_steps(sample, 3, monkeypatch):
        for layer in sample.experts.hashed_layers:
            assert all(len(set(row)) == sample.experts.top_k for row in step[layer].tolist())


def test_a_sample_has_the_heads_of_each_layer() -> None:
    """Those without a window have others in Gemma 4."""
    model = config(model_type="gemma4_text", architectures=["Gemma4ForCausalLM"], **UNEVEN)
    assert [model.heads(layer).key_size for layer in range(2)] == [8, 12]
    cpu = torch.device("cpu")
    SyntheticModel(model, probed(cpu, DType.FLOAT32, None), cpu, no_tick).step(1)


def test_no_memory_is_refused_before_it_is_taken() -> None:
    with pytest.raises(CapacityError, match="only 1 MiB are free here"):
        measure_stage(
            config(hidden_size=8192, intermediate_size=28672),
            DType.BFLOAT16,
            device="cpu",
            threads=1,
            memory_bytes=2**20,
            tick=no_tick,
        )


@given(
    hidden=st.sampled_from([64, 1024, 8192]),
    n_layers=st.integers(1, 200),
    vocab_size=st.integers(1, 300_000),
    memory_bytes=st.integers(0, 4 * GIB),
    dtype=st.sampled_from(list(DType)),
)
def test_a_sample_fits_its_memory_and_stands_for_the_model(
    hidden: int, n_layers: int, vocab_size: int, memory_bytes: int, dtype: DType
) -> None:
    model = config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=n_layers,
        vocab_size=vocab_size,
    )
    form = WeightForm(dtype=dtype)
    sample = synthetic_config(model, form, memory_bytes)
    roomy = synthetic_config(model, form, 1 << 60)
    assert roomy is not None
    is_uncached = roomy.n_layers * layer_weight_bytes(model, form) >= UNCACHED_BYTES
    assert is_uncached or roomy.n_layers == n_layers
    head_bytes = roomy.vocab_size * hidden * dtype.size_bytes
    assert head_bytes <= MAX_HEAD_BYTES
    assert roomy.vocab_size == vocab_size or head_bytes > MAX_HEAD_BYTES // 2
    if sample is None:
        assert memory_bytes < synthetic_bytes(roomy, form)
    else:
        assert synthetic_bytes(sample, form) <= memory_bytes
        assert 1 <= sample.n_layers <= roomy.n_layers
        assert 1 <= sample.vocab_size <= roomy.vocab_size


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("{", CheckpointError, "not readable as JSON"),
        ("[" * 100_000, CheckpointError, "not readable as JSON"),
        ("[]", CheckpointError, "expected a JSON object"),
        ('{"model_type": "alexnet"}', UnsupportedModelError, "alexnet"),
    ],
)
def test_a_config_that_is_none_is_refused(text: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        read_config(text, "what anna sent")


def test_the_disk_is_measured_where_there_are_tensors(tmp_path: Path) -> None:
    assert measure_disk(tmp_path) is None
    assert measure_disk(tmp_path / "missing") is None
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert measure_disk(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(bytes(3 * 2**20 + 5))
    rate = measure_disk(tmp_path)
    assert rate is not None
    assert rate == rounded(rate) > 0


def test_reads_of_memory_are_measured_where_there_is_more_than_caches_hold() -> None:
    assert measuring.measure_reads(measuring.READ_BYTES // 4 - 1) is None
    assert (measuring.measure_reads(measuring.READ_BYTES // 4) or 0) > 1e6


@pytest.mark.parametrize("is_disturbed", [False, True])
def test_beside_other_programs_the_best_window_counts_and_the_figures_are_not_steady(
    is_disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    means = [
        StepTimes(plan_s=0, embed_s=s, layers_s=s, head_s=s, sample_s=0)
        for s in (0.012, 0.012, 0.01)
    ]

    def step(taken: Windows) -> bool:
        taken.means += means
        return False

    monkeypatch.setattr(Windows, "step", step)
    monkeypatch.setattr(ProcessorUse, "disturbed", lambda before, later: is_disturbed)
    monkeypatch.setattr(measuring, "_chunk_s", lambda model, tick: 1.0)
    figures = measure_stage(
        config(), DType.FLOAT32, device="cpu", threads=1, memory_bytes=GIB, tick=no_tick
    )
    assert figures.is_steady is not is_disturbed
    assert figures.embed_s == (0.01 if is_disturbed else 0.012)
