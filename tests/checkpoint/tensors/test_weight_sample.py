"""The sample of the weights: every tensor of a usual model, a bounded choice of a huge one."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_llama

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.tensors.manifest import (
    MAX_SAMPLES,
    SAMPLE_BYTES,
    merged,
    sample_range,
    sampled_tensors,
)
from shardnet.checkpoint.tensors.stored_tensor import StoredTensor


def stored(name: str, offset: int = 0, size_bytes: int = 4, file: str = "f") -> StoredTensor:
    return StoredTensor(
        name=name, dtype="U8", shape=(size_bytes,), size_bytes=size_bytes, file=file, offset=offset
    )


@pytest.mark.parametrize(
    ("size_bytes", "want"),
    [(0, (7, 0)), (10, (7, 10)), (1024, (7, 1024)), (1025, (7, 1024)), (5000, (7 + 1988, 1024))],
)
def test_a_sample_is_the_middle(size_bytes: int, want: tuple[int, int]) -> None:
    assert sample_range(stored("x", 7, size_bytes)) == want


def test_a_huge_model_is_sampled_within_a_bound_and_rare_tensors_stay() -> None:
    """As a mixture of experts with 90,000 tensors: of one layer's router there is but one."""
    experts = [f"layers.{n}.experts.{e}.{w}" for n in range(61) for e in range(256) for w in "ud"]
    others = [f"layers.{n}.{w}" for n in range(61) for w in ("router", "norm", "q_proj")]
    everything = [stored(name, offset) for offset, name in enumerate((*experts, *others, "embed"))]
    chosen = [info.name for info in sampled_tensors(everything)]
    assert set(others) <= set(chosen)
    assert "embed" in chosen
    assert MAX_SAMPLES - 1 <= len(chosen) <= MAX_SAMPLES
    layers = Counter(int(re.findall(r"\d+", name)[0]) for name in chosen if "experts" in name)
    assert min(layers.values()) > 50


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 20))
def test_any_names_fit_the_limit_in_order_of_the_file(numbers: list[int], limit: int) -> None:
    names = {f"{'abc'[number % 3]}.{number}": number for number in numbers}
    tensors = [stored(name, 100 - number) for name, number in names.items()]
    chosen = sampled_tensors(tensors, limit)
    assert len(chosen) == min(limit, len(tensors)) or len(tensors) > limit > len(chosen)
    assert len(chosen) <= limit
    assert [info.offset for info in chosen] == sorted(info.offset for info in chosen)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9))))
def test_merged_ranges_have_the_same_bytes_apart(ranges: list[tuple[int, int]]) -> None:
    made = merged(ranges)
    covered = {at for offset, n_bytes in ranges for at in range(offset, offset + n_bytes)}
    assert {at for offset, n in made for at in range(offset, offset + n)} == covered
    assert all(first + n < second for (first, n), (second, _) in pairwise(made))


@pytest.mark.parametrize("position", ["first", "last", "smallest"])
def test_one_changed_tensor_makes_another_model(tmp_path: Path, position: str) -> None:
    base = Checkpoint.open(make_llama(tmp_path / "base"))
    other = make_llama(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    by_place = sorted(weights, key=lambda name: base.stored[name].offset)
    smallest = min(weights, key=lambda name: weights[name].numel())
    name = {"first": by_place[0], "last": by_place[-1], "smallest": smallest}[position]
    torch.manual_seed(3)
    weights[name] += torch.rand_like(weights[name])
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    changed = Checkpoint.open(other)
    assert changed.stored.keys() == base.stored.keys()
    assert changed.model_id != base.model_id


def test_few_bytes_of_tensors_are_read(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_llama(tmp_path / "model", max_shard_size="60KB"))
    n_bytes = sum(n for ranges in checkpoint.samples.values() for _, n in ranges)
    assert 0 < n_bytes <= SAMPLE_BYTES * len(checkpoint.stored)
    assert sum(map(len, checkpoint.samples.values())) == len(checkpoint.stored)
