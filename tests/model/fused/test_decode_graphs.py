"""Decode steps by replay: the logits of the eager path, from tensors that stay where they are."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder, make_gpt2
from support.oracles.operator_tape import TapeCapture
from support.rings.stage_chain import CPU, Rows, StageChain, batch_of, even_split
from support.soak import cases
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.arithmetic import row_functions
from shardnet.model.config.limits import GRAPH_BUCKETS
from shardnet.model.config.panel_form import Quantization
from shardnet.model.families.registry import FAMILIES
from shardnet.model.fused.decode_graphs import GRAPHS_VARIABLE, find_capture
from shardnet.model.kernels import linear, panel_linear
from shardnet.model.kernels.linear import MAX_EXACT_ROWS, Kernel, KernelChoice, probe
from shardnet.stage.load import load_stage
from shardnet.stage.runs import Run
from shardnet.types import (
    DType,
    KvDType,
    LayerRange,
)

GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 20}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"num_hidden_layers": 3},
    "phi3": {"sliding_window": 20},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"num_hidden_layers": 7},
    "granite": {"residual_multiplier": 0.22, "attention_multiplier": 0.2},
    "olmo2": {"attention_bias": True},
    "qwen2_moe": {"mlp_only_layers": [0, 2]},
    "qwen3_moe": {"mlp_only_layers": [1, 2]},
}
"""Every family of which layers can be captured."""
USUAL = ["llama", "gemma3_text", "olmo2", "qwen2_moe"]
N_CAPTURED = {"gemma3_text": 8, "qwen3": 4, "qwen2_moe": 4, "qwen3_moe": 3}
"""Pieces of a bucket: one more than layers where all can be captured."""
EAGER = sorted(FAMILIES.keys() - CASES.keys())
USUAL_EAGER = ["deepseek_v3", "gpt2", "gpt_oss", "llama4_text"]
N_SLOTS = 6


@pytest.fixture(autouse=True)
def _functions_of_rows_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: what the compiled library computes is on no tape."""
    monkeypatch.setattr(row_functions, "native_kernels", lambda: None)


def choice_of(quant: Quantization | None = None) -> KernelChoice:
    """A batch-invariant kernel of torch, which is what graphs are made of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "native_kernels", lambda: None)
        choice = probe(CPU, DType.FLOAT32, None, quant)
    if choice.exact_rows < MAX_EXACT_ROWS:
        pytest.skip("no kernel here is batch-invariant")
    return choice


def load(
    folder: Path,
    capture: TapeCapture | None = None,
    *,
    n_stages: int = 1,
    choice: KernelChoice | None = None,
    kv_dtype: KvDType = KvDType.AUTO,
) -> StageChain:
    ranges = even_split(Checkpoint.open(folder).config.n_layers, n_stages)
    return StageChain.load(
        folder, ranges, choice or choice_of(), kv_dtype=kv_dtype, capture=capture
    )


def traffic(n_steps: int, seed: int = 5) -> list[list[Rows]]:
    """Micro-batches of sequences that come and go: prompts of 1 to 40 rows, drafts, single rows."""
    draw = random.Random(seed)
    ends: dict[int, int] = {}
    steps = []
    for _ in range(n_steps):
        groups = []
        for slot in draw.sample(range(N_SLOTS), draw.randint(1, N_SLOTS)):
            if draw.random() < 0.1:
                ends[slot] = 0  # another sequence takes the slot
            start = ends.get(slot, 0)
            n_rows = draw.choice((1, 1, 1, 1, 3, 6) if start else (1, 5, 25, 40))
            ends[slot] = start + n_rows
            ids = [draw.randrange(300) for _ in range(n_rows)]
            groups.append(Rows(slot=slot, position=start, ids=ids, n_sampled=n_rows))
        steps.append(groups)
    return steps


def answers(chain: StageChain, steps: Sequence[Sequence[Rows]]) -> list[Tensor]:
    return [chain.step(*groups) for groups in steps]


def differing(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[int]:
    """The numbers of the steps whose logits are not the same bits."""
    pairs = enumerate(zip(left, right, strict=True))
    return [number for number, (a, b) in pairs if not torch.equal(a, b)]


def n_small(steps: Sequence[Sequence[Rows]]) -> int:
    return sum(sum(len(rows.ids) for rows in groups) <= MAX_EXACT_ROWS for groups in steps)


@pytest.mark.parametrize("case", cases(USUAL, [case for case in CASES if case not in USUAL]))
def test_replayed_steps_are_those_of_the_eager_path(case: str, tmp_path: Path) -> None:
    folder = make_decoder(tmp_path, case, with_tokenizer=False, **CASES[case])
    capture, steps = TapeCapture(), traffic(25)
    assert not differing(answers(load(folder, capture), steps), answers(load(folder), steps))
    n_pieces = N_CAPTURED.get(case, 5)
    assert capture.n_replayed == n_small(steps) * n_pieces
    assert capture.n_captured % n_pieces == 0
    assert 4 * n_pieces <= capture.n_captured <= len(GRAPH_BUCKETS) * n_pieces


@pytest.mark.parametrize(
    "family", cases(USUAL_EAGER, [family for family in EAGER if family not in USUAL_EAGER])
)
def test_what_cannot_be_captured_runs_as_ever(family: str, tmp_path: Path) -> None:
    """Of the usual ones nothing can be, of the others more or less."""
    if family == "gpt2":
        folder = make_gpt2(tmp_path, with_tokenizer=False)
    else:
        folder = make_decoder(tmp_path, family, with_tokenizer=False)
    capture, steps = TapeCapture(), traffic(3)
    assert not differing(answers(load(folder, capture), steps), answers(load(folder), steps))
    assert family not in USUAL_EAGER or capture.n_captured == capture.n_replayed == 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_decoder(tmp_path_factory.mktemp("llama"), "llama", with_tokenizer=False)


def singles(*counts: int) -> list[list[Rows]]:
    """Steps of one row of each of so many sequences."""
    steps, ends = [], [0] * max(counts)
    for n_rows in counts:
        steps.append(
            [
                Rows(
                    slot=slot,
                    position=ends[slot],
                    ids=[(7 * slot + 31 * ends[slot]) % 300],
                    n_sampled=1,
                )
                for slot in range(n_rows)
            ]
        )
        ends[:n_rows] = [end + 1 for end in ends[:n_rows]]
    return steps


def test_every_number_of_rows_has_its_bucket(llama: Path) -> None:
    """From the first to one too many, going down again over what larger steps have left behind."""
    steps = singles(33, *range(32, 0, -1), 2, 17, 32)
    capture = TapeCapture()
    assert not differing(answers(load(llama, capture), steps), answers(load(llama), steps))
    assert capture.n_captured == len(GRAPH_BUCKETS) * 5
    assert capture.n_replayed == (len(steps) - 1) * 5


@pytest.mark.parametrize("kv_dtype", KvDType)
def test_stages_keep_apart_what_they_replay(llama: Path, kv_dtype: KvDType) -> None:
    capture, steps = TapeCapture(), traffic(20, seed=6)
    split = load(llama, capture, n_stages=3, kv_dtype=kv_dtype)
    assert not differing(answers(split, steps), answers(load(llama, kv_dtype=kv_dtype), steps))
    assert capture.n_replayed == n_small(steps) * 7


@pytest.mark.parametrize("quant", Quantization)
def test_rounded_weights_are_replayed_as_torch_multiplies_them(
    quant: Quantization, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU there is no compiled library, and torch is not batch-invariant."""
    monkeypatch.setattr(panel_linear, "native_kernels", lambda: None)
    choice = probe(CPU, DType.FLOAT32, None, quant)
    capture, steps = TapeCapture(), traffic(12)
    got = answers(load(llama, capture, choice=choice), steps)
    for mine, theirs in zip(got, answers(load(llama, choice=choice), steps), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    assert capture.n_replayed == n_small(steps) * 5


def test_products_with_a_smallest_number_of_rows_are_replayed(llama: Path) -> None:
    choice = KernelChoice(dtype=DType.FLOAT32, kernel=Kernel.PLAIN, exact_rows=1, min_rows=4)
    capture, steps = TapeCapture(), singles(*range(1, 7))
    got = answers(load(llama, capture, choice=choice), steps)
    for mine, theirs in zip(got, answers(load(llama, choice=choice), steps), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    assert capture.n_replayed == 6 * 5


def test_steps_that_go_through_together_do_not_meet(llama: Path) -> None:
    """Only the first is replayed; and what a step gave stays, whatever runs after it."""
    capture, steps = TapeCapture(), singles(5, 7, 6, 8)
    *runs, after = [Run(batch=batch_of(groups), hidden=None) for groups in steps]
    [eager] = load(llama).stages
    [stage] = load(llama, capture).stages
    want = eager.run_together(runs)
    for _ in range(2):
        got = stage.run_together(runs)
        stage.run_together([after])
        for mine, theirs in zip(got, want, strict=True):
            assert isinstance(mine, Tensor)
            assert isinstance(theirs, Tensor)
            assert torch.equal(mine, theirs)
    assert capture.n_replayed == 2 * 2 * 5


@pytest.mark.parametrize("limit", [0, 7])
def test_a_capture_that_fails_leaves_a_stage_that_works(
    limit: int, llama: Path, logged: io.StringIO
) -> None:
    capture = TapeCapture(limit)
    steps = singles(*range(1, 9), 1, 3)
    assert not differing(answers(load(llama, capture), steps), answers(load(llama), steps))
    assert capture.n_replayed == (0 if limit == 0 else 2 * 5)
    """Steps of one row go on with what they have, no other bucket is tried."""
    [line] = logged.getvalue().splitlines()
    n_rows = 1 if limit == 0 else 2
    assert line == (
        f"decode steps of {n_rows} rows run operator by operator, they cannot be captured: CUDA "
        "out of memory. Tried to allocate 2 MiB"
    )


def test_streamed_layers_are_left_out(llama: Path) -> None:
    """Their weights move from step to step."""
    capture, steps = TapeCapture(), traffic(10)
    stage = load_stage(
        Checkpoint.open(llama),
        LayerRange(0, 4),
        choice=choice_of(),
        device=CPU,
        room_blocks=64,
        progress=lambda done, total: None,
        n_streamed=2,
        capture=capture,
    )
    got = answers(StageChain([stage]), steps)
    assert not differing(got, answers(load(llama), steps))
    assert capture.n_replayed == n_small(steps) * 4
    """Of the layers 0 and 2, each apart."""


def test_a_cpu_captures_nothing_and_a_gpu_can_be_told_not_to() -> None:
    assert find_capture(CPU, {}) is None
    assert find_capture(torch.device("cuda"), {GRAPHS_VARIABLE: "Off"}) is None


def test_the_tape_runs_on_what_it_has_seen_and_nothing_else() -> None:
    """As a graph does: a tensor that only the function knows by then is not read again."""
    place, result, known = torch.zeros(3), torch.zeros(3), [torch.ones(3)]

    def run() -> None:
        result.copy_((place + 1).mul_(2) + known[0])

    replay = TapeCapture()(run)
    place.fill_(4)
    known[0] = torch.zeros(3)
    replay()
    assert result.tolist() == [11, 11, 11]
