"""A web server for tests, on loopback, that misbehaves when told to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(slots=True, kw_only=True)
class Web:
    """What it has, by path, what it was asked, and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    etag: str = '"1"'
    asked: list[str] = field(default_factory=list)
    """PATH of each request, and the Range if one was asked for."""
    cuts: list[int] = field(default_factory=list)
    """After how many bytes of body the next answers are cut."""
    takes_ranges: bool = True
    tells_length: bool = True
    shifts_ranges_by: int = 0
    """How far a range begins from where it was asked for."""
    redirects: dict[str, str] = field(default_factory=dict)
    address: str = ""


@contextmanager
def open_web() -> Iterator[Web]:
    """Serve on a free port of loopback."""
    web = Web()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"web": web}))
    web.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    web: Web

    def log_message(self, *_: object) -> None:
        """The tests look at what was asked themselves."""

    def do_GET(self) -> None:
        web = self.web
        wanted = self.headers.get("Range", "")
        web.asked.append(f"{self.path} {wanted}".strip())
        if self.path in web.redirects:
            self.send_response(302)
            self.send_header("Location", web.redirects[self.path])
            self.end_headers()
            return
        if self.path not in web.files:
            self.send_error(404)
            return
        data = web.files[self.path]
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        is_same = self.headers.get("If-Range") == web.etag
        if not (wanted and is_same and web.takes_ranges):
            self.send_response(200)
            start = 0
        elif start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.end_headers()
            return
        else:
            start += web.shifts_ranges_by
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        if web.etag:
            self.send_header("ETag", web.etag)
        if web.tells_length:
            self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = min(len(data), start + web.cuts.pop(0)) if web.cuts else len(data)
        with contextlib.suppress(ConnectionError):  # whoever asked may have gone
            self.wfile.write(data[start:end])
