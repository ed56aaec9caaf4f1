"""Another version for a node: who may send it, what is taken, and what requests do meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.cluster.keyed_streams import Said, say
from support.cluster.small_node import small_settings
from support.models.checkpoints import make_llama
from support.rings.stage_chain import random_prompt
from support.system.environments import make_wheel
from support.waiting import until

from shardnet import installation
from shardnet.api.client import connect, dial
from shardnet.api.updating import Due, Updater, Wheel, download, in_order, with_wheels
from shardnet.cluster.node.node import Node, listening
from shardnet.cluster.sharing.bulk_client import BulkClient, SourceRefused, WheelClient
from shardnet.errors import (
    BusyError,
    ConfigurationError,
    PeerFailedError,
    RemoteProtocolError,
    UsageError,
)
from shardnet.installation import KeeperFolder
from shardnet.transport.identity import make_identity
from shardnet.types import NodeId
from shardnet.wire.messages.bulk import OfferWheel
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.handshake import Purpose
from shardnet.wire.messages.membership import NodeInfo
from shardnet.wire.messages.plans import ModelChoice
from shardnet.wire.messages.updates import DescribeUpdate, Update, UpdateDescribed

IDENTITY = make_identity(b"k" * 16)
CONTENT = b"bytes of a wheel" * 70_000
NAME = "shardnet-9.0-py3-none-any.whl"
DEADLINE_S = 60.0


@asynccontextmanager
async def node_with_keeper(folder: Path) -> AsyncIterator[Node]:
    (folder / "keeper").mkdir(parents=True)
    keeper = KeeperFolder(folder / "keeper")
    settings = replace(small_settings(folder, IDENTITY), keeper=keeper)
    async with listening(settings, "127.0.0.1", 0) as node:
        yield node


def offer(content: bytes = CONTENT, name: str = NAME, proof: str = "") -> OfferWheel:
    sha256 = hashlib.sha256(content).hexdigest()
    proof = proof or IDENTITY.wheel_proofs(name, sha256)[-1]
    return OfferWheel(request=1, name=name, size_bytes=len(content), sha256=sha256, proof=proof)


def order(deadline_s: float, *, may_pause: bool = False) -> Update:
    return Update(
        request=0,
        sha256=offer().sha256,
        deadline_s=deadline_s,
        within_s=DEADLINE_S,
        may_pause=may_pause,
    )


async def send(node: Node, offered: OfferWheel, content: bytes = CONTENT) -> None:
    link = await dial(node.address, IDENTITY, purpose=Purpose.BULK)
    try:
        await WheelClient(link).send(offered, io.BytesIO(content), lambda done, total: None)
    finally:
        await link.close()


@pytest.fixture
def replaceable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this checkout count as installed, and every wheel fit."""
    monkeypatch.setattr(installation, "why_fixed", lambda: "")
    monkeypatch.setattr(installation, "check", lambda wheel: None)


@pytest.mark.usefixtures("replaceable")
def test_only_what_the_clusters_key_vouches_for_is_taken(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), node_with_keeper(tmp_path) as node:
            wheels = tmp_path / "keeper"
            for wrong, why in (
                (offer(proof="0" * 64), "does not come from a holder of the cluster key"),
                (offer(name="../shardnet-9.0-py3-none-any.whl"), "is no wheel of shardnet"),
                (offer(name="other-9.0-py3-none-any.whl"), "is no wheel of shardnet"),
            ):
                with pytest.raises(SourceRefused, match=why):
                    await send(node, wrong)
            with pytest.raises(RemoteProtocolError, match="the wheel has changed on the way"):
                await send(node, offer(), CONTENT[::-1])
            async with connect(node.address, IDENTITY) as client:
                with pytest.raises(UsageError, match="no such wheel was sent here"):
                    await client.ask(order(1.0), Done)
            await send(node, offer())
            assert (wheels / NAME).read_bytes() == CONTENT
            await send(node, offer(name=NAME.replace("9.0", "9.1")))
            assert [path.name for path in wheels.glob("*.whl")] == [NAME.replace("9.0", "9.1")]

            link = await dial(node.address, IDENTITY, purpose=Purpose.BULK)
            with pytest.raises(SourceRefused, match="weights go from node to node only"):
                await BulkClient(link, "f" * 64).skeleton()
            await link.close()

    asyncio.run(main())


def test_a_node_takes_no_version_unless_its_owner_has_said_so(tmp_path: Path) -> None:
    """With a key and without; and one of a checkout says what to do there."""

    async def main() -> None:
        for identity in (None, IDENTITY):
            async with listening(small_settings(tmp_path, identity), "127.0.0.1", 0) as node:
                async with connect(node.address, identity) as client:
                    told = await client.ask(DescribeUpdate(request=0), UpdateDescribed)
                assert "--allow-update" in told.refusal
                assert "pip install WHEEL" in told.remedy
                link = await dial(node.address, identity, purpose=Purpose.BULK)
                with pytest.raises(SourceRefused, match="its owner has not allowed it"):
                    await WheelClient(link).send(offer(), io.BytesIO(CONTENT), lambda *_: None)
                await link.close()
        async with node_with_keeper(tmp_path) as node, connect(node.address, IDENTITY) as client:
            assert (
                "update that checkout"
                in (await client.ask(DescribeUpdate(request=0), UpdateDescribed)).refusal
            )

    asyncio.run(main())


@pytest.mark.usefixtures("replaceable", "unmeasured")
def test_a_node_that_requests_need_stays_or_is_waited_for(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", max_position_embeddings=1024, num_hidden_layers=4)
    prompts = [random_prompt(20, 300, seed=1), random_prompt(30, 300, seed=2)]

    async def main() -> None:
        async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
            lines: list[str] = []
            settings = replace(small_settings(tmp_path / "anna", IDENTITY), log=lines.append)
            anna = await stack.enter_async_context(listening(settings, "127.0.0.1", 0))
            bert_stack = await stack.enter_async_context(AsyncExitStack())
            (tmp_path / "bert" / "keeper").mkdir(parents=True)
            settings = replace(
                small_settings(tmp_path / "bert", IDENTITY),
                node=NodeId("b" * 32),
                name="bert",
                peers=(anna.address,),
                keeper=KeeperFolder(tmp_path / "bert" / "keeper"),
            )
            bert = await bert_stack.enter_async_context(listening(settings, "127.0.0.1", 0))
            address = bert.address
            choice = ModelChoice(
                model=str(model), nodes=[anna.address, address], layers=[(0, 2), (2, 4)]
            )
            client = await stack.enter_async_context(connect(anna.address, IDENTITY))
            whole = await say(client, prompts, choice)
            await send(bert, offer())

            said = Said.of(prompts)
            saying = asyncio.create_task(say(client, prompts, choice, said=said))
            await said.some.wait()
            async with connect(address, IDENTITY) as other:
                with pytest.raises(BusyError, match="requests still need this node after 0"):
                    await other.ask(order(0.01), Done)
                assert not bert.info().is_draining
                await other.ask(order(DEADLINE_S, may_pause=True), Done)
            assert bert.updates.is_ordered
            taken = KeeperFolder(tmp_path / "bert" / "keeper").take_order()
            assert taken == (tmp_path / "bert" / "keeper" / NAME, DEADLINE_S)
            await bert_stack.aclose()
            await until(lambda: any("no ring yet" in line for line in lines))
            assert not saying.done()
            port = int(address.rpartition(":")[2])
            settings = replace(settings, node=NodeId("c" * 32))
            await stack.enter_async_context(listening(settings, "127.0.0.1", port))
            await saying
            assert (said.tokens, said.logprobs) == (whole.tokens, whole.logprobs)

    asyncio.run(main())


def due(name: str, platform: str = "linux-x86_64", **more: object) -> Due:
    info = NodeInfo(
        node=name, name=name, address=f"{name}:1", version="1.0", device="cpu", memory_bytes=0,
        memory_free_bytes=0, cores=1, threads=1, dtypes=[], host_id=name,
    )  # fmt: skip
    return replace(Due(info=info, platform=platform), **more)  # type: ignore[arg-type]


def wheel(name: str) -> Wheel:
    _, version, *_, tag = name.removesuffix(".whl").split("-")
    return Wheel(path=Path(name), version=version, tag=tag, size_bytes=1, sha256="0" * 64)


LINUX = wheel("shardnet-2.0-py3-none-manylinux_2_28_x86_64.whl")
MAC = wheel("shardnet-2.0-py3-none-macosx_11_0_arm64.whl")
WINDOWS = wheel("shardnet-2.0-py3-none-win_amd64.whl")


def test_each_node_gets_the_wheel_of_its_platform_and_heads_come_last() -> None:
    nodes = [
        due("anna", leads=True),
        due("mac", "macosx-14.0-arm64"),
        due("bert", "win-amd64"),
        due("hand", refusal="it was not allowed"),
        due("arm", "linux-aarch64", refusal="it was not allowed"),
    ]
    given = with_wheels(in_order(nodes), [LINUX, MAC, WINDOWS])
    assert [(one.info.name, one.wheel) for one in given] == [
        ("arm", None),
        ("bert", WINDOWS),
        ("hand", None),
        ("mac", MAC),
        ("anna", LINUX),
    ]
    assert with_wheels([due("anna")], [wheel("shardnet-1.0-py3-none-any.whl")])[0].wheel is None
    for nodes, wheels, why in (
        ([due("anna"), due("mac", "macosx-14.0-arm64")], [LINUX], "mac .* no wheel is named for"),
        ([due("anna")], [LINUX, MAC], "no node runs shardnet-2.0-py3-none-macosx_11_0_arm64.whl"),
        ([due("arm", "linux-aarch64")], [LINUX], "no node runs"),
        ([due("anna")], [LINUX, wheel("shardnet-3.0-py3-none-any.whl")], "wheels of 2.0 and 3.0"),
    ):
        with pytest.raises(UsageError, match=why):
            with_wheels(nodes, wheels)


@pytest.mark.parametrize("content", ["", "x"])
def test_what_is_no_wheel_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / ("shardnet-2.0.tar.gz" if content else NAME)
    if content:
        path.write_text(content)
    with pytest.raises(UsageError, match=path.name):
        Wheel.read(path)


def test_a_node_that_runs_its_former_version_again_ends_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    updater = Updater(
        identity=IDENTITY, deadline_s=1.0, within_s=1.0, may_pause=False, say=said.append
    )
    one = due("bert", wheel=LINUX)
    states = [(one.info, ""), (None, ""), (one.info, "it ended with status 1")]

    async def state(self: Updater, due: Due) -> tuple[NodeInfo | None, str]:
        return states.pop(0)

    monkeypatch.setattr(Updater, "_state", state)
    why = "bert .bert:1. does not run 2.0: it ended with status 1; it runs 1.0 again"
    with pytest.raises(PeerFailedError, match=why):
        asyncio.run(updater._back(one))


def test_wheels_are_downloaded_for_the_platforms_of_the_nodes(tmp_path: Path) -> None:
    made = make_wheel(tmp_path, "9.0", main="pass")
    files = tmp_path / "index" / "shardnet"
    files.mkdir(parents=True)
    for tag in ("manylinux_2_28_aarch64", "macosx_11_0_arm64", "win_amd64"):
        (files / f"shardnet-9.0-py3-none-{tag}.whl").write_bytes(made.read_bytes())
    links = "".join(f'<a href="{path.name}">{path.name}</a>' for path in files.iterdir())
    (files / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    index, folder = (tmp_path / "index").as_uri(), tmp_path / "got"
    found = download("9.0", index, ["linux-aarch64", "macosx-14.0-arm64"], folder)
    tags = [wheel.tag for wheel in found]
    assert tags == ["macosx_11_0_arm64", "manylinux_2_28_aarch64"]
    with pytest.raises(ConfigurationError, match="no wheel of shardnet==9"):
        download("9.1", index, ["win-amd64"], folder)
