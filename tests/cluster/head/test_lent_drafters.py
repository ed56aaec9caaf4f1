"""A drafter behind a link: a ring drafts with it as with its own, and goes on without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from support.models.checkpoints import make_llama
from support.models.drafter_checkpoints import make_dflash, make_eagle3
from support.rings.real_ring import ask, guessing, real_ring, say, say_all
from support.rings.stage_chain import CPU, probed, random_prompt
from support.rings.stage_forms import FORM, form_of

from shardnet.cluster.head import lent_drafters
from shardnet.cluster.head.lent_drafters import DrafterLoader, FarDrafter, LentDrafters, OnBytes
from shardnet.cluster.peers import control_link
from shardnet.cluster.peers.control_link import ControlLink, Handler, Incoming, MessageHandlers
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import (
    CapacityError,
    CheckpointError,
    LinkError,
    PeerSilentError,
    ShardnetError,
    UsageError,
)
from shardnet.runtime.engine.draft_model import DraftModel, load_drafter
from shardnet.runtime.engine.model_drafts import Ask
from shardnet.runtime.engine.requests import Speculation
from shardnet.transport.memory import memory_pair
from shardnet.types import DType, SlotId
from shardnet.wire.messages.drafting import Draft, DrafterReady, LoadDrafter
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


def order_of(folder: Path, which: str) -> LoadDrafter:
    form = form_of(folder / "model")
    return LoadDrafter(request=0, drafter=str(folder) + f"/{which}", form=form, vocab_size=320)


async def borrowed(control: ControlLink, folder: Path, which: str) -> FarDrafter:
    far = FarDrafter(control, order_of(folder, which))
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
READY = DrafterReady(request=0, layers=(), most=4, draft_s=0.0)


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


@pytest.mark.parametrize(
    ("which", "token", "n_bytes"),
    [
        ("eagle3", 320, 288),
        ("small", 320, 0),
        ("eagle3", 3, 286),
        ("eagle3", 3, 0),
        ("small", 3, 2),
    ],
)
def test_what_a_drafter_cannot_read_is_refused(
    folder: Path, which: str, token: int, n_bytes: int
) -> None:
    """A token that the model lacks, and states of another size."""

    async def main() -> None:
        async with lending(Loader()) as (control, _):
            far = await borrowed(control, folder, which)
            draft = Draft(
                request=0,
                drafter=0,
                slot=SlotId(0),
                position=0,
                token_ids=token.to_bytes(4, "little"),
                limit=1,
                states=bytes(n_bytes),
            )
            with pytest.raises(LinkError, match="Draft has"):
                await far.ask(Ask(draft=draft))

    asyncio.run(main())


@pytest.mark.parametrize("which", ["small", "eagle3"])
def test_two_loads_at_once_take_no_room_twice(folder: Path, which: str) -> None:
    paths = [which, f"model/../{which}", f"small/../{which}"]  # jobs of each run side by side
    asked, here = [order_of(folder, path) for path in paths], Loader()

    async def main() -> None:
        room = (await here.load(asked[0], lambda done, total: None)).n_bytes * 3 // 2
        orders: Any = SimpleNamespace(
            free_bytes=lambda: room - orders.drafter_bytes(),
            threads_of=lambda place: 1,
            device=SimpleNamespace(for_torch="cpu"),
        )
        planner: Any = None
        loader = DrafterLoader(disk=DiskJobs("disk"), planner=planner, orders=orders)
        loads = [loader.load(each, lambda done, total: None) for each in asked]
        found = await asyncio.gather(*loads, return_exceptions=True)
        loaded = [each for each in found if isinstance(each, DraftModel)]
        taken = sum(each.n_bytes for each in loaded)
        assert orders.drafter_bytes() == taken <= room
        assert all(isinstance(each, DraftModel | CapacityError) for each in found)
        assert len(loaded) < 3
        for each in [*loaded, *here.loaded]:
            each.close()
        assert orders.drafter_bytes() == 0
        loader.disk.close()

    asyncio.run(main())
