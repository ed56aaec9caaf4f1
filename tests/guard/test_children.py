"""Windows' job objects: which calls are made, with what; and that nothing is done elsewhere."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator

import pytest

from shardnet.guard import children

SIZE = 144
"""Of JOBOBJECT_EXTENDED_LIMIT_INFORMATION on Windows of 64 bits."""


class Kernel32:
    """Windows' library: notes what is called, and hands out handles."""

    def __init__(self) -> None:
        self.called: list[tuple[object, ...]] = []
        self.limits = b""
        self.fails = False

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            self.called.append((name, *arguments[:3]))
            if name == "SetInformationJobObject":
                assert isinstance(arguments[2], bytes)
                self.limits = arguments[2]
            if name == "K32GetProcessMemoryInfo":
                struct.pack_into("=II9Q", arguments[1], 0, 80, 0, *[0] * 6, 1000, 0, 0)
            return 0 if self.fails else len(self.called)

        return call


@pytest.fixture
def kernel32(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel32]:
    fake = Kernel32()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(children, "library", lambda name: fake)
    for made in (children._children, children._this_process):
        made.cache_clear()
    yield fake
    for made in (children._children, children._this_process):
        made.cache_clear()


def test_children_end_with_the_process(kernel32: Kernel32) -> None:
    """All in one job, which ends with its only handle."""
    children.end_with_this_process(7)
    children.end_with_this_process(8)
    assert [name for name, *_ in kernel32.called] == [
        *("OpenProcess", "CreateJobObjectW", "SetInformationJobObject"),
        *("AssignProcessToJobObject", "CloseHandle"),
        *("OpenProcess", "AssignProcessToJobObject", "CloseHandle"),
    ]
    assert [one[3] for one in kernel32.called if one[0] == "OpenProcess"] == [7, 8]
    assert len(kernel32.limits) == SIZE
    assert struct.unpack_from("=I", kernel32.limits, 16) == (0x2000,)


def test_a_process_limits_itself(kernel32: Kernel32) -> None:
    """Its memory beyond what it has, and its processor time in steps of 100 ns."""
    children.limit_this_process(5, 1 << 20)
    children.limit_this_process(6, 2 << 20)
    assert [name for name, *_ in kernel32.called].count("AssignProcessToJobObject") == 1
    (time,), (flags,) = (
        struct.unpack_from(form, kernel32.limits, at) for form, at in (("=q", 0), ("=I", 16))
    )
    assert time >= 60_000_000
    assert flags == 0x502
    assert struct.unpack_from("=Q", kernel32.limits, 112) == (1000 + (2 << 20),)


def test_what_windows_refuses_costs_only_the_limit(
    kernel32: Kernel32, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 5, raising=False)
    monkeypatch.setattr(ctypes, "FormatError", lambda code: "Access is denied. ", raising=False)
    kernel32.fails = True
    children.end_with_this_process(7)
    children.limit_this_process(5, 1 << 20)
    assert kernel32.limits == b""


def test_elsewhere_windows_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "library", None)
    children.end_with_this_process(7)
    children.limit_this_process(5, 1 << 20)
