"""The files of the page: where they are, what a browser is told, what they are made of."""

from __future__ import annotations

import asyncio
import hashlib
import re
from posixpath import dirname, join, normpath

import pytest
from support.servers.asgi_client import ask
from support.servers.http_app import served

from shardnet.api.dashboard.page_files import FOLDER, read_files
from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.settings import Settings


def test_the_page_is_open_and_says_what_a_browser_may_load() -> None:
    async def main() -> None:
        async with served(Settings(keys=Keyring([parse_key("one", 1)]))) as server:
            page = await ask(server.app, "/dashboard/")
            assert page.status == 200
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert page.headers["content-security-policy"].startswith("default-src 'self';")
            assert "unsafe" not in page.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
            assert b"<script type=" in page.content
            script = await ask(server.app, "/dashboard/vendor/preact.js")
            assert script.headers["content-type"].startswith("text/javascript")
            assert script.headers["x-content-type-options"] == "nosniff"
            for missing in ("nothing.js", "../page_files.py", "vendor"):
                assert (await ask(server.app, f"/dashboard/{missing}")).status == 404

    asyncio.run(main())


@pytest.mark.parametrize(("root_path", "target"), [("", "dashboard/"), ("/llm", "/llm/dashboard/")])
def test_the_root_leads_to_the_page(root_path: str, target: str) -> None:
    async def main() -> None:
        async with served(Settings(root_path=root_path)) as server:
            for path in ("/", "/dashboard"):
                answer = await ask(server.app, root_path + path)
                assert (answer.status, answer.headers["location"]) == (307, target)

    asyncio.run(main())


def text_of(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_the_notice_has_every_foreign_file_as_it_is() -> None:
    told = dict(re.findall(r"^(\S+\.js) .* sha256:(\w+)$", text_of("vendor/NOTICE"), re.M))
    files = {path.name: path.read_bytes() for path in (FOLDER / "vendor").glob("*.js")}
    assert told == {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()}
    assert "Permission is hereby granted" in text_of("vendor/NOTICE")  # MIT
    assert "Apache License" in text_of("vendor/NOTICE")


def test_the_page_is_made_of_its_own_files_and_sets_no_markup() -> None:
    files = read_files()
    scripts = [name for name in files if name.endswith(".js")]
    assert len(scripts) > 15
    reached = {"index.html", "icon.svg", "vendor/NOTICE"}
    for name in ["index.html", *scripts]:
        text = text_of(name)
        if name == "index.html":
            found = re.findall(r'(?:src|href)="([^"]+)"', text)
        else:
            found = re.findall(r'(?:from|import) ?"([^"]+)"', text)
        reached |= {normpath(join(dirname(name), path)) for path in found}
        if not name.startswith("vendor/"):
            for forbidden in ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "://"):
                assert forbidden not in text, (name, forbidden)
    assert reached == {*files}
