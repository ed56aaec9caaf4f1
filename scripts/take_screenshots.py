"""Take the pictures of the dashboard in docs/: three nodes of this machine, a browser, a chat.

It needs Chromium, and takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser.chromium import Page, browsing, program, running  # noqa: E402
from support.system.nodes import NodeProcess, open_machine  # noqa: E402

from shardnet.api.client import Client, connect  # noqa: E402
from shardnet.api.serve.server import serving  # noqa: E402
from shardnet.api.server.settings import Listening  # noqa: E402
from shardnet.assets import DEFAULT_MODEL_NAME  # noqa: E402
from shardnet.wire.messages.plans import ModelChoice  # noqa: E402

STRIP_S: Final = 2.0
"""How long steps are waited for, so that the strip of them is full."""

NAMES: Final = ("attic", "cellar", "desk")
PROMPT: Final = "It is a truth universally acknowledged"
PARAMETERS: Final = '{"temperature": "0.6", "seed": "7", "max_completion_tokens": "120"}'
WIDE: Final[dict[str, Any]] = {"width": 1120, "height": 800}
PHONE: Final[dict[str, Any]] = {"width": 390, "height": 844}

Pictures = dict[str, bytes]
"""PNG files by name."""


async def take(page: Page, url: str, client: Client, nodes: list[NodeProcess]) -> Pictures:
    """Take all pictures; return them by name."""
    taken: Pictures = {}
    await page.look_like(**WIDE)
    await page.open(f"{url}/dashboard/#chat")
    await page.evaluate(f"localStorage.setItem('shardnet.parameters', {PARAMETERS!r})")
    await page.open("about:blank")
    await page.open(f"{url}/dashboard/#chat")
    await page.until("document.activeElement?.id === 'say'")
    await page.type(PROMPT)
    await page.press("Enter")
    await page.until("document.querySelector('.message .figures')")
    await page.evaluate("document.querySelector('.heat').focus()")
    for _ in range(9):
        await page.press("ArrowRight")
    taken["chat"] = await page.screenshot()

    await page.evaluate("location.hash = 'ring'")
    asking = asyncio.gather(*(client.complete(PROMPT, max_tokens=900) for _ in range(2)))
    await page.until("document.querySelectorAll('.requests .request').length === 2")
    await page.until("document.querySelector('.strip canvas')")
    await asyncio.sleep(STRIP_S)
    taken["ring"] = await page.screenshot()
    await page.look_like(**PHONE, scheme="dark")
    taken["phone"] = await page.screenshot()
    await page.look_like(**WIDE, scheme="dark")
    await asyncio.to_thread(nodes[1].kill)
    await page.until("document.querySelector('.node.lost')")
    taken["lost"] = await page.screenshot()
    await asyncio.gather(asking, return_exceptions=True)
    return taken


async def run(scratch: Path) -> Pictures:
    """Start nodes, a server and a browser, and take the pictures."""
    with open_machine(scratch / "machine") as machine, running(scratch / "browser") as started:
        nodes = await asyncio.to_thread(machine.start_nodes, *NAMES)
        addresses = [node.address for node in nodes]
        async with connect(addresses[0]) as client:
            client.choice = ModelChoice(model=DEFAULT_MODEL_NAME, nodes=addresses)
            async with (
                serving(client, Listening(host="127.0.0.1", port=0)) as url,
                browsing(started) as browser,
            ):
                return await take(await browser.open_page(), url, client, nodes)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where pictures go")
    options = parser.parse_args()
    if not program():
        parser.error("no Chromium is installed")
    with tempfile.TemporaryDirectory() as scratch:
        for name, picture in asyncio.run(run(Path(scratch))).items():
            (options.folder / f"dashboard-{name}.png").write_bytes(picture)


if __name__ == "__main__":
    main()
