"""Which positions the kernel text chooses, and what another stage has chosen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.devices import DEVICE, HOST, device_of

from shardnet.model.config.model_config import Indexer
from shardnet.model.devices import device_choice
from shardnet.model.devices.device_choice import Chooser
from shardnet.model.devices.device_kv import PAGE
from shardnet.model.devices.mixer_device import StepBuffers

N_POSITIONS, SIZE = 1300, 20
NUMBERS = np.random.default_rng(5)


def whole_numbers(*shape: int) -> np.ndarray[Any, Any]:
    """Small ones: sums are exact in any order, and scores are often equal."""
    return NUMBERS.integers(-2, 3, shape).astype(np.float32)


@pytest.mark.parametrize("kind", [HOST, DEVICE, "(THREADS - 1 - (i))"])
@pytest.mark.parametrize(
    ("n_heads", "n_pooled", "n_chosen", "most"),
    [(3, 1, 100, 1 << 26), (40, 1, 700, 1 << 26), (40, 4, 400, 20_000), (5, 16, 32, 1)],
)
def test_the_highest_scores_are_chosen_of_equal_ones_the_first(
    kind: str, n_heads: int, n_pooled: int, n_chosen: int, most: int, monkeypatch: Any
) -> None:
    """By rows that see little, more than they may choose, and all; some at a time."""
    monkeypatch.setattr(device_choice, "_MOST_SCORE_BYTES", most)
    device = device_of(kind)
    ends = np.array([0, n_chosen - 1, n_chosen, n_chosen + n_pooled, 1000, N_POSITIONS - 1])
    n_rows, n_entries = len(ends), N_POSITIONS // n_pooled
    queries, keys = whole_numbers(n_rows, n_heads, SIZE), whole_numbers(n_entries, SIZE)
    weights = whole_numbers(n_rows, n_heads)
    pages = np.array([7, 3, 0, 5, 2, 1, 4], np.uint32)  # the first is another slot's
    of_page = PAGE // n_pooled
    stored = np.zeros((8 * of_page, SIZE), np.float32)
    for entry in range(n_entries):
        stored[pages[1 + entry // of_page] * of_page + entry % of_page] = keys[entry]
    places = np.ones((n_rows, 3), np.uint32)
    places[:, 0], places[:, 2] = ends, range(n_rows)
    config = Indexer(
        n_heads=n_heads,
        head_size=SIZE,
        n_chosen=n_chosen,
        interleaved=False,
        n_pooled=n_pooled,
        layers=(),
    )
    on: Any = device
    choose, at = Chooser(config, on, 0.5), (device.put(places), device.put(pages))
    step = StepBuffers(
        n_rows=n_rows, n_blocks=16, at=at, runs=at[0], tables=[], heads=None, chooses=True
    )
    choose(device.put(queries), device.put(weights), (device.put(stored), SIZE), step)
    width = config.n_attended
    chosen, looked = np.empty((n_rows, width), np.int32), np.empty((n_rows, 3), np.uint32)
    for name, array in (("chosen", chosen), ("looked", looked)):
        device.driver.download(device.scratch.buffers[name], array)
    above = np.maximum(np.einsum("rhd,ed->rhe", queries, keys), 0)
    scores = torch.from_numpy(np.einsum("rhe,rh->re", above, weights))
    for row, end in enumerate(ends):
        n_seen = int(end + 1) // n_pooled
        best = scores[row, :n_seen].sort(descending=True, stable=True).indices
        taken = best[: n_chosen // n_pooled].sort().values.numpy()
        wanted = [int(n) * n_pooled + k for n in taken for k in range(n_pooled)]
        wanted += range(n_seen * n_pooled, int(end) + 1)
        assert chosen[row].tolist() == wanted + [-1] * (width - len(wanted))
        assert looked[row].tolist() == [len(wanted) - 1, 1, row]
