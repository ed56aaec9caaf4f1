"""Proxies that cannot be used, and URLs in the place of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardnet.api.requests import name_model
from shardnet.checkpoint.hub_cache import HubName
from shardnet.cluster.download.hub import check_proxies, pull
from shardnet.errors import HubError, ShardnetError, UsageError

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize(
    ("proxy", "words"),
    [
        ("none://anna:secret@host:1", "cannot be used"),
        ("http://anna:sec/ret@host:1", "cannot be used"),
        ("http://anna:secret@host:port", "cannot be used"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proxy: str, words: str
) -> None:
    """By the variables that may hold it, and not by its password."""
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    asks = (
        check_proxies,
        lambda: pull(HubName(repo="org/name"), lambda *_: None, root=tmp_path),
    )
    for ask in asks:
        with pytest.raises(ShardnetError, match=words) as caught:
            ask()
        assert "HTTPS_PROXY" in str(caught.value)
        assert "sec" not in str(caught.value).replace("special", "")


def test_a_proxy_that_does_not_answer_is_thought_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="the proxy that the environment names"):
        pull(HubName(repo="org/name"), lambda *_: None, root=tmp_path)


def test_a_url_is_no_model_and_is_told_what_to_do() -> None:
    with pytest.raises(UsageError, match="download the file and give its path") as caught:
        name_model("https://anna:secret@host/a.gguf")
    assert "secret" not in str(caught.value)
