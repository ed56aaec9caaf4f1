"""Drafts by the layer that predicts further tokens: those of the published module, no text changed.

The oracle has transformers' layers in plain code around them; it computes every draft from scratch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models.mtp_checkpoints import N_LAYERS, PlainMtp, make_mtp
from support.rings.stage_chain import even_split, random_prompt
from support.rings.torch_rings import TorchStages

from shardnet.types import SamplingParams

FAMILIES = ["deepseek_v3", "glm4_moe", "qwen3_next"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def stages(folder: Path) -> TorchStages:
    return TorchStages(folder, even_split(N_LAYERS, 2), has_mtp=True)


def test_drafts_are_those_of_the_published_module(folder: Path, stages: TorchStages) -> None:
    """Behind a prompt in chunks, a row alone, and rows of which some are rejected."""
    oracle = PlainMtp(folder)
    tokens = random_prompt(45, 300)
    stages.open(SamplingParams(), n_prompt=len(tokens), n_drafts=4)
    for start in (0, 20):
        assert not stages.step(start, tokens[start : start + 20], 0).drafts
    samples = stages.step(40, tokens[40:], 1)
    for n_right in (0, 2, 1, 3):
        tokens.append(samples.token_ids[-1])
        (drafts,) = samples.drafts
        assert drafts.position == len(tokens)
        assert [*drafts.token_ids] == oracle.drafts(tokens, len(drafts.token_ids))
        right = _continue(oracle, tokens, n_right)
        wrong = [(right[-1] if right else 7) + 1] if n_right else []
        rows = [tokens[-1], *right[:n_right], *wrong]
        samples = stages.step(len(tokens) - 1, rows, len(rows))
        assert [*samples.token_ids[:n_right]] == right[:n_right]
        tokens += right[:n_right]
        samples = _truncated(samples, n_right)
    assert len(drafts.token_ids) == 3


def _continue(oracle, tokens, n):
    import torch

    made = list(tokens)
    with torch.inference_mode():
        for _ in range(n):
            made.append(int(oracle.model(torch.tensor([made])).logits[0, -1].argmax()))
    return made[len(tokens) :]


def _truncated(samples, n_right):
    from msgspec.structs import replace

    return replace(samples, token_ids=samples.token_ids[: n_right + 1])
