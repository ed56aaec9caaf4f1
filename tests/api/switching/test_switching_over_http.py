"""Requests for several models over HTTP: they wait, hear why, and find their model loaded."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.servers.asgi_client import Exchanged, ask, asking
from support.servers.http_app import Served, served
from support.waiting import until

from shardnet.api.server import service
from shardnet.api.server.settings import Settings
from shardnet.api.switching import model_switch, turns
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.errors import (
    BusyError,
    CheckpointError,
    PeerFailedError,
    ShardnetError,
    ShortageError,
)
from shardnet.wire.messages.generation import Generate, Tokenize, Unload
from shardnet.wire.messages.household import (
    HOUSEHOLD_STORE,
    HouseholdListed,
    HouseholdModel,
    HouseholdModelState,
    ListHousehold,
)
from shardnet.wire.messages.membership import ListedModel, ListModels, ModelsListed, StageInfo
from shardnet.wire.messages.plans import ModelChoice, NodeProgress

COMPLETIONS, CHAT = "/v1/completions", "/api/chat"
TINY, BIG, DEFAULT = "org/Tiny-Llama", "org/Big-Llama", "shardnet/default"
HASTY = Settings(headers_s=0, heartbeat_s=0.005)


@pytest.fixture(autouse=True)
def _without_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LINGER_S", 0.0)


def saying(prompt: str, model: str, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "model": model, **more}


@dataclass(slots=True, kw_only=True)
class Ring:
    """What a scripted node's ring has loaded. Loading waits for `may_load`, if that is closed.

    `fails` has errors by model: of loading, or once of generating with "generating".
    """

    server: Served
    loaded: list[str] = field(default_factory=list)
    unloaded: list[Unload] = field(default_factory=list)
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    fails: dict[str, ShardnetError] = field(default_factory=dict)
    n_given_up: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def before(self, control: ControlLink, message: Incoming) -> None:
        """Load before an answer, as a node does."""
        if isinstance(message, Unload):
            if "unloading" in self.fails:
                raise self.fails.pop("unloading")
            self.unloaded.append(message)
            self.loaded.append("")
        elif isinstance(message, Generate) and "generating" in self.fails:
            raise self.fails.pop("generating")
        elif isinstance(message, Tokenize):
            await self._load(control, message)
        async with self.changed:
            self.changed.notify_all()

    async def _load(self, control: ControlLink, message: Tokenize) -> None:
        model = message.generate.choice.model
        if model in self.fails:
            raise self.fails.pop(model)
        if self.loaded[-1:] != [model]:
            told = NodeProgress(request=message.request, rank=0, done_bytes=4, total_bytes=10)
            control.send(told)
            try:
                await self.may_load.wait()
            except asyncio.CancelledError:
                self.n_given_up += 1
                raise
            self.loaded.append(model)

    async def until_unloaded(self, n: int) -> None:
        """Wait until so many were unloaded."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: len(self.unloaded) >= n)


@asynccontextmanager
async def ring(settings: Settings = HASTY) -> AsyncIterator[Ring]:
    """Serve a ring that loads at once."""
    async with served(settings) as server, asyncio.timeout(60):
        made = Ring(server=server)
        made.may_load.set()
        server.node.before = made.before
        yield made


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


async def text_of(exchanged: Exchanged) -> str:
    await exchanged.until_said(b"[DONE]")
    return "".join(one["choices"][0]["text"] for one in exchanged.events[:-1])


def test_another_model_is_loaded_when_the_ring_is_idle_and_who_waits_hears_why() -> None:
    async def main() -> None:
        async with ring() as there:
            app = there.server.app
            stream = saying("hello", BIG, stream=True)
            async with asking(app, COMPLETIONS, saying("wait", TINY, stream=True)) as first:
                await first.until_said(b'"w"')
                async with asking(app, COMPLETIONS, stream) as second:
                    await second.until_said(f": waiting for 1 request to {TINY}".encode())
                    assert there.loaded == [TINY]
                    there.may_load.clear()
                    first.leave()
                    await second.until_said(f": {BIG}: loading 40 %".encode())
                    there.may_load.set()
                    assert await text_of(second) == "hello"
            assert there.loaded == [TINY, BIG]
            listed = (await ask(app, "/v1/models")).json["data"]
            assert {TINY, BIG} <= {model["id"] for model in listed}
            assert (await ask(app, "/v1/models/")).json["data"] == listed

    asyncio.run(main())


def test_whatever_asks_for_a_model_waits_for_its_turn() -> None:
    """Also what only counts tokens: the nodes would refuse it."""
    conversation = {"model": BIG, "messages": [{"role": "user", "content": "abc"}]}
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", conversation),
        ("/v1/messages/count_tokens", conversation),
        ("/tokenize", {"model": BIG, "prompt": "abc"}),
        ("/detokenize", {"model": BIG, "tokens": [97]}),
        (CHAT, {**conversation, "stream": False}),
        (CHAT, {"model": BIG}),
    ]

    async def main() -> None:
        async with ring() as there:
            for path, body in bodies:
                asked = saying("wait", TINY, stream=True)
                async with asking(there.server.app, COMPLETIONS, asked) as first:
                    await first.until_said(b'"w"')
                    async with asking(there.server.app, path, body) as second:
                        await until(lambda: there.server.service.switch.n_waiting > 0)
                        assert there.loaded[-1] == TINY
                        first.leave()
                        async with second.changed:
                            await second.changed.wait_for(lambda: second.status)
                        assert second.status == 200, (path, second.content)
                        assert there.loaded[-1] == BIG

    asyncio.run(main())


def test_who_hears_nothing_is_told_what_a_model_of_the_household_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no turn in the ring. keep_alive 0 has it unloaded."""
    monkeypatch.setattr(service, "PATIENCE_S", 0.3)

    async def main() -> None:
        async with ring() as there:
            before = there.server.node.before

            async def told(control: ControlLink, message: Incoming) -> None:
                number = getattr(message, "request", 0)
                if isinstance(message, ListModels):
                    named = [ListedModel(name=BIG, store=HOUSEHOLD_STORE)]
                    control.send(ModelsListed(request=number, node="n", name="n", models=named))
                if isinstance(message, ListHousehold):
                    model = HouseholdModel(name=BIG, choice=ModelChoice(model=BIG))
                    state = HouseholdModelState(model=model, state="waiting", why="others in use")
                    control.send(HouseholdListed(request=number, models=[state]))
                await before(control, message)

            there.server.node.before = told
            there.may_load.clear()
            answer = await ask(there.server.app, COMPLETIONS, saying("hello", BIG))
            assert answer.status == 503
            assert "others in use" in answer.json["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
            assert not there.server.service.switch.n_waiting
            there.may_load.set()
            monkeypatch.setattr(service, "PATIENCE_S", 60)  # a busy machine answers late
            talk = {"model": BIG, "prompt": "hello", "stream": False, "keep_alive": 0}
            answer = await ask(there.server.app, "/api/generate", talk)
            assert answer.status == 200
            assert [one.model for one in there.unloaded] == [BIG]
            answer = await ask(there.server.app, "/api/generate", {"model": BIG, "keep_alive": 0})
            assert answer.json["done_reason"] == "unload"
            assert [one.model for one in there.unloaded] == [BIG, BIG]

    asyncio.run(main())


def test_who_hears_nothing_is_told_when_to_ask_again_and_finds_it_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "PATIENCE_S", 0.3)

    async def main() -> None:
        async with ring() as there:
            there.may_load.clear()
            answer = await ask(there.server.app, COMPLETIONS, saying("hello", BIG))
            assert answer.status == 503
            assert f"{BIG} is not ready: {BIG}: loading 40 %" in answer.json["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
            ready = await ask(there.server.app, "/readyz")
            assert (ready.status, ready.json["reason"]) == (503, f"{BIG}: loading 40 %")
            assert (await ask(there.server.app, "/health")).status == 200
            assert there.n_given_up == 0
            there.may_load.set()
            monkeypatch.setattr(service, "PATIENCE_S", 60)  # a busy machine answers late
            answer = await ask(there.server.app, COMPLETIONS, saying("hello", BIG))
            assert answer.json["choices"][0]["text"] == "hello"
            assert there.loaded == [BIG]

    asyncio.run(main())


def test_a_client_that_gives_up_early_does_not_undo_the_loading() -> None:
    async def main() -> None:
        async with ring() as there:
            there.may_load.clear()
            stream = saying("hello", BIG, stream=True)
            async with asking(there.server.app, COMPLETIONS, stream) as first:
                await first.until_said(b"loading 40 %")
            other = saying("hello", TINY, stream=True)
            async with asking(there.server.app, COMPLETIONS, other) as waits:
                await waits.until_said(f": {BIG}: loading 40 %".encode())
                assert there.n_given_up == 0
                there.may_load.set()
                assert await text_of(await ask(there.server.app, COMPLETIONS, stream)) == "hello"
                assert await text_of(waits) == "hello"
            assert there.loaded == [BIG, TINY]

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_fails_who_asked_for_it_alone() -> None:
    async def main() -> None:
        async with ring() as there:
            there.fails[BIG] = ShardnetError("damaged")
            answer = await ask(there.server.app, COMPLETIONS, saying("hello", BIG))
            assert (answer.status, answer.json["error"]["message"][-7:]) == (500, "damaged")
            for model in (TINY, BIG):
                answer = await ask(there.server.app, COMPLETIONS, saying("hello", model))
                assert answer.status == 200

    asyncio.run(main())


@pytest.mark.parametrize("where", [BIG, "generating"])
def test_a_machine_that_lacks_something_is_named_at_once_and_not_asked_over_and_over(
    where: str,
) -> None:
    """A disk that fails may do so for ever: no other program is waited for."""

    async def main() -> None:
        async with ring() as there:
            lacks = ShortageError("b: the disk fails", remedy="look into the log")
            there.fails[where] = lacks
            answer = await ask(there.server.app, COMPLETIONS, saying("hello", BIG))
            assert (answer.status, answer.headers["retry-after"]) == (503, "2")
            assert answer.json["error"]["message"].endswith(str(lacks))
            answer = await ask(there.server.app, COMPLETIONS, saying("hello", BIG))
            assert answer.status == 200

    asyncio.run(main())


def test_a_ring_that_broke_is_built_again_and_says_when_to_ask() -> None:
    async def main() -> None:
        async with ring() as there:
            app = there.server.app
            assert (await ask(app, COMPLETIONS, saying("a", TINY))).status == 200
            there.may_load.clear()
            there.loaded.clear()
            there.fails["generating"] = PeerFailedError("node b was lost")
            failed = await ask(app, COMPLETIONS, saying("a", TINY))
            assert (failed.status, failed.headers["retry-after"]) == (503, "2")
            await until(lambda: "loading 40" in there.server.service.switch.doing)
            again = await ask(app, COMPLETIONS, saying("a", TINY))  # at once
            assert again.status == 503
            assert "a node of its ring was lost" in again.json["error"]["message"]
            assert int(again.headers["retry-after"]) >= 1
            watched = await ask(app, "/readyz")
            assert (watched.status, watched.json["status"]) == (503, "unavailable")
            assert (await ask(app, "/healthz")).status == 200
            async with asking(app, COMPLETIONS, saying("hello", TINY, stream=True)) as stream:
                await stream.until_said(f": {TINY}: loading 40 %".encode())
                there.may_load.set()
                assert await text_of(stream) == "hello"
            assert (await ask(app, "/readyz")).status == 200

    asyncio.run(main())


def test_clients_see_the_name_of_a_model_and_not_where_it_lies() -> None:
    async def main() -> None:
        async with ring() as there:
            app, client = there.server.app, there.server.service.client
            client.choice = ModelChoice(model="/srv/models/Big")
            there.may_load.clear()
            body = {"prompt": "hello", "stream": True}
            async with asking(app, COMPLETIONS, body) as stream:
                await stream.until_said(b": Big: loading 40 %")
                watched = await ask(app, "/readyz")
                assert (watched.status, watched.json["reason"]) == (503, "Big: loading 40 %")
                there.may_load.set()
                assert await text_of(stream) == "hello"
                assert b"/srv" not in stream.content
            there.loaded.clear()
            there.fails["/srv/models/Big"] = CheckpointError("/srv/models/Big has no config.json")
            client.choice = ModelChoice(model=TINY)
            assert (await ask(app, COMPLETIONS, {"prompt": "a"})).status == 200
            client.choice = ModelChoice(model="/srv/models/Big")
            failed = await ask(app, COMPLETIONS, {"prompt": "a"})
            assert (failed.status, failed.json["error"]["message"]) == (
                404,
                "Big has no config.json",
            )
            listed = await ask(app, "/v1/models")
            assert listed.json["data"][0]["id"] == "Big"

    asyncio.run(main())


def test_a_ring_that_other_programs_use_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_switch, "BUSY_S", (0.001, 0.001))

    async def main() -> None:
        async with ring() as there:
            app = there.server.app
            for where in (TINY, "generating"):
                there.fails[where] = BusyError("this node is generating with another")
                answer = await ask(app, COMPLETIONS, saying("hello", TINY))
                assert answer.json["choices"][0]["text"] == "hello"
            assert there.fails == {}
            n_asked = len(there.server.node.asked)
            monkeypatch.setattr(model_switch, "BUSY_S", (60.0, 60.0))
            there.fails[BIG] = BusyError("this node is generating with another")
            async with asking(app, COMPLETIONS, saying("a", BIG, stream=True)) as stream:
                await stream.until_said(b"this node is generating with another")
            assert len(there.server.node.asked) == n_asked

    asyncio.run(main())


def test_a_model_that_nobody_uses_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_switch, "LEAST_KEPT_S", 0.0)

    async def main() -> None:
        async with ring(Settings(idle_unload_s=0.01)) as there:
            app = there.server.app
            there.fails["unloading"] = BusyError("it was used just now by another program")
            assert (await ask(app, COMPLETIONS, saying("a", TINY))).status == 200
            await there.until_unloaded(1)
            [unloaded] = there.unloaded
            assert (unloaded.model, unloaded.idle_s) == (TINY, 0.01)
            assert (await ask(app, COMPLETIONS, saying("a", TINY))).status == 200
            await there.until_unloaded(2)
            assert there.loaded == [TINY, "", TINY, ""]

    asyncio.run(main())


def test_keep_alive_says_how_long_a_model_stays() -> None:
    def said(**more: Any) -> dict[str, Any]:
        content = [{"role": "user", "content": "a"}]
        return {"model": TINY, "messages": content, "stream": False, **more}

    async def main() -> None:
        async with ring(Settings(idle_unload_s=3600)) as there:
            app, switch = there.server.app, there.server.service.switch
            for keep, expected_s in (
                ("5m", 300),
                (90, 90),
                (None, 3600),
                (-1, None),
                ("-1m", None),
                ("1h30m", 5400),
            ):
                assert (await ask(app, CHAT, said(keep_alive=keep))).status == 200
                if expected_s is None:
                    assert switch.expires_s is None
                else:
                    assert switch.expires_s == pytest.approx(expected_s, abs=30)
            there.server.node.stage = StageInfo(model=TINY, layers=(0, 1), rank=0)
            [listed] = (await ask(app, "/api/ps")).json["models"]
            assert (listed["model"], listed["size"], listed["size_vram"]) == (TINY, 8, 0)
            assert (listed["context_length"], listed["details"]["family"]) == (4096, "llama")
            left = datetime.datetime.fromisoformat(listed["expires_at"]) - now()
            assert left.total_seconds() == pytest.approx(5400, abs=30)
            assert not there.unloaded
            await ask(app, CHAT, said(keep_alive=0))
            await there.until_unloaded(1)
            await ask(app, CHAT, {"model": TINY})
            answer = await ask(app, CHAT, {"model": TINY, "keep_alive": 0})
            assert answer.json["done_reason"] == "unload"
            assert [one.model for one in there.unloaded] == [TINY, TINY]

    asyncio.run(main())


def test_a_server_that_never_switches_has_one_model() -> None:
    async def main() -> None:
        async with ring(Settings(may_switch=False)) as there:
            app = there.server.app
            [only] = (await ask(app, "/v1/models")).json["data"]
            assert only["id"] == DEFAULT
            refused = await ask(app, COMPLETIONS, saying("a", TINY))
            assert refused.status == 404
            assert f"there is {DEFAULT}" in refused.json["error"]["message"]
            assert "--switch never" in refused.json["error"]["message"]
            for name in ("", DEFAULT, "default"):
                assert (await ask(app, COMPLETIONS, saying("a", name))).status == 200
            assert there.loaded == [DEFAULT]

    asyncio.run(main())


def test_what_is_said_of_the_default_model_changes_no_other_one() -> None:
    async def main() -> None:
        async with ring() as there:
            app = there.server.app
            assert (await ask(app, COMPLETIONS, saying("a", TINY))).status == 200
            shown = await ask(app, "/api/show", {"model": DEFAULT})
            assert shown.json["capabilities"] == ["completion"]
            assert there.loaded == [TINY]

    asyncio.run(main())
