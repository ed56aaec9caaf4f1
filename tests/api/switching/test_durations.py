"""Durations as people and programs write them."""

from __future__ import annotations

import pytest

from shardnet.api.switching.model_switch import MOST_S, parse_duration


def test_what_is_a_duration() -> None:
    written = ["90", "1.5", "30m", "1h30m", "300ms", "2d", " 5s ", "0", "999999999d"]
    seconds = [90, 1.5, 1800, 5400, 0.3, 172800, 5, 0, MOST_S]
    assert [parse_duration(text) for text in written] == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "m", "-5m", "5 m", "5m3", "1e3", "inf", "nan", "5M", "\u0665", "1s" * 99, "9" * 99]
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration such as 30m, 1h30m or 90"):
        parse_duration(text)
