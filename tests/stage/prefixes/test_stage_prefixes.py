"""From a slot to files and back, while the slot is written."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.soak import examples

from shardnet.errors import UsageError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.stage.prefixes import stage_prefixes
from shardnet.stage.prefixes.prefix_store import PrefixStore
from shardnet.stage.prefixes.stage_prefixes import StagePrefixes
from shardnet.types import SequenceId, SlotId

KEYS = [bytes([number]) * 16 for number in range(4)]
SLOT, OTHER = SlotId(0), SlotId(1)
ONE = SequenceId(1)


class Stage:
    """A cache of two layers, the second with a window, whose prefixes are on disk."""

    def __init__(self, folder: Path, limit_bytes: int = 1 << 30, room_blocks: int = 16) -> None:
        cpu = torch.device("cpu")
        sizes = (2, 1, 4, torch.float32, cpu, room_blocks)
        self.kv = KvCache(*sizes, windows=(None, 300), value_size=0)
        files = PrefixStore(folder, limit_bytes).of_stage("a", "/m", "layers 0-1")
        self.prefixes = StagePrefixes(self.kv, files)

    def fill(self, slot: SlotId, n_positions: int, begin: int = 0, value: float = 0.0) -> None:
        """Write rows in steps of 256: each holds its position, and `value`."""
        for start in range(begin, n_positions, 256):
            end = min(n_positions, start + 256)
            self.kv.ensure(slot, end, end - start)
            for layer in range(2):
                keys, _ = self.kv.layer(slot, layer)
                first = self.kv.first(slot, layer)
                keys[0, start - first : end - first, 0] = torch.arange(start, end) + value

    def rows(self, slot: SlotId, layer: int) -> list[float]:
        return self.kv.layer(slot, layer)[0][0, :, 0].tolist()


class OnDevice:
    """A cache that says it is on a GPU."""

    device = torch.device("cuda")

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.prefixes.close()


def restorable(stage: Stage, n_keys: int = 4) -> list[int]:
    bits = int.from_bytes(stage.prefixes.restorable(KEYS[:n_keys]), "little")
    return [n_blocks for n_blocks in range(1, n_keys + 1) if bits >> n_blocks - 1 & 1]


def test_a_slot_comes_back_as_far_as_windows_reach(stage: Stage) -> None:
    """Of the layer with a window only the last blocks are there: shorter beginnings are not."""
    stage.fill(SLOT, 1000)
    stage.prefixes.save(SLOT, KEYS[:3])
    stage.prefixes.settle(10.0)
    assert restorable(stage) == [3]
    assert stage.prefixes.restore(ONE, KEYS[:3], range(768))
    assert stage.prefixes.adopt(ONE, OTHER, 768) == range(768)
    assert stage.rows(OTHER, 0) == [*range(768)]
    assert stage.rows(OTHER, 1) == [*range(256, 768)]
    assert stage.kv.blocks_used == 4 + 3
    stage.fill(OTHER, 800, begin=768)
    assert stage.rows(OTHER, 0)[:800] == [*range(800)]


def test_a_beginning_may_fill_the_room(stage: Stage, tmp_path: Path) -> None:
    stage.fill(SLOT, 512)
    stage.prefixes.save(SLOT, KEYS[:2])
    stage.prefixes.settle(10.0)
    for room_blocks, comes in ((1, False), (2, True)):
        other = Stage(tmp_path, room_blocks=room_blocks)
        assert other.prefixes.restore(ONE, KEYS[:2], range(512)) is comes
        other.prefixes.close()


def test_rows_that_are_written_before_the_disk_has_them_are_not_kept(stage: Stage) -> None:
    """The writer is held up while the slot is rewound to 300 and another prompt goes on there."""
    stage.fill(SLOT, 512)
    go = threading.Event()
    stage.prefixes._thread.submit(go.wait)
    stage.prefixes.save(SLOT, KEYS[:2])
    stage.fill(SLOT, 512, begin=300, value=0.5)
    go.set()
    stage.prefixes.settle(10.0)
    assert restorable(stage) == [1]
    assert stage.prefixes.restore(ONE, KEYS[:1], range(256))
    stage.prefixes.adopt(ONE, OTHER, 256)
    assert stage.rows(OTHER, 0) == [*range(256)]


def test_a_slot_that_is_freed_or_grows_meanwhile_is_kept_as_it_was(stage: Stage) -> None:
    stage.fill(SLOT, 512)
    go = threading.Event()
    stage.prefixes._thread.submit(go.wait)
    stage.prefixes.save(SLOT, KEYS[:2])
    stage.kv.free(SLOT)
    stage.fill(SLOT, 512, value=0.5)
    go.set()
    stage.prefixes.settle(10.0)
    assert stage.prefixes.restore(ONE, KEYS[:2], range(512))
    stage.prefixes.adopt(ONE, OTHER, 512)
    assert stage.rows(OTHER, 0) == [*range(512)]


def test_slots_that_wait_for_a_slow_disk_hold_little_memory(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_prefixes, "MAX_WAITING_BYTES", 3 * stage.prefixes.block_bytes)
    go = threading.Event()
    stage.prefixes._thread.submit(go.wait)
    for slot, keys in ((SLOT, KEYS[:2]), (OTHER, KEYS[2:])):
        stage.fill(slot, 512)
        stage.prefixes.save(slot, keys)
    go.set()
    stage.prefixes.settle(10.0)
    assert restorable(stage) == [1, 2]
    assert stage.prefixes.figures.saved == 512


def test_a_prompt_that_never_fits_whole_drives_no_other_from_the_disk(stage: Stage) -> None:
    """With windows its end is what counts: without that its beginning is worth nothing."""
    stage.fill(SLOT, 512)
    stage.prefixes.save(SLOT, KEYS[:2])
    stage.prefixes.settle(10.0)
    stage.prefixes.files.store.limit_bytes = 3 * stage.prefixes.block_bytes
    stage.fill(OTHER, 5 * 256)
    stage.prefixes.save(OTHER, [bytes([number]) * 16 for number in range(10, 15)])
    stage.prefixes.settle(10.0)
    assert restorable(stage) == [1, 2]


def test_only_what_was_read_whole_for_a_sequence_is_adopted(stage: Stage) -> None:
    stage.fill(SLOT, 512)
    stage.prefixes.save(SLOT, KEYS[:2])
    stage.prefixes.settle(10.0)
    assert not stage.prefixes.restore(ONE, KEYS[:3], range(768))
    assert not stage.prefixes.restore(ONE, KEYS[:2], range(511))
    assert not stage.prefixes.restore(ONE, KEYS * 5, range(20 * 256))
    with pytest.raises(UsageError, match="512 positions were not read for sequence 1"):
        stage.prefixes.adopt(ONE, OTHER, 512)
    two, three = SequenceId(2), SequenceId(3)
    are_read = [stage.prefixes.restore(each, KEYS[:2], range(512)) for each in (ONE, two, three)]
    assert are_read == [True, True, False]  # two that wait are the most
    with pytest.raises(UsageError, match="256 positions"):
        stage.prefixes.adopt(two, OTHER, 256)
    assert stage.prefixes.restore(three, KEYS[:2], range(512))
    assert stage.prefixes.restore(three, (), ())
    with pytest.raises(UsageError, match="sequence 3"):
        stage.prefixes.adopt(three, OTHER, 512)
    stage.prefixes.adopt(ONE, OTHER, 512)
    assert stage.rows(OTHER, 0) == [*range(512)]


def test_of_a_slot_on_a_device_only_what_is_missing_is_copied(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.prefixes, "_kv", OnDevice(stage.kv))
    for n_blocks in (1, 3):
        stage.fill(SLOT, n_blocks * 256, begin=stage.kv.blocks_used * 256)
        go = threading.Event()
        stage.prefixes._thread.submit(go.wait)
        stage.prefixes.save(SLOT, KEYS[:n_blocks])
        [saving] = stage.prefixes._saving
        go.set()
        stage.prefixes.settle(10.0)
    assert saving.contents.firsts == [256, 256]
    assert saving.contents.keys[0].shape[1] == 512
    assert stage.prefixes.restore(ONE, KEYS[:3], range(768))
    stage.prefixes.adopt(ONE, OTHER, 768)
    assert stage.rows(OTHER, 0) == [*range(768)]
    assert stage.rows(OTHER, 1) == [*range(256, 768)]


def test_what_comes_from_a_crowded_folder_is_always_what_was_asked_for(tmp_path: Path) -> None:
    """Two nodes write and read four prompts in room for about two, and files get damaged."""
    choices = random.Random(0)
    stages = [Stage(tmp_path, limit_bytes=10 * 2 * 256 * 4 * 4) for _ in range(2)]
    n_read = n_missing = 0
    for number in range(examples(150)):
        stage, prompt = choices.choice(stages), choices.randrange(4)
        n_blocks = choices.randint(1, 4)
        keys = [bytes([prompt, block]) * 8 for block in range(n_blocks)]
        if choices.random() < 0.4:
            stage.fill(SLOT, n_blocks * 256 + 1, value=1e4 * prompt)
            stage.prefixes.save(SLOT, keys)
            stage.kv.free(SLOT)
            if choices.random() < 0.7:
                stage.prefixes.settle(10.0)
        elif stage.prefixes.restore(ONE, keys, range(n_blocks * 256)):
            stage.prefixes.adopt(ONE, OTHER, n_blocks * 256)
            expected = [position + 1e4 * prompt for position in range(n_blocks * 256)]
            if stage.rows(OTHER, 0) != expected:
                break
            if stage.rows(OTHER, 1) != expected[stage.kv.first(OTHER, 1) :]:
                break
            n_read += 1
        else:
            n_missing += 1
        files = [*tmp_path.glob("*/*.kv"), *tmp_path.glob("*/*.w300")]
        if number % 20 == 19 and files:
            damaged = choices.choice(files)
            with contextlib.suppress(FileNotFoundError):
                damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    for stage in stages:
        stage.prefixes.settle(10.0)
        stage.prefixes.close()
    assert number == examples(150) - 1
    assert n_read > 10
    assert n_missing > 10
