"""A Hub for tests: speaks what huggingface_hub asks, on loopback, and misbehaves when told to."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True, kw_only=True)
class Hub:
    """The repositories that it has, by name, what it was asked, and how it misbehaves."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """METHOD FILE of each request for a file; the Range that was asked for, if one was."""
    gated: set[str] = field(default_factory=set)
    fails_with: int = 0
    cut_after_bytes: int = 0
    """The first answer with a body longer than this is cut there."""
    holds: bool = False
    """Bodies of large files do not come as long as this is set."""
    holds_after_cut: bool = False
    """Whether none comes any more once one was cut."""
    held: threading.Event = field(default_factory=threading.Event)
    lies_about: str = ""
    """A file that comes with other bytes than the Hub says."""
    address: str = ""

    def add(self, repo: str, folder: Path, **more: bytes) -> None:
        """Take a folder's files in."""
        self.repos[repo] = {p.name: p.read_bytes() for p in folder.iterdir()} | more
        self.commits[repo] = COMMIT

    def until_held(self) -> None:
        """Wait until a body was asked for that does not come."""
        assert self.held.wait(60)

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process ask this Hub alone."""
        return {"HF_ENDPOINT": self.address, "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "60"}


@contextmanager
def open_hub() -> Iterator[Hub]:
    """Serve on a free port of loopback."""
    hub = Hub()

    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        hub.holds = False
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        """The tests look at what was asked themselves."""

    def _answer(self, *, with_body: bool) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        if hub.fails_with:
            return self._say(hub.fails_with, b"{}")
        if path.startswith("/api/models/"):
            return self._info(path.removeprefix("/api/models/"))
        repo, _, rest = path.strip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repo in hub.gated:
            return self._refuse(403, "GatedRepo")
        if name not in hub.repos.get(repo, {}) or revision not in ("main", hub.commits[repo]):
            return self._refuse(404, "EntryNotFound")
        wanted = self.headers.get("Range", "")
        hub.asked.append(f"{self.command} {name} {wanted}".strip())
        self._file(repo, name, wanted, with_body=with_body)
        return None

    def _info(self, rest: str) -> None:
        repo, _, revision = rest.partition("/revision/")
        if repo in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if repo not in self.hub.repos:
            return self._refuse(404, "RepoNotFound")
        if revision not in ("", "main", self.hub.commits[repo]):
            return self._refuse(404, "RevisionNotFound")
        siblings = []
        for name, data in self.hub.repos[repo].items():
            entry = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if name.endswith((".safetensors", ".bin", ".pth", ".gguf")):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        body = {"id": repo, "modelId": repo, "sha": self.hub.commits[repo], "siblings": siblings}
        return self._say(200, json.dumps(body).encode())

    def _file(self, repo: str, name: str, wanted: str, *, with_body: bool) -> None:
        data = self.hub.repos[repo][name]
        digest = hashlib.sha256(data).hexdigest()
        if name == self.hub.lies_about:
            data = bytes(len(data))
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first or 0), int(last) + 1 if last else len(data)
        body = data[start:end]
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", self.hub.commits[repo])
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if not with_body:
            return
        while self.hub.holds and len(body) > 100_000:
            self.hub.held.set()
            time.sleep(0.01)
        cut = self.hub.cut_after_bytes
        if cut and len(body) > cut:
            self.hub.cut_after_bytes = 0
            self.hub.holds |= self.hub.holds_after_cut
            self.wfile.write(body[:cut])
            self.close_connection = True
            return
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._say(status, b'{"error": "no"}', {"X-Error-Code": code, "X-Error-Message": "no"})

    def _say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
