"""Figures that are kept from start to start, and files that are not to be believed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardnet.cluster.measuring.figure_cache import (
    UNSTEADY_GOOD_FOR_S,
    Figure,
    FigureCache,
    FigureKey,
    shape_of,
)
from shardnet.model.config.model_config import Indexer, ModelConfig
from shardnet.model.families.registry import parse_config
from shardnet.runtime.loading.measuring import StageFigures
from shardnet.types import DType, KvDType

INDEXER = Indexer(n_heads=2, head_size=8, n_chosen=4, interleaved=False, layers=(0,))
FIGURE = Figure(
    stage=StageFigures(layer_s=0.001, layer_256_s=0.02, embed_s=1e-5, head_s=0.003, kernel="k"),
    measured_at_s=1.5e9,
)


def config(**changes: Any) -> ModelConfig:
    raw = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    return parse_config(raw | changes, "config.json")


def key(dtype: DType = DType.BFLOAT16, **changes: Any) -> FigureKey:
    values = {
        "device": "cpu",
        "isa": "avx2",
        "arithmetic": "portable",
        "torch": "2",
        "threads": 2,
        "cores": 4,
        "version": "1",
        "host": "h",
    }
    model = config(**changes.pop("model", {}))
    return FigureKey(shape=shape_of(model), dtype=dtype, **(values | changes))


def lines() -> tuple[list[str], Any]:
    said: list[str] = []
    return said, said.append


def test_a_figure_outlives_the_process(tmp_path: Path) -> None:
    said, log = lines()
    assert FigureCache(tmp_path, log).get(key()) is None
    FigureCache(tmp_path, log).put(key(), FIGURE)
    assert FigureCache(tmp_path, log).get(key()) == FIGURE
    assert said == []


def test_what_another_node_of_the_machine_has_corrected_counts(tmp_path: Path) -> None:
    here, there = FigureCache(tmp_path, print), FigureCache(tmp_path, print)
    here.put(key(), FIGURE)
    corrected = dataclasses.replace(FIGURE, stage=FIGURE.stage.scaled(0.01))
    there.put(key(), corrected)
    assert here.get(key()) == corrected


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cuda (X)"},
        {"isa": "none"},
        {"isa": "off"},
        {"arithmetic": "AMX bfloat16"},
        {"torch": "3"},
        {"threads": 1},
        {"cores": 2},
        {"version": "2"},
        {"host": "g"},
        {"dtype": DType.FLOAT32},
        {"kv_dtype": KvDType.INT8},
        {"model": {"hidden_size": 128}},
        {"model": {"num_hidden_layers": 7}},
        {"model": {"attention_bias": True}},
        {"model": {"torch_dtype": "float16"}},
    ],
)
def test_a_figure_speaks_of_nothing_else(tmp_path: Path, other: dict[str, Any]) -> None:
    FigureCache(tmp_path, print).put(key(), FIGURE)
    assert FigureCache(tmp_path, print).get(key(**other)) is None


@pytest.mark.parametrize(
    "change",
    [{"value_size": 8}, {"has_gates": True}, {"mixerless_layers": (1,)}, {"indexer": INDEXER}],
)
def test_layers_of_another_kind_have_figures_of_their_own(change: dict[str, Any]) -> None:
    assert shape_of(dataclasses.replace(config(), **change)) != shape_of(config())


def test_where_the_model_lies_and_how_it_ends_texts_does_not_matter(tmp_path: Path) -> None:
    FigureCache(tmp_path, print).put(key(), FIGURE)
    same = key(model={"eos_token_id": 7, "rms_norm_eps": 1e-5, "max_position_embeddings": 99})
    assert FigureCache(tmp_path, print).get(same) == FIGURE


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', "other key", "no time"])
def test_a_damaged_file_is_ignored_and_rewritten(tmp_path: Path, damage: str) -> None:
    FigureCache(tmp_path, print).put(key(), FIGURE)
    [path] = (tmp_path / "figures").iterdir()
    written = json.loads(path.read_text())
    if damage == "other key":
        damage = json.dumps(written | {"key": msgspec.to_builtins(key(threads=9))})
    elif damage == "no time":
        written["figure"]["stage"]["layer_s"] = -1
        damage = json.dumps(written)
    path.write_text(damage)
    cache = FigureCache(tmp_path, print)
    assert cache.get(key()) is None
    cache.put(key(), FIGURE)
    assert FigureCache(tmp_path, print).get(key()) == FIGURE


def test_a_figure_of_a_busy_machine_is_known_for_minutes(tmp_path: Path) -> None:
    stage = msgspec.structs.replace(FIGURE.stage, is_steady=False)
    unsteady = dataclasses.replace(FIGURE, stage=stage)
    now_s = FIGURE.measured_at_s + UNSTEADY_GOOD_FOR_S - 1
    cache = FigureCache(tmp_path, print, lambda: now_s)
    cache.put(key(), unsteady)
    assert cache.get(key()) == unsteady
    assert FigureCache(tmp_path, print, lambda: now_s).get(key()) == unsteady
    now_s += 2
    assert cache.get(key()) is None
    assert FigureCache(tmp_path, print, lambda: now_s).get(key()) is None


def test_without_a_disk_figures_live_as_long_as_the_process(tmp_path: Path) -> None:
    said, log = lines()
    (tmp_path / "file").touch()
    cache = FigureCache(tmp_path / "file", log)
    cache.put(key(), FIGURE)
    cache.put(key(), FIGURE)
    assert cache.get(key()) == FIGURE
    assert len(said) == 1, "it is said once"
    assert "figures are not kept in" in said[0]
