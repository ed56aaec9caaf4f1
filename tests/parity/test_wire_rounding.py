"""A ring with a narrower wire: the model that rounds at its borders, and near the exact one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from support.models.checkpoints import make_decoder, make_gpt2, make_llama
from support.models.family_cases import CASES
from support.rings.stage_chain import (
    CPU,
    RoundingChain,
    StageChain,
    even_split,
    probed,
    random_prompt,
)
from support.soak import cases
from torch import Tensor

from shardnet.errors import WrongValuesError
from shardnet.model.kernels.linear import KernelChoice
from shardnet.model.sampling.sampler import Sampler, SampleRow
from shardnet.runtime.stage.compute import Activations, Samples
from shardnet.runtime.stage.torch_compute import TorchCompute
from shardnet.sampling_params import SamplingParams
from shardnet.slot_operations import OpenSequence
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    DType,
    Epoch,
    LayerRange,
    MicroBatch,
    RowGroup,
    SequenceId,
    SlotId,
    StepId,
    WireDType,
)
from shardnet.wire.payloads.data import StepData, data_frame, read_data

N_LAYERS = 4
VOCAB = 320
N_TOKENS = 6
STREAMS = "deepseek_v4"
"""A family whose rows have several residual streams, of which a group of int8 may have two."""
MAKERS: dict[str, Callable[..., Path]] = {
    "llama": partial(make_llama, hidden_size=96),
    "gpt2": partial(make_gpt2, n_embd=100),
    STREAMS: partial(make_decoder, family=STREAMS, **CASES[STREAMS]),
}
PLAIN = ["llama", "gpt2"]
NARROW = [WireDType.BFLOAT16, WireDType.FLOAT16, WireDType.INT8]
SPLITS = [even_split(N_LAYERS, 2), even_split(N_LAYERS, N_LAYERS)]
GREEDY = SamplingParams(n_logprobs=5)

TOLERANCE = {WireDType.BFLOAT16: 0.05, WireDType.FLOAT16: 0.01, WireDType.INT8: 0.2}
"""Largest error of a logit with a border before every layer, in the logits' standard deviation."""


@pytest.fixture(scope="module", params=PLAIN)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint whose rows are whole groups of int8 and a part of one."""
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=[DType.FLOAT32, DType.BFLOAT16], ids=lambda d: d.value)
def choice(request: pytest.FixtureRequest) -> KernelChoice:
    """What this machine computes in when asked for the dtype."""
    return probed(CPU, request.param, None)


class Ring:
    """What the nodes of a ring compute, and the frames between them."""

    def __init__(self, folder: Path, ranges: Sequence[LayerRange], choice: KernelChoice) -> None:
        stages = StageChain.load(folder, ranges, choice).stages
        own = WireDType.own(choice.dtype)
        self.computes = [
            TorchCompute(stage, Sampler(VOCAB) if stage.last else None, own) for stage in stages
        ]

    def use_wire(self, dtype: WireDType) -> None:
        for compute in self.computes:
            compute.use_wire(dtype, dtype)

    def generate(self, prompt: Sequence[int], n_tokens: int) -> list[Samples]:
        """Generate greedily: the tail's answers to all steps that sample."""
        opened = OpenSequence(sequence_id=SequenceId(1), slot=SlotId(0), sampling=GREEDY)
        for compute in self.computes:
            compute.operate(opened)
        starts = range(0, len(prompt), PREFILL_CHUNK_ROWS)
        for start in starts:
            rows = prompt[start : start + PREFILL_CHUNK_ROWS]
            answer = self.step(start, rows, n_sampled=int(start == starts[-1]))
        answers = [answer]
        for position in range(len(prompt), len(prompt) + n_tokens - 1):
            answers.append(self.step(position, [answers[-1].token_ids[0]], n_sampled=1))
        return answers

    def step(self, position: int, rows: Sequence[int], n_sampled: int) -> Samples:
        group = RowGroup(
            sequence_id=SequenceId(1),
            slot=SlotId(0),
            position=position,
            n_rows=len(rows),
            n_sampled=n_sampled,
        )
        batch = MicroBatch(epoch=Epoch(1), step=StepId(1), groups=(group,), token_ids=tuple(rows))
        arrived: Activations | None = None
        for compute in self.computes:
            result = compute.compute(batch, arrived)
            if isinstance(result, Samples):
                return result
            sent = StepData(
                batch=batch, dtype=result.dtype, width=result.width, payload=result.payload
            )
            came = read_data(data_frame(sent))
            arrived = Activations(payload=came.payload, dtype=came.dtype, width=came.width)
        raise AssertionError("the tail answers")


def sampled(logits: Tensor, positions: range) -> list[Samples]:
    """What the tail says of these logits, one step a row."""
    answers = []
    for row, position in zip(logits, positions, strict=True):
        result = Sampler(VOCAB).sample(row[None], [SampleRow(params=GREEDY, position=position)])
        answers.append(
            Samples(
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                prompt_logprobs=[],
                blocks=[],
            )
        )
    return answers


@pytest.mark.parametrize("folder", MAKERS, indirect=True)
@pytest.mark.parametrize("wire", NARROW, ids=lambda d: d.value)
@pytest.mark.parametrize("ranges", cases(SPLITS[1:], SPLITS[:1]), ids=lambda ranges: len(ranges))
def test_a_ring_is_the_model_that_rounds_at_its_borders(
    folder: Path, choice: KernelChoice, ranges: list[LayerRange], wire: WireDType
) -> None:
    """Bit for bit: the tail's ids and logprobs, behind a prompt of two chunks."""
    prompt = random_prompt(PREFILL_CHUNK_ROWS + 9, 300)
    ring = Ring(folder, ranges, choice)
    ring.use_wire(wire)
    chain = RoundingChain(StageChain.load(folder, ranges, choice).stages, wire)
    (logits,) = chain.generate([prompt], N_TOKENS)
    positions = range(len(prompt) - 1, len(prompt) + N_TOKENS - 1)
    assert ring.generate(prompt, N_TOKENS) == sampled(logits[-N_TOKENS:], positions)


def test_without_a_narrower_wire_a_ring_is_the_whole_model(
    folder: Path, choice: KernelChoice
) -> None:
    prompt = random_prompt(40, 300)
    ring = Ring(folder, even_split(N_LAYERS, 3), choice)
    (logits,) = StageChain.load(folder, [LayerRange(0, N_LAYERS)], choice).generate(
        [prompt], N_TOKENS
    )
    positions = range(len(prompt) - 1, len(prompt) + N_TOKENS - 1)
    exact = sampled(logits[-N_TOKENS:], positions)
    assert ring.generate(prompt, N_TOKENS) == exact
    ring.use_wire(WireDType.INT8)
    assert ring.generate(prompt, N_TOKENS) != exact
    ring.use_wire(WireDType.own(choice.dtype))
    assert ring.generate(prompt, N_TOKENS) == exact


@pytest.mark.parametrize("wire", NARROW, ids=lambda d: d.value)
def test_rounded_logits_stay_near_the_exact_ones(
    folder: Path, choice: KernelChoice, wire: WireDType
) -> None:
    prompt = random_prompt(120, 300)
    stages = StageChain.load(folder, SPLITS[1], choice).stages
    exact = StageChain(stages).prefill(0, prompt)
    error = (RoundingChain(stages, wire).prefill(1, prompt) - exact) / exact.std(-1, keepdim=True)
    assert error.abs().max() < TOLERANCE[wire]
    hidden = choice.hidden_dtype or choice.dtype
    if wire is WireDType.INT8 or hidden is DType.FLOAT32:  # float16 holds most bfloat16
        assert error.abs().max() > 0


def test_rows_in_another_dtype_are_refused_by_name(tmp_path: Path) -> None:
    choice = probed(CPU, DType.FLOAT32, None)
    ring = Ring(make_llama(tmp_path), SPLITS[0], choice)
    ring.computes[1].use_wire(WireDType.INT8, WireDType.INT8)
    with pytest.raises(WrongValuesError, match="came in float32, this ring's wire is int8 here"):
        ring.generate([1, 2], 1)
