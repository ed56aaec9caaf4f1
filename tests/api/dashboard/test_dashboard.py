"""The dashboard's data over HTTP: everything at once, as it changes, and what is done there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from starlette.types import ASGIApp
from support.cluster import scripted_node
from support.cluster.checkup_facts import reply, view
from support.cluster.scripted_node import client_of
from support.cluster.watched_node import WatchedNode, activity, stage_state, step
from support.servers.asgi_client import Exchanged, ask, asking

from shardnet.api.client import Client
from shardnet.api.dashboard import board as dashboard_board
from shardnet.api.dashboard import endpoints as board_endpoints
from shardnet.api.dashboard import jobs
from shardnet.api.dashboard.board import Dashboard, Watcher
from shardnet.api.dashboard.endpoints import PATH, endpoints
from shardnet.api.dashboard.jobs import Jobs
from shardnet.api.dashboard.state import ShownState
from shardnet.api.openai.faults import OPENAI
from shardnet.api.programs import PROGRAMS
from shardnet.api.server.app import make_app
from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Settings
from shardnet.api.switching import model_switch
from shardnet.errors import BusyError, CheckpointError
from shardnet.wire.messages.plans import ModelChoice, NodeProgress

EVERY_S = 0.01


@dataclass
class Board:
    app: ASGIApp
    node: WatchedNode
    client: Client
    dashboard: Dashboard
    service: Service

    async def ask(self, path: str, body: Any = None, **how: Any) -> Exchanged:
        return await ask(self.app, PATH + path, body, **how)

    async def post(self, path: str, body: Any = None) -> Exchanged:
        return await ask(self.app, PATH + path, body, method="POST")


@asynccontextmanager
async def board(settings: Settings | None = None) -> AsyncIterator[Board]:
    node = WatchedNode()
    async with asyncio.timeout(20), client_of(node) as client:
        service = Service(client=client, settings=settings or Settings(), models=ModelNames(client))
        dashboard = Dashboard(
            service, watcher=Watcher(client, nodes_every_s=EVERY_S, ring_every_s=EVERY_S, fresh_s=0)
        )
        app = make_app(service, endpoints(dashboard, OPENAI), OPENAI)
        try:
            yield Board(app, node, client, dashboard, service)
        finally:
            await service.close()


def events(exchanged: Exchanged, name: str) -> list[Any]:
    """The data of all events of this name that have come."""
    blocks = exchanged.content.decode().split("\n\n")
    head = f"event: {name}\ndata: "
    return [json.loads(one.removeprefix(head)) for one in blocks if one.startswith(head)]


async def until(exchanged: Exchanged, met: Callable[[], bool]) -> None:
    async with exchanged.changed:
        await exchanged.changed.wait_for(met)


def test_the_state_has_everything_as_it_is_written_down() -> None:
    async def main() -> None:
        async with board() as page:
            page.node.activity = activity(step(1, 9000.0))
            state = (await page.ask("/state")).json
            msgspec.convert(state, ShownState)
            assert state["server"]["answers"] is True
            assert (state["server"]["name"], state["server"]["active_requests"]) == ("anna", 1)
            assert [node["name"] for node in state["nodes"]] == ["anna", "bert"]
            assert state["ring"]["stages"][1]["layers"] == [2, 4]
            assert state["requests"][0]["id"] == "r1-7"
            assert state["steps"]["steps"][0]["stages"][0]["compute_ms"] == 3.0
            assert state["jobs"] == state["usage"] == []
            counter = page.service.metrics.generated_tokens
            counter.labels("ann", "m").inc(3)
            assert page.node.asked_for[0].known_ring == ""
            # What was said is not said again.
            again = (await page.ask("/state")).json
            [used] = again["usage"]
            assert (used["key"], used["model"], used["n_generated"]) == ("ann", "m", 3)
            assert page.node.asked_for[1].after_step == 1
            assert len(again["steps"]["steps"]) == 1

    asyncio.run(main())


def test_parts_come_as_they_change_and_nobody_is_asked_when_nobody_looks() -> None:
    async def main() -> None:
        async with board() as page:
            async with asking(page.app, f"{PATH}/events") as seen:
                await until(seen, lambda: bool(events(seen, "steps")))
                for name in (*ShownState.__struct_fields__,):
                    assert len(events(seen, name)) == 1, name
                # Time passes, and that is no news.
                await page.node.until_looked(len(page.node.asked_for) + 3)
                assert len(events(seen, "nodes")) == len(events(seen, "requests")) == 1

                page.node.activity = activity(step(1, 9000.0), step(2, 9100.0), requests=[])
                await until(seen, lambda: events(seen, "requests")[-1] == [])
                page.node.activity = activity(step(3, 9200.0), plan=None)
                await until(seen, lambda: len(events(seen, "steps")) == 3)
                steps = [[one["step"] for one in e["steps"]] for e in events(seen, "steps")]
                assert steps == [[], [1, 2], [3]]

                page.node.replies = [reply("anna")]
                await until(seen, lambda: len(events(seen, "nodes")) == 2)
                lost = events(seen, "nodes")[-1][1]
                assert (lost["name"], lost["state"], lost["memory_bytes"]) == (
                    "bert",
                    "lost",
                    8 << 30,
                )
                async with asking(page.app, f"{PATH}/events") as other:
                    await until(other, lambda: bool(events(other, "steps")))
                    first = events(other, "steps")[0]["steps"]
                    assert [one["step"] for one in first] == [1, 2, 3]
            assert page.dashboard.watcher._polling == []

    asyncio.run(main())


def test_pages_that_are_many_or_loaded_again_and_again_ask_the_nodes_no_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(board_endpoints, "MAX_WATCHING", 1)

    async def main() -> None:
        async with board() as page:
            page.dashboard.watcher = Watcher(page.client)
            await asyncio.gather(*(page.ask("/state") for _ in range(5)))
            assert len(page.node.asked_for) == 1
            async with asking(page.app, f"{PATH}/events") as seen:
                await until(seen, lambda: bool(events(seen, "steps")))
                assert (await page.ask("/events")).status == 429
                n_asked = len(page.node.asked_for)
                await page.ask("/state")
                assert len(page.node.asked_for) == n_asked

    asyncio.run(main())


def test_the_page_stays_alive_when_its_node_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with board() as page, asking(page.app, f"{PATH}/events") as seen:
            await until(seen, lambda: bool(events(seen, "steps")))
            monkeypatch.setattr(dashboard_board, "ANSWER_S", 0.02)
            page.node.replies = []
            await until(seen, lambda: not events(seen, "server")[-1]["answers"])
            await until(
                seen, lambda: {one["state"] for one in events(seen, "nodes")[-1]} == {"silent"}
            )
            silent = events(seen, "server")[-1]["failure"]
            await page.node.link.close()
            await until(seen, lambda: events(seen, "server")[-1]["failure"] != silent)
            assert not events(seen, "server")[-1]["answers"]
            assert events(seen, "ring")[-1]["id"] == "r1"

    asyncio.run(main())


def test_a_ring_that_the_asked_node_is_not_in_is_asked_for_at_its_head() -> None:
    async def main() -> None:
        async with board() as page:
            stage = stage_state(head="bert-id")
            page.node.replies = [reply("anna", view("bert")), reply("bert", stage=stage)]
            asked: list[str] = []

            async def say(**what: Any) -> Any:
                asked.append(what["at"])
                return activity()

            page.client.activity = say  # type: ignore[method-assign]
            assert (await page.ask("/state")).json["ring"]["head"] == "anna-id"
            assert asked == ["10.0.0.2:7433"]
            page.node.replies = [reply("anna", view("bert"), stage=stage)]
            await page.ask("/state")
            assert asked[-1] == ""

    asyncio.run(main())


def test_a_request_is_cancelled_by_its_id() -> None:
    async def main() -> None:
        async with board() as page:
            answer = await page.post("/requests/r1-7/cancel")
            assert (answer.status, answer.json) == (200, {"cancelled": "r1-7"})
            assert page.node.cancelled == [7]
            for name in ("r1-8", "r0-7", "7", "x"):
                assert (await page.post(f"/requests/{name}/cancel")).status == 404

    asyncio.run(main())


def test_a_plan_is_shown_with_or_without_nodes() -> None:
    async def main() -> None:
        async with board() as page:
            body = {"leave_out": ["bert-id"], "nodes": ["bert-id", "anna-id"], "context": 32}
            answer = (await page.ask("/plan", body)).json
            assert answer["stages"][0]["compute_ms"] == 1.5
            assert answer["left_out"][0]["name"] == "cleo"
            [asked] = page.node.plans
            assert asked.without == ["bert-id"]
            assert asked.choice.nodes == ["10.0.0.2:7433", "10.0.0.1:7433"]
            assert asked.choice.context == 32
            refused = await page.ask("/plan", {"nodes": ["bert-id", "nobody"]})
            assert (refused.status, refused.json["error"]["param"]) == (400, "nodes[1]")
            assert (await page.ask("/plan", {"model": "nothing"})).status == 404

    asyncio.run(main())


def test_models_findings_and_settings_are_shown() -> None:
    async def main() -> None:
        async with board() as page:
            await page.ask("/state")
            shown = (await page.ask("/models")).json
            names = {one["name"]: one for one in shown["models"]}
            assert names["org/Tiny-Llama"]["is_loaded"] is True
            assert names["org/Big-Llama"]["is_loaded"] is False
            assert names["org/Big-Llama"]["is_served"] is True
            assert names["org/Big-Llama"]["nodes"][0]["store"] == "here"

            found = (await page.ask("/doctor")).json["findings"]
            assert ("anna", "node") in {(one["where"], one["topic"]) for one in found}
            assert all(
                set(one) == {"severity", "topic", "where", "what", "remedy"} for one in found
            )

            body = {"url": "http://lab:8000/llm/v1", "model": "m", "api_key": "k"}
            programs = (await page.ask("/programs", body)).json["programs"]
            assert [one["name"] for one in programs] == [*PROGRAMS]
            webui = next(one for one in programs if one["name"] == "openwebui")
            assert "http://lab:8000/llm/v1" in webui["text"]
            assert (await page.ask("/programs", {"url": "javascript:alert(1)"})).status == 400

    asyncio.run(main())


def test_a_model_of_a_folder_is_shown_by_the_name_that_it_is_asked_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scripted_node, "MODELS", ("/srv/a/Tiny", "/srv/b/Twin", "/home/Twin"))

    async def main() -> None:
        async with board() as page:
            page.client.choice = ModelChoice(model="/srv/a/Tiny")
            list_models, asked = page.client.models, []

            def noted(**how: Any) -> Any:
                asked.append(how)
                return list_models(**how)

            page.client.models = noted  # type: ignore[method-assign, assignment]
            models = (await page.ask("/models")).json["models"]
            assert {"model": "/srv/a/Tiny"} in asked, "it may be in no folder that is looked into"
            told = {one["name"]: (one["is_served"], one["is_default"]) for one in models}
            twins = dict.fromkeys(("/srv/b/Twin", "/home/Twin"), (True, False))
            assert told == {"Tiny": (True, True), **twins}

    asyncio.run(main())


def test_without_the_key_nothing_is_told_or_done() -> None:
    async def main() -> None:
        settings = Settings(keys=Keyring([parse_key("me:secret", 1)]))
        async with board(settings) as page:
            for path in ("/state", "/events", "/models", "/doctor"):
                assert (await page.ask(path)).status == 401
            for path in (
                "/plan",
                "/load",
                "/unload",
                "/pull",
                "/programs",
                "/requests/r1-7/cancel",
            ):
                assert (await page.post(path, {"model": "a/b"})).status == 401
            assert page.node.asked_for == []
            assert page.node.cancelled == []
            headers = {"Authorization": "Bearer secret"}
            assert (await page.ask("/state", headers=headers)).json["server"]["has_keys"] is True

    asyncio.run(main())


def test_a_load_is_a_job_with_the_progress_of_its_stages() -> None:
    async def main() -> None:
        async with board() as page:
            may_end = asyncio.Event()

            async def load(
                ids: Any, *, model: Any, on_progress: Callable[[NodeProgress], None]
            ) -> None:
                def tell(rank: int, phase: Any, done: int, total: int) -> None:
                    on_progress(
                        NodeProgress(
                            request=1, rank=rank, phase=phase, done_bytes=done, total_bytes=total
                        )
                    )

                tell(0, "measuring", 1, 2)
                tell(1, "loading", 10, 100)
                tell(0, "loading", 20, 50)
                await may_end.wait()
                if model.model == "org/Big-Llama":
                    raise CheckpointError("it is broken", remedy="mend it")

            page.client.tokenize = load  # type: ignore[method-assign, assignment]
            begun = await page.ask("/load", {"model": "org/Tiny-Llama"})
            assert (begun.status, begun.json["kind"]) == (202, "load")
            assert begun.json["model"] == "org/Tiny-Llama"
            await asyncio.sleep(0)
            [job] = (await page.ask("/state")).json["jobs"]
            assert (job["phase"], job["done_bytes"], job["total_bytes"]) == ("loading", 30, 150)
            assert [one["rank"] for one in job["nodes"]] == [0, 1]
            assert (await page.ask("/load", {"model": "org/Big-Llama"})).status == 409
            assert (await page.post("/unload")).status == 409
            assert (await page.ask("/load", {"model": "none"})).status == 404

            stopped = (await page.post(f"/jobs/{job['id']}/cancel")).json
            assert stopped["state"] == "cancelled"
            assert (await page.post("/jobs/99/cancel")).status == 404
            may_end.set()
            async with asking(page.app, f"{PATH}/events") as seen:
                await page.ask("/load", {"model": "org/Big-Llama"})
                await until(seen, lambda: b'"failed"' in seen.content)
                failed = events(seen, "jobs")[-1][-1]
                assert (failed["state"], failed["error"], failed["remedy"]) == (
                    "failed",
                    "it is broken",
                    "mend it",
                )
            assert (await page.post("/unload")).json["state"] == "running"
            while (await page.ask("/state")).json["jobs"][-1]["state"] != "done":  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_job_names_its_model_and_not_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_switch, "BUSY_S", (0.0, 0.0))

    async def main() -> None:
        async with board() as page:
            page.client.choice = ModelChoice(model="/srv/a/Tiny")
            failures = [BusyError("busy"), CheckpointError("/srv/a/Tiny is broken")]
            phases = []

            async def load(ids: Any, **_: Any) -> None:
                phases.extend(job.phase for job in page.dashboard.jobs.listed())
                raise failures.pop(0)

            page.client.tokenize = load  # type: ignore[method-assign, assignment]
            async with asking(page.app, f"{PATH}/events") as seen:
                await page.ask("/load", {})
                await until(seen, lambda: b'"failed"' in seen.content)
                assert events(seen, "jobs")[-1][-1]["error"] == "Tiny is broken"
            assert phases[-1] == "Tiny: busy"

    asyncio.run(main())


def test_pulls_go_on_without_their_page_one_of_each_and_not_too_many() -> None:
    async def main() -> None:
        async with board() as page:
            now_s = 0.0
            tell: list[Callable[[int, int], None]] = []

            async def pull(name: Any, progress: Callable[[int, int], None], log: Any) -> None:
                tell.append(progress)
                await asyncio.Event().wait()

            page.dashboard.jobs = Jobs(
                page.service, page.dashboard.watcher.notify, download=pull, clock=lambda: now_s
            )
            [first, *_] = [
                (await page.ask("/pull", {"model": f"org/m{n}"})).json
                for n in range(jobs.MAX_PULLS)
            ]
            assert (await page.ask("/pull", {"model": "org/m0"})).status == 409
            assert (await page.ask("/pull", {"model": "org/more"})).status == 429
            for name in ("../up", "", "https://x/y/z"):
                assert (await page.ask("/pull", {"model": name})).status == 400
            tell[0](5, 10)
            shown = page.dashboard.jobs.listed()
            assert [one.state for one in shown] == ["running"] * jobs.MAX_PULLS
            assert (shown[0].done_bytes, shown[0].total_bytes) == (5, 10)
            await page.post(f"/jobs/{first['id']}/cancel")
            now_s += jobs.KEPT_S + 1
            assert len(page.dashboard.jobs.listed()) == jobs.MAX_PULLS - 1
            for n in range(2 * jobs.MAX_KEPT):
                begun = page.dashboard.jobs.pull(f"org/other{n}")
                await page.dashboard.jobs.cancel(begun.id)
            assert len(page.dashboard.jobs.listed()) == jobs.MAX_KEPT
            await page.service.close()
            assert {one.state for one in page.dashboard.jobs.listed()} == {"cancelled"}

    asyncio.run(main())


def test_the_state_of_a_server_says_how_it_is() -> None:
    async def main() -> None:
        async with board() as page:
            page.node.replies = [replace(reply("anna"), report=None, failure="x")]
            server = (await page.ask("/state")).json["server"]
            assert (server["answers"], server["node"]) == (False, None)
            assert server["failure"]

    asyncio.run(main())
