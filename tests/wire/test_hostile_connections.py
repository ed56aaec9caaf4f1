"""The corpus of hostile handshakes, and some more made from it: each ends in a documented error."""

from __future__ import annotations

import re
from itertools import product

import pytest
from support.hostile.mutate_connections import HANDSHAKES, fuzz_handshakes, shake_hands
from support.hostile.receive_frames import Finding

from shardnet.errors import LinkError
from shardnet.wire.connection import connection as connection_module
from shardnet.wire.framing.frames import Frame

COME_UP = ("hello-twice.bin", "hello-unknown-key.bin", "up-and-a-damaged-frame.bin")
FILES = sorted(path.name for path in HANDSHAKES.glob("*.bin"))


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_handshake_ends_by_name(name: str) -> None:
    data = (HANDSHAKES / name).read_bytes()
    for initiator, checked in product((True, False), repeat=2):
        is_up, error = shake_hands(data, initiator=initiator, checked=checked)
        assert isinstance(error, LinkError)
        assert is_up == (name in COME_UP)


def test_the_readme_names_every_handshake_once() -> None:
    text = (HANDSHAKES / "README.md").read_text()
    assert re.findall(r"^\| `(.+\.bin)` \|", text, re.MULTILINE) == FILES


def test_mutated_handshakes_end_in_documented_errors() -> None:
    figures = fuzz_handshakes(1000, seed=1)
    assert figures.n_read > 50, "mutations that never come up test little"
    assert figures.n_refused > 500
    assert figures.slow == []


def test_the_fuzzer_finds_an_error_that_is_not_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(frame: Frame) -> object:
        raise KeyError("purpose")

    monkeypatch.setattr(connection_module, "read_hello", broken)
    with pytest.raises(Finding, match="KeyError"):
        fuzz_handshakes(100, seed=1)
