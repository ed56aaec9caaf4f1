"""The parts of scripts/chaos: what a seed draws, what the switch does, what the ledger says."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.chaos.faults import OF_HEAD, Kind, Moment, draw_rounds
from support.chaos.lab import differences
from support.chaos.ledger import Entry, read_ledger, summary
from support.chaos.memory import MemoryBook, Sample, verdict
from support.chaos.rounds import read_parts
from support.chaos.soak_picture import drawn
from support.chaos.streams import Heard, make_prompts
from support.chaos.switch import PREFACE, REACHED, REFUSED, Switch

from shardnet.cluster.recovery.recovery import RecoveryRecord
from shardnet.errors import PeerFailedError

DOCS = Path(__file__).parents[1] / "docs"
Talk = Callable[[Switch, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_a_seed_draws_the_same_rounds_and_in_time_every_fault_at_every_moment() -> None:
    drawn = [*islice(draw_rounds(18, 4), 400)]
    assert drawn == [*islice(draw_rounds(18, 4), 400)]
    assert drawn[:50] != [*islice(draw_rounds(19, 4), 50)]
    faults = [fault for one in drawn for fault in one.faults]
    assert {fault.kind for fault in faults} == set(Kind)
    assert {fault.moment for fault in faults} == set(Moment)
    assert {fault.victim for fault in faults if fault.kind not in OF_HEAD} == {1, 2, 3}
    assert {fault.victim for fault in faults if fault.kind in OF_HEAD} == {0}


def through_switch(talk: Talk, *, listens: bool = True) -> None:
    """Have node 0 talk to node 1, which echoes, through a switch."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if not listens:
            server.close()
        switch = Switch("127.0.0.1", {0: ("", 0), 1: ("127.0.0.1", port)}, random.Random(0))
        await switch.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", switch.port)
        writer.write(PREFACE.pack(0, port))
        assert await reader.readexactly(1) == (REACHED if listens else REFUSED)
        await talk(switch, reader, writer)
        writer.close()
        await writer.wait_closed()
        await switch.close()
        server.close()

    asyncio.run(main())


def test_the_switch_holds_back_what_goes_one_way_and_passes_it_on_later() -> None:
    async def talk(
        switch: Switch, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        switch.way(1, 0).passes.clear()
        writer.write(b"hello")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read(5)
        switch.way(1, 0).passes.set()
        assert await reader.readexactly(5) == b"hello"

    through_switch(talk)


def test_the_switch_changes_as_many_bits_as_it_is_told() -> None:
    async def talk(
        switch: Switch, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        switch.way(0, 1).to_flip = 1
        writer.write(bytes(100))
        came = await reader.readexactly(100)
        assert sum(byte.bit_count() for byte in came) == 1

    through_switch(talk)


def test_the_switch_delays_and_keeps_the_order() -> None:
    async def talk(
        switch: Switch, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        began, switch.way(0, 1).delay_s = loop.time(), 0.05
        writer.write(b"a")
        await asyncio.sleep(0)
        switch.way(0, 1).delay_s = 0.0
        writer.write(b"b")
        assert await reader.readexactly(2) == b"ab"
        assert loop.time() - began > 0.0

    through_switch(talk)


def test_the_switch_says_that_nothing_listens() -> None:
    async def talk(
        switch: Switch, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        assert await reader.read() == b""

    through_switch(talk, listens=False)


def test_texts_are_compared_to_the_last_token() -> None:
    whole = Heard(tokens=[1, 2, 3], text="abc")
    assert Heard(tokens=[1, 2, 3], text="abc").difference(whole) == ""
    assert "token 1" in Heard(tokens=[1, 9, 3], text="axc").difference(whole)
    assert "2 tokens" in Heard(tokens=[1, 2], text="ab").difference(whole)
    failed = Heard(tokens=[1, 2], text="ab", error=PeerFailedError("gone"))
    assert failed.difference(whole) == ""


def test_parts_are_read_from_the_line_of_a_head() -> None:
    record = RecoveryRecord(
        at_s=0.0, why="", n_requests=8, notice_s=0.05, plan_s=0.02, load_s=0.3, replay_s=0.5
    )
    record.nodes = ("anna", "cleo")
    parts = {"notice": 0.05, "plan": 0.02, "load": 0.3, "replay": 0.5}
    assert read_parts(record.words) == parts
    assert read_parts(f"{record.words}\n{record.words}")["replay"] == 1.0


def test_memory_that_grows_once_it_was_settled_is_named() -> None:
    book = MemoryBook(1000.0)
    for minute in range(21):
        now_s = 1000.0 + 60 * minute
        assert book.is_due(now_s)
        grown = 100 * min(minute, 10)
        line = book.take(now_s, {"anna": (2000 + grown) << 20, "bert": (2000 + minute * 10) << 20})
        assert not book.is_due(now_s + 59)
    assert line == "resident after 20 min (MiB): anna 3000.0, bert 2200.0"
    assert book.growths() == {"anna": 0.0, "bert": pytest.approx(100 / 2100)}
    assert book.wrong() == ["bert has grown by 4.8 % after 10 min"]


def test_what_a_process_holds_too_much_is_named() -> None:
    before, slack = {"tasks": 5, "files": 9}, {"tasks": 2, "files": 0}
    assert differences(before, {"tasks": 7, "files": 9}, slack) == []
    assert differences(before, {"tasks": 8, "files": 9}, slack) == ["tasks: 5 before, 8 now"]


def test_the_ledger_counts_what_is_not_as_it_should_be() -> None:
    good = Entry(
        seed=1,
        number=1,
        faults=("killed",),
        moments=("while texts run",),
        victims=("bert",),
        outcomes={"equal": 8},
        notice_s=0.05,
        pause_s=0.9,
        n_recoveries=1,
    )
    bad = Entry(**{**good.json, "outcomes": {"equal": 7, "DIFFERS": 1}, "wrong": ("request 5",)})
    assert good.is_good
    assert not bad.is_good
    assert "**request 5**" in bad.row
    told = summary([good, bad])
    assert "15 equal, 1 DIFFERS; 1 rounds that are not as they should be" in told
    assert "| killed | 2 | 1 | 0.05 | 0.90 | 0.90 |" in told


def test_pauses_are_told_by_the_length_of_prompts() -> None:
    prompts = make_prompts(16, 20, longest=8000)
    lengths = [len(prompt.content) for prompt in prompts]
    assert lengths.count(8000) == 6
    assert 16 <= min(lengths) < 100
    entry = Entry(
        seed=1,
        number=1,
        faults=("killed",),
        moments=("while texts run",),
        victims=("bert",),
        outcomes={"equal": 3},
        pause_s=12.5,
        pauses=((16, 0.25), (8000, 12.5), (4001, 7.5)),
    )
    [read] = read_ledger(json.dumps(entry.json))
    assert read == entry
    told = summary([read])
    assert "| 1 to 100 | 1 | 0.25 | 0.25 |" in told
    assert told.endswith("| 4,001 to 8,000 | 2 | 10.00 | 12.50 |")


def test_the_page_has_the_table_of_its_ledger() -> None:
    entries = read_ledger((DOCS / "reliability-ledger.jsonl").read_text(encoding="utf-8"))
    totals, table = summary(entries).split("\n\n", 1)
    page = (DOCS / "reliability.md").read_text(encoding="utf-8")
    assert table in page
    assert totals in page
    assert all(entry.is_good for entry in entries)


def test_a_soak_names_what_grew_on_which_node() -> None:
    def samples(node: str, grows: str = "", by: int = 0) -> list[Sample]:
        held = {"resident_bytes": 300 << 20, "n_descriptors": 40, "n_threads": 20, "disk_bytes": 9}
        return [
            Sample(
                at_s=60.0 * minute,
                node=node,
                **{what: n + by * minute * (what == grows) for what, n in held.items()},
            )
            for minute in range(40)
        ]

    assert verdict(samples("anna")) == []
    assert verdict(samples("anna")[:12]) == []  # too few after it has settled
    to_and_fro = [
        replace(one, resident_bytes=one.resident_bytes + (60 << 20) * (number % 6))
        for number, one in enumerate(samples("anna"))
    ]
    assert verdict(to_and_fro) == []
    for what, by in (("resident_bytes", 1 << 20), ("n_descriptors", 1), ("n_threads", 1)):
        [said] = verdict(samples("anna") + samples("bert", what, by))
        assert said.startswith(f"bert: {what} grew from ")
    [said] = verdict(samples("anna", "disk_bytes", 1 << 20))
    assert "disk_bytes" in said


def test_a_picture_has_every_sample_and_a_gap_where_a_node_was_away() -> None:
    samples = [
        Sample(
            at_s=60.0 * minute,
            node=node,
            resident_bytes=(300 + minute) << 20,
            n_descriptors=40,
            n_threads=20,
            disk_bytes=9,
        )
        for node in ("anna", "b<rt")
        for minute in (0, 1, 2, 5, 6)
    ]
    root = ElementTree.fromstring(drawn(samples))
    paths = [one.attrib["d"] for one in root.iterfind(".//{*}path")][2:]
    assert len(paths) == 2 * 4
    assert all(path.count("L") == 3 and path.count("M") == 2 for path in paths)
    shown = [one.text for one in root.iterfind(".//{*}text")]
    assert {"anna", "b<rt", "306", "6 min"} <= set(shown)
