"""HTTP servers announced on loopback, as a browser of services hears them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from support.cluster.watchers import LOOPBACK
from zeroconf import ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from shardnet import __version__
from shardnet.cluster.discovery import http_announcement, service_browser
from shardnet.cluster.discovery.http_announcement import HttpServer, announce
from shardnet.cluster.machine.addresses import Interface

HTTP, OLLAMA = http_announcement.TYPES
SERVER = HttpServer(name="attic.lan", host="::", port=8000, path="/llm/")


class Browser:
    """What is announced now: records by name."""

    def __init__(self) -> None:
        self.found: dict[str, AsyncServiceInfo] = {}
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def browsing(self, *kinds: str) -> AsyncIterator[None]:
        async with AsyncZeroconf(interfaces=LOOPBACK) as zeroconf:
            self._zeroconf = zeroconf.zeroconf
            browser = AsyncServiceBrowser(self._zeroconf, [*kinds], handlers=[self._changed])
            yield
            await browser.async_cancel()

    async def until(self, holds: Callable[[dict[str, AsyncServiceInfo]], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds(self.found):
                self._news.clear()
                await self._news.wait()

    def _changed(
        self, zeroconf: Any, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        task = asyncio.ensure_future(self._read(service_type, name, state_change))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, kind: str, name: str, change: ServiceStateChange) -> None:
        service = AsyncServiceInfo(kind, name)
        if change is ServiceStateChange.Removed:
            self.found.pop(name, None)
        elif await service.async_request(self._zeroconf, 60_000):
            self.found[name] = service
        self._news.set()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_browser, "GOODBYE_S", 20.0)
    monkeypatch.setattr(http_announcement, "LOOK_S", 0.01)
    monkeypatch.setattr(http_announcement, "PROBE_S", 0.1)


def reached_at(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have this machine be on a network with these addresses."""
    lan = Interface(name="eth0", is_up=True, addresses=addresses)
    loopback = Interface(name="lo", is_up=True, addresses=("127.0.0.1/8", "::1/128"))
    monkeypatch.setattr(http_announcement, "read_interfaces", lambda: (lan, loopback))


@asynccontextmanager
async def announced(
    server: HttpServer, log: Callable[[str], None], interfaces: Sequence[str] = LOOPBACK
) -> AsyncIterator[None]:
    task = asyncio.create_task(announce(server, interfaces, log))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_a_server_is_heard_with_its_apis_moves_and_says_goodbye(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second one of the same machine gets another name."""
    reached_at(monkeypatch, "192.168.7.7/24", "fd00::7/64")
    lines: list[str] = []
    name, twin = f"shardnet on attic-lan.{HTTP}", f"shardnet on attic-lan-2.{HTTP}"

    async def main() -> None:
        browser = Browser()
        async with browser.browsing(HTTP, OLLAMA):
            async with announced(SERVER, lines.append):
                await browser.until(lambda found: len(found) >= 2)
                assert set(browser.found) == {name, name.replace(HTTP, OLLAMA)}
                record = browser.found[name]
                assert (record.port, record.decoded_properties) == (
                    8000,
                    {
                        "txtvers": "1",
                        "path": "/llm/",
                        "tls": "0",
                        "auth": "1",
                        "api": "openai,anthropic,ollama",
                        "product": "shardnet",
                        "version": __version__,
                    },
                )
                assert {*record.parsed_addresses()} == {"192.168.7.7", "fd00::7"}
                monkeypatch.setattr(http_announcement, "PROBE_S", 1.5)
                async with announced(SERVER._replace(port=8001), lines.append):
                    await browser.until(lambda found: twin in found)
                    assert [browser.found[one].port for one in (name, twin)] == [8000, 8001]
                await browser.until(lambda found: twin not in found)
                monkeypatch.setattr(http_announcement, "PROBE_S", 0.1)
                reached_at(monkeypatch, "192.168.8.8/24")
                await browser.until(
                    lambda found: (
                        name in found and found[name].parsed_addresses() == ["192.168.8.8"]
                    )
                )
            await browser.until(lambda found: not found)

    asyncio.run(main())
    assert lines[0] == f"announced by mDNS as {name.removesuffix('.')}"


def test_what_loopback_alone_reaches_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a server on all addresses of a machine without a network, until there is one."""
    for host in ("127.0.0.1", "::1"):
        assert HttpServer(name="a", host=host, port=1, path="/").hosts() == ()
    reached_at(monkeypatch)
    assert SERVER.hosts() == ()
    reached_at(monkeypatch, "192.168.7.7/24", "fd00::7/64")
    assert SERVER.hosts() == ("192.168.7.7", "fd00::7")


def test_a_server_of_https_is_announced_as_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    reached_at(monkeypatch, "192.168.7.7/24")
    secure = SERVER._replace(name="x" * 99, is_secure=True)

    async def main() -> None:
        browser = Browser()
        async with (
            browser.browsing(HTTP, OLLAMA, "_https._tcp.local."),
            announced(secure, lambda line: None),
        ):
            await browser.until(lambda found: bool(found))
            [record] = browser.found.values()
            assert record.name == f"shardnet on {46 * 'x'}._https._tcp.local."
            assert record.decoded_properties["tls"] == "1"

    asyncio.run(main())


def test_where_mdns_does_not_work_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that no interface of this machine has is none to send from."""
    reached_at(monkeypatch, "192.0.2.77/24")
    server = HttpServer(name="a", host="0.0.0.0", port=1, path="/")
    lines: list[str] = []

    async def main() -> None:
        looks, news = [0], asyncio.Event()

        def look(self: HttpServer) -> tuple[str, ...]:
            looks[0] += 1
            news.set()
            return ("192.0.2.77",)

        monkeypatch.setattr(HttpServer, "hosts", look)
        async with announced(server, lines.append, ()), asyncio.timeout(60):
            while looks[0] < 3:  # it looks again, and says nothing more
                news.clear()
                await news.wait()

    asyncio.run(main())
    [line] = lines
    assert "no address 192.0.2.77" in line
    assert "--no-mdns" in line
