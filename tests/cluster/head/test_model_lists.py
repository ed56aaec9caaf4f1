"""The models of a node and of its peers, as clients see them, and what their names mean."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cluster.small_node import small_settings
from support.hostile.small_files import GOOD
from support.models.model_stores import put_in_ollama, write_manifest

from shardnet import __version__
from shardnet.api.client import Client, connect
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.checkpoint.formats.gguf_header import read_gguf_header
from shardnet.cluster.head import model_lists
from shardnet.cluster.node.node import listening
from shardnet.cluster.peers.control_link import ControlLink, Incoming
from shardnet.cluster.planning.planning import Planner
from shardnet.errors import CheckpointError, ShardnetError, UsageError
from shardnet.transport import tcp
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose
from shardnet.wire.messages.membership import (
    IdentifyModel,
    ListedModel,
    ListModels,
    ModelIdentity,
    ModelsListed,
    NodeInfo,
    Status,
    StatusReply,
)
from shardnet.wire.messages.plans import ModelChoice

Answer = Callable[[ControlLink, Any], Any]
FAR = "ollama:far:1b"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a model in Ollama's store, and a damaged one."""
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    root = tmp_path / "home" / ".ollama" / "models"
    gguf = tmp_path / "small.gguf"
    gguf.write_bytes(GOOD["gguf"]()["model.gguf"])
    put_in_ollama(root, gguf, "tiny", "3b")
    gguf.write_bytes(gguf.read_bytes()[:100])
    put_in_ollama(root, gguf, "cut")
    write_manifest(root, {}, "empty")
    return tmp_path / "home"


@asynccontextmanager
async def asking(folder: Path, peer: Answer | None) -> AsyncIterator[Client]:
    """A client of a node that is linked to a `peer`, if any, played by a handler."""
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(listening(small_settings(folder), "127.0.0.1", 0))
        client = await stack.enter_async_context(connect(node.address))
        if peer is not None:
            host, port = node.address.split(":")
            hello = Hello(
                purpose=Purpose.CONTROL,
                role=PeerRole.NODE,
                node="bert",
                name="bert",
                version=__version__,
            )
            link = await tcp.connect(host, int(port), hello)
            serving = asyncio.create_task(ControlLink(link, peer).serve_to_the_end())
            stack.push_async_callback(asyncio.wait, [serving])
            stack.push_async_callback(link.close)
            while not node.links.peers.links.linked():
                await client.status()
        yield client


def ask(folder: Path, question: Callable[[Client], Any], peer: Answer | None = None) -> Any:
    async def main() -> Any:
        async with asking(folder, peer) as client:
            return await question(client)

    return asyncio.run(main())


async def lists(client: Client) -> list[ModelsListed]:
    return [listed async for listed in client.models()]


def test_all_models_are_listed_and_those_that_cannot_be_read_with_the_reason(
    tmp_path: Path,
) -> None:
    listed = ask(tmp_path, lists)
    assert {one.name for one in listed} == {"anna"}
    found = {model.name: model for one in listed for model in one.models}
    assert found.keys() == {
        DEFAULT_MODEL_NAME, "ollama:tiny:3b", "ollama:cut:latest", "ollama:empty:latest"
    }  # fmt: skip
    tiny = found["ollama:tiny:3b"]
    assert (tiny.store, tiny.family, tiny.fits, tiny.failure) == ("Ollama", "llama", True, "")
    assert tiny.size_bytes == tiny.held_bytes > 0
    assert tiny.context > 0
    assert tiny.form
    with (tmp_path / "whole.gguf").open("wb") as file:
        file.write(GOOD["gguf"]()["model.gguf"])
    tensors = read_gguf_header(tmp_path / "whole.gguf").tensors
    assert tiny.parameters == sum(math.prod(tensor.shape) for tensor in tensors)
    assert tiny.modified_s > 0
    assert "only 84 bytes remain" in found["ollama:cut:latest"].failure
    assert "names no GGUF" in found["ollama:empty:latest"].failure


def test_a_model_at_a_path_is_described_for_who_asks(tmp_path: Path) -> None:
    async def described(client: Client) -> list[tuple[str, str]]:
        pieces = client.models(model=str(tmp_path / "small.gguf"))
        models = [model async for piece in pieces for model in piece.models]
        return [(model.store, model.family) for model in models if "small" in model.name]

    (tmp_path / "small.gguf").write_bytes(GOOD["gguf"]()["model.gguf"])
    assert ask(tmp_path, described) == [("a path", "llama")]


def test_a_store_that_cannot_be_read_keeps_no_other_from_being_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(root: Path) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "home" / ".lmstudio" / "models").mkdir(parents=True)
    monkeypatch.setattr("shardnet.checkpoint.program_stores.lm_studio_models", fail)
    found = {model.name: model for one in ask(tmp_path, lists) for model in one.models}
    assert "ollama:tiny:3b" in found
    [store] = [model for name, model in found.items() if "lmstudio" in name]
    assert store.failure == "Permission denied"


def peer_of(*models: ListedModel, asked: list[Incoming] | None = None, of: str = "bert") -> Answer:
    """A peer that lists these models, and has none if it is asked."""

    async def answer(control: ControlLink, message: Any) -> None:
        if asked is not None:
            asked.append(message)
        match message:
            case ListModels():
                control.send(
                    ModelsListed(request=message.request, node=of, name=of, models=list(models))
                )
                control.send(Done(request=message.request))
            case Status():
                control.send(StatusReply(request=message.request, node=BERT, peers=[]))
            case IdentifyModel():
                control.send(ModelIdentity(request=message.request, model_id="", complete=False))
            case _:
                return

    return answer


BERT = NodeInfo(
    node="bert", name="bert", address="127.0.0.1:1", version=__version__, device="cpu",
    memory_bytes=2**40, memory_free_bytes=2**40, cores=1, threads=1, dtypes=["float32"],
    host_id="bert",
)  # fmt: skip


def test_what_peers_have_is_passed_on_under_their_own_names(tmp_path: Path) -> None:
    asked: list[Incoming] = []
    far = ListedModel(name=FAR, store="Ollama", size_bytes=5)
    listed = ask(tmp_path, lists, peer_of(far, asked=asked, of="somebody else"))
    assert [one.models for one in listed if one.node == "bert" == one.name] == [[far]]
    [request] = [message for message in asked if isinstance(message, ListModels)]
    assert {node.name for node in request.nodes} == {"anna", "bert"}, "whose memory counts"
    assert not request.with_peers


def test_a_peer_that_does_not_say_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def be_silent(control: ControlLink, message: Incoming) -> None:
        if isinstance(message, Status):
            await peer_of()(control, message)
        await asyncio.Event().wait()

    async def answer_wrongly(control: ControlLink, message: Any) -> None:
        control.send(StatusReply(request=message.request, node=BERT, peers=[]))

    for peer, words in (
        (be_silent, "no answer for 0.05 s"),
        (answer_wrongly, "answered ListModels with StatusReply"),
    ):
        with monkeypatch.context() as patched:
            if peer is be_silent:
                patched.setattr(model_lists, "SILENCE_S", 0.05)
            asked = ask(tmp_path, lists, peer)
        [bert] = [one for one in asked if one.name == "bert"]
        assert words in bert.failure
        assert bert.models == []


def plan(*models: str) -> Callable[[Client], Any]:
    async def question(client: Client) -> list[Any]:
        """What each is planned as, or the error."""
        answers: list[Any] = []
        for model in models:
            try:
                answers.append((await client.plan(model)).model)
            except ShardnetError as error:
                answers.append(error)
        return answers

    return question


def test_a_part_of_a_name_is_planned_as_the_model_that_it_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def tell(planner: object, choice: ModelChoice, *_: object, **__: object) -> None:
        raise UsageError(choice.model)

    repo = tmp_path / "home" / ".cache" / "huggingface" / "hub" / "models--lab--half"
    (repo / "snapshots" / ("c" * 40)).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c" * 40)
    for file in ("config.json", "model.safetensors.index.json"):
        (repo / "snapshots" / ("c" * 40) / file).write_text('{"weight_map": {"x": "gone"}}')
    monkeypatch.setattr(Planner, "plan", tell)
    for error in ask(tmp_path, plan("lab/half", "half")):
        assert str(error).endswith(": lab/half"), "the rest can be downloaded"
    models = ("ollama:tiny:3b", "tiny:3b", "TINY", "OLLAMA:tiny:3B", "ollama:tiny")
    for error in ask(tmp_path, plan(*models)):
        assert str(error).endswith(": ollama:tiny:3b")


def test_a_name_that_nobody_has_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    for error in ask(tmp_path, plan("tinny:3b", "lab/tinny:3b", "tinny", "ollama:tinny")):
        assert isinstance(error, CheckpointError)
        assert "; the nearest name is ollama:tiny:3b;" in str(error)
        assert "`shardnet models` lists" in str(error)


def test_a_name_that_is_damaged_here_says_so(tmp_path: Path) -> None:
    for error in ask(tmp_path, plan("ollama:empty", "empty")):
        assert "ollama:empty:latest on anna: " in str(error)
        assert "names no GGUF" in str(error)


def test_a_name_that_is_damaged_here_is_asked_of_a_peer_that_has_it(tmp_path: Path) -> None:
    asked: list[Incoming] = []
    whole = ListedModel(name="ollama:empty:latest", store="Ollama")
    [error] = ask(tmp_path, plan("empty"), peer_of(whole, asked=asked))
    assert "names no GGUF" not in str(error)
    assert {m.model for m in asked if isinstance(m, IdentifyModel)} == {whole.name}


def test_names_of_peers_count_too(tmp_path: Path) -> None:
    """Also those like one that is here."""
    asked: list[Incoming] = []
    far = ListedModel(name=FAR, store="Ollama")
    [error] = ask(tmp_path, plan("far"), peer_of(far, asked=asked))
    assert f"{FAR} is neither a folder" in str(error)
    assert {m.model for m in asked if isinstance(m, IdentifyModel)} == {FAR}
    other = ListedModel(name="ollama:tiny:1b", store="Ollama")
    [error] = ask(tmp_path, plan("tiny"), peer_of(other))
    assert isinstance(error, UsageError)
    assert "may be any of 2 models: ollama:tiny:1b, ollama:tiny:3b" in str(error)
