"""A headless Chromium, driven by its DevTools protocol over a pipe.

Knows Chromium's commands, not the dashboard. It resolves no name and asks nobody but this machine.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
FLAGS: Final = (
    *("--headless", "--no-sandbox", "--no-zygote", "--in-process-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-sync", "--disable-extensions", "--disable-default-apps"),
    *("--disable-background-networking", "--disable-component-update", "--no-proxy-server"),
    *("--disable-background-timer-throttling", "--mute-audio", "--hide-scrollbars"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--process-per-site",  # one for all pages of this machine: to start one takes a second
    "--remote-debugging-pipe",
)
COMMAND_S: Final = 60.0
"""How long the browser may take for a command, and a page until something holds."""
END_S: Final = 20.0

KEYS: Final[dict[str, tuple[int, str]]] = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    " ": (32, " "),
    "End": (35, ""),
    "Home": (36, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
}
"""Keys by name: the code that a browser is told, and the text that they make."""

Value = dict[str, Any]


def program() -> str:
    """Return the path of the browser, "" where there is none."""
    return next((path for path in map(shutil.which, PROGRAMS) if path), "")


class Page:
    """A tab. `problems` are errors of its scripts and breaches of its policy, `asked` all URLs."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        self.asked: list[str] = []

    async def do(self, method: str, **parameters: Any) -> Value:
        """Have the browser do a command in this tab."""
        return await self._browser.do(method, parameters, self._session)

    async def open(self, url: str) -> None:
        """Go to an address."""
        answer = await self.do("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, of its promise if it is one."""
        answer = await self.do(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until an expression is true in the page; return its value."""
        looking = f"""new Promise((resolve) => {{
            const look = () => {{
                const value = ({condition});
                if (value) resolve(value); else setTimeout(look, 20);
            }};
            look();
        }})"""
        try:
            return await self.evaluate(looking)
        except TimeoutError:
            seen = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never true: {condition}; {self.problems}; {seen}") from None

    async def record(self, expression: str) -> None:
        """Have the page keep each value that an expression has from now on, in `recorded`."""
        await self.evaluate(f"""(() => {{
            globalThis.recorded = new Set();
            const record = () => recorded.add({expression});
            new MutationObserver(record).observe(
                document.body, {{attributes: true, childList: true, subtree: true}});
        }})()""")

    async def until_text(self, text: str) -> None:
        """Wait until the page shows a text."""
        await self.until(f"document.body.innerText.includes({json.dumps(text)})")

    async def type(self, text: str) -> None:
        """Type a text where the focus is."""
        await self.do("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key."""
        code, text = KEYS[key]
        event = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        if text:
            event["text"] = text
        await self.do("Input.dispatchKeyEvent", type="keyDown", **event)
        await self.do("Input.dispatchKeyEvent", type="keyUp", **event)

    async def press_until(self, key: str, condition: str, *, most: int = 100) -> None:
        """Press a key until an expression is true."""
        for _ in range(most):
            if await self.evaluate(f"Boolean({condition})"):
                return
            await self.press(key)
        raise AssertionError(f"{key} {most} times, and never {condition}")

    async def focused(self) -> str:
        """Return what a screen reader says of what has the focus: role and name."""
        node = (await self.do("Runtime.evaluate", expression="document.activeElement"))["result"]
        tree = await self.do("Accessibility.getPartialAXTree", objectId=node["objectId"])
        first = tree["nodes"][0]
        return f"{first['role']['value']} {first.get('name', {}).get('value', '')}".strip()

    async def names(self) -> list[tuple[str, str]]:
        """List role and name of all that a screen reader finds in the page."""
        tree = await self.do("Accessibility.getFullAXTree")
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tree["nodes"]
            if not node["ignored"]
        ]

    async def look_like(self, *, width: int, height: int, scheme: str = "light") -> None:
        """Have the screen this size in pixels, the system these colours, and nothing move."""
        await self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        await self.do("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self) -> bytes:
        """Return what is seen as a PNG."""
        return base64.b64decode((await self.do("Page.captureScreenshot"))["data"])

    def hear(self, method: str, told: Value) -> None:
        """Take an event."""
        match method:
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                self.problems.append(
                    details.get("exception", {}).get("description") or details["text"]
                )
            case "Log.entryAdded" if told["entry"]["source"] in ("security", "javascript"):
                self.problems.append(told["entry"]["text"])
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning"):
                self.problems.append(str([argument.get("value") for argument in told["args"]]))
            case "Network.requestWillBeSent":
                self.asked.append(told["request"]["url"])


class Browser:
    """A running browser, whose pages and what they stored end with it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader = reader
        self._writer = writer
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Value]] = {}
        self._pages: dict[str, Page] = {}

    async def end(self) -> None:
        """Close the pages, and forget what they stored."""
        for page in self._pages.values():
            origin = await page.evaluate("location.origin")
            if origin != "null":
                await page.do("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
            await page.do("Page.close")

    async def do(self, method: str, parameters: Value, session: str = "") -> Value:
        """Do a command; return its answer. Raises TimeoutError, AssertionError for a refusal."""
        self._number += 1
        message: Value = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        answer: asyncio.Future[Value] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(COMMAND_S):
            return await answer

    async def open_page(self, url: str = "about:blank") -> Page:
        """Open a tab."""
        target = await self.do("Target.createTarget", {"url": "about:blank"})
        attached = await self.do("Target.attachToTarget", {**target, "flatten": True})
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.do(f"{domain}.enable")
        if url != "about:blank":
            await page.open(url)
        return page

    async def listen(self) -> None:
        """Take what the browser says, until it ends."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                self._hear(json.loads((await self._reader.readuntil(b"\0"))[:-1]))

    def _hear(self, message: Value) -> None:
        if "id" not in message:
            page = self._pages.get(message.get("sessionId", ""))
            if page is not None:
                page.hear(message["method"], message["params"])
            return
        answer = self._waiting.pop(message["id"], None)
        if answer is None or answer.done():
            return  # nobody waits for it any more
        if "error" in message:
            answer.set_exception(AssertionError(message["error"]["message"]))
        else:
            answer.set_result(message["result"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A browser's process, and our ends of its pipes."""

    process: subprocess.Popen[bytes]
    incoming: int
    outgoing: int


@contextmanager
def running(folder: Path) -> Iterator[Program]:
    """Run a browser whose files are in `folder`. It outlives event loops."""
    theirs_in, outgoing = os.pipe()
    incoming, theirs_out = os.pipe()
    process = _start(folder, theirs_in, theirs_out)
    try:
        yield Program(process=process, incoming=incoming, outgoing=outgoing)
    finally:
        for descriptor in (incoming, outgoing):  # without them it ends
            os.close(descriptor)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@asynccontextmanager
async def browsing(program: Program) -> AsyncIterator[Browser]:
    """Use a browser in this event loop, as if it had never been used before."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 << 20)
    incoming, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(program.incoming), "rb", 0)
    )
    writer, _ = await loop.connect_write_pipe(
        asyncio.BaseProtocol, os.fdopen(os.dup(program.outgoing), "wb", 0)
    )
    browser = Browser(reader, writer)
    listening = asyncio.create_task(browser.listen())
    try:
        try:
            yield browser
        finally:
            await browser.end()
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        incoming.close()
        writer.close()


def _start(folder: Path, theirs_in: int, theirs_out: int) -> subprocess.Popen[bytes]:
    """Start it with its pipes where it looks for them, at descriptors 3 and 4."""
    high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out))

    def place() -> None:
        os.dup2(high_in, 3)
        os.dup2(high_out, 4)

    try:
        return subprocess.Popen(
            [program(), *FLAGS, f"--user-data-dir={folder}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
            pass_fds=(3, 4),
            preexec_fn=place,
        )
    finally:
        for descriptor in (high_in, high_out, theirs_in, theirs_out):
            os.close(descriptor)
