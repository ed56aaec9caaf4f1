"""The corpus of hostile frames, and some more made from it: refused at once, in little memory."""

from __future__ import annotations

import re
import time
import tracemalloc
from pathlib import Path

import pytest
from support.hostile.mutate_frames import corpus_frames
from support.hostile.receive_frames import (
    PURPOSES,
    READERS,
    SLOW_S,
    Finding,
    fuzz_frames,
    receive,
)

from shardnet.wire.framing.frames import HEADER, KIB, Frame, FrameKind
from shardnet.wire.messages.bulk import read_bulk
from shardnet.wire.messages.handshake import Purpose

FOLDER = Path(__file__).parents[1] / "hostile" / "frames"
FRAMES = sorted(path.name for path in FOLDER.glob("*.bin"))
MOST_BYTES = 3 * 1024 * KIB


@pytest.mark.parametrize("name", FRAMES)
def test_a_hostile_frame_is_refused_at_once(name: str) -> None:
    data = (FOLDER / name).read_bytes()
    kind = data[2]
    purpose = PURPOSES.get(kind, Purpose.DATA)
    receive(data, purpose)  # takes what is imported at first use
    began = time.process_time()
    tracemalloc.start()
    try:
        n_read, n_refused = receive(data, purpose)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (n_read, n_refused > 0) == (0, True)
    assert time.process_time() - began < SLOW_S
    assert peak_bytes < MOST_BYTES + len(data) * 20


def test_the_readme_names_every_frame_once() -> None:
    written = re.findall(r"^\| `(.+\.bin)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert written == FRAMES


def test_mutated_frames_end_in_documented_errors() -> None:
    figures = fuzz_frames(2000, seed=1)
    assert figures.n_frames == 2000
    assert figures.n_read > 100, "mutations that are never read test decoders little"
    assert figures.n_refused > 1000
    assert figures.slow == []


def test_what_the_corpus_begins_is_fuzzed_too() -> None:
    frames = corpus_frames()
    assert len(frames) > len(FRAMES) // 2
    assert fuzz_frames(500, seed=2, frames=frames).slow == []


def test_the_fuzzer_finds_an_error_that_is_not_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(frame: Frame) -> object:
        if len(frame.meta) > 40:
            raise IndexError("list index out of range")
        return read_bulk(frame)

    monkeypatch.setitem(READERS, FrameKind.BULK, broken)
    with pytest.raises(Finding, match="IndexError") as found:
        fuzz_frames(2000, seed=1)
    assert len(found.value.data) >= HEADER.size
