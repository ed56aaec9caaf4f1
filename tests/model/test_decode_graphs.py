"""Decode steps by replay: the logits of the eager path, from tensors that stay where they are."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_decoder, make_gpt2
from operator_tape import TapeCapture
from stage_chain import CPU, Rows, StageChain, even_split, random_prompt

from shardnet.model import quantized
from shardnet.model.checkpoint import Checkpoint
from shardnet.model.decode_graphs import GRAPHS_VARIABLE, find_capture
from shardnet.model.footprint import GRAPH_BUCKETS
from shardnet.model.kernels import Kernel, KernelChoice
from shardnet.model.quantization import Quantization
from shardnet.model.stage_model import StageModel, load_stage
from shardnet.types import DType, KvDType, LayerRange

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
EAGER = ("mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3")
CHOICE = KernelChoice(dtype=DType.FLOAT32, kernel=Kernel.PLAIN, exact_rows=1, min_rows=1)
"""Products as on CUDA, by torch's own kernel. Its rows have other bits in other company."""
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
N_SLOTS = 6


def load(
    folder: Path,
    capture: TapeCapture | None = None,
    n_stages: int = 1,
    choice: KernelChoice = CHOICE,
    kv_dtype: KvDType = KvDType.AUTO,
) -> StageChain:
    ranges = even_split(Checkpoint.open(folder).config.n_layers, n_stages)
    return StageChain.load(folder, ranges, choice, kv_dtype=kv_dtype, capture=capture)


def traffic(n_steps: int) -> list[list[Rows]]:
    """Micro-batches of some sequences that come and go: prompts, drafts, single rows, 1 to 40."""
    draw = random.Random(5)
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


def check_same(captured: StageChain, eager: StageChain, steps: list[list[Rows]]) -> None:
    for number, groups in enumerate(steps):
        got, want = captured.step(*groups), eager.step(*groups)
        torch.testing.assert_close(got, want, **TOLERANCE, msg=lambda m, n=number: f"{n}: {m}")
        assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_are_those_of_the_eager_path(case: str, tmp_path: Path) -> None:
    folder = make_decoder(tmp_path, case, with_tokenizer=False, **CASES[case])
    capture = TapeCapture()
    check_same(load(folder, capture), load(folder), traffic(30))
    assert capture.n_replayed > 2 * capture.n_captured > 0
