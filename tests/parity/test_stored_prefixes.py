"""Prompts that begin on disk, on whole rings: the same text always, or computed again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES as FAMILY_CASES
from support.rings.stage_chain import even_split, random_prompt
from support.rings.stored_rings import StoredStages, n_kept
from support.rings.torch_rings import TorchStages, request, run, tokens_of
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.sampling_params import SamplingParams
from shardnet.types import KvDType

CONTEXT = 1280
CASES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "mistral": {"num_hidden_layers": 2, "sliding_window": 300},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "deepseek_v2": {"num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 4},
    "kimi_linear": {},
    "glm5_next_text": FAMILY_CASES["glm5_next_text"],
    "lfm2": {},
    "falcon_h1": {},
    "nemotron_h": {},
    "deepseek_v4": FAMILY_CASES["deepseek_v4"],
    "deepseek_v41_text": {},
    "qwen4_exp_text": FAMILY_CASES["qwen4_exp_text"],
    "hy_v4": FAMILY_CASES["hy_v4"],
}
PENALISED = SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.3, n_logprobs=1)
"""What is drawn depends on every token before it, those of the prompt too."""


@pytest.fixture(
    scope="module",
    params=cases(
        ["llama", "gemma3_text", "qwen3_next", "deepseek_v4"],
        [
            *("mistral", "deepseek_v2", "kimi_linear", "glm5_next_text", "qwen4_exp_text", "hy_v4"),
            *("lfm2", "falcon_h1", "nemotron_h", "deepseek_v41_text"),
        ],
    ),
)
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchStages:
    path = tmp_path_factory.mktemp(request.param)
    folder = make_decoder(
        path, request.param, max_position_embeddings=CONTEXT, **CASES[request.param]
    )
    n_layers = Checkpoint.open(folder).config.n_layers
    kv_dtype = KvDType.INT8 if request.param == "gemma3_text" else KvDType.AUTO
    return TorchStages(folder, even_split(n_layers, 2), context=CONTEXT, kv_dtype=kv_dtype)


@pytest.fixture
def stored(stages: TorchStages, tmp_path: Path) -> Iterator[StoredStages]:
    stored = StoredStages(stages, tmp_path)
    yield stored
    stored.close()
    for compute in stages.computes:
        compute.prefixes = None


def test_text_is_the_same_from_disk_and_computed(stored: StoredStages) -> None:
    """A prompt, the turn after its answer, and another one with the same beginning.

    Each runs on a ring that was just built: a slot is never warm.
    """
    prompt = random_prompt(757, 300, seed=1)
    first = request(prompt, 13, PENALISED)
    cold = run(stored.stages, first, chunk_rows=256)[0]
    turn = request([*prompt, *tokens_of(cold), 5, 6, 7], 10, PENALISED)
    other = request([*prompt[:520], *random_prompt(40, 300, seed=3)], 10, PENALISED)
    expected = [run(stored.stages, each, chunk_rows=256)[0] for each in (first, turn, other)]
    found = [stored.run(each)[0] for each in (first, first, turn, other)]
    assert [tokens_of(events) for events in found[1:]] == [tokens_of(e) for e in expected]
    assert [n_kept(events) for events in found] == [0, 512, 768, 512]
    assert [kept.figures.restored for kept in stored.kept] == [1792, 1792]


def test_a_damaged_or_missing_file_is_computed_again_and_written_again(
    stored: StoredStages,
) -> None:
    prompt = random_prompt(600, 300, seed=2)
    wanted = request(prompt, 10)
    expected = tokens_of(stored.run(wanted)[0])
    [damaged, *_] = sorted(stored.store.folder.glob("*/*.*kv*")) or [
        *stored.store.folder.glob("*/*.w*")
    ]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    events = stored.run(wanted)[0]
    assert (n_kept(events), tokens_of(events)) == (0, expected)
    assert damaged.read_bytes() != content
    assert n_kept(stored.run(wanted)[0]) == 512
    damaged.unlink()
    assert n_kept(stored.run(wanted)[0]) < 512
    assert n_kept(stored.run(wanted)[0]) == 512
