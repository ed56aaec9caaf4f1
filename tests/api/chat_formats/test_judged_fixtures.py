"""What models write, judged by canitoolcall: its fixtures, read by our parsers.

docs/tool-calls.md has the numbers.
"""

from __future__ import annotations

from functools import cache

import pytest
from canitoolcall.fixtures import Fixture, load_fixtures
from support import soak
from support.chat_formats.judged import judge

N_FIXTURES = {
    "deepseek": 85,
    "gemma4": 48,
    "glm": 51,
    "gpt-oss": 51,
    "kimi": 49,
    "llama": 34,
    "mistral": 47,
    "qwen3-hermes": 50,
    "qwen3-xml": 54,
}
SOFT = {"gemma4/vllm-text-before-call"}
"""Where another fixture of the family wants the opposite: space before a call is content."""

ALL_WAYS: tuple[str, ...] = ()


@cache
def fixtures() -> dict[str, list[Fixture]]:
    found: dict[str, list[Fixture]] = {}
    for fixture in load_fixtures():
        found.setdefault(fixture.family, []).append(fixture)
    return found


@pytest.mark.parametrize("family", N_FIXTURES)
@pytest.mark.parametrize("ways", soak.cases([("rand:1:8",)], [ALL_WAYS]), ids=str)
def test_every_fixture_passes(family: str, ways: tuple[str, ...]) -> None:
    """At once as an answer that is not streamed, and streamed in these ways."""
    verdicts = {fixture.id: judge(fixture, only=ways) for fixture in fixtures()[family]}
    assert len(verdicts) == N_FIXTURES[family]
    not_passed = {
        name: verdict.why for name, verdict in verdicts.items() if verdict.status != "pass"
    }
    assert not_passed == dict.fromkeys(SOFT & verdicts.keys(), "")


def test_no_family_is_left_out() -> None:
    assert fixtures().keys() == N_FIXTURES.keys()
