"""llama-server's own forms: timings, templates, texts with biases, the best of several."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from support.cluster.small_node import small_settings
from support.servers.asgi_client import ask

from shardnet.api.client import open_client
from shardnet.api.serve.server import application
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Settings
from shardnet.cluster.node.node import running

ASKED = [{"role": "user", "content": "Who is Emma?"}]
TIMES = ("ms", "n", "per_second", "per_token_ms")


def test_they_are_answered_as_llama_server_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(small_settings(tmp_path)) as node, AsyncExitStack() as stack:
            client = await stack.enter_async_context(open_client(await node.client()))
            models = ModelNames(client, may_switch=True)
            service = Service(client=client, settings=Settings(), models=models)
            stack.push_async_callback(service.close)
            app = application(service)

            body = {"messages": ASKED, "max_tokens": 4, "temperature": 0}
            told = (await ask(app, "/v1/chat/completions", body)).json
            timings = told["timings"]
            assert timings["predicted_n"] == 4
            assert timings["prompt_n"] + timings["cache_n"] == told["usage"]["prompt_tokens"]
            named = {f"{what}_{of}" for what in ("prompt", "predicted") for of in TIMES}
            assert timings.keys() == {"cache_n", *named}
            stream = await ask(app, "/v1/chat/completions", {**body, "stream": True})
            with_times = [one for one in stream.events if "timings" in one]
            assert [one["choices"][0]["finish_reason"] for one in with_times] == ["length"]

            applied = (await ask(app, "/apply-template", {"messages": ASKED})).json["prompt"]
            assert "Who is Emma?" in applied
            count = await ask(app, "/v1/responses/input_tokens", {"input": "Who is Emma?"})
            assert count.json == {
                "object": "response.input_tokens",
                "input_tokens": told["usage"]["prompt_tokens"],
            }

            plain = {"prompt": "She had", "max_tokens": 1, "temperature": 0}
            first = (await ask(app, "/v1/completions", plain)).json["choices"][0]["text"]
            for biases in ({first: -100}, [[first, False]]):
                biased = await ask(app, "/v1/completions", {**plain, "logit_bias": biases})
                assert biased.json["choices"][0]["text"] != first

            several = {"prompt": "She had", "max_tokens": 6, "temperature": 1.0, "seed": 3}
            four = (await ask(app, "/v1/completions", {**several, "n": 4, "logprobs": 0})).json
            best = (await ask(app, "/v1/completions", {**several, "n": 2, "best_of": 4})).json

            def likelihood(choice: dict[str, dict[str, list[float]]]) -> float:
                logprobs = choice["logprobs"]["token_logprobs"]
                return sum(logprobs) / len(logprobs)

            ranked = sorted(four["choices"], key=likelihood, reverse=True)
            assert [one["text"] for one in best["choices"]] == [one["text"] for one in ranked[:2]]
            assert [one["logprobs"] for one in best["choices"]] == [None, None]

            sampled = {
                **several,
                "n": 1,
                "dry_multiplier": 2.0,
                "top_n_sigma": 1.0,
                "typical_p": 0.9,
            }
            again = [(await ask(app, "/v1/completions", sampled)).json for _ in range(2)]
            assert again[0]["choices"] == again[1]["choices"]

    asyncio.run(main())
