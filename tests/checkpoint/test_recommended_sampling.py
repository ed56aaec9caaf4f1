"""generation_config.json: what of it counts as recommended sampling."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import pytest

from shardnet.checkpoint.recommended_sampling import read_licence, read_recommended
from shardnet.cluster.head.requests import sampling_params
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.generation import Generate
from shardnet.wire.messages.plans import ModelChoice


@pytest.mark.parametrize(
    ("said", "recommended"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"top_k": 64, "top_p": 0.95}, {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"eos_token_id": 1}, {}),
        (
            {"temperature": True, "top_k": 1.5, "top_p": 7, "min_p": "0.1"}
            | {"repetition_penalty": 1e9},
            {},
        ),
        ({"temperature": -1, "min_p": 0.1, "top_k": -1}, {"temperature": 1.0, "min_p": 0.1}),
    ],
)
def test_values_in_range_are_recommended(
    tmp_path: Path, said: dict[str, Any], recommended: dict[str, float]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_recommended(tmp_path) == recommended


@pytest.mark.parametrize("text", ["", "[]", '{"temperature": NaN}', '{"temperature": 1e999}'])
def test_a_file_that_cannot_be_used_recommends_nothing(tmp_path: Path, text: str) -> None:
    assert read_recommended(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(text)
    assert read_recommended(tmp_path) == {}
    assert read_recommended(tmp_path / "generation_config.json") == {}


def test_a_request_gets_what_it_leaves_to_the_makers() -> None:
    recommended = {"temperature": 0.6, "top_p": 0.95}
    facts = SimpleNamespace(recommended=recommended)
    lead = cast(Any, SimpleNamespace(plan=SimpleNamespace(facts=facts)))
    given = SamplingParams(temperature=0.2, top_k=5, seed=3)
    asked = Generate(
        request=0,
        choice=ModelChoice(model="m"),
        sampling=given,
        recommended=["top_p", "min_p"],
    )
    assert sampling_params(asked, lead) == SamplingParams(
        temperature=0.2, top_k=5, top_p=0.95, seed=3
    )


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n", "apache-2.0"),
        ("---\nlicense: other\nlicense_name: 'tiny'\n---\n", "tiny"),
        ("---\nlicense:\n- mit\n---\n", ""),
        ("# A model\nlicense: mit\n---\n", ""),
        ("---\nlicense: mit\n", ""),
        ("", ""),
    ],
)
def test_of_a_folder_its_model_card_names_one(tmp_path: Path, card: str, licence: str) -> None:
    assert read_licence(tmp_path) == ""
    (tmp_path / "README.md").write_text(card)
    assert read_licence(tmp_path) == licence


def test_of_a_gguf_file_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_license("mit")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_licence(path) == "mit"
    path.write_bytes(path.read_bytes()[:40])
    assert read_licence(path) == ""
    assert read_licence(tmp_path / "none.gguf") == ""
