"""What a command does while it searches the network for a node."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.own_process import figures_of

from shardnet.cluster.machine.addresses import LOOPBACK_HOST
from shardnet_cli.finding import target
from shardnet_cli.flags.options import Search


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_node_here_is_prepared_while_none_is_heard(
    monkeypatch: pytest.MonkeyPatch, is_heard: bool
) -> None:
    prepared, done = threading.Event(), asyncio.Event()

    async def find(
        identity: object, search: object, *, insecure: bool, on_heard: Callable[[], None]
    ) -> Any:
        if is_heard:
            on_heard()
            await asyncio.sleep(0)
        else:
            assert await asyncio.to_thread(prepared.wait, 30)
        done.set()
        return ["found"]

    monkeypatch.setattr(target, "find_nearest", find)
    monkeypatch.setattr(target, "SOON_S", 0.01)
    found = asyncio.run(target._search(None, Search(), insecure=False, prepare=prepared.set))
    assert found == ["found"]
    assert done.is_set()
    assert prepared.is_set() is not is_heard


def test_what_a_node_needs_is_imported_and_left_out_of_collections() -> None:
    found = figures_of(
        "import gc, json, sys\n"
        "from shardnet_cli.finding.target import import_node\n"
        "before = 'torch' in sys.modules\n"
        "import_node()\n"
        "after = [name in sys.modules for name in ('torch', 'shardnet.cluster.node.node')]\n"
        "print(json.dumps([before, *after, gc.isenabled(), gc.get_freeze_count() > 100_000]))"
    )
    assert found == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("hosts", "longest_s"),
    [((LOOPBACK_HOST,), target.HERE_S), (("10.0.0.1", LOOPBACK_HOST), target.LONGEST_S)],
)
def test_this_machine_alone_is_searched_for_a_shorter_time(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...], longest_s: float
) -> None:
    asked: dict[str, Any] = {}

    async def browse(interfaces: tuple[str, ...], **options: Any) -> list[Any]:
        asked.update(options, interfaces=interfaces)
        return []

    monkeypatch.setattr("shardnet.cluster.discovery.discovery.browse", browse)
    monkeypatch.setattr(target, "multicast_hosts", lambda *_: hosts)
    assert asyncio.run(target.browse_all()) == []
    assert (asked["interfaces"], asked["longest_s"]) == (hosts, longest_s)
