"""A drafter behind a link: a ring drafts with it as with its own, and goes on without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.models.checkpoints import make_llama
from support.models.drafter_checkpoints import make_dflash, make_eagle3
from support.rings.real_ring import ask, guessing, real_ring, say, say_all
from support.rings.stage_chain import CPU, probed, random_prompt
from support.rings.stage_forms import FORM, form_of

from shardnet.cluster.head import lent_drafters
from shardnet.cluster.head.lent_drafters import FarDrafter, LentDrafters, OnBytes
from shardnet.cluster.peers import control_link
from shardnet.cluster.peers.control_link import ControlLink, Handler, Incoming, MessageHandlers
from shardnet.errors import (
    CapacityError,
    CheckpointError,
    PeerSilentError,
    ShardnetError,
    UsageError,
)
from shardnet.runtime.engine.draft_model import DraftModel, load_drafter
from shardnet.runtime.engine.requests import Speculation
from shardnet.transport.memory import memory_pair
from shardnet.types import DType, SlotId
from shardnet.wire.messages.drafting import DrafterReady, LoadDrafter
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose

pytestmark = pytest.mark.usefixtures("drafts_always_pay")
MODEL_LAYERS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lent")
    make_llama(folder / "model", num_hidden_layers=MODEL_LAYERS)
    make_llama(folder / "small", num_hidden_layers=1, seed=5)
    make_eagle3(folder / "eagle3", "specforge")
    make_dflash(folder / "dflash")
    return folder


class Loader:
    """Loads on the test's thread what a node would load on others."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        self.memory_bytes = memory_bytes
        self.loaded: list[DraftModel] = []

    async def load(self, message: LoadDrafter, on_progress: OnBytes) -> DraftModel:
        model = load_drafter(
            Path(message.drafter),
            Path(message.form.model),
            message.form,
            vocab_size=message.vocab_size,
            device="cpu",
            memory_bytes=self.memory_bytes,
            threads=1,
        )
        self.loaded.append(model)
        return model


def hello(name: str) -> Hello:
    return Hello(purpose=Purpose.CONTROL, role=PeerRole.NODE, node=name, name=name, version="0")


async def nobody(control: ControlLink, message: Incoming) -> None:
    raise AssertionError(f"{message} was not expected")


@asynccontextmanager
async def linked(handle: Handler) -> AsyncIterator[ControlLink]:
    """A link to a node that handles requests so."""
    near, far = await memory_pair(hello("near"), hello("far"))
    asking, answering = ControlLink(near, nobody), ControlLink(far, handle)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asking.serve_to_the_end())
        tasks.create_task(answering.serve_to_the_end())
        try:
            yield asking
        finally:
            await asyncio.gather(near.close(), far.close())


@asynccontextmanager
async def lending(loader: Any) -> AsyncIterator[tuple[ControlLink, Callable[[], None]]]:
    """A link to a node that lends, and what makes it deaf."""
    handlers, is_deaf = MessageHandlers(), asyncio.Event()
    LentDrafters(loader=loader, log=lambda line: None).register(handlers)

    async def handle(control: ControlLink, message: Incoming) -> None:
        if is_deaf.is_set():
            await asyncio.Event().wait()
        await handlers.handle(control, message)

    async with linked(handle) as asking:
        yield asking, is_deaf.set
    for model in loader.loaded:
        assert model.is_closed
        model.executor.join()


async def borrowed(control: ControlLink, folder: Path, which: str) -> FarDrafter:
    order = LoadDrafter(
        request=0,
        drafter=str(folder / which),
        form=form_of(folder / "model"),
        vocab_size=320,
    )
    far = FarDrafter(control, order)
    await far.load(lambda done, total: None)
    return far


def speculation(host: FarDrafter) -> Speculation:
    return Speculation(make_draft_source=host.draft_source, layers=host.layers, most=4)


@pytest.mark.parametrize("which", ["small", "model", "eagle3", "dflash"])
@pytest.mark.parametrize("end", ["", "closed", "deaf", "lost"])
def test_words_are_those_without(folder: Path, which: str, end: str) -> None:
    asked = [ask(random_prompt(40, 300, seed=n), 40, temperature=0.3 * n) for n in range(3)]

    async def main() -> None:
        loader = Loader()
        choice = probed(CPU, DType.FLOAT32, None)
        async with (
            real_ring(folder / "model", choice, n_stages=2, n_layers=MODEL_LAYERS) as engine,
            lending(loader) as (control, deafen),
        ):
            plain = [(await say(engine, request)).tokens for request in asked]
            far = await borrowed(control, folder, which)
            ends: dict[str, Callable[[], object]] = {
                "closed": loader.loaded[0].close,
                "deaf": deafen,
                "lost": lambda: control.link.abort("gone"),
            }
            said = [await say(engine, guessing(asked[0], speculation(far)))]
            assert said[0].n_drafted > 0
            if which == "model":
                assert said[0].n_accepted == said[0].n_drafted
            saying = asyncio.ensure_future(
                say_all(engine, [guessing(request, speculation(far)) for request in asked[1:]])
            )
            if end:
                await asyncio.sleep(0)
                ends[end]()
            said += await saying
            assert [one.tokens for one in said] == plain
            assert far.is_closed == (end in ("closed", "lost")) or end == "closed"
            assert far.is_late or end != "deaf"
            far.close()

    asyncio.run(main())


def test_an_answer_that_never_comes_ends_the_drafter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_link, "REPLY_SILENCE_S", 0.05)

    async def main() -> None:
        async with lending(Loader()) as (control, deafen):
            far = await borrowed(control, folder, "small")
            deafen()
            woken = asyncio.Event()
            source = far.draft_source(woken.set)
            assert not source.prepare([1, 2, 3], 2)
            await woken.wait()
            assert source.prepare([1, 2, 3], 2)
            assert source.draft([1, 2, 3], 2) == []
            assert far.is_closed

    asyncio.run(main())


def test_what_does_not_fit_or_is_for_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    wrong: list[tuple[Loader, str, type[ShardnetError], str]] = [
        (Loader(1000), "eagle3", CapacityError, "far .*bytes, 1000 are left"),
        (Loader(1000), "small", CapacityError, "far "),
        (Loader(), "other", CheckpointError, "far .*330 token ids, the model of the ring 320"),
        (Loader(), "narrow", CheckpointError, "far .*96 columns, this one has 48"),
    ]
    make_llama(folder / "other", num_hidden_layers=1, vocab_size=330)
    make_eagle3(folder / "narrow", "specforge", hidden_size=96)

    async def main() -> None:
        for loader, which, error, message in wrong:
            async with lending(loader) as (control, _):
                with pytest.raises(error, match=message):
                    await borrowed(control, folder, which)

    asyncio.run(main())


ORDER = LoadDrafter(request=0, drafter="small", form=FORM, vocab_size=320)
READY = DrafterReady(request=0, layers=(), most=4, weight_bytes=1, draft_s=0.0)


@pytest.mark.parametrize("n_ready", [1, 2])
def test_a_node_that_says_twice_that_it_is_ready_or_keeps_a_slot_is_not_asked_again(
    n_ready: int,
) -> None:
    async def handle(control: ControlLink, message: Incoming) -> None:
        if not isinstance(message, LoadDrafter):
            raise UsageError("there is no drafter here")
        for _ in range(n_ready):
            control.send(replace(READY, request=message.request))
        await asyncio.Event().wait()

    async def main() -> None:
        async with linked(handle) as control:
            far = FarDrafter(control, ORDER)
            await far.load(lambda done, total: None)
            [failed] = await asyncio.gather(far.free(SlotId(0)), return_exceptions=True)
            assert isinstance(failed, UsageError | asyncio.CancelledError)
            assert far.is_closed

    asyncio.run(main())


def test_a_load_ends_though_its_node_reports_progress_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lent_drafters, "LOAD_S", 0.05)

    async def handle(control: ControlLink, message: Incoming) -> None:
        assert isinstance(message, LoadDrafter)
        while True:
            control.tell_progress(message.request, 0, 0)
            await control.link.drain()
            await asyncio.sleep(0)

    def fail(done: int, total: int) -> None:
        raise ValueError("a bug")

    async def main() -> None:
        async with linked(handle) as control:
            with pytest.raises(PeerSilentError, match="loads no drafter"):
                await FarDrafter(control, ORDER).load(lambda done, total: None)
            with pytest.raises(ShardnetError, match="internal error in a drafter"):
                await FarDrafter(control, ORDER).load(fail)

    asyncio.run(main())
