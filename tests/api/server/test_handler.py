"""One HTTP request: keys, limits, bodies, errors, clients that leave, streams that wait."""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from support.servers.asgi_client import Exchanged, ask, asking
from support.servers.http_app import served

from shardnet.api.openai.faults import OPENAI
from shardnet.api.server.app import make_app
from shardnet.api.server.bodies import MAX_VALUES, decode_body
from shardnet.api.server.endpoint import Endpoint, Reply, Stream, comment, event
from shardnet.api.server.errors import RETRY_S, HttpError, fault_of
from shardnet.api.server.keys import MOST_GUESSES, Keyring, parse_key
from shardnet.api.server.metrics import Metrics
from shardnet.api.server.service import MAX_RETRY_S, MAX_TRACED_AT_ONCE, MAX_TRACES, Exchange, Pace
from shardnet.api.server.settings import LogLine, Settings
from shardnet.errors import (
    BusyError,
    CancelledRequestError,
    CapacityError,
    CheckpointError,
    ContextExceededError,
    DeadlineError,
    DiskSilentError,
    LinkClosedError,
    PeerFailedError,
    QueueFullError,
    ShardnetError,
    ShortageError,
    UsageError,
)
from shardnet.wire.messages.control import Failed, reported_error
from shardnet.wire.messages.diagnostics import RingLoad, RingWait

COMPLETIONS = "/v1/completions"


def endpoint(handle: Callable[[Exchange, None], Awaitable[Reply]]) -> Endpoint[None]:
    return Endpoint(method="GET", path="/", summary="", handle=handle, dialect=OPENAI)


def keyring(*texts: str) -> Keyring:
    return Keyring([parse_key(text, number) for number, text in enumerate(texts, 1)])


def test_a_key_is_asked_for_but_by_whoever_watches() -> None:
    async def main() -> None:
        async with served(Settings(keys=keyring("alice:one"))) as server:
            for headers in ({}, {"Authorization": "Bearer two"}, {"x-api-key": "two"}):
                refused = await ask(server.app, "/v1/models", headers=headers)
                assert refused.status == 401
                assert refused.json["error"]["code"] == "invalid_api_key"
                assert refused.headers["www-authenticate"] == "Bearer"
            for headers in ({"Authorization": "Bearer one"}, {"x-api-key": "one"}):
                assert (await ask(server.app, "/v1/models", headers=headers)).status == 200
            assert (await ask(server.app, "/healthz")).status == 200
            assert (await ask(server.app, "/metrics")).status == 401

    asyncio.run(main())


def test_a_key_has_its_requests_at_once_and_no_more() -> None:
    async def main() -> None:
        mine = {"headers": {"Authorization": "Bearer one"}}
        async with served(Settings(keys=keyring("alice:one:1", "two"))) as server:
            body = {"prompt": "wait", "stream": True}
            async with asking(server.app, COMPLETIONS, body, **mine) as running:
                await running.until_said(b'"w"')
                refused = await ask(server.app, COMPLETIONS, {"prompt": "a"}, **mine)
                assert refused.status == 429
                assert int(refused.headers["retry-after"]) > 0
                others = {"headers": {"Authorization": "Bearer two"}}
                assert (await ask(server.app, COMPLETIONS, {"prompt": "a"}, **others)).status == 200
            assert (await ask(server.app, COMPLETIONS, {"prompt": "a"}, **mine)).status == 200

    asyncio.run(main())


def test_a_key_has_its_tokens_a_minute_and_no_more() -> None:
    async def main() -> None:
        mine, others = ({"headers": {"Authorization": f"Bearer {key}"}} for key in ("one", "two"))
        async with served(Settings(keys=keyring("alice:one:0:60", "two"))) as server:
            long = {"prompt": "a" * 100, "max_tokens": 100}
            assert (await ask(server.app, COMPLETIONS, long, **mine)).status == 200
            refused = await ask(server.app, COMPLETIONS, {"prompt": "a"}, **mine)
            assert (refused.status, refused.json["error"]["code"]) == (429, "busy")
            assert 30 < int(refused.headers["retry-after"]) <= 41
            assert (await ask(server.app, "/v1/models", **mine)).status == 200
            assert (await ask(server.app, COMPLETIONS, {"prompt": "a"}, **others)).status == 200

    asyncio.run(main())


def test_a_prompt_counts_for_its_key_though_its_client_leaves() -> None:
    async def main() -> None:
        mine = {"headers": {"Authorization": "Bearer one"}}
        async with served(Settings(keys=keyring("alice:one:0:60"))) as server:
            for n in (1, 2):
                body = {"prompt": "wait", "stream": True}
                async with asking(server.app, COMPLETIONS, body, **mine) as running:
                    await running.until_said(b'"w"')
                    running.leave()
                    await server.node.until_given_up(n)
            told = (await ask(server.app, "/metrics", **mine)).content.decode()
            assert 'shardnet_prompt_tokens_total{key="alice",model="shardnet/default"} 4.0' in told

    asyncio.run(main())


def test_what_strangers_send_where_no_body_is_read_is_not_kept() -> None:
    n_asked = 0

    async def main() -> None:
        nonlocal n_asked
        async with served(Settings(keys=keyring("alice:one"))) as server:

            async def receive() -> dict[str, Any]:
                nonlocal n_asked
                n_asked += 1
                await asyncio.sleep(0)
                return {"type": "http.request", "body": b"x" * 2**20, "more_body": True}

            for path, status in (("/healthz", 200), ("/nothing", 404)):
                sent: list[dict[str, Any]] = []

                async def send(message: dict[str, Any], sent: list[Any] = sent) -> None:
                    sent.append(message)

                scope: dict[str, Any] = {"type": "http", "headers": [], "query_string": b""}
                scope |= {"method": "GET", "path": path, "raw_path": path.encode()}
                async with asyncio.timeout(10):
                    await server.app({**scope, "root_path": ""}, receive, send)
                assert sent[0]["status"] == status

    asyncio.run(main())
    assert n_asked < 30  # it comes for ever: nobody waits for its end


@pytest.mark.parametrize("named", ["", " ", "x\ny", "ä", "ok"])
def test_any_keyword_of_a_schema_can_be_named_in_a_header(named: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": named}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "{}"}], "response_format": form}

    async def main() -> Exchanged:
        async with served() as server:
            return await ask(server.app, "/v1/chat/completions", body)

    answer = asyncio.run(main())
    told = answer.headers["x-shardnet-schema-left-out"]
    assert (answer.status, told.isascii(), told.isprintable()) == (200, True, True)
    assert told.startswith("format")
    assert told == told.strip()


def test_who_is_turned_away_is_told_when_a_place_should_be_free() -> None:
    pace = Pace()
    assert pace.retry_s(0.0) == RETRY_S
    for end_s in range(10):
        pace.ended(3.0 * end_s)
    # One every three seconds: each who is turned away is told of another place.
    assert [pace.retry_s(30.0) for _ in range(3)] == [3, 6, 9]
    assert pace.retry_s(33.0) == 10  # 33 s have gone by with ten ends
    assert {pace.retry_s(33.0) for _ in range(100)} >= {13, MAX_RETRY_S}
    assert pace.retry_s(10_000.0) == MAX_RETRY_S

    async def main() -> None:
        mine = {"headers": {"Authorization": "Bearer one"}}
        async with served(Settings(keys=keyring("alice:one:1"), most_requests=2)) as server:
            now_s = time.monotonic()
            for number in range(10):
                server.service.paces["alice"].ended(now_s - 495 + 50 * number)
                server.service.paces[""].ended(now_s - 200 + 20 * number)
            body = {"prompt": "wait", "stream": True}
            async with asking(server.app, COMPLETIONS, body, **mine) as running:
                await running.until_said(b'"w"')
                for retry_s in ("50", "60"):
                    refused = await ask(server.app, COMPLETIONS, {"prompt": "a"}, **mine)
                    assert (refused.status, refused.headers["retry-after"]) == (429, retry_s)

    asyncio.run(main())


def test_an_id_is_taken_if_it_is_sound() -> None:
    async def main() -> None:
        log: list[str] = []
        async with served(Settings(log=log.append)) as server:
            for given, is_kept in (("my-id", True), ("x" * 129, False), ("a b", False)):
                answer = await ask(server.app, "/v1/models", headers={"X-Request-Id": given})
                assert (answer.headers["x-request-id"] == given) is is_kept
                assert log[-1].endswith(f"request {answer.headers['x-request-id']}")
                assert log[-1].startswith("GET /v1/models 200 ")

    asyncio.run(main())


def test_a_request_is_traced_that_asks_for_it_and_its_key_alone_sees_it() -> None:
    async def main() -> None:
        log: list[str] = []
        async with served(Settings(keys=keyring("alice:one", "bob:two"), log=log.append)) as server:
            mine = {"Authorization": "Bearer one"}
            traced = {**mine, "X-Request-Id": "slow", "X-Shardnet-Trace": "1"}
            body = {"prompt": "ab", "n": MAX_TRACED_AT_ONCE + 2}
            assert (await ask(server.app, COMPLETIONS, body, headers=traced)).status == 200
            line = log[-1]
            assert isinstance(line, LogLine)
            assert (line.facts["request"], line.facts["key"]) == ("slow", "alice")
            assert line.facts["generated_tokens"] == MAX_TRACED_AT_ONCE + 2
            trace = await ask(server.app, "/traces/slow", headers=mine)
            requests = {e["args"]["request"] for e in trace.json["traceEvents"] if e["ph"] == "X"
                        and e["cat"] == "request"}  # fmt: skip
            assert len(requests) == MAX_TRACED_AT_ONCE
            other = {"Authorization": "Bearer two"}
            assert (await ask(server.app, "/traces/slow", headers=other)).status == 404
            for number in range(MAX_TRACES):
                plain = {**mine, "X-Request-Id": f"plain{number}"}
                await ask(server.app, COMPLETIONS, {"prompt": "ab"}, headers=plain)
            refused = await ask(server.app, "/traces/plain0", headers=mine)
            assert "X-Shardnet-Trace: 1" in refused.json["error"]["message"]
            assert (await ask(server.app, "/traces/slow", headers=mine)).status == 200
            for number in range(MAX_TRACES):
                newer = {**traced, "X-Request-Id": f"newer{number}"}
                await ask(server.app, COMPLETIONS, {"prompt": "ab"}, headers=newer)
            assert (await ask(server.app, "/traces/slow", headers=mine)).status == 404

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "parameter", "words"),
    [
        (b"", None, "the body is empty: send JSON"),
        (b"{", None, "the body is not JSON"),
        (b"[" * 100_000, None, "the body is not JSON"),
        (b'"\xff"', None, "the body is not JSON"),
        (b"[]", None, "the value is []"),
        ({}, "prompt", "prompt is missing"),
        ({"prompt": "a", "temperature": "x"}, "temperature", "temperature is 'x': give a number"),
        ({"prompt": "a", "temperature": -1}, "temperature", "give a number of at least 0"),
        ({"prompt": "a", "n": 0}, "n", "give a whole number of at least 1"),
        ({"prompt": "a", "stop": [""]}, "stop[0]", "'': give text that is not empty"),
        ({"prompt": "a", "logit_bias": {"": 1}}, "logit_bias", "logit_bias names ''"),
        ({"prompt": [1, "a"]}, "prompt", "a list of several kinds"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of", "best_of must be n or more"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of", "and n in a stream"),
        ({"prompt": [1], "suffix": "b"}, "suffix", "suffix needs a prompt that is text"),
        ({"prompt": "a", "draft_tokens": 2}, "draft_tokens", "needs speculate"),
        (
            {"prompt": "a", "speculate": "/etc/passwd"},
            "speculate",
            "give auto or mtp or ngram or off",
        ),
    ],
)
def test_a_wrong_body_is_refused_by_the_name_of_its_field(
    body: Any, parameter: str | None, words: str
) -> None:
    async def main() -> None:
        async with served() as server:
            answer = await ask(server.app, COMPLETIONS, body)
            assert answer.status == 400
            error = answer.json["error"]
            assert words in error["message"]
            assert error["param"] == parameter
            assert server.node.asked == []

    asyncio.run(main())


def test_unknown_fields_and_nulls_are_passed_over() -> None:
    async def main() -> None:
        async with served() as server:
            body = {"prompt": "ab", "nobody_knows": [1], "temperature": None, "stop": None}
            answer = await ask(server.app, COMPLETIONS, body)
            assert answer.json["choices"][0]["text"] == "ab"

    asyncio.run(main())


def test_a_body_has_a_limit_whether_announced_or_not() -> None:
    async def main() -> None:
        async with served(Settings(most_body_bytes=100)) as server:
            body = {"prompt": "a" * 100}
            for headers in ({}, {"content-length": "120"}, {"content-length": "9" * 30}):
                answer = await ask(server.app, COMPLETIONS, body, headers=headers)
                assert answer.status == 413
            full = {"prompt": "a" * 86}
            assert len(json.dumps(full)) == 100
            for headers in ({}, {"content-length": "100"}):
                answer = await ask(server.app, COMPLETIONS, full, headers=headers)
                assert answer.status == 200

    asyncio.run(main())


@pytest.mark.parametrize("value", [b"[]", b"1"])
def test_a_body_of_too_many_values_is_refused_before_it_is_read(value: bytes) -> None:
    raw = b'{"prompt":[' + (value + b",") * (MAX_VALUES + 1) + value + b"]}"
    with pytest.raises(HttpError, match="the body has more than"):
        decode_body(raw, dict)


def test_other_paths_and_methods_are_refused_in_the_same_form() -> None:
    async def main() -> None:
        async with served() as server:
            missing = await ask(server.app, "/v1/nothing")
            assert (missing.status, missing.json["error"]["type"]) == (404, "invalid_request_error")
            near = (await ask(server.app, "/v1/chat/completion", {})).json["error"]["message"]
            assert "did you mean '/v1/chat/completions'? GET /openapi.json lists" in near
            wrong = await ask(server.app, COMPLETIONS)
            assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
            assert "is asked with POST" in wrong.json["error"]["message"]
            for path, status in (("/v1/messages", 405), ("/v1/messages/batches", 404)):
                answer = await ask(server.app, path)
                kind = "invalid_request_error" if status == 405 else "not_found_error"
                assert (answer.status, answer.json["error"]["type"]) == (status, kind)
                assert (answer.json["type"], path in answer.json["error"]["message"]) == (
                    "error",
                    True,
                )
            for path, status in (("/api/chat", 405), ("/api/nothing", 404), ("/api", 404)):
                answer = await ask(server.app, path)
                assert (answer.status, [*answer.json]) == (status, ["error"])
                assert path in answer.json["error"]

    asyncio.run(main())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_its_request(is_stream: bool) -> None:
    async def main() -> None:
        log: list[str] = []
        async with served(Settings(log=log.append)) as server:
            body = {"prompt": "wait", "stream": is_stream}
            async with asking(server.app, COMPLETIONS, body) as running:
                await server.node.until_asked(1)
                running.leave()
                async with asyncio.timeout(30):
                    await server.node.until_given_up(1)
            assert log[-1].startswith(f"POST {COMPLETIONS} 499 ")
            assert server.service.n_active == 0

    asyncio.run(main())


def test_a_server_that_stops_says_so_in_the_stream() -> None:
    async def main() -> None:
        async with served() as server:
            body = {"prompt": "wait", "stream": True}
            async with asking(server.app, COMPLETIONS, body) as running:
                await running.until_said(b'"w"')
                server.service.stop()
                await running.until_said(b"[DONE]")
                assert running.events[-2]["error"]["type"] == "service_unavailable_error"
            answer = await ask(server.app, COMPLETIONS, {"prompt": "wait"})
            assert (answer.status, answer.headers["retry-after"]) == (503, "2")

    asyncio.run(main())


CONTEXT = ContextExceededError.of("too long", 99, 64)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CONTEXT, 400),
        (UsageError("wrong"), 400),
        (CapacityError("too much"), 400),
        (CancelledRequestError("by who watches"), 400),
        (CheckpointError("missing"), 404),
        (DiskSilentError("asleep"), 503),
        (QueueFullError("full"), 429),
        (BusyError("another model"), 503),
        (ShortageError("no descriptor"), 503),
        *((OSError(number, "short"), 503) for number in (errno.EMFILE, errno.ENFILE, errno.EIO)),
        (OSError(errno.ENOENT, "a bug"), 500),
        (LinkClosedError("gone"), 503),
        (PeerFailedError("gone"), 503),
        (DeadlineError("late"), 504),
        (ShardnetError("broken"), 500),
        (ValueError("a bug"), 500),
    ],
)
def test_every_error_has_its_status(error: Exception, status: int) -> None:
    async def fail(exchange: Exchange, body: None) -> Reply:
        raise error

    async def main() -> None:
        async with served() as server:
            one = endpoint(fail)
            answer = await ask(make_app(server.service, [one], OPENAI), "/")
            assert answer.status == status
            assert ("retry-after" in answer.headers) is (status in (429, 503))
            if error is CONTEXT:
                assert answer.json["error"] == {
                    "code": "context_length_exceeded",
                    "type": "exceed_context_size_error",
                    "n_prompt_tokens": 99,
                    "n_ctx": 64,
                    "param": None,
                    "message": "the request (99 tokens) exceeds the available context size "
                    "(64 tokens): maximum context length is 64 tokens, shorten the conversation",
                }

    asyncio.run(main())


def test_a_wrong_value_that_a_node_refuses_is_named_as_the_body_has_it() -> None:
    error = reported_error(
        Failed(request=1, code=2, message="logit-bias names token 9", remedy="see --help"),
        "desk (10.0.0.2:52310)",
    )
    fault = fault_of(error)
    assert (fault.status, fault.parameter) == (400, "logit_bias")
    assert fault.message == "logit_bias names token 9"
    flag = fault_of(UsageError("--speculate mtp: no layer", remedy="choose --speculate ngram"))
    assert (flag.parameter, flag.message) == ("speculate", "speculate mtp: no layer")
    told = fault_of(UsageError("the prompt is empty", remedy="give some text"))
    assert (told.parameter, told.message) == (None, "the prompt is empty; give some text")


def test_who_guesses_keys_has_to_wait_but_not_who_had_a_right_one() -> None:
    async def main() -> None:
        async with served(Settings(keys=keyring("right"))) as server:

            async def status(key: str, host: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                app = from_host(server.app, host)
                return (await ask(app, "/v1/models", headers=headers)).status

            assert await status("right", "10.0.0.1") == 200
            for host, last in (("10.0.0.1", 401), ("10.0.0.2", 429)):
                told = [await status(f"wrong {number}", host) for number in range(30)]
                assert told[:MOST_GUESSES] == [401] * MOST_GUESSES
                assert told[-1] == last
            assert await status("right", "10.0.0.2") == 429  # no guess is judged meanwhile
            assert await status("right", "10.0.0.1") == await status("right", "10.0.0.3") == 200

    asyncio.run(main())


def from_host(app: ASGIApp, host: str) -> ASGIApp:
    """Let an application's requests come from a host."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "client": (host, 1)}, receive, send)

    return call


def test_a_stream_that_waits_has_headers_and_comments() -> None:
    goes_on = asyncio.Event()

    async def chunks(exchange: Exchange) -> AsyncGenerator[bytes, None]:
        await goes_on.wait()
        yield event(1)
        raise PeerFailedError("a node is gone")

    async def wait(exchange: Exchange, body: None) -> Reply:
        exchange.note = "loading 5 %"
        return Stream(chunks=chunks(exchange), heartbeat=lambda: comment(exchange.note))

    async def main() -> None:
        async with served(Settings(headers_s=0, heartbeat_s=0.001)) as server:
            one = endpoint(wait)
            async with asking(make_app(server.service, [one], OPENAI), "/") as waiting:
                await waiting.until_said(b": loading 5 %\n\n: loading 5 %\n\n")
                assert waiting.status == 200
                assert waiting.headers["content-type"].startswith("text/event-stream")
                goes_on.set()
                await waiting.until_said(b"[DONE]")
                first, failed, _ = waiting.events
                assert first == 1
                assert failed["error"]["message"] == "a node is gone"

    asyncio.run(main())


def test_a_proxy_may_have_the_server_below_its_root() -> None:
    async def main() -> None:
        async with served(Settings(root_path="/llm")) as server:
            for path in ("/llm/v1/models", "/v1/models"):
                assert (await ask(server.app, path)).status == 200
            document = (await ask(server.app, "/llm/openapi.json")).json
            assert document["servers"] == [{"url": "/llm"}]

    asyncio.run(main())


def test_pages_of_other_sites_may_ask_only_if_named() -> None:
    async def main() -> None:
        origin = {"headers": {"Origin": "https://chat.example"}}
        async with served() as server:
            answer = await ask(server.app, "/v1/models", **origin)
            assert "access-control-allow-origin" not in answer.headers
        async with served(Settings(cors_origins=("https://Chat.example/",))) as server:
            answer = await ask(server.app, "/v1/models", **origin)
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
            other = {"headers": {"Origin": "https://evil.example"}}
            answer = await ask(server.app, "/v1/models", **other)
            assert "access-control-allow-origin" not in answer.headers

    asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "may_ask"),
    [
        ({}, True),
        ({"Host": "127.0.0.1:8000"}, True),
        ({"Host": "[::1]:8000"}, True),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, True),
        ({"Host": "tower.local", "Origin": "http://tower.local"}, True),
        ({"Host": "host.docker.internal:8000"}, True),
        ({"Host": "tower:8000"}, True),
        ({"Host": "llm.example:443", "Origin": "https://llm.example"}, True),
        ({"Host": "a", "Origin": "https://chat.example"}, True),
        ({"Host": "a", "Origin": "vscode-webview://1"}, True),
        ({"Host": "a", "Origin": "https://proxied.example", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Host": "a", "Sec-Fetch-Site": "none"}, True),
        ({"Host": "a", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, True),
        # A name that is made to mean this machine, and pages that ask from afar.
        ({"Host": "evil.example:8000"}, False),
        ({"Host": "localhost.evil.example"}, False),
        ({"Host": "evil.example", "Sec-Fetch-Site": "same-origin"}, False),
        ({"Host": "a", "Origin": "https://evil.example"}, False),
        ({"Host": "a", "Origin": "https://chat.example.evil.example"}, False),
        ({"Host": "localhost:8000", "Origin": "http://localhost:3000"}, False),
        ({"Host": "a", "Origin": "null"}, False),
        ({"Host": "a", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, False),
    ],
)
def test_pages_of_strangers_may_not_ask_where_there_is_no_key(
    headers: dict[str, str], may_ask: bool
) -> None:
    async def main() -> None:
        named = Settings(cors_origins=("https://chat.example",), allowed_hosts=("LLM.example",))
        async with served(named) as server:
            answer = await ask(server.app, "/v1/models", headers=headers)
            assert answer.status == (200 if may_ask else 403)
            posted = await ask(server.app, COMPLETIONS, {"prompt": "a"}, headers=headers)
            is_link = headers.get("Sec-Fetch-Mode") == "navigate"
            assert posted.status == (200 if may_ask and not is_link else 403)
        async with served(Settings(keys=keyring("one"))) as server:
            with_key = {**headers, "x-api-key": "one"}
            assert (await ask(server.app, "/v1/models", headers=with_key)).status == 200

    asyncio.run(main())


def test_what_is_waited_for_behind_a_lost_ring_is_a_gauge() -> None:
    """Of the ring of the nodes that reported; 0 for all that is not waited for."""
    metrics, wait = (
        Metrics(),
        RingWait(kind="replay", what="reading 9 tokens again", expected_s=2.5),
    )
    found = []
    for waits in (None, wait):
        load = RingLoad(
            running=1,
            waiting=0,
            paused=0,
            warm_slots=0,
            warm_blocks=0,
            used_blocks=0,
            room_blocks=1,
            wait=waits,
        )
        metrics.ring.take([], load)
        lines = metrics.written().decode().splitlines()
        name = "shardnet_ring_recovery_waiting_seconds{"
        found.append([line.removeprefix(name) for line in lines if line.startswith(name)])
    kinds = ["nodes", "plan", "load", "replay"]
    assert found[0] == [f'for="{kind}"}} 0.0' for kind in kinds]
    assert found[1] == [*found[0][:3], 'for="replay"} 2.5']
