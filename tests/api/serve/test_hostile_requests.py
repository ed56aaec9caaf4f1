"""The corpus of hostile requests, and some more made from it: no answer is a 500."""

from __future__ import annotations

import asyncio
import re

from support.cluster.scripted_node import ScriptedNode, client_of
from support.hostile.mutate_connections import REQUESTS, answer_to, fuzz_requests, status_of

from shardnet.api.serve.server import serving
from shardnet.api.server.settings import Listening

FILES = sorted(path.name for path in REQUESTS.glob("*.http"))
NOT_WHOLE = "length-is-a-lie.http"


def test_every_hostile_request_is_refused() -> None:
    async def main() -> dict[str, int]:
        listening = Listening(host="127.0.0.1", port=0)
        async with client_of(ScriptedNode()) as client, serving(client, listening) as url:
            whole = {
                name: status_of(await answer_to(url, (REQUESTS / name).read_bytes(), 20.0))
                for name in FILES
                if name != NOT_WHOLE
            }
            return whole | {
                NOT_WHOLE: status_of(await answer_to(url, (REQUESTS / NOT_WHOLE).read_bytes()))
            }

    statuses = asyncio.run(main())
    assert statuses.pop(NOT_WHOLE) == 0
    assert {name: status for name, status in statuses.items() if not 400 <= status < 500} == {}


def test_the_readme_names_every_request_once() -> None:
    text = (REQUESTS / "README.md").read_text()
    assert re.findall(r"^\| `(.+\.http)` \|", text, re.MULTILINE) == FILES


def test_mutated_requests_make_no_500() -> None:
    figures = fuzz_requests(60, seed=1)
    assert figures.n_frames == 60
    assert figures.n_read > 0, "requests that are all refused test little"
    assert figures.n_refused > 15
    assert figures.n_pings == 2
