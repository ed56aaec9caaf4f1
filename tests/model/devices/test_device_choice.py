"""Which positions the kernel text chooses, and what another stage has chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.devices import DEVICE, HOST, device_of

from shardnet.model.config.model_config import Indexer
from shardnet.model.devices import device_choice
from shardnet.model.devices.device_kv import PAGE
from shardnet.model.devices.mixer_device import StepBuffers

N_POSITIONS, SIZE = 1300, 32
NUMBERS = np.random.default_rng(5)


def whole_numbers(*shape: int) -> np.ndarray[Any, Any]:
    """Small ones: as factors are powers of two sums are exact, and scores are often equal."""
    return NUMBERS.integers(-2, 3, shape).astype(np.float32)


@pytest.mark.parametrize("kind", [HOST, DEVICE, "(THREADS - 1 - (i))"])
@pytest.mark.parametrize(
    ("n_heads", "n_chosen", "most"), [(2, 100, 1 << 26), (32, 700, 20_000), (128, 513, 1)]
)
def test_the_highest_scores_are_chosen_of_equal_ones_the_first(
    kind: str, n_heads: int, n_chosen: int, most: int, monkeypatch: Any
) -> None:
    """By rows that see little, more than they may choose, and all; some at a time."""
    monkeypatch.setattr(device_choice, "_MOST_SCORE_BYTES", most)
    on: Any = device_of(kind)
    ends = np.array([0, n_chosen - 1, n_chosen, 1000, N_POSITIONS - 1])
    queries, keys = whole_numbers(len(ends), n_heads, SIZE), whole_numbers(N_POSITIONS, SIZE)
    weights = whole_numbers(len(ends), n_heads)
    pages = np.array([7, 3, 0, 5, 2, 1, 4], np.uint32)  # the first is another slot's
    stored = np.zeros((8 * PAGE, SIZE), np.float32)
    for position in range(N_POSITIONS):
        stored[pages[1 + position // PAGE] * PAGE + position % PAGE] = keys[position]
    places = np.ones((len(ends), 3), np.uint32)
    places[:, 0], places[:, 2] = ends, range(len(ends))
    sizes = {"n_heads": n_heads, "head_size": SIZE, "n_chosen": n_chosen}
    config = Indexer(**sizes, interleaved=False, layers=())
    given = [on.put(each) for each in (queries, weights, places, pages, stored)]
    at = given[2], given[3]
    step = StepBuffers(
        n_rows=len(ends), n_blocks=16, at=at, runs=at[0], tables=[], heads=None, chooses=True
    )
    kernels = on.kernels.of({"SIZE": SIZE}, device_choice.CHOICE_PARTS, device_choice.CHOICE_NAMES)
    device_choice.choose(on, kernels, config, given, step)
    chosen, looked = np.empty((len(ends), n_chosen), np.int32), np.empty_like(places)
    for name, array in (("chosen", chosen), ("looked", looked)):
        on.driver.download(on.scratch.buffers[name], array)
    above = np.maximum(np.einsum("rhd,ed->rhe", queries, keys), 0)
    scores = torch.from_numpy(np.einsum("rhe,rh->re", above, weights))
    for row, end in enumerate(ends):
        best = scores[row, : end + 1].sort(descending=True, stable=True).indices[:n_chosen]
        wanted = best.sort().values.tolist()
        assert chosen[row].tolist() == wanted + [-1] * (n_chosen - len(wanted))
        assert looked[row].tolist() == [len(wanted) - 1, 1, row]
