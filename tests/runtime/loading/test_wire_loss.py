"""What a narrower wire does to the logits, against the whole model in memory."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_llama
from support.models.loaded_tokenizers import load_here
from support.rings.stage_chain import CPU, RoundingChain, StageChain, probed

from shardnet.errors import CheckpointError, NumericalError
from shardnet.runtime.loading.model_facts import identify
from shardnet.runtime.loading.wire_loss import (
    N_ROWS,
    TEXT,
    compare_logits,
    measure_rounding_s,
    measure_wire_loss,
)
from shardnet.stage import load as loading
from shardnet.types import DType, LayerRange, WireDType
from shardnet.wire.messages.plans import WireError


def no_report(done_bytes: int, total_bytes: int) -> None:
    """Progress that nobody wants."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"), hidden_size=96)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda d: d.value)
def test_it_is_what_the_whole_model_says(folder: Path, dtype: DType) -> None:
    wire = WireDType.INT8
    found = measure_wire_loss(identify(folder), dtype, {1: wire, 3: wire}, no_report)
    ids = load_here(folder).encode(TEXT)[:N_ROWS]
    ranges = [LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4)]
    stages = StageChain.load(folder, ranges, probed(CPU, dtype, None)).stages
    exact = StageChain(stages).prefill(0, ids)
    rounded = RoundingChain(stages, wire).prefill(1, ids)
    assert found == compare_logits(exact, rounded)
    assert found.n_rows == N_ROWS
    assert 0 < found.rms_error < found.max_error < 0.2
    assert found.kl > 0
    one = measure_wire_loss(identify(folder), dtype, {3: wire}, no_report)
    assert 0 < one.rms_error < found.rms_error, "a link that rounds, and one that does not"


def test_a_wire_that_rounds_nothing_changes_nothing(folder: Path) -> None:
    exact = WireError(n_rows=64, n_changed=0, max_error=0, rms_error=0, kl=0)
    facts = identify(folder)
    for borders in ({2: WireDType.FLOAT32}, {}):
        assert measure_wire_loss(facts, DType.FLOAT32, borders, no_report) == exact


def test_parts_of_layers_are_rounded_as_they_travel_between_nodes(folder: Path) -> None:
    facts = identify(folder)

    def found(wire: WireDType, *layers: int) -> float:
        gathers = dict.fromkeys(layers, (wire, (1, 1)))
        return measure_wire_loss(facts, DType.FLOAT32, {}, no_report, gathers).rms_error

    assert found(WireDType.FLOAT32, 0, 1) == 0
    coarse, fine = found(WireDType.INT8, 0, 1, 2, 3), found(WireDType.BFLOAT16, 0, 1, 2, 3)
    assert 0 < fine < coarse < 0.2
    assert 0 < found(WireDType.INT8, 2) < coarse


def test_a_model_without_tokenizer_or_of_few_positions_has_its_rows(tmp_path: Path) -> None:
    made = make_llama(tmp_path, with_tokenizer=False, max_position_embeddings=20)
    found = measure_wire_loss(identify(made), DType.FLOAT32, {2: WireDType.INT8}, no_report)
    assert found.n_rows == 20
    assert found.max_error > 0


def test_one_layer_is_in_memory_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[Any]] = []
    load = loading.load_stage

    def load_and_note(*arguments: Any, **options: Any) -> Any:
        gc.collect()
        assert not any(one() for one in loaded)
        stage = load(*arguments, **options)
        loaded.append(weakref.ref(stage))
        return stage

    monkeypatch.setattr(loading, "load_stage", load_and_note)
    measure_wire_loss(identify(folder), DType.FLOAT32, {1: WireDType.INT8}, no_report)
    assert len(loaded) == 4


def test_progress_goes_up_to_the_whole_checkpoint(folder: Path) -> None:
    reports: list[tuple[int, int]] = []
    measure_wire_loss(
        identify(folder),
        DType.FLOAT32,
        {2: WireDType.INT8},
        lambda done, total: reports.append((done, total)),
    )
    done = [report[0] for report in reports]
    assert done == sorted(done)
    assert len(set(done)) > 20
    assert reports[-1][0] == reports[-1][1] == reports[0][1]


def test_what_progress_raises_ends_it(folder: Path) -> None:
    calls = []

    def give_up(done_bytes: int, total_bytes: int) -> None:
        calls.append(done_bytes)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_wire_loss(identify(folder), DType.FLOAT32, {2: WireDType.INT8}, give_up)
    assert len(calls) == 1


def test_a_checkpoint_that_changed_is_refused(folder: Path, tmp_path: Path) -> None:
    facts = identify(folder)
    other = replace(facts, path=make_llama(tmp_path, hidden_size=48))
    with pytest.raises(CheckpointError, match="has changed since"):
        measure_wire_loss(other, DType.FLOAT32, {2: WireDType.INT8}, no_report)
    gone = replace(facts, path=tmp_path / "gone")
    with pytest.raises(CheckpointError):
        measure_wire_loss(gone, DType.FLOAT32, {2: WireDType.INT8}, no_report)


def test_errors_are_shares_of_the_rows_own_spread() -> None:
    exact = torch.tensor([[0.0, 2.0, 4.0], [0.0, 20.0, 40.0]])  # deviations 2 and 20
    rounded = torch.tensor([[0.0, 2.0, 4.0], [0.0, 41.0, 40.0]])
    found = compare_logits(exact, rounded)
    assert (found.n_rows, found.n_changed) == (2, 1)
    assert found.max_error == pytest.approx(21 / 20)
    assert found.rms_error == pytest.approx((((21 / 20) ** 2) / 3 / 2) ** 0.5)
    probability = torch.tensor([0.0, 20.0, 40.0], dtype=torch.float64).softmax(-1)
    other = torch.tensor([0.0, 41.0, 40.0], dtype=torch.float64).softmax(-1)
    assert found.kl == pytest.approx(float((probability * (probability / other).log()).sum()) / 2)


def test_a_row_without_spread_counts_as_it_is() -> None:
    exact, rounded = torch.ones(2, 3), torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.5]])
    found = compare_logits(exact, rounded)
    assert found.max_error == 0.5
    assert found.n_changed == 1


@pytest.mark.parametrize("which", [0, 1])
def test_logits_that_are_no_numbers_are_an_error(which: int) -> None:
    logits = [torch.ones(1, 2), torch.ones(1, 2)]
    logits[which][0, 1] = float("nan")
    with pytest.raises(NumericalError, match=("without", "with")[which] + " the narrower wire"):
        compare_logits(*logits)


def test_rounding_takes_time() -> None:
    assert 0 < measure_rounding_s(4096, DType.BFLOAT16, WireDType.INT8) < 1
