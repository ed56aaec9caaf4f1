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
    ("n_heads", "n_pooled", "n_chosen", "most"),
    [(2, 1, 100, 1 << 26), (32, 1, 700, 20_000), (128, 4, 512, 1), (2, 16, 32, 20_000)],
)
def test_the_highest_scores_are_chosen_of_equal_ones_the_first(
    kind: str, n_heads: int, n_pooled: int, n_chosen: int, most: int, monkeypatch: Any
) -> None:
    """By rows that see little, more than they may choose, and all; some at a time."""
    monkeypatch.setattr(device_choice, "_MOST_SCORE_BYTES", most)
    on: Any = device_of(kind)
    ends = np.array([0, n_chosen - 1, n_chosen, n_chosen + n_pooled, 1000, N_POSITIONS - 1])
    n_entries, of_page = N_POSITIONS // n_pooled, PAGE // n_pooled
    queries, keys = whole_numbers(len(ends), n_heads, SIZE), whole_numbers(n_entries, SIZE)
    weights = whole_numbers(len(ends), n_heads)
    pages = np.array([7, 3, 0, 5, 2, 1, 4], np.uint32)  # the first is another slot's
    stored = np.zeros((8 * of_page, SIZE), np.float32)
    for entry in range(n_entries):
        stored[pages[1 + entry // of_page] * of_page + entry % of_page] = keys[entry]
    places = np.ones((len(ends), 3), np.uint32)
    places[:, 0], places[:, 2] = ends, range(len(ends))
    sizes = {"n_heads": n_heads, "head_size": SIZE, "n_chosen": n_chosen, "n_pooled": n_pooled}
    config = Indexer(**sizes, interleaved=False, layers=())
    given = [on.put(each) for each in (queries, weights, places, pages, stored)]
    at = given[2], given[3]
    step = StepBuffers(
        n_rows=len(ends), n_blocks=16, at=at, runs=at[0], tables=[], heads=None, chooses=True
    )
    kernels = on.kernels.of({"SIZE": SIZE}, device_choice.CHOICE_PARTS, device_choice.CHOICE_NAMES)
    device_choice.choose(on, kernels, config, given, step)
    width = config.n_attended
    chosen, looked = np.empty((len(ends), width), np.int32), np.empty_like(places)
    for name, array in (("chosen", chosen), ("looked", looked)):
        on.driver.download(on.scratch.buffers[name], array)
    above = np.maximum(np.einsum("rhd,ed->rhe", queries, keys), 0)
    scores = torch.from_numpy(np.einsum("rhe,rh->re", above, weights))
    for row, end in enumerate(ends.tolist()):
        n_seen = (end + 1) // n_pooled
        best = scores[row, :n_seen].sort(descending=True, stable=True).indices
        taken = best[: n_chosen // n_pooled].sort().values.tolist()
        wanted = [entry * n_pooled + k for entry in taken for k in range(n_pooled)]
        wanted += range(n_seen * n_pooled, end + 1)
        assert chosen[row].tolist() == wanted + [-1] * (width - len(wanted))
        assert looked[row].tolist() == [len(wanted) - 1, 1, row]
