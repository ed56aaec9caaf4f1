"""Discovery on loopback, and what it makes of records that others may have written.

Other nodes may announce themselves on the loopback of the machine that runs the tests: each test
looks at its own alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cluster.watchers import LOOPBACK, RECORD, Watcher, new_record, running
from zeroconf import ServiceStateChange
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from shardnet.cluster.discovery import service_browser
from shardnet.cluster.discovery.discovery import browse
from shardnet.cluster.discovery.service_browser import (
    SERVICE_TYPE,
    Goodbye,
    NodeRecord,
    RecordReader,
    RecordWarnings,
    UnusableRecordError,
    _FollowedRecords,
    from_service,
    to_service,
)
from shardnet.transport.loop import run
from shardnet.types import NodeId


@pytest.fixture(scope="module", autouse=True)
def _loop_before_all_tests() -> None:
    """Have libuv open the pipe for signals that it keeps as long as the process lives."""
    run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is late with answers and goodbyes."""
    monkeypatch.setattr(service_browser, "RESOLVE_S", 60.0)
    monkeypatch.setattr(service_browser, "GOODBYE_S", 20.0)


def test_nodes_find_each_other_a_late_one_too_and_hear_goodbyes() -> None:
    async def main() -> None:
        anna, bert, cleo = (Watcher(new_record(name)) for name in ("anna", "bert", "cleo"))
        async with running(anna, bert):
            await anna.sees(bert.record)
            await bert.sees(anna.record)
            async with running(cleo):
                for one in (anna, bert):
                    await one.sees(cleo.record)
                    await cleo.sees(one.record)
            for one in (anna, bert):
                await one.sees(Goodbye(node=cleo.record.node))
        for one in (anna, bert, cleo):
            assert one.record not in one.events, "a node found itself"
            assert one.own_lines == []

    asyncio.run(main())


def test_a_later_record_takes_the_place_of_the_first() -> None:
    async def main() -> None:
        anna = Watcher(new_record("anna"))
        bert = Watcher(new_record("bert"), reannounce_s=0.05)
        async with running(anna, bert):
            await anna.sees(bert.record)
            bert.record = replace(bert.record, port=7444)
            await anna.sees(bert.record)

    asyncio.run(main())


def test_a_changed_record_is_announced_when_it_is_due_and_not_only_in_turn() -> None:
    async def main() -> None:
        anna = Watcher(new_record("anna"))
        bert = Watcher(new_record("bert"), reannounce_s=1e9)
        async with running(anna, bert):
            await anna.sees(bert.record)
            bert.record = replace(bert.record, port=7444)
            bert._discovery.announce()
            await anna.sees(bert.record)

    asyncio.run(main())


def test_records_that_are_no_good_are_named_once_and_harm_nobody() -> None:
    async def main() -> None:
        anna, bert = Watcher(new_record("anna")), Watcher(new_record("bert"))
        bad = AsyncServiceInfo(
            SERVICE_TYPE,
            f"not an id.{SERVICE_TYPE}",
            port=1,
            parsed_addresses=LOOPBACK,
            properties={"id": b"\xff\xfe", "name": "x\n" * 50},
        )
        async with running(anna), AsyncZeroconf(interfaces=LOOPBACK) as stranger:
            await stranger.async_register_service(bad, cooperating_responders=True)
            await anna.says("not an id")
            await stranger.async_update_service(bad)
            async with running(bert):
                await anna.sees(bert.record)
        assert len([line for line in anna.lines if "not an id" in line]) == 1
        assert all("\n" not in line for line in anna.lines)

    asyncio.run(main())


def test_records_that_came_without_room_are_read_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their nodes announce them again and again, but zeroconf reports only what is new."""

    async def read(reader: RecordReader, zeroconf: Any, name: str) -> NodeRecord | None:
        return replace(RECORD, node=NodeId(name)) if name != "unusable" else None

    monkeypatch.setattr(service_browser, "MAX_RECORDS", 2)
    monkeypatch.setattr(service_browser, "MAX_WAITING", 3)
    monkeypatch.setattr(RecordReader, "read", read)

    async def main() -> None:
        events: list[NodeRecord | Goodbye] = []
        warnings = RecordWarnings(print)
        reader = RecordReader(own=NodeId(""), own_host_id="", warnings=warnings, only_here=False)
        zeroconf: Any = None
        async with asyncio.TaskGroup() as tasks:
            seen = _FollowedRecords(zeroconf, reader, events.append, tasks)
            added, removed = ServiceStateChange.Added, ServiceStateChange.Removed

            async def change(how: ServiceStateChange, *names: str) -> list[str]:
                events.clear()
                for name in names:
                    seen.changed(zeroconf, SERVICE_TYPE, name, how)
                for _ in range(4):
                    await asyncio.sleep(0)
                return [event.node for event in events if isinstance(event, NodeRecord)]

            assert await change(added, "a", "unusable", "b", "c", "d", "e") == ["a", "b"]
            assert await change(removed, "c") == []
            assert await change(removed, "a") == ["d"]
            assert await change(removed, "b", "d") == [], "it was one too many to wait"

    asyncio.run(main())


def test_without_multicast_there_is_one_warning_and_another_attempt() -> None:
    async def main() -> None:
        anna = Watcher(new_record("anna"), interfaces=["203.0.113.7"], reannounce_s=0.01)
        bert = Watcher(new_record("bert"), reannounce_s=0.01)
        async with running(anna, bert):
            await anna.says("mDNS does not work here")
            anna._discovery._fixed_interfaces = ("127.0.0.1",)  # the network has come up
            await bert.sees(anna.record)
        [line] = anna.own_lines
        assert "--peer" in line

    asyncio.run(main())


def test_records_are_withdrawn_when_the_interfaces_change_and_found_anew() -> None:
    """A node that died meanwhile says no goodbye, and its record is in no cache to expire."""

    async def main() -> None:
        anna = Watcher(new_record("anna"), reannounce_s=0.01)
        bert = Watcher(new_record("bert"), reannounce_s=0.01)
        async with running(anna, bert):
            await anna.sees(bert.record)
            anna._discovery._fixed_interfaces = ("203.0.113.7",)
            await anna.sees(Goodbye(node=bert.record.node))
            assert bert.record.node not in anna._discovery.records
            anna.events.clear()
            anna._discovery._fixed_interfaces = ("127.0.0.1",)
            await anna.sees(bert.record)

    asyncio.run(main())


def test_a_machine_that_cannot_list_its_addresses_tries_again() -> None:
    """As when too many files are open: the node goes on."""

    async def main() -> None:
        anna = Watcher(new_record("anna"), reannounce_s=0.01)
        bert = Watcher(new_record("bert"), reannounce_s=0.01)
        failures = [OSError("too many open files")]

        def own() -> NodeRecord:
            if failures:
                raise failures.pop()
            return anna.record

        async with running(bert):
            announcing = asyncio.create_task(anna._discovery.run(own, anna._see))
            await anna.says("too many open files")
            await bert.sees(anna.record)
            announcing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await announcing

    asyncio.run(main())


@pytest.mark.parametrize("n_turns", range(8))
def test_a_node_that_is_stopped_while_it_begins_leaves_no_socket(n_turns: int) -> None:
    """uvloop warns of one, and may never end."""

    async def main() -> None:
        beginning = asyncio.create_task(Watcher(new_record("anna")).run())
        for _ in range(n_turns):
            await asyncio.sleep(0)
        beginning.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beginning

    run(main())


def test_a_command_finds_nodes_without_being_one() -> None:
    async def main() -> None:
        anna, bert = Watcher(new_record("anna")), Watcher(new_record("bert"))
        async with running(anna, bert):
            await anna.sees(bert.record)
            await bert.sees(anna.record)
            how: dict[str, Any] = {"own_host_id": RECORD.host_id, "longest_s": 60.0, "quiet_s": 5.0}
            found = await browse(LOOPBACK, only_here=False, **how)
            assert {anna.record, bert.record} <= set(found)
        how = {"own_host_id": "x", "longest_s": 1.0, "quiet_s": 1.0}
        assert await browse(["203.0.113.7"], only_here=False, **how) == []

    asyncio.run(main())


def test_without_a_key_nobody_beyond_this_machine_is_found() -> None:
    """Whatever comes on loopback's sockets: also other machines' records come there."""

    async def main() -> None:
        here = {"hosts": ("127.0.0.1", "::1"), "fingerprint": ""}
        anna = Watcher(replace(new_record("anna"), **here))
        bert = Watcher(replace(new_record("bert"), **here))
        hosts = ("192.168.1.66", "127.0.0.1")
        stranger = Watcher(replace(new_record("eve"), host_id="another", hosts=hosts))
        liar = Watcher(replace(new_record("lia"), hosts=hosts))  # says that it is on this machine
        async with running(stranger, liar, anna, bert):
            found = await browse(
                LOOPBACK,
                own_host_id=RECORD.host_id,
                only_here=True,
                longest_s=60.0,
                quiet_s=5.0,
            )
            at_home = {one.record.node for one in (anna, bert, liar)}
            assert at_home <= {one.node for one in found}
            assert {host for one in found for host in one.hosts} <= {"127.0.0.1", "::1"}
            await anna.sees(bert.record)
            await anna.sees(replace(liar.record, hosts=("127.0.0.1",)))
        assert stranger.record.node not in {one.node for one in found}
        nodes = {event.node for event in anna.events if isinstance(event, NodeRecord)}
        assert stranger.record.node not in nodes

    asyncio.run(main())


# --- the record


def service(name: str = RECORD.node, **changes: Any) -> AsyncServiceInfo:
    """RECORD as a stranger may have written it; a property that is None is left out."""
    properties = dict(to_service(RECORD).properties)
    options: dict[str, Any] = {"port": 7433, "parsed_addresses": list(RECORD.hosts)}
    for key, value in changes.items():
        if key in options:
            options[key] = value
        else:
            properties[key.encode()] = value
    kept = {key: value for key, value in properties.items() if value is not None}
    return AsyncServiceInfo(SERVICE_TYPE, f"{name}.{SERVICE_TYPE}", properties=kept, **options)


def test_a_record_is_read_as_it_was_written() -> None:
    assert from_service(to_service(RECORD), "another machine") == RECORD
    scoped = replace(RECORD, hosts=("fe80::10%eth0",))
    assert from_service(to_service(scoped), "").hosts == ("fe80::10",)


@given(st.text(max_size=300), st.text(max_size=300), st.integers(1, 65535))
def test_any_name_fits_a_record(name: str, host_id: str, port: int) -> None:
    written = to_service(replace(RECORD, name=name, host_id=host_id, port=port))
    read = from_service(written, "")
    assert read.port == port
    assert read.name.isprintable()
    assert not name.isascii() or read.name == "".join(filter(str.isprintable, name))[:200]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "b" * 32}, "its id is not its name"),
        ({"id": None}, "no id"),
        ({"id": b"../../etc"}, "its id is malformed"),
        ({"version": b"1;rm -rf"}, "its version is malformed"),
        ({"version": b"1" * 33}, "its version is malformed"),
        ({"protocol": b"one"}, "its protocol is malformed"),
        ({"protocol": b"9" * 200}, "its protocol is malformed"),
        ({"cluster": b"secret!"}, "its cluster is malformed"),
        ({"host": b"a\x1b[2Jb"}, "its host is malformed"),
        ({"host": b"\xff"}, "its host is no text"),
        ({"host": None}, "no host"),
        ({"port": 0}, "no port"),
        ({"parsed_addresses": []}, "no usable address"),
        ({"parsed_addresses": ["127.0.0.1", "::1"]}, "no usable address"),
        ({"parsed_addresses": ["224.0.0.1", "0.0.0.0", "::", "ff02::1"]}, "no usable address"),
    ],
)
def test_a_record_that_is_not_well_formed_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(UnusableRecordError, match=why):
        from_service(service(**changes), "another machine")


def test_only_the_usable_addresses_count_and_not_too_many() -> None:
    addresses = ["127.0.0.1", "224.0.0.1", "192.168.1.5"]
    assert from_service(service(parsed_addresses=addresses), "").hosts == ("192.168.1.5",)
    same_machine = from_service(service(parsed_addresses=addresses), RECORD.host_id)
    assert set(same_machine.hosts) == {"127.0.0.1", "192.168.1.5"}
    many = [f"10.0.{n}.1" for n in range(200)]
    assert len(from_service(service(parsed_addresses=many), "").hosts) == 16


@given(
    st.dictionaries(
        st.sampled_from(["id", "name", "version", "protocol", "cluster", "host", "x"]),
        st.binary(max_size=200) | st.none(),
    )
)
def test_any_properties_are_read_or_refused(changes: dict[str, bytes | None]) -> None:
    properties: dict[str, bytes | None] = {"id": RECORD.node.encode(), **changes}
    raw = AsyncServiceInfo(
        SERVICE_TYPE,
        f"{RECORD.node}.{SERVICE_TYPE}",
        port=1,
        parsed_addresses=["10.0.0.1"],
        properties=properties,
    )
    with contextlib.suppress(UnusableRecordError):
        assert from_service(raw, "").name.isprintable()
