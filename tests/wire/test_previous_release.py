"""The wire's messages against those of the release before: nothing goes, what is added is optional.

tests/golden/release_messages.txt has the rows of docs/protocol.md as they were in that release;
`scripts/release` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from support.protocol.protocol_notation import STRUCTS, fields_of

from shardnet.wire.messages.handshake import Capability

DOCUMENT = Path(__file__).parents[2] / "docs" / "protocol.md"
RELEASED = Path(__file__).parents[1] / "golden" / "release_messages.txt"

WIDENED: Final[dict[str, str]] = {}
"""Fields whose type takes more than in the release before, and the capability that tells it."""

GUARDED: Final = {
    "SamplingParams": Capability.SAMPLERS,
    "PlanRequest": Capability.WHAT_IF,
    "LeaveRing": Capability.UPDATE,
    "Generate": Capability.THOUGHTS,
    "LoadStage": Capability.BORDER_WIDTH,
}
"""Messages that the release before refuses with a key more, and the capability without which none
is sent.
"""


def split(fields: str) -> dict[str, str]:
    """The fields of a row, each with its type and default; "?" stands for that of an optional."""
    parts, depth, begin, quoted = [], 0, 0, False
    for at, letter in enumerate(fields + ","):
        quoted ^= letter == '"'
        depth += (letter in "[{") - (letter in "]}") if not quoted else 0
        if letter == "," and depth == 0 and not quoted:
            parts.append(fields[begin:at].strip())
            begin = at + 1
    told = [part.partition(": ") for part in parts if part]
    return {name.rstrip("?"): ("? " if name.endswith("?") else "") + kind for name, _, kind in told}


def changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """What a node of the release before would stumble over, of messages and their fields."""
    found = []
    for name, fields in before.items():
        old, new = split(fields), split(now.get(name, ""))
        for field in old.keys() - new.keys():
            found.append(f"{name}.{field} is gone")
        for field in new.keys() - old.keys():
            if not (new[field].startswith("? ") or " = " in new[field]):
                found.append(f"{name}.{field} is new and has no default")
        for field in old.keys() & new.keys():
            if new[field] != old[field] and f"{name}.{field}" not in WIDENED:
                found.append(f"{name}.{field} was {old[field]} and is {new[field]}")
        if name not in now:
            found.append(f"{name} is gone")
    return found


def test_messages_are_those_of_the_release_before_and_more() -> None:
    rows = RELEASED.read_text(encoding="utf-8").splitlines()
    before = {name: fields for name, _, fields in (row.partition(" | ") for row in rows)}
    assert len(before) > 100
    assert changes(before, {name: fields_of(kind) for name, kind in STRUCTS.items()}) == []


def test_what_refuses_other_keys_has_further_ones_only_by_a_capability() -> None:
    rows = RELEASED.read_text(encoding="utf-8").splitlines()
    before = {name: fields for name, _, fields in (row.partition(" | ") for row in rows)}
    grown = {
        name
        for name, kind in STRUCTS.items()
        if kind.__struct_config__.forbid_unknown_fields
        and name in before
        and split(fields_of(kind)).keys() > split(before[name]).keys()
    }
    assert grown == {*GUARDED}
    section = DOCUMENT.read_text(encoding="utf-8").split("**Releases.**")[1].split("```")[0]
    for name, capability in GUARDED.items():
        assert re.search(rf"^\| `{capability}` \|.*{name}", section, re.MULTILINE), name


def test_a_change_that_a_release_before_would_stumble_over_is_seen() -> None:
    row = {"Ask": 'request: u63, how: "a" or "b, c" = "a", many: [[u32, u32]](3) = [], last?: u32'}
    assert changes(row, row) == []
    assert changes(row, {"Ask": row["Ask"] + ", more: u32 = 0, still?: u32"}) == []
    assert changes(row, {"Ask": row["Ask"] + ", more: u32"}) == [
        "Ask.more is new and has no default"
    ]
    assert changes(row, {"Ask": row["Ask"].replace("last?", "last")}) == [
        "Ask.last was ? u32 and is u32"
    ]
    assert changes(row, {"Ask": re.sub(r'how: .*? = "a", ', "", row["Ask"])}) == ["Ask.how is gone"]
    assert "Ask is gone" in changes(row, {})


def test_the_document_lists_the_capabilities_of_hellos() -> None:
    section = DOCUMENT.read_text(encoding="utf-8").split("**Releases.**")[1].split("```")[0]
    assert re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE) == [*Capability]
