"""Drafters that scripts/train_drafters.py trains: what is written, recorded and counted."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

SCRIPTS = Path(__file__).parents[1] / "scripts"
SMALL = argparse.Namespace(texts=8, length=24, steps=1, seed=0, threads=1, bfloat16=False)
PROMPT = [0, 500, 17, 320, 41, 900, 77, 31, 12, 640, 8, 300, 29, 1500, 3000, 44]


@pytest.fixture(scope="module")
def scripts() -> Any:
    """The script's modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        patch.syspath_prepend(SCRIPTS / "benchmarks")
        import timed_flights
        import train_drafters
        from drafters import counting, files, recording

        yield SimpleNamespace(
            train=train_drafters,
            files=files,
            recording=recording,
            counting=counting,
            timed=timed_flights,
            model=recording.load_model(),
        )
    for name in [*sys.modules]:
        if name.startswith("drafters"):
            del sys.modules[name]


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash", "model"])
def test_a_trained_drafter_is_written_and_drafts_by_what_is_known_alone(
    scripts: Any, kind: str, tmp_path: Path
) -> None:
    """What is behind a place does not change what is drafted there."""
    options = argparse.Namespace(**vars(SMALL), folder=tmp_path)
    torch.manual_seed(0)
    texts = scripts.train._texts(scripts.model, options)
    scripts.train.MAKE[kind](scripts.model, texts, options)
    drafter = scripts.files.load_drafter(tmp_path, scripts.model)
    whole = scripts.recording.record(drafter, scripts.model, scripts.recording.Text(PROMPT, 4))
    assert whole.ids.shape[:2] == (len(PROMPT) - 1, scripts.recording.RANKS)
    for place in (3, 9):
        cut = scripts.recording.Text(PROMPT[: place + 2], 4)
        alone = scripts.recording.record(drafter, scripts.model, cut)
        assert torch.equal(alone.ids[place], whole.ids[place])


def test_an_eagle_head_says_words_of_its_own_and_maps_them(scripts: Any, tmp_path: Path) -> None:
    vocabulary = torch.arange(0, 4096, 3)
    eagle = scripts.train.Eagle(scripts.model, vocabulary)
    scripts.files.write_eagle(tmp_path, eagle)
    stored = load_file(tmp_path / "model.safetensors")
    n_words = json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"]
    assert torch.equal(stored["d2t"] + torch.arange(n_words), vocabulary)
    assert torch.equal(stored["t2d"].nonzero().flatten(), vocabulary)
    recorded = scripts.recording.record(eagle, scripts.model, scripts.recording.Text(PROMPT, 4))
    assert set(recorded.ids.flatten().tolist()) <= set(vocabulary.tolist())


def toy_record(scripts: Any, text: list[int], *, second: bool) -> Any:
    """Right drafts of two tokens; the first of them is the second best where `second`."""
    ids = torch.full((len(text) - 1, 2, 2, 2), -1)
    for place in range(len(text) - 3):
        ids[place, :, 0, int(second)] = text[place + 2]
        ids[place, int(second), 1, 0] = text[place + 3]
    return scripts.recording.Recorded(ids, torch.full(ids.shape, 0.5))


def test_a_tree_gives_what_its_branches_do(scripts: Any) -> None:
    text = scripts.recording.Text([*range(50)], 2)
    places = range(1, 48)
    for second, chain, tree in ((False, 3.0, 3.0), (True, 1.0, 3.0)):
        recorded = toy_record(scripts, text.ids, second=second)
        paths = {place: scripts.counting.right_path(text, recorded, place) for place in places}
        assert scripts.counting.chain_gain(text, recorded, 2) == pytest.approx(chain, abs=0.2)
        gained = scripts.counting.tree_gain(text, recorded, paths, 3)
        assert gained == pytest.approx(tree, abs=0.2)


def test_replayed_drafts_say_the_text_and_are_as_fast_as_they_are_right(scripts: Any) -> None:
    text = scripts.recording.Text([*range(3, 203)], 4)
    records = {"mtp": toy_record(scripts, text.ids, second=False)}
    records |= {"eagle3": records["mtp"], "model": toy_record(scripts, text.ids, second=True)}
    found = scripts.timed.table({"toy": text}, {"toy": records}, [2], [0.05])
    faster = {name: cell[0] for name, cell in found[0].items() if isinstance(cell, list)}
    assert faster["plain"] == 1
    assert faster["draft model elsewhere"] > 0.85
    assert min(faster["MTP, waits"], faster["MTP, flies"], faster["EAGLE-3"]) > 2
