"""Proxies that cannot be used, and URLs in the place of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import close_session  # type: ignore[attr-defined]
from support.models.checkpoints import make_llama
from support.servers.hub_server import COMMIT, open_hub

from shardnet.api.requests import name_model
from shardnet.checkpoint.hub_cache import HubName
from shardnet.cluster.download import hub, hub_ranges
from shardnet.cluster.download.hub import check_proxies, pull
from shardnet.cluster.download.hub_layers import pull_layers
from shardnet.cluster.store.model_cache import ModelCache
from shardnet.errors import CheckpointError, HubError, ShardnetError, UsageError
from shardnet.types import LayerRange

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


FILE = hub.HubFile(name="model.safetensors", size_bytes=100 << 20, sha256="")


def counter() -> hub._Counter:
    model = HubName.parse("a/b")
    assert model is not None
    return hub._Counter(lambda *_: None, model, FILE, 7, 7 + FILE.size_bytes)


def test_a_download_that_starts_over_without_coming_further_ends() -> None:
    """A server that ignores where to resume, and a connection that breaks after each MiB."""
    counting = counter()
    for _ in range(hub.MAX_IN_VAIN):
        counting.update(1 << 20)
        counting.update(-1 << 20)
    counting.update(1 << 20)
    with pytest.raises(HubError, match=r"model\.safetensors starts over .* 1048576 bytes"):
        counting.update(-1 << 20)


def test_a_download_that_comes_further_each_time_goes_on() -> None:
    counting = counter()
    for n_bytes in range(1 << 20, 20 << 20, 1 << 20):
        counting.update(n_bytes)
        counting.update(-n_bytes)
    counting.update(FILE.size_bytes)


def test_more_bytes_than_announced_end_a_download() -> None:
    counting = counter()
    counting.update(FILE.size_bytes)
    with pytest.raises(HubError, match=r"more of model\.safetensors came than the 104857600 bytes"):
        counting.update(20 << 20)


def test_a_header_ends_within_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    content = (4).to_bytes(8, "little") + b"{  }"
    ranges = hub_ranges.HubRanges(HubName(repo="org/name"), COMMIT)
    monkeypatch.setattr(ranges, "stream", lambda _, begin, end: iter([content[begin:end]]))
    assert ranges.header(replace(FILE, size_bytes=12)) == content
    for size_bytes in (7, 11):
        with pytest.raises(HubError, match=r"model\.safetensors is no safetensors file"):
            ranges.header(replace(FILE, size_bytes=size_bytes))


@pytest.mark.parametrize(
    ("commit", "n_files", "why"),
    [
        ("../../evil", 1, r"commit '\.\./\.\./evil'"),
        ("a" * 40, 20_001, "lists 20001 files"),
        ("a" * 40, 1, "no weights that are read here"),
    ],
)
def test_a_listing_that_no_hub_gives_is_refused(
    commit: str, n_files: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    files = [
        SimpleNamespace(rfilename=f"../../{n}.safetensors", size=1, lfs=None)
        for n in range(n_files)
    ]

    def info(*_: object, **__: object) -> object:
        return SimpleNamespace(siblings=files, sha=commit)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    model = HubName.parse("a/b")
    assert model is not None
    with pytest.raises(ShardnetError, match=why):
        hub.look_up(model, tmp_path)


def test_nothing_is_downloaded_of_a_model_without_the_tokenizer_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF has its own; where none is needed, the download begins."""
    names = ["config.json", "model.safetensors"]
    begun: list[str] = []

    def look_up(*_: object) -> tuple[str, list[hub.HubFile]]:
        return "a" * 40, [hub.HubFile(name=name, size_bytes=9, sha256="") for name in names]

    def fetch(_name: object, _commit: object, file: hub.HubFile, *_: object) -> None:
        begun.append(file.name)
        raise HubError("begun")

    monkeypatch.setattr(hub, "look_up", look_up)
    monkeypatch.setattr(hub, "_fetch", fetch)
    model = HubName(repo="org/name")
    with pytest.raises(CheckpointError, match=r"org/name has no tokenizer .*, which text needs"):
        pull(model, lambda *_: None, root=tmp_path, tokenizer_for="text")
    assert not begun
    for files, tokenizer_for in ((names, ""), ([*names, "tekken.json"], "text"), (["a.gguf"], "-")):
        names = files
        with pytest.raises(HubError, match="begun"):
            pull(model, lambda *_: None, root=tmp_path, tokenizer_for=tokenizer_for)
    assert begun == ["config.json", "config.json", "a.gguf"]


def point_at(address: str, patch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub ask a Hub at another address."""
    patch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


REFUSING = "http://127.0.0.1:9"


@pytest.mark.parametrize("is_away", [True, False])
def test_a_download_waits_for_a_network_or_a_hub_that_comes_back(
    *, is_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not try again at once only, when nothing can have changed."""
    with open_hub() as served:
        served.repos["a/b"], served.commits["a/b"] = {"f.bin": bytes(range(200))}, COMMIT
        waited: list[float] = []

        def wait(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 3:
                point_at(served.address, monkeypatch)
                served.fails_with = 0

        monkeypatch.setattr(hub_ranges, "sleep", wait)
        point_at(REFUSING if is_away else served.address, monkeypatch)
        served.fails_with = 503
        name = HubName.parse("a/b")
        assert name is not None
        ranges = hub_ranges.HubRanges(name, COMMIT)
        assert b"".join(ranges.stream("f.bin", 5, 200)) == bytes(range(5, 200))
        assert waited == [0, 2, 5]
        served.fails_with = 503
        with pytest.raises(HfHubHTTPError, match="503"):
            b"".join(ranges.stream("f.bin", 0, 1))
        close_session()
        assert waited[3:] == [*hub_ranges.WAITS_S]


def test_layers_of_an_encoder_come_without_what_replicas_do_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sentence-transformers lays such models out."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    beside = {"modules.json": b"[]", "1_Pooling/config.json": b"{}"}
    with open_hub() as served:
        served.add("a/b", make_llama(tmp_path / "model"), **beside)
        point_at(served.address, monkeypatch)
        name = HubName.parse("a/b")
        assert name is not None
        cache = ModelCache(tmp_path / "cache")
        pulled = pull_layers(name, LayerRange(0, 1), lambda *_: None, cache)
        close_session()
    assert pulled.n_new_bytes
    [held] = cache.models()
    assert held.name == "a/b"


@pytest.mark.parametrize("has_links", [True, False])
def test_a_model_is_kept_once_with_links_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Windows makes links for developers and administrators alone; there files are in snapshots."""
    supported = "huggingface_hub.file_download.are_symlinks_supported"
    monkeypatch.setattr(supported, lambda cache_dir=None: has_links)
    with open_hub() as served:
        served.add("a/b", make_llama(tmp_path / "model"))
        point_at(served.address, monkeypatch)
        name = HubName(repo="a/b")
        for _ in range(2):
            folder = pull(name, lambda *_: None, root=tmp_path / "hub").folder
        close_session()
    n_asked = sum(asked.startswith("GET model.safetensors") for asked in served.asked)
    assert n_asked == 1
    weights = folder / "model.safetensors"
    assert weights.is_symlink() == has_links
    size_bytes = weights.stat().st_size
    every = [path for path in (tmp_path / "hub").rglob("*") if not path.is_symlink()]
    assert sum(path.stat().st_size == size_bytes for path in every if path.is_file()) == 1


def test_a_drive_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no root above all drives."""
    monkeypatch.setattr(Path, "exists", lambda path: False)
    with pytest.raises(HubError, match="there is no drive of"):
        hub.check_room("it", 1, Path("no-root/hub"), else_do="wait", error=HubError)
