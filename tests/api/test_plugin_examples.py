"""The examples of docs/extending.md, added as an installed package adds them."""

from __future__ import annotations

import asyncio
import importlib
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.models.checkpoints import N_TOKENS, make_llama
from support.rings.stage_chain import even_split, random_prompt
from support.rings.torch_rings import load_stages, request, run, tokens_of
from support.servers.asgi_client import ask
from support.servers.http_app import served

from shardnet import api
from shardnet.api.serve.server import application, installed_endpoints
from shardnet.api.server.endpoint import Endpoint, Json
from shardnet.api.server.model_names import ModelNames
from shardnet.api.server.service import Service
from shardnet.api.server.settings import Settings
from shardnet.cluster.machine.profile import find_devices
from shardnet.errors import ConfigurationError
from shardnet.runtime.stage.compute import ComputePlugin
from shardnet.sampling_params import SamplingParams
from shardnet.types import LayerRange

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROMPT = "It is a truth universally acknowledged, " * 8

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package with the examples in it, and these entry points."""

    def install(name: str, entry_points: str) -> None:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(entry_points)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.syspath_prepend(str(tmp_path))
    return install


@pytest.fixture(scope="module")
def numpy_plugin() -> ComputePlugin:
    plugin: ComputePlugin = runpy.run_path(str(EXAMPLES / "numpy_compute.py"))["NUMPY"]
    return plugin


def test_a_node_computes_and_serves_what_a_package_adds(install: Install) -> None:
    install(
        "added",
        "[shardnet.computes]\nnumpy = numpy_compute:NUMPY\n"
        "[shardnet.endpoints]\ntgi = tgi_format:endpoints\n",
    )

    async def main() -> None:
        choice = api.ModelChoice(model="shardnet/default", dtype="float32")
        async with api.in_process(model=choice, threads=1, device="numpy") as client:
            assert (await client.status()).node.device == "numpy"
            [first] = await client.complete(PROMPT, max_tokens=6)
            assert first.usage.n_generated == 6
            [again] = await client.complete(
                [*first.prompt_token_ids, *first.token_ids, 300], max_tokens=1
            )
            assert again.usage.n_reused > 0
            service = Service(client=client, settings=Settings(), models=ModelNames(client))
            app = application(service, installed_endpoints())
            body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 6}}
            assert (await ask(app, "/generate", body)).json == {"generated_text": first.text}
            stream = await ask(app, "/generate_stream", body)
            assert [one["token"]["id"] for one in stream.events] == [*first.token_ids]
            assert [one["generated_text"] for one in stream.events] == [None] * 5 + [first.text]
            wrong = await ask(app, "/generate", {"inputs": 5})
            assert (wrong.status, wrong.json["error_type"]) == (400, "validation")
            described = (await ask(app, "/openapi.json")).json
            assert "TgiBody" in str(described["paths"]["/generate"])

    asyncio.run(main())


def test_a_ring_of_torch_and_numpy_says_what_torch_says(
    numpy_plugin: ComputePlugin, tmp_path: Path
) -> None:
    """In both orders, for several sequences at once, prompts in chunks, greedy and drawn."""
    folder = make_llama(tmp_path / "llama")
    requests = [
        request(random_prompt(n, N_TOKENS, seed=n), 8, SamplingParams(temperature=t, seed=5))
        for n, t in ((5, 0.0), (37, 0.8))
    ]
    whole, halves = even_split(4, 1), even_split(4, 2)

    def said(ranges: Sequence[LayerRange], plugins: Sequence[ComputePlugin | None]) -> Any:
        stages = load_stages(folder, ranges, plugins)
        return [tokens_of(events) for events in run(stages, *requests)]

    expected = said(whole, [None])
    assert said(halves, [numpy_plugin, None]) == expected
    assert said(halves, [None, numpy_plugin]) == expected


@pytest.mark.parametrize(
    ("entry_points", "complaint"),
    [
        ("[shardnet.computes]\nnumpy = nothing_like_it:NUMPY\n", "added adds 'numpy'.*No module"),
        ("[shardnet.computes]\nnumpy = numpy_compute:load\n", "should be a ComputePlugin"),
        (
            "[shardnet.computes]\nother = numpy_compute:NUMPY\n",
            "choose auto, cpu, nvidia, cuda, mps, opencl or other",
        ),
    ],
)
def test_a_device_that_cannot_be_used_is_named(
    install: Install, entry_points: str, complaint: str
) -> None:
    install("added", entry_points)
    with pytest.raises(ConfigurationError, match=complaint):
        find_devices("numpy")


def test_two_packages_with_one_name_are_both_named(install: Install) -> None:
    install("one", "[shardnet.computes]\nnumpy = numpy_compute:NUMPY\n")
    install("two", "[shardnet.computes]\nnumpy = numpy_compute:load\n")
    with pytest.raises(ConfigurationError, match="numpy_compute:NUMPY and numpy_compute:load add"):
        find_devices("numpy")


def test_endpoints_that_cannot_be_added_are_named(install: Install) -> None:
    install("added", "[shardnet.endpoints]\ntgi = tgi_format:error_of\n")
    with pytest.raises(ConfigurationError, match="should be a function that returns"):
        installed_endpoints()

    async def answer(exchange: Any, body: None) -> Json:
        return Json(value={})

    async def main() -> None:
        tgi = runpy.run_path(str(EXAMPLES / "tgi_format.py"))["TGI"]
        mine = Endpoint(method="GET", path="/v1/models", summary="mine", handle=answer, dialect=tgi)
        with pytest.raises(ConfigurationError, match="GET /v1/models of the format 'tgi' is taken"):
            async with served(added=[mine]):
                pass

    asyncio.run(main())
