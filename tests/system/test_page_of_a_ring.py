"""The dashboard of a real ring in a browser: a chat streams, a request is cancelled, a killed node
turns red; pictures are dropped and pasted."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from support.browser.chromium import Program, browsing, program, running
from support.models.pictured_model import make_pictured, png
from support.system.nodes import Crew, Machine

from shardnet.api.client import connect
from shardnet.api.connections import in_process
from shardnet.api.serve.server import serving
from shardnet.api.server.settings import Listening
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.errors import ShardnetError
from shardnet.wire.messages.plans import ModelChoice

DEADLINE_S = 120.0
PROMPT = "It is a truth universally acknowledged"
ANSWER = "document.querySelector('.message.assistant:last-of-type')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with running(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.mark.skipif(not program(), reason="no Chromium is installed")
def test_a_chat_streams_a_request_is_cancelled_and_a_killed_node_turns_red(
    trio: Crew, machine: Machine, browser: Program
) -> None:
    [victim] = machine.start_nodes("vera")
    addresses = [trio.nodes[0].address, victim.address]

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), connect(addresses[0]) as client:
            client.choice = ModelChoice(model=DEFAULT_MODEL_NAME, nodes=addresses)
            async with (
                serving(client, Listening(host="127.0.0.1", port=0)) as url,
                browsing(browser) as window,
            ):
                page = await window.open_page(f"{url}/#chat")
                await page.look_like(width=1024, height=768)
                await page.until("document.activeElement?.id === 'say'")
                await page.evaluate("document.querySelector('.parameters .check input').click()")
                await page.evaluate("document.querySelector('#say').focus()")
                await page.type(PROMPT)
                await page.press("Enter")
                await page.until(f"{ANSWER}?.querySelectorAll('[data-token]').length > 20")
                if await page.evaluate(f"!{ANSWER}.querySelector('.figures')"):
                    await page.press("Escape")
                await page.until(f"{ANSWER}.querySelector('.figures')")
                text = await page.evaluate(f"{ANSWER}.querySelector('.heat').textContent")
                assert len(text) > 20
                tokens = await page.evaluate(f"{ANSWER}.querySelectorAll('.heat span').length")
                await page.evaluate(f"{ANSWER}.querySelector('.heat').focus()")
                await page.press("End")
                assert await page.evaluate("document.querySelector('.chosen')?.dataset.token") == (
                    str(tokens - 1)
                )

                await page.evaluate("location.hash = 'ring'")
                card = "document.querySelector('.node[data-node=vera]')"
                await page.until(f"{card}?.classList.contains('up')")
                await page.until("document.querySelectorAll('.stage.up').length === 2")
                await page.until("document.querySelector('.strip canvas')")
                await page.until("!document.querySelector('.request')")
                asked = asyncio.create_task(client.complete(PROMPT, max_tokens=1000))
                await page.until("document.querySelector('.request button')")
                await page.evaluate("document.querySelector('.request button').click()")
                with pytest.raises(ShardnetError, match="cancelled"):
                    await asked
                await page.until("!document.querySelector('.request')")
                await page.record("document.querySelectorAll('.stage.lost').length")
                victim.kill()
                await page.until(f"{card}.classList.contains('lost')")
                await page.until("recorded.has(1)")  # until the ring goes on without it
                red = await page.evaluate(f"getComputedStyle({card}).borderTopColor")
                assert red == "rgb(179, 32, 31)"
                await page.evaluate("location.hash = 'chat'")
                await page.until_text(PROMPT)
                assert await page.evaluate(
                    "document.querySelector('[role=status]').textContent"
                ) == ("live")
                assert page.problems == []

    asyncio.run(main())


GIVEN = """(() => {
    const bytes = Uint8Array.from(atob("%s"), (letter) => letter.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], "%s", { type: "%s" }));
    const how = { bubbles: true, cancelable: true };
    const event = "%s" === "drop"
        ? new DragEvent("drop", { ...how, dataTransfer: transfer })
        : new ClipboardEvent("paste", { ...how, clipboardData: transfer });
    document.querySelector("#say").dispatchEvent(event);
})()"""
"""Gives the page a file: what is in it, its name and type, and how it comes."""


@pytest.mark.skipif(not program(), reason="no Chromium is installed")
def test_pictures_are_dropped_pasted_taken_away_and_asked_about(
    browser: Program, tmp_path: Path
) -> None:
    """Small before they are sent and in the message; what is no picture is named."""
    choice = ModelChoice(model=str(make_pictured(tmp_path / "model")), dtype="float32")
    picture = base64.b64encode(png(60, 60)).decode()

    async def main() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            in_process(model=choice, threads=1, device="cpu") as client,
            serving(client, Listening(host="127.0.0.1", port=0)) as url,
            browsing(browser) as window,
        ):
            page = await window.open_page(f"{url}/#chat")
            await page.look_like(width=1024, height=768)
            await page.until("document.activeElement?.id === 'say'")
            thumbnails = "document.querySelectorAll('form .thumbnails img').length"
            await page.evaluate(GIVEN % (picture, "a.png", "image/png", "drop"))
            await page.until(f"{thumbnails} === 1")
            await page.evaluate(GIVEN % (picture, "b.png", "image/png", "paste"))
            await page.until(f"{thumbnails} === 2")
            await page.evaluate(GIVEN % (picture, "c.svg", "image/svg+xml", "drop"))
            await page.until_text("c.svg is no PNG")
            shown = Image.open(io.BytesIO(await page.screenshot()))
            place = await page.evaluate(
                "(({x, y, width, height}) => [x, y, x + width, y + height].map(Math.round))"
                "(document.querySelector('form .thumbnails img').getBoundingClientRect())"
            )
            colours = shown.crop(tuple(place)).getcolors(1 << 16)
            assert colours is not None
            assert len(colours) > 20, "blots of many colours"
            await page.evaluate(
                "document.querySelector('[aria-label=\"Remove picture 2\"]').click()"
            )
            await page.until(f"{thumbnails} === 1")
            await page.evaluate("document.querySelector('#say').focus()")
            await page.type("a")
            await page.press("Enter")
            await page.until(f"{ANSWER}?.textContent.length > 3")
            assert await page.evaluate(thumbnails) == 0
            assert (
                await page.evaluate(
                    "document.querySelectorAll('.message.user .thumbnails img').length"
                )
                == 1
            )
            if await page.evaluate(f"!{ANSWER}.querySelector('.figures')"):
                await page.press("Escape")
            await page.until(f"{ANSWER}.querySelector('.figures')")
            assert page.problems == []

    asyncio.run(main())
