"""The page in a browser, over scripted data: what is shown, pressed, typed, and what stays text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.types import ASGIApp
from support.browser.chromium import Page, Program, browsing, program, running
from support.cluster.scripted_node import ScriptedNode, client_of
from support.servers.scripted_dashboard import ScriptedDashboard

from shardnet.api.client import Client
from shardnet.api.dashboard import page_files
from shardnet.api.openai import endpoints as openai
from shardnet.api.openai.faults import OPENAI
from shardnet.api.serve import server
from shardnet.api.server.app import make_app
from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Listening, Settings

pytestmark = pytest.mark.skipif(not program(), reason="no Chromium is installed")

EVIL = "<img src=x onerror='window.bad = 1'><script>window.bad = 1</script>"
"""What does harm where text becomes HTML."""
VIEWS = ("ring", "chat", "requests", "models", "doctor", "programs")
NAMED = {"button", "link", "textbox", "combobox", "checkbox", "spinbutton", "progressbar", "image"}
"""Roles of what is useless to a screen reader without a name."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    with running(tmp_path_factory.mktemp("browser")) as started:
        yield started


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A page, where it is, and what is behind it."""

    page: Page
    url: str
    dashboard: ScriptedDashboard
    node: ScriptedNode
    client: Client
    server: AsyncExitStack

    async def press(self, name: str) -> None:
        """Press the button of this name."""
        told = "(one.ariaLabel ?? one.textContent.trim())"
        every = "[...document.querySelectorAll('button')]"
        await self.page.evaluate(f"{every}.find((one) => {told} === {name!r}).click()")

    async def view(self, name: str) -> None:
        """Go to a view."""
        await self.page.evaluate(f"location.hash = {name!r}")
        await self.page.until(f"document.querySelector('[aria-current]').hash === '#{name}'")


@asynccontextmanager
async def shown(
    browser: Program, monkeypatch: pytest.MonkeyPatch, settings: Settings | None = None
) -> AsyncIterator[Shown]:
    """Serve the page over a scripted node, and open it."""
    dashboard, node = ScriptedDashboard(), ScriptedNode()

    def application(service: Service, added: Any) -> ASGIApp:
        page = page_files.endpoints(OPENAI, service.settings.root_path)
        return make_app(service, [*dashboard.endpoints(), *openai.endpoints(), *page], OPENAI)

    monkeypatch.setattr(server, "application", application)
    listening = Listening(host="127.0.0.1", port=0, settings=settings or Settings())
    async with (
        client_of(node) as client,
        AsyncExitStack() as stack,
        browsing(browser) as window,
    ):
        url = await stack.enter_async_context(server.serving(client, listening))
        page = await window.open_page(f"{url}/")
        yield Shown(page=page, url=url, dashboard=dashboard, node=node, client=client, server=stack)


def model(name: str) -> dict[str, Any]:
    facts = {"size_bytes": 1 << 30, "family": "llama", "form": "bfloat16", "context": 4096}
    states = {"is_served": True, "is_default": False, "is_loaded": False, "fits": True}
    held = {"node": "id-of-anna", "name": "anna", "store": "here", "held_bytes": 1}
    return {"name": name, **facts, **states, "failure": None, "nodes": [held]}


def test_what_changes_is_shown_and_the_page_outlives_nodes_and_server(
    browser: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with shown(browser, monkeypatch) as it:
            page, dashboard = it.page, it.dashboard
            await page.until_text("1500 / 6000 read")
            await page.until_text("Drafts by mtp on bert: 120 of 150 right, 2.50 tokens a step.")
            await page.until("document.title === 'Ring · anna'")
            card = "document.querySelector('.node[data-node=bert]')"
            before = await page.evaluate(f"getComputedStyle({card}).borderTopColor")
            [anna, bert] = dashboard.state["nodes"]
            why = f"the link ended: {EVIL}"
            dashboard.tell("nodes", [anna, {**bert, "state": "lost", "why": why, "since_s": 1.0}])
            await page.until_text(why)
            assert await page.evaluate(f"{card}.querySelector('.badge').textContent") == "lost"
            red = "getComputedStyle(document.querySelector('.stage.lost circle')).stroke"
            await page.until(f"getComputedStyle({card}).borderTopColor === {red}")
            assert await page.evaluate(red) != before

            await it.view("requests")
            await it.press("Cancel request 42")
            await dashboard.until_asked("requests/42/cancel")
            await page.until_text("nothing is scripted for requests/{id}/cancel")

            asked = [url for url in page.asked if not url.startswith(f"{it.url}/dashboard/")]
            assert asked == [f"{it.url}/"]
            assert page.problems == []
            await it.server.aclose()
            await page.until_text("No answer from the server")
            await it.view("ring")
            await page.until_text("anna")
            badge = "document.querySelector('.badge').textContent"
            assert await page.evaluate(badge) == "no answer"
            again = Listening(host="127.0.0.1", port=int(it.url.rpartition(":")[2]))
            dashboard.state["nodes"][1]["state"] = "up"
            async with server.serving(it.client, again):
                await page.until(f"{badge} === 'live'")
                await page.until(f"{card}.classList.contains('up')")
            assert await page.evaluate("window.bad") is None

    asyncio.run(main())


def test_every_view_does_what_it_says_and_has_names_on_a_phone_too(
    browser: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with shown(browser, monkeypatch) as it:
            page, dashboard = it.page, it.dashboard
            dashboard.answers["models"] = {"models": [model(EVIL), model("b")], "silent": []}
            dashboard.answers["load"] = {}
            await it.view("models")
            await page.until_text(EVIL)
            await it.press("Load b")
            assert await dashboard.until_asked("load") == {"model": "b"}
            job = {"id": "3", "kind": "load", "model": "b", "state": "running", "phase": "loading"}
            figures = {"done_bytes": 1 << 20, "total_bytes": 4 << 20, "age_s": 2.5, "nodes": []}
            dashboard.tell("jobs", [{**job, **figures, "error": None, "remedy": None}])
            await page.until_text("1.00 MiB of 4.00 MiB")

            beside = {
                "model": {"name": EVIL, "kept": True, "choice": {"model": "/models/org/b"}},
                "state": "waiting",
                "why": "it waits for memory",
                "predicted_tok_s": 3.5,
                "shares": [{"name": "anna", "memory_bytes": 1 << 30}],
                "n_requests": 1,
                "n_waiting": 2,
            }
            dashboard.answers["household"] = {"models": [beside]}
            await page.until_text("waiting, 1 request, 2 waiting, it waits for memory")
            await page.until_text("anna 1.00 GiB")
            dashboard.answers["household/{id:path}"] = {"models": []}
            await it.press(f"Remove {EVIL}")
            await dashboard.until_asked(f"household/{EVIL}")

            dashboard.answers["plan"] = {
                "model": "b",
                "context": 64,
                "dtype": "bfloat16",
                "wire_dtype": "bfloat16",
                "predicted_tok_s": 12.0,
                "why": "it is scripted",
                "warnings": [],
                "stages": [],
                "left_out": [{"node": "id-of-old", "name": "old", "why": EVIL}],
            }
            await page.evaluate("document.querySelector('fieldset input').click()")
            await it.press("Preview")
            assert await dashboard.until_asked("plan") == {
                "model": "",
                "leave_out": ["id-of-anna"],
            }
            await page.until_text("without anna")
            await page.until_text("12.0 tokens/s")

            finding = {"severity": "problem", "topic": "link", "where": "bert", "what": EVIL}
            dashboard.answers["doctor"] = {"findings": [{**finding, "remedy": "plug it in"}]}
            await it.view("doctor")
            await page.until_text("1 of 1 findings are problems.")
            shell = {"name": "aider", "where": "a shell", "text": EVIL, "note": None}
            dashboard.answers["programs"] = {"programs": [shell]}
            await it.view("programs")
            await page.until_text("aider")
            body = await dashboard.until_asked("programs")
            assert (body["url"], body["api_key"]) == (it.url, "")

            for width, scheme in ((360, "dark"), (1280, "light")):
                await page.look_like(width=width, height=700, scheme=scheme)
                for name in VIEWS:
                    await it.view(name)
                    assert await page.evaluate("document.documentElement.scrollWidth") <= width, (
                        name
                    )
                    names = await page.names()
                    assert len(names) > 10
                    assert not [role for role, told in names if role in NAMED and not told], name
            assert await page.evaluate("window.bad") is None
            assert page.problems == []

    asyncio.run(main())


def test_a_chat_by_keyboard_alone(browser: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """It streams, what it says stays text, it is stopped, and asked again."""

    async def main() -> None:
        async with shown(browser, monkeypatch) as it:
            page = it.page
            await page.until_text("anna")
            await page.press("Tab")
            assert await page.focused() == "link To the content"
            await page.press_until("Tab", "document.activeElement?.textContent === 'Chat'")
            await page.press("Enter")
            await page.until("document.querySelector('#say')")
            await page.press_until("Tab", "document.activeElement?.id === 'say'")
            assert await page.focused() == "textbox Your message"
            await page.type(f"{EVIL}\n```html\n{EVIL}\n```\nend")
            await page.press("Enter")
            answer = "document.querySelector('.message.assistant:last-of-type')"
            await page.until(f"{answer}?.innerText.includes('end')")
            assert (await page.evaluate(f"{answer}.innerText")).count(EVIL) == 2
            assert (await page.evaluate(f"{answer}.querySelector('pre').textContent")) == EVIL
            assert (
                await page.evaluate("document.querySelectorAll('main img, main script').length")
                == 0
            )
            [asked] = it.node.asked
            assert asked.sampling.n_logprobs is None

            await page.until("!document.querySelector('#say').value")
            await page.type("wait here")
            await page.press("Enter")
            await page.until("document.querySelector('.log').innerText.endsWith('w')")
            await page.press("Escape")
            await it.node.until_given_up(1)
            await page.until_text("Stopped.")
            await page.press_until("Tab", "document.activeElement?.textContent === 'Retry'")
            await page.press("Enter")
            await it.node.until_asked(3)
            await page.until("!document.body.innerText.includes('Stopped.')")
            await page.press_until("Tab", "document.activeElement?.textContent.trim() === 'Stop'")
            await page.press("Enter")
            await it.node.until_given_up(2)
            assert await page.evaluate("window.bad") is None
            assert page.problems == []

    asyncio.run(main())


MARKDOWN = """# Title
A **bold** and `code` [link](https://a.example/) [bad](javascript:alert(1))

| a | b |
|---|---|
| 1 | 2 |

1. one
2. two <b>x</b>
"""


def test_answers_are_markdown_and_conversations_are_kept(
    browser: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with shown(browser, monkeypatch) as it:
            page = it.page
            await page.until_text("anna")
            await page.evaluate("location.hash = 'chat'")
            await page.until("document.activeElement?.id === 'say'")
            await page.type(MARKDOWN)
            await page.press("Enter")
            answer = "document.querySelector('.message.assistant:last-of-type .text')"
            await page.until(f"{answer}?.querySelectorAll('li').length === 2")
            for found, text in (
                (".heading", "Title"),
                ("strong", "bold"),
                ("code", "code"),
                ("td:last-child", "2"),
                ("li:last-child", "two <b>x</b>"),
            ):
                told = await page.evaluate(f"{answer}.querySelector('{found}').textContent.trim()")
                assert told == text
            links = f"[...{answer}.querySelectorAll('a')].map((one) => one.href)"
            assert await page.evaluate(links) == ["https://a.example/"]

            await it.press("New chat")
            await page.until("!document.querySelector('.message')")
            await page.evaluate("document.querySelector('#say').focus()")
            await page.type("other")
            await page.press("Enter")
            kept = "[...document.querySelectorAll('.conversations .plain')]"
            names = f"{kept}.map((one) => one.textContent.trim())"
            await page.until(f"{names}.length === 2 && !{kept}[1].disabled")  # answered
            assert await page.evaluate(names) == ["other", "# Title"]
            await page.evaluate(f"{kept}[1].click()")
            await page.until(f"{answer}?.querySelector('table')")
            await page.evaluate(
                "void (URL.createObjectURL = (blob) => (globalThis.blob = blob, '#'),"
                " HTMLAnchorElement.prototype.click = function () { globalThis.link = this; })"
            )
            save = "document.querySelector('.conversations [aria-label=\"Save # Title\"]')"
            await page.evaluate(f"{save}.click()")
            assert await page.evaluate("globalThis.link.download") == "Title.json"
            file = json.loads(await page.evaluate("globalThis.blob.text()"))
            said = [(message["role"], message["content"]) for message in file["messages"]]
            text = MARKDOWN.strip()
            assert said == [("user", text), ("assistant", text)]
            delete = "document.querySelector('.conversations [aria-label=\"Delete # Title\"]')"
            await page.evaluate(f"{delete}.click()")
            await page.until("!document.querySelector('.message')")
            assert await page.evaluate(names) == ["other"]
            await check_nested_without_end(page)
            assert page.problems == []

    asyncio.run(main())


def test_a_conversation_is_kept_that_is_left_amid_an_answer_and_where_there_is_little_room(
    browser: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = "JSON.parse(localStorage['shardnet.conversations'] ?? '[]')"

    async def main() -> None:
        async with shown(browser, monkeypatch) as it:
            page = it.page
            await page.evaluate("location.hash = 'chat'")

            async def say(text: str) -> None:
                await page.until("document.activeElement?.id === 'say'")
                await page.type(text)
                await page.press("Enter")
                await page.until(f"{kept}[0]?.name.startsWith({text[:9]!r})")

            await say("wait")
            await page.until("document.querySelector('.message.assistant .text')?.textContent")
            await it.press("New chat")
            await page.until(f"{kept}[0].messages.length === 2")
            await page.evaluate(
                "void (() => { localStorage.room = 'x'.repeat(1000);"
                " for (let n = 1 << 22; n >= 1; n >>= 1)"
                " try { localStorage[n] = 'x'.repeat(n); } catch {}"
                " delete localStorage.room; })()"
            )
            for text in ("a" * 300, "b" * 300):
                await page.evaluate("document.querySelector('#say').focus()")
                await say(text)
                await page.until(f"{kept}[0].messages.length === 2")
                await it.press("New chat")
            assert await page.evaluate(f"{kept}.map(({{ name }}) => name[0])") == ["b"]

    asyncio.run(main())


async def check_nested_without_end(page: Page) -> None:
    """Check that what a model that repeats itself nests is shown, however deep."""
    for text in ("> ", "1. ", "- "):
        for n in (40, 1_000, 6_000):  # from 3_000 on no parser's stack suffices
            shows = await page.evaluate(
                "Promise.all([import('./prose.js'), import('./html.js')])"
                ".then(([{ Prose }, { html, render }]) => {"
                " const at = document.createElement('div');"
                f" render(html`<${{Prose}} text=${{{text!r}.repeat({n}) + 'end'}} />`, at);"
                " return at.textContent.trim().endsWith('end'); })"
            )
            assert shows, (text, n)


def test_a_key_is_asked_for_below_a_sub_path(
    browser: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keyring([parse_key("ann:one", 1)])

    async def main() -> None:
        settings = Settings(keys=keys, root_path="/llm")
        async with shown(browser, monkeypatch, settings) as it:
            page = it.page
            assert it.url.endswith("/llm")
            await page.until("document.querySelector('dialog[open]')")
            assert "anna" not in await page.evaluate("document.body.innerText")
            await page.until_text("asks for one of its keys: its owner chose them with --api-key")
            closing = "document.querySelector('dialog').addEventListener('close', resolve)"
            await page.evaluate(f"void (shut = new Promise((resolve) => {closing}))")
            await page.press("Escape")
            await page.evaluate("shut.then(() => true)")
            await page.until_text("The server asks for a key")
            await it.press("Key…")
            for typed in ("wrong", "one"):
                await page.until("document.activeElement?.name === 'key'")
                await page.type(typed)
                await page.press("Enter")
                if typed == "wrong":
                    await page.until_text("does not know the key that was given")
            await page.until_text("anna")
            await page.until("!document.querySelector('dialog[open]')")
            kept = "[sessionStorage.getItem('shardnet.key'), localStorage.getItem('shardnet.key')]"
            assert await page.evaluate(kept) == ["one", None]
            assert all(url.startswith(f"{it.url}/") for url in page.asked)

    asyncio.run(main())
