"""`shardnet doctor` against set-ups that are broken in every way it should know.

Each is broken on hosts of its own, in network namespaces, where these are permitted, and has its
twin on loopback, which always runs. What loopback cannot show has its twin where it is named. The
words themselves are in tests/cluster/diagnosis/test_diagnosis.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.system.nodes import Machine, NodeProcess, Result, open_machine
from support.system.sites import Site, open_site
from support.system.strangers import (
    OTHER_VERSION,
    PREAMBLE,
    answering,
    beating,
    connected,
    dropping,
    hello,
    unused_address,
)

from shardnet import __version__
from shardnet.wire.messages.handshake import PeerRole

Answer = TypeVar("Answer")

LATE = ("no report within", "took longer than", "were not read within")
"""What is said where a busy machine keeps somebody from answering in time."""
MUTE = "olaf"
"""A node that sends nothing but heartbeats."""
DEAF = ("no answer within", "no answer at all", "nothing comes")
"""The same of a knock, which may as well be somebody who never answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the doctor has said."""

    result: Result
    findings: list[dict[str, str]]

    def says(self, severity: str, topic: str, *parts: str) -> bool:
        """Whether there is a finding of this severity and topic with all these parts."""
        return any(
            finding["severity"] == severity
            and finding["topic"] == topic
            and all(part in " ".join(finding.values()) for part in parts)
            for finding in self.findings
        )

    @property
    def problems(self) -> list[str]:
        """The topics and texts of everything that is wrong."""
        return [
            f"{f['topic']}: {f['where']}: {f['what']}"
            for f in self.findings
            if f["severity"] == "problem"
        ]


def examine(machine: Machine, *arguments: str, nodes: Sequence[NodeProcess] = ()) -> Diagnosis:
    """Run the doctor on a machine until everybody has answered in time; `nodes` also its knocks."""
    while True:
        said = _examine(machine, *arguments)
        is_deaf = any(
            node.address in problem and words in problem
            for problem in said.problems
            for node in nodes
            for words in DEAF
        )
        told = [" ".join(one.values()) for one in said.findings if MUTE not in one["where"]]
        if not is_deaf and not any(late in finding for late in LATE for finding in told):
            return said


def _examine(machine: Machine, *arguments: str) -> Diagnosis:
    result = machine.run("doctor", "--json", *arguments)
    assert "Traceback" not in result.stderr, result.stderr
    findings: list[dict[str, Any]] = json.loads(result.stdout)
    has_problem = any(finding["severity"] == "problem" for finding in findings)
    assert result.code == has_problem, result
    return Diagnosis(result=result, findings=findings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


# --- on loopback --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Troubled:
    """A machine without a key where much is wrong, one with a key, and what the doctor says.

    Addresses by what is wrong there.
    """

    keyed: Machine
    anna: NodeProcess
    carl: NodeProcess
    wrong: dict[str, str]
    of_anna: Diagnosis
    of_carl: Diagnosis


@pytest.fixture(scope="module")
def troubled(folder: Path) -> Iterator[Troubled]:
    """Two nodes are called anna and have little memory; one of them knows addresses that are wrong
    in many ways, and a node of an older version links to it. Carl has a key and looks for her."""
    with ExitStack() as machines:
        plain = machines.enter_context(open_machine(folder / "plain"))
        keyed = machines.enter_context(open_machine(folder / "keyed"))
        assert keyed.run("key", "new").code == 0
        with ExitStack() as strangers:
            wrong = {
                "refused": unused_address(),
                "dropped": strangers.enter_context(dropping()),
                "hangs": strangers.enter_context(answering(b"")),
                "version": strangers.enter_context(answering(OTHER_VERSION)),
                "stranger": strangers.enter_context(answering(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
            }
            peers = [part for address in wrong.values() for part in ("--peer", address)]
            [anna] = plain.start_nodes("anna", arguments=["--memory", "2MiB", *peers])
            twin = ["--memory", "1MiB", "--peer", anna.address]
            plain.start_nodes("anna", arguments=twin)
            named = ["--host", "127.0.0.1", "--peer", anna.address]
            [carl] = keyed.start_nodes("carl", arguments=named)
            for address in wrong.values():
                anna.stderr.wait_for(f"peer {address}: ")
            anna.stderr.wait_for("node anna (")
            anna.stderr.wait_for("refused a link: ")
            old = hello(role=PeerRole.NODE, node="f" * 32, name=MUTE, version="0.0.1")
            strangers.enter_context(
                beating(strangers.enter_context(connected(anna, PREAMBLE + old)))
            )
            anna.stderr.wait_for("node olaf (")
            of_anna = examine(plain, "--model", "shardnet/default")
            while not of_anna.says("problem", "key"):  # a member of that host has just linked
                of_anna = examine(plain, "--model", "shardnet/default")
            of_carl = examine(keyed, "--peer", anna.address, nodes=[anna, carl])
        yield Troubled(
            keyed=keyed,
            anna=anna,
            carl=carl,
            wrong=wrong,
            of_anna=of_anna,
            of_carl=of_carl,
        )


def _diagnosis(result: Result) -> Diagnosis:
    assert result.code == 1, result
    return Diagnosis(result=result, findings=json.loads(result.stdout))


@pytest.mark.parametrize(
    ("kind", "topic", "words"),
    [
        ("refused", "port", "nothing listens there"),
        ("dropped", "port", "no answer within"),
        ("hangs", "port", "no answer within"),
        ("version", "version", "update the older one"),
        ("stranger", "port", "does not speak the protocol"),
    ],
)
def test_a_named_address_that_is_wrong_is_told_by_its_cause(
    troubled: Troubled, kind: str, topic: str, words: str
) -> None:
    assert troubled.of_anna.says("problem", topic, troubled.wrong[kind], words)


def test_two_nodes_with_one_name_are_told_apart(troubled: Troubled) -> None:
    node = troubled.anna.ready["node"][:6]
    assert troubled.of_anna.says("problem", "name", "2 nodes have this name", node, "--name")
    assert troubled.of_anna.says("ok", "link", f"anna ({node}) → anna (")


def test_too_little_memory_is_told_in_the_planners_words(troubled: Troubled) -> None:
    assert troubled.of_anna.says("problem", "model", "does not fit", "add a node of")
    assert troubled.of_anna.says("ok", "model", "has the checkpoint shardnet/default")


def test_nodes_without_mdns_are_told_of(troubled: Troubled) -> None:
    """Nobody expects to hear them. Whom a node has heard is told in test_discovery_namespaces."""
    assert troubled.of_carl.says("info", "multicast", "carl", "neither announces itself")
    assert not troubled.of_carl.says("problem", "multicast")


def test_an_older_version_is_named_and_left_alone(troubled: Troubled) -> None:
    assert troubled.of_anna.says("problem", "version", "olaf", "shardnet 0.0.1", __version__)
    assert troubled.of_anna.says("info", "node", "olaf", "its own view is missing")


def test_a_wrong_key_is_named_on_both_sides(troubled: Troubled) -> None:
    assert troubled.of_anna.says("problem", "key", "it refused 127.0.0.1", "cluster key")
    assert troubled.of_carl.says("problem", "key", troubled.anna.address, "has no cluster key")


def test_another_key_is_named_by_the_doctor_itself(troubled: Troubled, machine: Machine) -> None:
    assert machine.run("key", "new").code == 0
    said = examine(machine, "--peer", troubled.carl.address, nodes=[troubled.carl])
    assert said.says("problem", "key", "it holds another cluster key", "shardnet key join")
    assert said.says("info", "node", "no node runs here")


def test_a_node_that_was_started_with_another_key_is_named(
    troubled: Troubled, machine: Machine
) -> None:
    """The doctor of the same machine cannot ask it."""
    assert machine.run("key", "new").code == 0
    key = str(machine.config_path.with_name("cluster.key"))
    said = examine(troubled.keyed, "--key-file", key, nodes=[troubled.carl])
    assert said.says("problem", "node", troubled.carl.address, "another cluster key")


def test_without_a_node_what_can_be_checked_is(machine: Machine) -> None:
    said = examine(machine)
    assert said.problems == []
    assert said.says("info", "key", "there is no cluster key", "shardnet key new")
    assert machine.run("key", "new").code == 0
    machine.config_path.with_name("cluster.key").chmod(0o644)
    missing = unused_address()
    said = examine(machine, "--peer", missing, "--model", "no-such-model")
    assert said.says("problem", "key", "chmod 600")
    assert said.says("problem", "port", missing, "nothing listens there")
    assert said.says("problem", "model", "no checkpoint folder")


def test_lines_are_plain_and_one_per_finding(troubled: Troubled) -> None:
    result = troubled.keyed.run("doctor")
    assert result.code == 1
    for line in result.stdout.splitlines():
        assert line.split()[0] in ("ok", "info", "problem"), line
        assert line.isprintable()
    assert result.stdout.startswith("problem")


def while_frozen(
    frozen: NodeProcess,
    other: NodeProcess,
    ask: Callable[[], Answer],
    was_in_time: Callable[[Answer], bool],
) -> Answer:
    """Ask while a node is frozen, and again if the other one had given it up before it was asked.

    The nodes are linked again afterwards. Fails if none of five answers was in time.
    """
    name = frozen.ready["name"]
    for _ in range(5):
        seen = len(other.log)
        frozen.freeze()
        try:
            answer = ask()
        finally:
            frozen.thaw()
        if was_in_time(answer):
            return answer
        other.stderr.wait_for(f"node {name} (", after=seen)
    raise AssertionError(f"five times {name} was given up before: {answer}")


def test_a_frozen_peer_holds_neither_the_doctor_nor_the_list(machine: Machine) -> None:
    """It is still linked, and so it is listed: nobody has given it up yet."""
    [bert] = machine.start_nodes("bert")
    [anna] = machine.start_nodes("anna", arguments=["--peer", bert.address])
    anna.stderr.wait_for("node bert (")
    asked = ["--nodes", anna.address]
    machine.nodes_with("anna", "bert", arguments=asked)
    listed = while_frozen(
        bert,
        anna,
        lambda: machine.nodes_with("anna", arguments=asked),
        lambda found: len(found) > 1,
    )
    assert listed.keys() == {"anna", "bert"}
    said = while_frozen(
        bert,
        anna,
        lambda: _diagnosis(machine.call("doctor", "--json")),
        lambda said: said.says("problem", "port", "anna → bert", "accepted and then nothing comes"),
    )
    assert said.says("problem", "node", bert.address, "restart it")


# --- on hosts of their own ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(folder: Path) -> Iterator[tuple[Site, Diagnosis, Diagnosis]]:
    """Three hosts whose switch passes no multicast and that all have a bridge with one address.

    Bert's firewall drops what comes to his port, and his packets are smaller; carl has another key.
    Gives also what the doctors of anna and carl say.
    """
    (folder / "site").mkdir()
    with open_site("namespaces", 3, folder / "site") as site:
        site.hosts[0].network.lose_multicast()
        for host in site.hosts:
            host.add_bridge("docker0", "172.17.0.1/16")
            host.add_bridge("lab0", "10.1.0.1/16")
        site.hosts[1].drop_tcp(7433)
        site.hosts[1].set_mtu(1400)
        other = folder / "other.key"
        assert site.machines[2].run("key", "new", "--key-file", str(other)).code == 0
        anna = site.start(0, "anna", "--port", "7433")
        to_anna = ("--port", "7433", "--peer", f"{site.hosts[0].address}:7433")
        site.start(1, "bert", *to_anna)
        site.start(2, "carl", *to_anna, "--key-file", str(other))
        anna.stderr.wait_for("node bert (")
        anna.stderr.wait_for("refused a link: ")
        of_anna = examine(site.machines[0])
        # None is said of nodes that have just started, nor at the first try on a busy machine.
        while not (
            of_anna.says("info", "multicast", "ufw")
            and of_anna.says("ok", "link", "bert → ")
            and of_anna.says("info", "address", "bert → anna", "another node answers")
        ):
            of_anna = examine(site.machines[0])
        yield site, of_anna, examine(site.machines[2], "--key-file", str(other))


def test_a_firewall_is_named_by_the_side_that_it_stops(
    broken: tuple[Site, Diagnosis, Diagnosis],
) -> None:
    site, of_anna, _ = broken
    bert = f"{site.hosts[1].address}:7433"
    assert of_anna.says("problem", "port", "anna → bert", bert, "no answer at all", "firewall")
    assert of_anna.says("ok", "link", "bert → anna", f"linked at {site.hosts[0].address}")


def test_missing_multicast_is_named(broken: tuple[Site, Diagnosis, Diagnosis]) -> None:
    """Twin: test_nodes_without_mdns_are_told_of, and test_diagnosis.py."""
    _, of_anna, _ = broken
    assert of_anna.says("info", "multicast", "never heard", "anna (eth0", "from bert", "5353")
    assert not of_anna.says("problem", "multicast")


def test_a_bridge_that_every_host_has_is_told_and_not_used(
    broken: tuple[Site, Diagnosis, Diagnosis],
) -> None:
    """Twin: test_diagnosis.py."""
    site, of_anna, _ = broken
    address = f"uses {site.hosts[0].address}:7433"
    assert of_anna.says("info", "address", "bert → anna", address, "not 10.1.0.1:7433", "another")
    assert of_anna.says("ok", "address", "not 172.17.0.1 (docker0): bridge of containers")
    assert not any("172.17.0.1:7433" in json.dumps(finding) for finding in of_anna.findings)


def test_unlike_packet_sizes_are_told(broken: tuple[Site, Diagnosis, Diagnosis]) -> None:
    """Twin: test_diagnosis.py."""
    _, of_anna, _ = broken
    assert of_anna.says("info", "mtu", "1500 bytes on eth0", "1400 bytes on eth0")


def test_another_key_on_another_host_is_named_on_both(
    broken: tuple[Site, Diagnosis, Diagnosis],
) -> None:
    site, of_anna, of_carl = broken
    assert of_anna.says("problem", "key", f"it refused {site.hosts[2].address}")
    assert of_carl.says("problem", "key", site.hosts[0].address, "another cluster key")
