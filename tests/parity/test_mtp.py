"""Drafts by the layer that predicts further tokens: those of the published module, no text changed.

The oracle has transformers' layers in plain code around them; it computes every draft from scratch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.models.mtp_checkpoints import N_LAYERS, PlainMtp, make_mtp
from support.rings.stage_chain import even_split, random_prompt
from support.rings.torch_rings import TorchStages, request, run, tokens_of

from shardnet.runtime.engine.requests import GenerationFinished, Speculation
from shardnet.sampling_params import SamplingParams

MTP = Speculation(make_draft_source=None, most=3)


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def stages(folder: Path) -> TorchStages:
    return TorchStages(folder, even_split(N_LAYERS, 2), has_mtp=True)


def test_drafts_are_those_of_the_published_module(folder: Path, stages: TorchStages) -> None:
    """Behind a prompt in chunks, a row alone, and rows of which some are rejected."""
    oracle = PlainMtp(folder)
    tokens = random_prompt(45, 300)
    stages.open(SamplingParams(), n_prompt=len(tokens), n_drafts=3)
    for start in (0, 20):
        assert not stages.step(start, tokens[start : start + 20], 0).drafts
    samples = stages.step(40, tokens[40:], 1)
    n_drafted = []
    for n_right in (0, 2, 1, 3):
        tokens.append(samples.token_ids[n_drafted[-1][0] if n_drafted else 0])
        (drafts,) = samples.drafts
        assert drafts.position == len(tokens)
        assert [*drafts.token_ids] == oracle.drafts(tokens, len(drafts.token_ids))
        right = oracle.tokens(tokens, n_right)
        wrong = [319 - right[-1]] if n_right == 2 else []
        rows = [tokens[-1], *right, *wrong]
        samples = stages.step(len(tokens) - 1, rows, len(rows))
        assert [*samples.token_ids[:n_right]] == right
        tokens += right
        n_drafted.append((n_right, len(drafts.token_ids)))
    assert [n for _, n in n_drafted] == [1, 1, 3, 2]


@pytest.mark.usefixtures("drafts_always_pay")
def test_drafts_change_no_token(stages: TorchStages) -> None:
    """Greedy and sampled, at once and one behind the other, which begins with what the first said.

    Nearly all drafts of random layers are rejected: rows are written over, states rewound.
    """
    prompts = [random_prompt(n, 300, seed=n) for n in (40, 17, 30)]
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.4, seed=3),
        SamplingParams(temperature=0.3, seed=1, repetition_penalty=1.3),
    ]
    asked = [request(ids, 14, kind) for ids, kind in zip(prompts, kinds, strict=True)]
    plain = [tokens_of(events) for events in run(stages, *asked, at_once=False)]
    asked.append(request([*prompts[0], *plain[0], 5, 6], 8))
    plain.append(tokens_of(run(stages, asked[3])[0]))
    drafted = [replace(one, speculation=MTP) for one in asked]
    for at_once in (True, False):
        events = run(stages, *drafted, at_once=at_once)
        assert [tokens_of(one) for one in events] == plain
        ends = [one[-1] for one in events]
        assert all(isinstance(end, GenerationFinished) and end.timing.n_drafted for end in ends)
