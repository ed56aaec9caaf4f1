"""One key, real processes: members are served over TLS, everyone else is refused by name."""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.soak import is_soak
from support.system.nodes import Crew, Machine, NodeProcess, open_machine
from support.system.parrot import LONG, Parrots
from support.system.warm_start import is_possible

from shardnet.wire.framing.frames import PREAMBLE

TLS_ALERT = 0x15


def new_key(machine: Machine) -> str:
    """Make the machine's key and return its text."""
    result = machine.run("key", "new")
    assert result.code == 0, result.stderr
    return result.stdout.strip()


def key_file(machine: Machine) -> Path:
    return machine.config_path.with_name("cluster.key")


def listens_on(node: NodeProcess) -> set[str]:
    """The addresses the process is bound to."""
    connections = psutil.Process(node.pid).net_connections("tcp")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def forms_of(key: str) -> list[str]:
    """The key as it might leak: as written, without groups, in any of its groups."""
    return [key, key.replace("-", ""), *key.split("-")]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Two nodes that hold one key, found where keys are kept."""
    with open_machine(tmp_path_factory.mktemp("guarded") / "machine") as machine:
        new_key(machine)
        yield Crew(machine=machine, nodes=machine.start_nodes("anna", "bert"))


# --- with the key


def test_members_generate_together(guarded: Crew, parrots: Parrots) -> None:
    arguments = ["--nodes", guarded.addresses(), "--layers", "0-1,1-4", "--max-tokens", "5"]
    result = guarded.generate("abc", parrots.alphabet, *arguments, "--json")
    assert result.json["text"] == "defgh"
    assert [stage["rank"] for stage in result.json["stages"]] == [0, 1]


def test_the_node_of_this_machine_is_asked_and_follows_the_key(
    guarded: Crew, parrots: Parrots
) -> None:
    result = guarded.generate("abc", parrots.alphabet, "--max-tokens", "2")
    assert result.stdout == "de\n", result.stderr
    assert "asking the node of this machine" in result.stderr
    assert guarded.machine.nodes_with("anna", "bert").keys() == {"anna", "bert"}


def test_a_node_that_joined_by_typing_the_key_finds_its_peer(
    guarded: Crew, machine: Machine
) -> None:
    key = guarded.machine.run("key", "show").stdout
    typed = key.lower().replace("-", " ")
    joined = machine.run("key", "join", stdin=typed)
    assert joined.code == 0, joined.stderr
    (carl,) = machine.start_nodes("carl", arguments=["--peer", guarded.nodes[0].address])
    assert carl.ready["cluster"] == guarded.nodes[0].ready["cluster"]
    for peer, names in ((carl, ["carl"]), (guarded.nodes[0], ["anna", "carl"])):
        assert machine.nodes_with(*names, arguments=["--peer", peer.address])


def test_with_a_key_a_node_listens_everywhere(guarded: Crew) -> None:
    assert listens_on(guarded.nodes[0]) <= {"::", "0.0.0.0"}
    host = guarded.nodes[0].ready["host"]
    assert host not in ("::", "0.0.0.0")


def test_a_node_answers_what_is_no_tls_with_an_alert_and_nothing_else(guarded: Crew) -> None:
    port = guarded.nodes[0].ready["port"]
    with socket.create_connection(("127.0.0.1", port), timeout=120) as stranger:
        stranger.sendall(PREAMBLE)
        received = b""
        while chunk := stranger.recv(1000):
            received += chunk
    assert received[0] == TLS_ALERT
    assert len(received) == 7


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_local_nodes_use_the_key_that_is_named(
    machine: Machine, parrots: Parrots, tmp_path: Path
) -> None:
    place = tmp_path / "elsewhere.key"
    assert machine.run("key", "new", "--key-file", str(place)).code == 0
    arguments = ["--model", str(parrots.alphabet), "--local", "2", "--max-tokens", "3"]
    result = machine.run("generate", "abc", *arguments, "--key-file", str(place))
    assert result.stdout == "def\n", result.stderr
    variable = {"SHARDNET_KEY_FILE": str(place)}
    assert machine.run("key", "show", environment=variable).code == 0
    machine.config_path.write_text(f"key_file = '{place}'\n")
    assert machine.run("key", "show").code == 0


# --- without it, or with another


def test_another_key_is_refused_by_name_and_logged_once(
    guarded: Crew, machine: Machine, parrots: Parrots
) -> None:
    new_key(machine)
    node = guarded.nodes[1]
    before = len(node.log)
    address = f"127.0.0.1:{node.ready['port']}"
    for _ in range(2):
        arguments = ["--model", str(parrots.alphabet), "--nodes", address]
        error = machine.run("generate", "abc", *arguments).error
        assert error.startswith(f"{address}: it holds another cluster key")
        assert "shardnet key join" in error
    log = node.stderr.wait_for("it holds another cluster key", after=before)[before:]
    assert log.count("\n") == 1
    assert "refused a link: 127.0.0.1:" in log


@pytest.mark.skipif(sys.platform != "linux", reason="others have one loopback address")
def test_strangers_that_drip_tls_take_no_memory(guarded: Crew) -> None:
    """400 connections of forty hosts, each with all but the last byte of a ClientHello.

    With a TLS engine for each handshake that may be under way the node grows by 7 MiB, as measured.
    """
    node, said = guarded.nodes[0], ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(
            ssl.MemoryBIO(), said, server_hostname="a"
        ).do_handshake()
    hello, process = said.read(), psutil.Process(node.pid)

    def own_bytes() -> int:
        found = process.memory_info()  # without libraries, whose pages come in as they are used
        return int(found.rss - found.shared)

    assert guarded.machine.nodes_with("anna", "bert")
    before_bytes = own_bytes()
    with contextlib.ExitStack() as stack:
        for number in range(400):
            stranger = stack.enter_context(socket.socket())
            stranger.bind((f"127.0.2.{1 + number % 40}", 0))
            stranger.connect(("127.0.0.1", node.ready["port"]))
            stranger.sendall(hello[:40])
            stranger.sendall(hello[40:-1])
        assert guarded.machine.nodes_with("anna", "bert")  # a member comes in meanwhile
        grown_bytes = own_bytes() - before_bytes
    assert grown_bytes < 4 << 20


def test_no_key_is_refused_by_name(guarded: Crew, machine: Machine, parrots: Parrots) -> None:
    address = guarded.nodes[0].address
    for flags in ([], ["--insecure"]):
        arguments = ["--model", str(parrots.alphabet), "--nodes", address, *flags]
        error = machine.run("generate", "abc", *arguments).error
        assert address in error
        assert "holds none; run `shardnet key join` here" in error


def test_a_node_without_a_key_is_named_by_a_client_with_one(
    trio: Crew, guarded: Crew, parrots: Parrots
) -> None:
    arguments = ["--nodes", trio.nodes[0].address]
    error = guarded.generate("abc", parrots.alphabet, *arguments).error
    assert trio.nodes[0].address in error
    assert "has no cluster key" in error
    insecure = guarded.generate("abc", parrots.alphabet, *arguments, "--insecure")
    assert insecure.code == 0, insecure.stderr


def test_a_ring_with_a_node_of_another_cluster_is_refused(
    trio: Crew, guarded: Crew, parrots: Parrots
) -> None:
    nodes = f"{guarded.nodes[0].address},{trio.nodes[0].address}"
    error = guarded.generate("abc", parrots.alphabet, "--nodes", nodes).error
    assert trio.nodes[0].address in error
    assert "has no cluster key" in error


def test_a_node_of_this_machine_with_another_key_is_passed_over(
    machine: Machine, parrots: Parrots
) -> None:
    machine.start_nodes("early")
    new_key(machine)
    result = machine.run("generate", "abc", "--model", str(parrots.alphabet), "--max-tokens", "2")
    assert result.stdout == "de\n"
    assert "node early of this machine is not asked: " in result.stderr
    assert "has no cluster key" in result.stderr


# --- what a node listens on


def test_without_a_key_a_node_listens_on_loopback_only(trio: Crew) -> None:
    assert listens_on(trio.nodes[0]) == {"127.0.0.1"}
    assert trio.nodes[0].ready["cluster"] is None


def test_insecure_is_warned_of_at_every_start(machine: Machine) -> None:
    new_key(machine)
    (node,) = machine.start_nodes("open", arguments=["--insecure", "--host", "0.0.0.0"])
    assert listens_on(node) == {"0.0.0.0"}
    assert node.ready["cluster"] is None
    assert "warning: --insecure: links are neither encrypted nor authenticated" in node.log


# --- where the key may not be seen


def test_the_key_is_seen_nowhere(guarded: Crew, parrots: Parrots) -> None:
    key = guarded.machine.run("key", "show").stdout.strip()
    command = guarded.machine.begin(
        *("generate", "abc", "--model", str(parrots.alphabet), "--local", "2"),
        *("--context", str(LONG), "--max-tokens", str(LONG - 10)),
    )
    command.stdout.wait_for("d")
    processes = guarded.machine.processes()
    assert len(processes) == 3 if is_possible() else 2 + 3  # what a copy shows is its server's
    places = [" ".join(process.cmdline()) for process in processes]
    places += [f"{name}={value}" for p in processes for name, value in p.environ().items()]
    places += [node.log + node.stdout.text for node in guarded.nodes]
    places += [path.read_text() for path in guarded.machine.runtime_dir.iterdir()]
    places.append(command.stderr.text)
    command.kill()
    for place in places:
        for form in forms_of(key):
            assert form not in place.upper()


def test_a_key_that_others_may_read_is_refused_everywhere(machine: Machine) -> None:
    key = new_key(machine)
    path = key_file(machine)
    path.chmod(0o644)
    commands = (["node", "--port", "0"], ["generate", "a"], ["nodes"], ["key", "show"])
    for arguments in commands:
        error = machine.run(*arguments).error
        assert f"chmod 600 {path}" in error
        assert not any(form in error for form in forms_of(key))


def test_a_key_file_that_is_named_must_be_there(machine: Machine, tmp_path: Path) -> None:
    missing = str(tmp_path / "no.key")
    commands = (["node", "--port", "0"], ["plan"], ["unload"], ["key", "show"])
    for arguments in commands:
        error = machine.run(*arguments, "--key-file", missing).error
        assert missing in error
        assert "shardnet key new" in error


# --- shardnet key


def test_a_mistyped_key_is_named_as_such_and_not_repeated(machine: Machine) -> None:
    key = new_key(machine)
    mistyped = ("1" if key[0] != "1" else "2") + key[1:]
    error = machine.run("key", "join", "-", "--replace", stdin=mistyped).error
    assert "the cluster key is mistyped" in error
    assert not any(form in error for form in forms_of(mistyped))
    assert machine.run("key", "show").stdout.strip() == key


def test_a_key_as_an_argument_is_refused_and_not_repeated(machine: Machine) -> None:
    key = new_key(machine)
    result = machine.run("key", "join", key)
    assert result.code == 2
    assert "every user of this machine can read arguments" in " ".join(result.stderr.split())
    assert key not in result.stderr


def test_a_key_is_replaced_only_on_demand(machine: Machine) -> None:
    first = new_key(machine)
    assert "--replace" in machine.run("key", "new").error
    second = machine.run("key", "new", "--replace").stdout.strip()
    assert second != first
    assert "--replace" in machine.run("key", "join", stdin=first).error
    assert machine.run("key", "join", "--replace", stdin=first).code == 0
    shown = machine.run("key", "show")
    assert shown.stdout.strip() == first
    assert "cluster" in shown.stderr


def test_nothing_typed_is_no_key(machine: Machine) -> None:
    assert "no key was given" in machine.run("key", "join").error
    assert not key_file(machine).exists()
