"""Take the pictures of the dashboard in docs/: three nodes of this machine, a browser, a chat.

It needs Chromium, and takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.browser.chromium import Page, browsing, program, running  # noqa: E402
from support.system.nodes import NodeProcess, open_machine  # noqa: E402

from shardnet.api.client import connect  # noqa: E402
from shardnet.api.serve.server import serving  # noqa: E402
from shardnet.api.server.settings import Listening  # noqa: E402
from shardnet.assets import DEFAULT_MODEL_NAME  # noqa: E402
from shardnet.wire.messages.plans import ModelChoice  # noqa: E402

NAMES: Final = ("attic", "cellar", "desk")
PROMPT: Final = "It is a truth universally acknowledged"
WIDE: Final = {"width": 1280, "height": 860}
PHONE: Final = {"width": 390, "height": 844}


async def ask(page: Page, text: str) -> None:
    """Say something in the chat."""
    await page.evaluate("location.hash = 'chat'")
    await page.until("document.activeElement.id === 'say'")
    await page.type(text)
    await page.press("Enter")


async def take(page: Page, nodes: list[NodeProcess], folder: Path) -> None:
    """Take all pictures."""

    async def save(name: str) -> None:
        path = folder / f"dashboard-{name}.png"
        await asyncio.to_thread(path.write_bytes, await page.screenshot())

    await page.look_like(**WIDE)
    await page.until_text(NAMES[2])
    await ask(page, PROMPT)
    await page.until("document.querySelector('.message .figures')")
    await page.evaluate("document.querySelector('.heat').focus()")
    for _ in range(9):
        await page.press("ArrowRight")
    await save("chat")
    await ask(page, "Tell me more.")
    await page.until("document.querySelectorAll('.message.assistant').length === 2")
    await page.evaluate("location.hash = 'ring'")
    await page.until("document.querySelectorAll('.requests .request').length")
    await page.until("document.querySelector('.strip canvas')")
    await asyncio.sleep(1.5)  # for a strip of steps
    await save("ring")
    await page.look_like(**PHONE, scheme="dark")
    await save("phone")
    await page.look_like(**WIDE, scheme="dark")
    await asyncio.to_thread(nodes[1].kill)
    await page.until("document.querySelector('.node.lost')")
    await save("lost")


async def run(folder: Path, scratch: Path) -> None:
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
                await take(await browser.open_page(f"{url}/"), nodes, folder)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where pictures go")
    options = parser.parse_args()
    if not program():
        parser.error("no Chromium is installed")
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(run(options.folder, Path(scratch)))


if __name__ == "__main__":
    main()
