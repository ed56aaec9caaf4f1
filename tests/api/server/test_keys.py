"""API keys: how they are written, found and limited."""

from __future__ import annotations

import pytest

from shardnet.api.server.keys import ApiKey, Keyring, parse_key
from shardnet.errors import ConfigurationError


def test_a_key_has_a_name_and_a_limit() -> None:
    assert parse_key("s3cret", 2) == ApiKey(name="2", secret="s3cret")
    assert parse_key("alice:s3cret", 1) == ApiKey(name="alice", secret="s3cret")
    assert parse_key(" alice:s3cret:8\n", 1).most_requests == 8
    both = ApiKey(name="alice", secret="s3cret", most_requests=8, tokens_per_minute=500)
    assert parse_key("alice:s3cret:8:500", 1) == both


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:",
        ":b",
        "a:b:c",
        "a:b:1:2:3",
        "a:b:1:c",
        "a:b:-1",
        "ä:b",
        "a:b:²",
        "a:b:" + 5000 * "9",
    ],
)
def test_what_is_no_key_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ConfigurationError, match="API key 3"):
        parse_key(text, 3)


def test_a_limit_behind_a_key_without_a_name_is_not_taken_for_the_key() -> None:
    with pytest.raises(ConfigurationError, match=r"reads as the KEY of .*write NAME:KEY:LIMIT"):
        parse_key("s3cret:4", 1)
    assert parse_key("4", 1).secret == "4"
    assert parse_key("alice:1234567", 1).secret == "1234567"


def test_a_key_is_found_by_its_whole_secret() -> None:
    keys = Keyring([parse_key("a:one", 1), parse_key("b:two", 2)])
    found = keys.find("two")
    assert found is not None
    assert found.name == "b"
    assert [keys.find(wrong) for wrong in ("", "on", "onee", "a", "ü")] == [None] * 5


def test_two_of_one_name_or_secret_are_refused() -> None:
    for texts in (("a:one", "a:two"), ("a:one", "b:one")):
        with pytest.raises(ConfigurationError, match="two API keys"):
            Keyring([parse_key(text, number) for number, text in enumerate(texts)])


def test_a_limit_is_of_requests_at_once() -> None:
    limited, free = parse_key("a:one:1", 1), parse_key("b:two", 2)
    keys = Keyring([limited, free])
    with keys.place(limited) as first, keys.place(limited) as second, keys.place(free) as third:
        assert (first, second, third) == (True, False, True)
    with keys.place(limited) as again:
        assert again


def test_a_limit_is_of_tokens_a_minute() -> None:
    """Those of a minute at once, then as many as the minutes give."""
    limited, free = parse_key("a:one:0:600", 1), parse_key("b:two", 2)
    keys = Keyring([limited, free])
    keys.spend(free, 10**9, 0.0)
    assert keys.wait_s(free, 0.0) == 0
    for now_s, n_tokens, wait_s in ((50.0, 500, 0.0), (50.0, 400, 30.0), (80.0, 10, 1.0)):
        keys.spend(limited, n_tokens, now_s)
        assert keys.wait_s(limited, now_s) == wait_s
    assert keys.wait_s(limited, 81.0) == 0
    keys.spend(limited, 600, 1000.0)
    assert keys.wait_s(limited, 1000.0) == 0
