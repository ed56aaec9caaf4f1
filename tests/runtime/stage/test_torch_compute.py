"""A stage that runs out of memory or of numbers: what needed it fails by name, others go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.checkpoints import make_llama
from support.rings.torch_rings import TorchStages

from shardnet.errors import CapacityError, WrongValuesError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.output_params import OutputParams
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import CloseSequence, OpenSequence
from shardnet.types import BLOCK_POSITIONS, LayerRange, SequenceId, SlotId

NO_MEMORY = [
    MemoryError(),
    RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"),
]


def opening(slot: int, n_kept: int = 0, source: int | None = None) -> OpenSequence:
    """Open the sequence that has the number of its slot."""
    return OpenSequence(
        sequence_id=SequenceId(slot),
        slot=SlotId(slot),
        sampling=SamplingParams(),
        n_kept=n_kept,
        source=None if source is None else SlotId(source),
    )


@pytest.mark.parametrize("error", NO_MEMORY, ids=["Python", "torch"])
def test_without_memory_a_step_or_a_sequence_fails_and_the_stage_goes_on(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_llama(tmp_path / "model")
    stages = TorchStages(folder, [LayerRange(0, 4)])
    [compute] = stages.computes
    ids = [n % 50 for n in range(BLOCK_POSITIONS + 4)]
    compute.operate(opening(0))
    expected = stages.step(0, ids, 1).token_ids

    def full(*_: object) -> None:
        raise error

    named = "no memory is left for step 1 on the node with layers 0-4; start that node with less"
    compute.operate(opening(1))
    with monkeypatch.context() as patched:
        patched.setattr(KvCache, "_empty", full)
        with pytest.raises(CapacityError, match="memory"):  # the KV cache names it itself
            stages.step(0, ids, 1, slot=1)
        compute.operate(opening(2, n_kept=len(ids) - 1, source=0))
        # What a closed sequence leaves need not shrink.
        compute.operate(CloseSequence(sequence_id=SequenceId(0), slot=SlotId(0), n_kept=2))
    with pytest.raises(CapacityError, match="memory"):
        stages.step(len(ids) - 1, ids[-1:], 1, slot=2)
    compute.operate(CloseSequence(sequence_id=SequenceId(2), slot=SlotId(2), n_kept=0))
    compute.operate(opening(2, n_kept=2, source=0))
    with monkeypatch.context() as patched:
        patched.setattr("shardnet.stage.stage_model.StageModel.run_alone", full)
        with pytest.raises(CapacityError, match=named) as raised:
            stages.step(2, ids[2:], 1, slot=2)
        assert raised.value.__cause__ is None
    assert stages.step(2, ids[2:], 1, slot=2).token_ids == expected
    assert stages.step(0, ids, 1, slot=1).token_ids == expected


@pytest.mark.parametrize("n_sampled", [0, 1])
def test_a_prompt_whose_logprobs_are_no_numbers_names_its_sequence(
    n_sampled: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are not sampled ones: fewer of these are in the step, or none."""
    stages = TorchStages(make_llama(tmp_path / "model"), [LayerRange(0, 4)])
    stages.open(SamplingParams(), slot=3, n_prompt=20, outputs=OutputParams(n_prompt_logprobs=0))

    def overflown(_: object, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(rows), stages.vocab_size)
        logits[3:4] = torch.nan
        return logits

    monkeypatch.setattr("shardnet.stage.stage_model.StageModel.logits", overflown)
    with pytest.raises(WrongValuesError, match="row 3 have maximum nan") as raised:
        stages.step(0, [*range(10)], n_sampled, slot=3)
    assert raised.value.sequence == 3
