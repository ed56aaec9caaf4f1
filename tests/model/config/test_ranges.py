"""Every number of a config at its extremes: refused by name, or computed with to finite logits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.checkpoints import make_decoder
from support.models.family_cases import CASES
from support.models.gguf_files import gguf_metadata, write_gguf
from support.rings.stage_chain import StageChain, random_prompt
from support.soak import cases

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import CheckpointError, ShardnetError
from shardnet.model.families.registry import parse_config
from shardnet.types import LayerRange

EXTREMES = cases(
    [0, -1, 2**27, 2**60, 1e-320, 1e-30, 1e-6, 1e6, 1e12, math.inf], [2**31 - 1, 1.0, 1e300]
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "attention_factor": 1.2,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 128,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "attention_factor": 1.1,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama-llama3": {"rope_parameters": LLAMA3, "num_hidden_layers": 2},
    "llama-yarn": {"rope_parameters": YARN, "num_hidden_layers": 2},
    "llama-longrope": {"rope_parameters": LONGROPE, "num_hidden_layers": 2},
    "llama-dynamic": {"rope_parameters": DYNAMIC, "num_hidden_layers": 2},
    **{name: CASES[name] for name in ("granite", "gemma3_text-long", "llama4_text", "gpt_oss-odd")},
}
SELDOM = {
    name: CASES[name]
    for name in ("gemma2", "deepseek_v2-groups", "qwen3_5_text", "glm4_moe-groups", "qwen2_moe")
}

Path_ = tuple[str | int, ...]


def numbers(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Where the numbers of a config stand; of a list the first one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, (*path, key))
    elif isinstance(value, list):
        yield from numbers(value[0], (*path, 0)) if value else ()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def changed(config: dict[str, Any], path: Path_, value: float) -> dict[str, Any]:
    made = inner = json.loads(json.dumps(config))
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


@pytest.mark.parametrize("name", cases([*MODELS], [*SELDOM]))
def test_a_number_is_refused_by_name_or_gives_finite_logits(name: str, tmp_path: Path) -> None:
    make_decoder(tmp_path, name.split("-")[0], with_tokenizer=False, **(MODELS | SELDOM)[name])
    file = tmp_path / "config.json"
    good = json.loads(file.read_text())
    usual = parse_config(good, "config.json")
    tried: set[str] = set()
    for path in numbers(good):
        for value in EXTREMES:
            raw = changed(good, path, value)
            try:
                config = parse_config(raw, "config.json")
            except ShardnetError:
                continue
            if config == usual or repr(config) in tried:
                continue
            tried.add(repr(config))
            file.write_text(json.dumps(raw))
            try:
                chain = StageChain.load(tmp_path, [LayerRange(0, config.n_layers)])
            except ShardnetError:  # tensors of other shapes
                continue
            logits = chain.prefill(0, random_prompt(9, 300))
            assert torch.isfinite(logits).all(), (path, value)
    assert len(tried) > 5


GGUF_EXTREMES = (0, -1, 2**31 - 1, 1e-320, 1e38, math.nan, "text", [])


@pytest.mark.parametrize("family", cases(["llama"], ["gemma3_text", "gpt_oss", "deepseek_v2"]))
def test_what_a_gguf_says_is_refused_by_name_or_gives_finite_logits(
    family: str, tmp_path: Path
) -> None:
    make_decoder(tmp_path, family, with_tokenizer=False, **CASES.get(family, {}))
    said = gguf_metadata(json.loads((tmp_path / "config.json").read_text()))
    n_refused = 0
    for key, value in said.items():
        for extreme in GGUF_EXTREMES if isinstance(value, int | float) else ():
            changed_too = {key.replace(".", "__"): extreme}
            file = write_gguf(tmp_path, tmp_path / "changed.gguf", **changed_too)
            try:
                n_layers = Checkpoint.open(file).config.n_layers
                chain = StageChain.load(file, [LayerRange(0, n_layers)])
            except ShardnetError:
                n_refused += 1
                continue
            logits = chain.prefill(0, random_prompt(9, 300))
            assert torch.isfinite(logits).all(), (key, extreme)
    assert n_refused > 20


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": 1e-320}, r"rope_theta is 1e-320, expected 1 to 1e\+12"),
        ({"rope_theta": 1e300}, r"rope_theta is 1e\+300, expected 1 to"),
        ({"rms_norm_eps": 1e6}, "rms_norm_eps is 1000000.0, expected 1e-30 to 1"),
        ({"max_position_embeddings": 2**28}, "max_position_embeddings is 268435456, expected 1 to"),
        ({"hidden_size": 2**21}, "2097152 columns in one linear, expected at most 1048576"),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 1e-300}},
            r"low_freq_factor is 1e-300, expected 1e-06 to 1e\+06",
        ),
    ],
)
def test_the_error_says_key_value_and_range(changes: dict[str, Any], named: str) -> None:
    raw: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 100,
        "vocab_size": 99,
    }
    with pytest.raises(CheckpointError, match=f"^config.json: (it claims |.*){named}"):
        parse_config(raw | changes, "config.json")


def test_a_checkpoint_with_such_a_number_does_not_open(tmp_path: Path) -> None:
    make_decoder(tmp_path, "llama", rope_parameters=LLAMA3 | {"rope_theta": 1e-320})
    with pytest.raises(CheckpointError, match=r"rope_theta is 1e-320, expected 1 to 1e\+12"):
        Checkpoint.open(tmp_path)
