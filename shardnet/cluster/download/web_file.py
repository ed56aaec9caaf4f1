"""Downloads one file from a URL, going on where a broken attempt has stopped.

Knows HTTP through `httpx2`: ranges, redirects, what a server may get wrong, and what to do then.
Blocks: to be called on a thread that may wait. Must not know what the file is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import httpx2

from shardnet import __version__
from shardnet.cluster.download.web_address import check_proxies, shown, split_url, what_to_look_at
from shardnet.cluster.machine.disk_room import check_room
from shardnet.errors import HubError

Report = Callable[[str, int, int], None]
"""Takes (file, bytes done of all files, bytes in all). What it raises ends the download."""

SILENCE_S: Final = 15.0
"""How long a server may say nothing."""
TRIES: Final = 5
"""How often a connection is made anew while no byte comes over it."""
_PARTIAL, _UNSATISFIABLE = 206, 416  # HTTP: a range as asked for; it begins behind the end
_NAME: Final = re.compile(r"[^./\\:\0][^/\\:\0]{0,200}")
GO_ON: Final = "run the command again to go on where it stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFile:
    """A file that came from a URL. `n_new_bytes` came over the network just now."""

    path: Path
    size_bytes: int
    sha256: str
    n_new_bytes: int


def file_name(url: str) -> str:
    """Return the name of the file at a URL.

    Raises HubError where the URL is not http or https, or ends in no name a file may have. No
    message of this module shows a URL's password.
    """
    name = unquote(split_url(url).path.rpartition("/")[2])
    if not _NAME.fullmatch(name) or not name.isprintable():
        raise HubError(f"{shown(url)} ends in no file name: give the URL of a file")
    return name


def download(url: str, folder: Path, report: Report, *, sha256: str = "") -> WebFile:
    """Download the file at `url` into `folder`, under the name it has there.

    `sha256`, in hex, is what it must be; "" accepts what comes. A file that is there whole is left
    as it is. Raises HubError, which says what to do: then nothing has the file's name, and what
    came so far waits beside it in NAME.part.
    """
    name = file_name(url)
    path, part = folder / name, _Part(folder / f"{name}.part")
    with _named_errors(shown(url), folder):
        check_proxies()
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            digest = sha256_of(path)
            if sha256 and digest != sha256.lower():
                raise HubError(f"{path} is there and is another file ({digest}): move it away")
            size_bytes = path.stat().st_size
            return WebFile(path=path, size_bytes=size_bytes, sha256=digest, n_new_bytes=0)
        n_new_bytes = _Download(url, name, part, report).run()
        digest = part.sha256()
        if sha256 and digest != sha256.lower():
            part.delete()
            raise HubError(
                f"{shown(url)} came with SHA-256 {digest}, not {sha256}, and was deleted"
            )
        size_bytes = part.path.stat().st_size
        part.path.replace(path)
        part.delete()
    return WebFile(path=path, size_bytes=size_bytes, sha256=digest, n_new_bytes=n_new_bytes)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest(url: str) -> str:
    """Stand for a URL, which may hold a password, in a file."""
    return hashlib.sha256(url.encode()).hexdigest()


class _Part:
    """What has come of a file, its SHA-256, and of which version it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sha256: hashlib._Hash | None = None
        self._n_hashed = 0
        self._note = path.with_name(f"{path.name}.json")

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def version_of(self, url: str) -> str:
        """Return the version of which there is a part, "" where that is not known."""
        try:
            match json.loads(self._note.read_bytes()):
                case {"url": str(noted), "version": str(version)} if noted == _digest(url):
                    return version
        except (OSError, ValueError):
            pass
        return ""

    def read(self) -> hashlib._Hash:
        """Return the digest of what has come so far. What was here before is read once."""
        if self._sha256 is None:
            self.path.touch()
            with self.path.open("rb") as opened:
                self._sha256 = hashlib.file_digest(opened, "sha256")
                self._n_hashed = opened.tell()
        return self._sha256

    @contextlib.contextmanager
    def appending(self) -> Iterator[Callable[[bytes], None]]:
        """Give what takes the next bytes."""
        sha256 = self.read()
        with self.path.open("ab") as file:

            def append(piece: bytes) -> None:
                file.write(piece)
                sha256.update(piece)
                self._n_hashed += len(piece)

            yield append

    def sha256(self) -> str:
        """Return the SHA-256 of the whole file, in hex.

        Raises HubError, and deletes the part, where another program wrote into it too.
        """
        digest = self.read().hexdigest()
        if self.size_bytes != self._n_hashed:
            self.delete()
            raise HubError(f"{self.path}: another program wrote into it too; deleted: try again")
        return digest

    def begin(self, url: str, version: str) -> None:
        """Begin anew, with nothing."""
        self.path.write_bytes(b"")
        self._sha256, self._n_hashed = hashlib.sha256(), 0
        self._note.write_text(
            json.dumps({"url": _digest(url), "version": version}), encoding="utf-8"
        )

    def delete(self) -> None:
        self._sha256 = None
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)


class _Download:
    """One download: as many connections as it takes."""

    def __init__(self, url: str, name: str, part: _Part, report: Report) -> None:
        self._url, self._name, self._part, self._report = url, name, part, report
        self._shown = shown(url)
        self._total: int | None = None
        self._n_new_bytes = 0

    def run(self) -> int:
        """Bring the part to its end; return the bytes that came."""
        left = TRIES
        with httpx2.Client(
            timeout=SILENCE_S,
            follow_redirects=True,
            headers={"User-Agent": f"shardnet/{__version__}", "Accept-Encoding": "identity"},
        ) as client:
            while True:
                had = self._n_new_bytes
                try:
                    if self._connect(client):
                        return self._n_new_bytes
                    error: httpx2.TransportError | None = None
                except httpx2.TransportError as caught:
                    error = caught
                left = TRIES if self._n_new_bytes > had else left - 1
                if not left:
                    raise error or HubError(
                        f"{self._shown}: the server ends after {self._part.size_bytes} of "
                        f"{self._total} bytes, again and again; {GO_ON}"
                    )

    def _connect(self, client: httpx2.Client) -> bool:
        """Take what one connection gives. Returns whether the file is whole."""
        at = self._part.size_bytes
        version = self._part.version_of(self._url)
        if at and version:
            self._part.read()  # a server waits for no disk
        headers = {"Range": f"bytes={at}-", "If-Range": version} if at and version else {}
        with client.stream("GET", self._url, headers=headers) as response:
            _check_redirects(self._url, response)
            if response.status_code == _UNSATISFIABLE:
                if response.headers.get("Content-Range") == f"bytes */{at}":
                    return True
                self._part.delete()
                return False
            response.raise_for_status()
            total = _total_bytes(response, at)
            if response.status_code != _PARTIAL:
                self._part.begin(self._url, _version(response))
                at = 0
            self._total = total
            self._check_room((total or 0) - at)
            return self._take(response)

    def _take(self, response: httpx2.Response) -> bool:
        done = self._part.size_bytes
        with self._part.appending() as append:
            for piece in response.iter_raw():
                done += len(piece)
                if self._total is not None and done > self._total:
                    raise HubError(
                        f"{self._shown}: more than the {self._total} bytes promised came"
                    )
                if self._total is None:
                    self._check_room(len(piece))
                append(piece)
                self._n_new_bytes += len(piece)
                self._report(self._name, done, self._total or 0)
        return self._total is None or done == self._total

    def _check_room(self, n_bytes: int) -> None:
        folder = self._part.path.parent
        check_room(
            self._shown, n_bytes, folder, else_do="choose another folder with --to", error=HubError
        )


def _total_bytes(response: httpx2.Response, at: int) -> int | None:
    """Return the size of the whole file, None where the server does not say."""
    if response.status_code == _PARTIAL:
        said = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", said)
        if match is None or int(match[1]) != at or int(match[2]) + 1 != int(match[3]):
            url = shown(str(response.url))
            raise HubError(f"{url}: asked for the bytes from {at} on, it sends {said!r}")
        return int(match[3])
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def _version(response: httpx2.Response) -> str:
    """Return what tells this version of the file from others, for If-Range; "" without any."""
    etag: str = response.headers.get("ETag", "")
    if etag and not etag.startswith("W/"):
        return etag
    return str(response.headers.get("Last-Modified", ""))


def _check_redirects(url: str, response: httpx2.Response) -> None:
    """Refuse a way from https over http: what comes then may be anybody's."""
    if urlsplit(url).scheme == "https":
        for step in [*response.history, response]:
            if step.url.scheme != "https":
                to = shown(str(step.url))
                raise HubError(f"{shown(url)} leads to {to}, which is not encrypted; refused")


@contextlib.contextmanager
def _named_errors(url: str, folder: Path) -> Iterator[None]:
    try:
        yield
    except httpx2.HTTPStatusError as error:
        status: Any = error.response.status_code
        raise HubError(f"{url}: the server answered {status}; check the URL") from error
    except httpx2.TooManyRedirects as error:
        raise HubError(f"{url} leads round in circles; check the URL") from error
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        what = str(error) or type(error).__name__
        raise HubError(f"{url}: {what}; look at {what_to_look_at()}; {GO_ON}") from error
    except OSError as error:
        where = error.filename or folder
        raise HubError(
            f"{url}: {where}: {error.strerror}; make room there, or choose a folder with --to"
        ) from error
