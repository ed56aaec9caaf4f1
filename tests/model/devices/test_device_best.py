"""The token with the largest logit is found on the device: the host takes it without the logits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.devices import DEVICE, HOST, compared, device_of
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.rings import stage_chain
from support.rings.torch_rings import TorchStages

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import WrongValuesError
from shardnet.model.devices.device_layers import Device
from shardnet.model.drivers.driver import launch
from shardnet.model.kernels.linear import probe
from shardnet.model.sampling.sampler import Sampler
from shardnet.sampling_params import SamplingParams
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import Arith, DType, LayerRange

pytestmark = compared


@pytest.mark.parametrize("kind", [HOST, DEVICE, "(THREADS - 1 - (i))"])
@pytest.mark.parametrize("n", [1, 3, 255, 1024, 5003, 5004])
def test_the_largest_is_found_of_equal_ones_the_first(kind: str, n: int) -> None:
    on, numbers = device_of(kind), np.random.default_rng(n)
    rows = numbers.integers(-9, 9, (8, n)).astype(np.float32)
    rows[1] = -np.inf
    rows[2, n // 2] = rows[2, -1] = np.inf
    rows[3, n // 3 :] = np.nan
    rows[4] = 0.0
    rows[4, : n // 2] = -0.0  # which equals 0
    rows[5] = np.arange(n)
    best, given = np.empty((8, 2), np.uint32), on.put(rows)
    taken = on.driver.empty(best.nbytes)
    launch(on.driver, on.rows_kernels()["find_best"], (8, 1), [given, taken], n)
    on.driver.download(taken, best)
    expected = torch.from_numpy(rows).argmax(1).numpy()
    assert best[:, 0].tolist() == expected.tolist()
    found = np.take_along_axis(rows, expected[:, None], 1)[:, 0]
    assert best[:, 1].tolist() == found.view(np.uint32).tolist()


def test_a_token_that_is_none_is_not_taken() -> None:
    sampler = Sampler(8, without_token=[3, 7])

    def best(ids: list[int], last: float = 2.0) -> Any:
        maxima = np.array([1.0, last], np.float32)
        return np.column_stack((np.array(ids, np.uint32), maxima.view(np.uint32)))

    found = sampler.take_best(best([2, 6]))
    assert found is not None
    assert (found.token_ids, found.logprobs) == ([2, 6], [None, None])
    assert sampler.take_best(best([2, 3])) is None
    assert sampler.take_best(best([7, 2])) is None
    with pytest.raises(WrongValuesError) as raised:
        sampler.take_best(best([2, 6], np.nan))
    assert raised.value.rows == (1,)


@pytest.mark.parametrize("case", ["qwen3-windows", "gemma2"])
def test_tokens_are_those_of_the_hosts_logits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy sequences without their logits, unless these are capped; of others with them."""
    folder = make_decoder(tmp_path, case.split("-")[0], **CASES[case])
    choice = probe(torch.device("cpu"), DType.FLOAT32, None, arith=Arith.PORTABLE)
    n_layers = Checkpoint.open(folder).config.n_layers
    logits, n_taken = StageModel.logits, 0

    def counted(self: StageModel, rows: torch.Tensor) -> torch.Tensor:
        nonlocal n_taken
        n_taken += 1
        return logits(self, rows)

    monkeypatch.setattr(StageModel, "logits", counted)

    def tokens(on: Device | None, **params: Any) -> tuple[list[Any], int]:
        """Let two sequences sample, side by side behind their prompts; say how often by logits."""
        nonlocal n_taken
        loading = functools.partial(load_stage, on=on)
        monkeypatch.setattr(stage_chain, "load_stage", loading)
        stages = TorchStages(folder, [LayerRange(0, n_layers)], choice)
        found: list[Any] = []
        for slot in range(2):
            stages.open(SamplingParams(**params), slot=slot)
            found.append(stages.step(0, [5, 9 + slot, 7], 1, slot=slot))
        n_taken = 0
        for position in range(3, 9):
            for slot in range(2):
                ids = [found[-2].token_ids[0]]
                found.append(stages.step(position, ids, 1, slot=slot))
        return [(each.token_ids, each.logprobs) for each in found], n_taken

    for params in ({}, {"n_logprobs": 2}, {"temperature": 0.9}, {"repetition_penalty": 1.7}):
        (own, n_own), (expected, _) = tokens(device_of(HOST), **params), tokens(None, **params)
        assert own == expected
        assert n_own == (12 if params or case == "gemma2" else 0)
