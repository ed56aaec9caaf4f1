"""What of a URL is shown, and proxies that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.servers.web_server import open_web

from shardnet.api.requests import name_model
from shardnet.checkpoint.hub_cache import HubName
from shardnet.cluster.download.hub import pull
from shardnet.cluster.download.web_address import check_proxies, shown, split_url
from shardnet.cluster.download.web_file import download
from shardnet.errors import HubError, ShardnetError, UsageError

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("https://host:1/a/b.gguf", "https://host:1/a/b.gguf"),
        ("https://anna:secret@host:1/b.gguf", "https://host:1/b.gguf"),
        ("https://anna:se@cret@host/a@b", "https://host/a@b"),
        ("https://anna:secret@host", "https://host"),
        ("https://host/b.gguf?token=secret/@x", "https://host/b.gguf"),
        ("https://anna:secret@host?token=secret", "https://host"),
    ],
)
def test_no_secret_of_a_url_is_shown(url: str, seen: str) -> None:
    assert shown(url) == seen


@pytest.mark.parametrize(
    "url",
    ["http://anna:sec/ret@host/a", "http://host:99999/secret", "http://[::1/secret"],
)
def test_a_malformed_url_is_not_repeated(url: str) -> None:
    with pytest.raises(HubError, match="this URL is malformed") as caught:
        split_url(url)
    assert "sec" not in str(caught.value).replace("special", "")


def test_a_failed_download_shows_no_password(tmp_path: Path) -> None:
    with open_web() as web:
        host = web.address.removeprefix("http://")
        with pytest.raises(HubError, match="the server answered 404") as caught:
            download(f"http://anna:secret@{host}/a.gguf?k=secret", tmp_path, lambda *_: None)
        assert "secret" not in str(caught.value)
        web.files["/b.gguf?k=secret"] = b"1234"
        web.cuts = [2, 0, 0, 0, 0, 0]
        with pytest.raises(HubError, match="go on where it stopped") as caught:
            download(f"http://anna:secret@{host}/b.gguf?k=secret", tmp_path, lambda *_: None)
    assert "secret" not in str(caught.value)
    [note] = tmp_path.glob("*.part.json")
    assert "secret" not in json.dumps(json.loads(note.read_text()))


@pytest.mark.parametrize(
    ("proxy", "words"),
    [
        ("none://anna:secret@host:1", "is none that can be used"),
        ("http://anna:sec/ret@host:1", "is none that can be used"),
        ("http://anna:secret@host:port", "is none that can be used"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proxy: str, words: str
) -> None:
    """By the variables that may hold it, and not by its password."""
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    asks = (
        check_proxies,
        lambda: download("http://127.0.0.1:9/a.gguf", tmp_path, lambda *_: None),
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
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="the proxy that the environment names"):
        download("http://127.0.0.1:8/a.gguf", tmp_path, lambda *_: None)


def test_a_url_is_no_model_and_is_told_what_to_do() -> None:
    with pytest.raises(UsageError, match="download it with `shardnet pull`") as caught:
        name_model("https://anna:secret@host/a.gguf")
    assert "secret" not in str(caught.value)
