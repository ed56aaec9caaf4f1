"""Control links over the in-memory transport: requests, progress, refusals, ends."""

from __future__ import annotations

import asyncio
import gc
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.strategies.wire_strategies import encoded

from shardnet import __version__
from shardnet.cluster.peers import control_link as control_module
from shardnet.cluster.peers.control_link import ControlLink, Handler, Incoming
from shardnet.errors import (
    CancelledRequestError,
    CheckpointError,
    LinkError,
    PeerSilentError,
    RemoteProtocolError,
    ShardnetError,
    UsageError,
    VersionMismatchError,
)
from shardnet.transport.loop import cancel_all, finish
from shardnet.transport.memory import memory_pair
from shardnet.wire.framing.frames import Frame, FrameKind
from shardnet.wire.messages.control import Done, Failed, control_frame
from shardnet.wire.messages.generation import Unload
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose
from shardnet.wire.messages.membership import IdentifyModel, ModelIdentity, PeersKnown
from shardnet.wire.messages.stages import LoadProgress, RingBroken


def hello(name: str) -> Hello:
    return Hello(purpose=Purpose.CONTROL, role=PeerRole.NODE, node=name, name=name, version="0")


async def nobody(control: ControlLink, message: Incoming) -> None:
    raise AssertionError(f"{message} was not expected")


@asynccontextmanager
async def pair(handler: Handler) -> AsyncIterator[tuple[ControlLink, ControlLink]]:
    """Two control links that read; `handler` answers on the second."""
    near, far = await memory_pair(hello("near"), hello("far"))
    asking, answering = ControlLink(near, nobody), ControlLink(far, handler)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asking.serve_to_the_end())
        tasks.create_task(answering.serve_to_the_end())
        try:
            yield asking, answering
        finally:
            await asyncio.gather(near.close(), far.close())


def test_progress_precedes_the_reply_and_requests_do_not_mix() -> None:
    async def identify(control: ControlLink, message: Incoming) -> None:
        assert isinstance(message, IdentifyModel)
        is_slow = message.model == "slow"
        if is_slow:
            control.send(LoadProgress(request=message.request, done_bytes=1, total_bytes=2))
            await asyncio.sleep(0)
        control.send(ModelIdentity(request=message.request, model_id="", complete=is_slow))

    async def main() -> None:
        async with pair(identify) as (asking, _):
            seen: list[int] = []

            async def ask(model: str) -> bool:
                message = IdentifyModel(request=0, model=model)
                reply = await asking.ask(
                    message, ModelIdentity, on_progress=lambda p: seen.append(p.done_bytes)
                )
                return reply.complete

            assert await asyncio.gather(ask("slow"), ask("fast")) == [True, False]
            assert seen == [1]

    asyncio.run(main())


def test_a_named_failure_comes_back_as_itself_with_the_peer() -> None:
    async def refuse(control: ControlLink, message: Incoming) -> None:
        raise CheckpointError("no checkpoint at /x")

    async def main() -> None:
        async with pair(refuse) as (asking, _):
            with pytest.raises(CheckpointError, match=r"far .*: no checkpoint at /x"):
                await asking.ask(IdentifyModel(request=1, model="/x"), ModelIdentity)

    asyncio.run(main())


class Panic(BaseException):
    """What a library in another language raises when it panics."""


@pytest.mark.parametrize("kind", [ZeroDivisionError, Panic])
def test_a_bug_of_ours_ends_its_request_alone(
    logged: io.StringIO, kind: type[BaseException]
) -> None:
    """The link, and with it the node, goes on: other requests are not at fault."""

    async def stumble(control: ControlLink, message: Incoming) -> None:
        if not isinstance(message, Unload):
            raise kind("a bug of ours")
        control.send(Done(request=message.request))

    async def main() -> None:
        async with pair(stumble) as (asking, _):
            asking.send(RingBroken(ring="r", epoch=1, code=1, message=""))
            with pytest.raises(ShardnetError, match=r"far .*: internal error in IdentifyModel"):
                await asking.ask(IdentifyModel(request=1, model="/x"), ModelIdentity)
            await asking.ask(Unload(request=2), Done)

    asyncio.run(main())
    assert "RingBroken of near" in logged.getvalue()
    assert "IdentifyModel of near" in logged.getvalue()
    assert "test_control_link.py" in logged.getvalue()


def test_a_reply_of_another_kind_is_the_peers_fault() -> None:
    async def confuse(control: ControlLink, message: Incoming) -> None:
        assert isinstance(message, IdentifyModel)
        control.send(Done(request=message.request))

    async def main() -> None:
        async with pair(confuse) as (asking, _):
            with pytest.raises(RemoteProtocolError, match="answered IdentifyModel with Done"):
                await asking.ask(IdentifyModel(request=1, model="/x"), ModelIdentity)

    asyncio.run(main())


def frame_of(message: dict[str, Any]) -> Frame:
    return Frame(kind=FrameKind.CONTROL, meta=encoded(message))


LATER = {
    "a request of a new kind": {"type": "PaintNode", "request": 900, "colour": "red"},
    "a key of a known one": {"type": "Unload", "request": 901, "colour": "red"},
}


@pytest.mark.parametrize("message", LATER.values(), ids=LATER)
def test_a_request_that_only_another_release_knows_is_refused_and_the_link_stays(
    message: dict[str, Any],
) -> None:
    """Hellos say "0" here: every peer is of another release."""

    async def answer(control: ControlLink, message: Incoming) -> None:
        control.send(Done(request=message.request))  # type: ignore[union-attr]

    async def main() -> None:
        async with pair(answer) as (asking, _):
            refused = asyncio.get_running_loop().create_future()
            asking._answers[int(message["request"])] = refused.set_result
            asking.link.send(frame_of(message))
            asking.link.send(frame_of({"type": "NodePainted", "node": "n"}))  # nobody waits for it
            failed = await refused
            assert isinstance(failed, Failed)
            assert failed.code == VersionMismatchError.code
            for part in (__version__, "shardnet 0", str(message["type"])):
                assert part in failed.message
            await asking.ask(Unload(request=2), Done)

    asyncio.run(main())


def test_an_answer_in_the_words_of_another_release_fails_its_request_alone() -> None:
    async def answer(control: ControlLink, message: Incoming) -> None:
        if isinstance(message, Unload):
            control.send(Done(request=message.request))
        else:
            words = {"type": "ModelIdentity", "request": message.request, "complete": "nearly"}  # type: ignore[union-attr]
            control.link.send(frame_of(words))

    async def main() -> None:
        async with pair(answer) as (asking, _):
            with pytest.raises(RemoteProtocolError, match="CONTROL frame is malformed"):
                await asking.ask(IdentifyModel(request=1, model="/x"), ModelIdentity)
            await asking.ask(Unload(request=2), Done)

    asyncio.run(main())


@pytest.mark.parametrize("message", LATER.values(), ids=LATER)
def test_what_a_peer_of_the_same_release_may_not_send_ends_the_link(
    monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    monkeypatch.setattr(control_module, "__version__", "0")

    async def main() -> None:
        async with pair(nobody) as (asking, _):
            asking.link.send(frame_of(message))
            with pytest.raises(RemoteProtocolError, match="CONTROL frame is malformed"):
                await asking.ask(Unload(request=2), Done)

    asyncio.run(main())


def test_the_end_of_the_link_ends_every_wait_and_later_requests() -> None:
    async def hang_up(control: ControlLink, message: Incoming) -> None:
        control.link.abort("gone")

    async def main() -> None:
        async with pair(hang_up) as (asking, _):
            for _ in range(2):
                with pytest.raises(LinkError):
                    await asking.ask(Unload(request=0), Done)

    asyncio.run(main())


def test_the_end_of_a_link_is_told_before_what_it_cancels_has_ended() -> None:
    """A load that is cancelled may wait for its disk; whoever watches the peer must not."""

    async def main() -> None:
        began, may_end = asyncio.Event(), asyncio.Event()
        ends: list[ShardnetError] = []

        async def load(control: ControlLink, message: Incoming) -> None:
            began.set()
            await finish(may_end.wait())

        near, far = await memory_pair(hello("near"), hello("far"))
        control = ControlLink(near, load, on_lost=ends.append)
        serving = asyncio.create_task(control.serve())
        far.send(control_frame(Unload(request=1)))
        await began.wait()
        asking = asyncio.create_task(control.ask(Unload(request=1), Done))
        await asyncio.sleep(0)
        far.abort("gone")
        with pytest.raises(LinkError):
            await asking
        assert (ends, serving.done()) == ([control.ended], False)
        may_end.set()
        with pytest.raises(LinkError):
            await serving
        assert len(ends) == 1

    asyncio.run(main())


def test_what_a_peer_says_before_it_closes_the_link_is_heard() -> None:
    """One that goes to sleep says how it is woken, and is gone."""

    async def main() -> None:
        heard: list[Incoming] = []

        async def hear(control: ControlLink, message: Incoming) -> None:
            heard.append(message)

        near, far = await memory_pair(hello("near"), hello("far"))
        far.send(control_frame(PeersKnown(peers=[], rests="it sleeps")))
        await far.close()
        with pytest.raises(LinkError):
            await ControlLink(near, hear).serve()
        assert heard == [PeersKnown(peers=[], rests="it sleeps")]

    asyncio.run(main())


def test_giving_up_a_wait_cancels_the_request_at_the_peer() -> None:
    async def main() -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def wait(control: ControlLink, message: Incoming) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with pair(wait) as (asking, _):
            asked = asyncio.create_task(asking.ask(Unload(request=5), Done))
            await begun.wait()
            asked.cancel()
            await cancelled.wait()
            with pytest.raises(asyncio.CancelledError):
                await asked

    asyncio.run(main())


def test_a_peer_that_answers_nothing_is_told_that_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_module, "REPLY_SILENCE_S", 0.05)

    async def main() -> None:
        cancelled = asyncio.Event()

        async def wait(control: ControlLink, message: Incoming) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with pair(wait) as (asking, _):
            with pytest.raises(PeerSilentError, match="did not answer Unload for"):
                await asking.ask(Unload(request=5), Done)
            async with asyncio.timeout(60):
                await cancelled.wait()

    asyncio.run(main())


def test_work_that_is_given_up_fails_unheard() -> None:
    """It raises when nobody waits for its answer any more: that is nobody's error."""
    reported: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: reported.append(what))
        begun, ended = asyncio.Event(), asyncio.Event()

        async def fail() -> Done:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.set()
                raise UsageError("it was given up") from None
            raise AssertionError("it waits for ever")

        async def answer(control: ControlLink, message: Incoming) -> None:
            await control.answer_with(1, fail())

        async with pair(answer) as (asking, _):
            given_up = asyncio.create_task(asking.ask(Unload(request=5), Done))
            await begun.wait()
            await cancel_all(given_up)
            await ended.wait()
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert reported == []


def test_a_cancelled_request_is_answered_with_its_code() -> None:
    async def main() -> None:
        async def give_up(control: ControlLink, message: Incoming) -> None:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(0)

        async with pair(give_up) as (asking, _):
            with pytest.raises(CancelledRequestError):
                await asking.ask(Unload(request=5), Done)

    asyncio.run(main())


def test_a_client_sees_no_group_and_no_assertion() -> None:
    """Of a group it sees the first error: by its name, or where a check of ours failed."""

    async def fail(model: str) -> None:
        if model == "/named":
            raise CheckpointError("the file is damaged")
        raise AssertionError

    async def stumble(control: ControlLink, message: Incoming) -> None:
        if isinstance(message, IdentifyModel):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail(message.model))

    async def main() -> None:
        async with pair(stumble) as (asking, _):
            with pytest.raises(CheckpointError, match="the file is damaged"):
                await asking.ask(IdentifyModel(request=1, model="/named"), ModelIdentity)
            with pytest.raises(ShardnetError, match=r"a check of its own failed in .*:\d+") as seen:
                await asking.ask(IdentifyModel(request=2, model="/x"), ModelIdentity)
            assert "Group" not in str(seen.value)
            assert "AssertionError" not in str(seen.value)

    asyncio.run(main())
