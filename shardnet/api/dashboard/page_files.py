"""Endpoints for the files of the page: HTML, styles, scripts.

Knows what a browser is told beside each: that the page loads nothing from elsewhere, and is shown
in no other page. The files hold nothing secret and need no key; what they ask for does.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from shardnet.api.server.endpoint import Dialect, Endpoint, Reply, Text
from shardnet.api.server.errors import refused
from shardnet.api.server.service import Exchange

PATH: Final = "/dashboard/"
FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
HEADERS: Final = (
    (
        "content-security-policy",
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-cache"),
)
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",
}


@cache
def read_files() -> dict[str, Text]:
    """Read all files of the page, once; return an answer for each, by its path below PATH."""
    return {
        path.relative_to(FOLDER).as_posix(): Text(
            text=path.read_bytes(), media_type=_TYPES[path.suffix], headers=HEADERS
        )
        for path in sorted(FOLDER.rglob("*"))
        if path.is_file() and path.suffix in _TYPES
    }


def endpoints(dialect: Dialect, root_path: str) -> list[Endpoint[None]]:
    """List these endpoints; faults are written as `dialect` does."""
    files = read_files()

    async def show(exchange: Exchange, body: None) -> Reply:
        name = exchange.path_parameters["file"] or INDEX
        if name not in files:
            raise refused(f"the page has no file '{name[:200]}'", status=404)
        return files[name]

    async def lead(exchange: Exchange, body: None) -> Reply:
        # Without a known root a proxy may have this server anywhere: only a relative path is right.
        target = f"{root_path}{PATH}" if root_path else PATH.removeprefix("/")
        return Text(text="", media_type=_TYPES[""], status=307, headers=(("location", target),))

    described = [
        ("/", "To the dashboard", lead),
        ("/dashboard", "To the dashboard", lead),
        (f"{PATH}{{file:path}}", "The dashboard's files", show),
    ]
    return [
        dialect.at(f"GET {path}", summary, handle, is_open=True)
        for path, summary, handle in described
    ]
