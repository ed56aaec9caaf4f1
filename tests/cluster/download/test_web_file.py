"""One file from a URL: what breaks, what lies, and what is left behind."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.web_server import Web, open_web

from shardnet.cluster.download import web_file
from shardnet.cluster.download.web_file import WebFile, download, file_name
from shardnet.cluster.machine import disk_room
from shardnet.errors import HubError

DATA = random.Random(5).randbytes(3_000_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def web() -> Iterator[Web]:
    with open_web() as web:
        web.files["/models/tiny.gguf"] = DATA
        yield web


def fetch(web: Web, folder: Path, *, sha256: str = "", path: str = "/models/tiny.gguf") -> WebFile:
    return download(web.address + path, folder, lambda *_: None, sha256=sha256)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_comes_with_its_digest_and_only_once(web: Web, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    url = f"{web.address}/models/tiny.gguf?download=true"
    web.files["/models/tiny.gguf?download=true"] = DATA
    file = download(url, tmp_path / "new", lambda *news: seen.append(news))
    assert file.path == tmp_path / "new" / "tiny.gguf"
    assert file.path.read_bytes() == DATA
    assert (file.sha256, file.size_bytes, file.n_new_bytes) == (SHA256, len(DATA), len(DATA))
    assert names(file.path.parent) == {"tiny.gguf"}
    assert seen[-1] == ("tiny.gguf", len(DATA), len(DATA))
    again = download(url, tmp_path / "new", lambda *_: None, sha256=SHA256.upper())
    assert again.n_new_bytes == 0
    assert len(web.asked) == 1


def test_broken_connections_are_gone_on_with(web: Web, tmp_path: Path) -> None:
    web.cuts = [1_000_000, 500_000]
    file = fetch(web, tmp_path)
    assert (file.path.read_bytes(), file.sha256) == (DATA, SHA256)
    starts = [0, *(int(a.partition("bytes=")[2].removesuffix("-")) for a in web.asked[1:])]
    assert len(starts) == 3
    assert 0 < starts[1] <= 1_000_000 < starts[2] <= 1_500_000


def test_a_later_command_goes_on_with_what_an_earlier_one_left(web: Web, tmp_path: Path) -> None:
    web.cuts = [2_000_000]

    class GivenUp(Exception):
        pass

    def give_up(file: str, done: int, total: int) -> None:
        if done > 1_000_000:
            raise GivenUp

    with pytest.raises(GivenUp):
        download(f"{web.address}/models/tiny.gguf", tmp_path, give_up)
    assert "tiny.gguf" not in names(tmp_path)
    web.cuts = []
    file = fetch(web, tmp_path)
    assert (file.path.read_bytes(), file.sha256) == (DATA, SHA256)
    assert file.n_new_bytes < 2_000_000


def test_what_two_programs_have_written_is_not_kept(web: Web, tmp_path: Path) -> None:
    def write_too(file: str, done: int, total: int) -> None:
        with (tmp_path / "tiny.gguf.part").open("ab") as part:
            part.write(b"of another download")

    with pytest.raises(HubError, match="another program wrote into it too"):
        download(f"{web.address}/models/tiny.gguf", tmp_path, write_too)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("change", ["another version", "no version", "no ranges"])
def test_what_cannot_be_gone_on_with_is_begun_anew(web: Web, tmp_path: Path, change: str) -> None:
    web.cuts = [1_000_000]
    if change == "no version":
        web.etag = ""
    web.takes_ranges = change != "no ranges"
    (tmp_path / "tiny.gguf.part").write_bytes(b"of some other file")
    if change == "another version":
        note = {"url": f"{web.address}/models/tiny.gguf", "version": '"0"'}
        (tmp_path / "tiny.gguf.part.json").write_text(json.dumps(note))
    file = fetch(web, tmp_path)
    assert (file.path.read_bytes(), file.sha256) == (DATA, SHA256)
    assert names(tmp_path) == {"tiny.gguf"}


def test_a_new_version_between_two_connections_is_not_mixed_in(web: Web, tmp_path: Path) -> None:
    web.cuts = [1_000_000]
    new = random.Random(6).randbytes(2_500_000)

    def change(file: str, done: int, total: int) -> None:
        web.files["/models/tiny.gguf"], web.etag = new, '"2"'

    file = download(f"{web.address}/models/tiny.gguf", tmp_path, change)
    assert file.path.read_bytes() == new
    assert file.sha256 == hashlib.sha256(new).hexdigest()


def test_a_part_that_is_all_of_it_needs_no_byte(web: Web, tmp_path: Path) -> None:
    url = f"{web.address}/models/tiny.gguf"
    (tmp_path / "tiny.gguf.part").write_bytes(DATA)
    note = {"url": hashlib.sha256(url.encode()).hexdigest(), "version": web.etag}
    (tmp_path / "tiny.gguf.part.json").write_text(json.dumps(note))
    file = download(url, tmp_path, lambda *_: None)
    assert (file.n_new_bytes, file.sha256) == (0, SHA256)


def test_a_server_without_lengths_is_taken_at_its_word(web: Web, tmp_path: Path) -> None:
    web.tells_length = False
    assert fetch(web, tmp_path).sha256 == SHA256


def test_a_server_that_never_gives_more_is_given_up(web: Web, tmp_path: Path) -> None:
    web.cuts = [1_000_000, *[0] * 50]
    with pytest.raises(HubError, match=r"tiny\.gguf: .*run the command again"):
        fetch(web, tmp_path)
    assert len(web.asked) == 1 + web_file.TRIES
    assert "tiny.gguf" not in names(tmp_path)


def test_a_range_from_somewhere_else_is_refused(web: Web, tmp_path: Path) -> None:
    web.cuts = [1_000_000]
    web.shifts_ranges_by = 5
    with pytest.raises(HubError, match=r"asked for the bytes from \d+ on, it sends 'bytes \d+-"):
        fetch(web, tmp_path)


def test_another_digest_is_not_kept(web: Web, tmp_path: Path) -> None:
    with pytest.raises(HubError, match=f"came with SHA-256 {SHA256}, not 00"):
        fetch(web, tmp_path, sha256="00" * 32)
    assert names(tmp_path) == set()
    (tmp_path / "tiny.gguf").write_bytes(b"mine")
    with pytest.raises(HubError, match="is there and is another file"):
        fetch(web, tmp_path, sha256=SHA256)
    assert (tmp_path / "tiny.gguf").read_bytes() == b"mine"


def test_redirects_are_followed_and_circles_named(web: Web, tmp_path: Path) -> None:
    web.redirects = {"/latest.gguf": "/models/tiny.gguf", "/round": "/round"}
    assert fetch(web, tmp_path, path="/latest.gguf").path == tmp_path / "latest.gguf"
    with pytest.raises(HubError, match="round in circles"):
        fetch(web, tmp_path, path="/round")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/a.gguf", "begins with https"),
        ("https:///a.gguf", "begins with https"),
        ("https://host/models/", "ends in no file name"),
        ("https://host/..", "ends in no file name"),
        ("https://host/a%2Fb", "ends in no file name"),
        ("https://host/.hidden", "ends in no file name"),
        ("https://host/a%00b", "ends in no file name"),
    ],
)
def test_a_url_of_no_file_is_refused(url: str, words: str) -> None:
    with pytest.raises(HubError, match=words):
        file_name(url)


def test_what_is_not_there_and_who_does_not_answer_is_named(web: Web, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="the server answered 404; check the URL"):
        fetch(web, tmp_path, path="/none.gguf")
    with pytest.raises(HubError, match=r"127\.0\.0\.1:9/a\.gguf: .*look at the network"):
        download("http://127.0.0.1:9/a.gguf", tmp_path, lambda *_: None)


def test_a_folder_that_cannot_be_written_is_named(web: Web, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HubError, match="or choose a folder with --to"):
        fetch(web, tmp_path / "file")


def test_no_room_is_named_before_a_byte_is_written(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_room, "LEFT_FREE_BYTES", 1 << 60)
    with pytest.raises(HubError, match=r"GiB more in .* make room"):
        fetch(web, tmp_path)
    assert (tmp_path / "tiny.gguf.part").stat().st_size == 0
