"""Machines that sleep while nobody needs them, as real processes: requests wake them.

What a network interface does is done by a thread here: it waits for the packet, and has the machine
go on that sleeps. On loopback the packet goes where the node has said; in namespaces it is
broadcast, and the machine was turned off: its node is started at the packet.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from support.soak import is_soak
from support.system.nodes import Machine, NodeProcess
from support.system.parrot import Parrots
from support.system.sites import gone, here, open_site

from shardnet.cluster.machine.wake_on_lan import magic_packet

MEMORY = ("--memory", "35MiB")
"""Too little for the model on one node."""
N_PACKETS = 4
"""Interfaces that lose their link just then see the first ones not; a second passes between two."""


@contextlib.contextmanager
def listening_card(card: socket.socket, wake: Callable[[], None], n: int) -> Iterator[list[bytes]]:
    """Call `wake` at the n-th packet, and collect them all."""
    packets: list[bytes] = []

    def listen() -> None:
        while packet := card.recv(200):
            packets.append(packet)
            if len(packets) == n:
                wake()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield packets
    finally:
        card.sendto(b"", card.getsockname())  # which ends it
        listener.join()


def generate(machine: Machine, parrots: Parrots, anna: NodeProcess) -> str:
    """Have the node make three tokens, with whatever nodes it takes."""
    told = machine.call(
        *("generate", "a", "--model", str(parrots.alphabet), "--max-tokens", "3", "--json"),
        *("--peer", anna.address, "--no-mdns"),
    )
    text: str = told.json["text"]
    return text


def test_a_request_wakes_the_machine_that_it_needs(machine: Machine, parrots: Parrots) -> None:
    """Its plan says so before. What the other had loaded is there still, and no ring is recovered.

    A process that is stopped alone stands for a machine that is suspended.
    """
    [anna] = machine.start_nodes("anna", arguments=MEMORY)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.0.0.1", 0))
        [cleo] = machine.start_nodes(
            "cleo",
            arguments=[
                *(*MEMORY, "--peer", anna.address, "--sleep-after", "8s" if is_soak() else "1s"),
                *("--sleep-command", "kill -STOP $PPID"),
                *("--wake-at", f"127.0.0.1:{card.getsockname()[1]}"),
            ],
        )
        with listening_card(card, cleo.thaw, N_PACKETS) as packets:
            here(anna, "cleo")
            if is_soak():  # what is known of it, and loaded, outlives its sleep
                assert generate(machine, parrots, anna) == "bcd"
            anna.stderr.wait_for("cleo sleeps: not known yet how long it takes to wake")
            gone(anna, "cleo", after=0)
            asked = ("plan", "--model", str(parrots.alphabet), "--peer", anna.address)
            plan = machine.call(*asked, "--json").json
            assert [one["name"] for one in plan["asleep"]] == ["cleo"]
            assert {stage["name"] for stage in plan["stages"]} == {"anna", "cleo"}
            assert "cleo sleeps: " in plan["why"]
            assert (plan["predicted_tok_s"] is not None) is is_soak()
            assert packets == [], "a plan wakes nobody"

            assert generate(machine, parrots, anna) == "bcd"
            assert len(packets) >= N_PACKETS
            assert re.fullmatch(rb"\xff{6}(.{6})\1{15}", packets[0], re.DOTALL)
            took = re.search(r"cleo is awake, after ([0-9.]+) s", anna.log)
            assert took is not None
            assert float(took[1]) > N_PACKETS - 2
    cleo.stderr.wait_for("awake again, after")
    assert "recovering" not in anna.log
    assert cleo.log.count("loaded layers") == 1


def test_a_machine_that_does_not_wake_is_named_in_time_and_is_woken_by_hand(
    machine: Machine, parrots: Parrots
) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.0.0.1", 0))
        port = card.getsockname()[1]
    [anna] = machine.start_nodes("anna", arguments=[*MEMORY, "--wake-wait", "3s"])
    [cleo] = machine.start_nodes(
        "cleo",
        arguments=[
            *(*MEMORY, "--peer", anna.address, "--sleep-after", "1s"),
            *("--sleep-command", "kill -STOP $PPID", "--wake-at", f"127.0.0.1:{port}"),
        ],
    )
    gone(anna, "cleo", after=0)
    asked = ("generate", "a", "--model", str(parrots.alphabet), "--peer", anna.address)
    for _ in range(2):  # the second time it is not waited for
        error = machine.call(*asked).stderr
        assert "left out: cleo (it did not wake within 3 s; see that Wake-on-LAN" in error
    assert anna.log.count("waking cleo") == 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.0.0.1", port))
        with listening_card(card, cleo.thaw, 1):
            woken = machine.call("wake", "cleo", "--peer", anna.address)
    assert woken.code == 0, woken.stderr
    assert "cleo is awake" in woken.stderr
    assert generate(machine, parrots, anna) == "bcd"


CARD = """
import socket
card = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
card.bind(("", 9))
print("listening", flush=True)
packet, sender = card.recvfrom(200)
print(sender[0], packet.hex(), flush=True)
"""
"""What an interface of a machine that is off does."""


def test_a_machine_that_is_off_is_started_by_a_broadcast(tmp_path: Path, parrots: Parrots) -> None:
    with open_site("namespaces", 2, tmp_path) as site:
        anna_host, cleo_host = site.hosts
        anna = site.start(0, "anna", *MEMORY)
        off = ("--sleep-after", "1s", "--sleep-command", "kill -TERM $PPID")
        cleo = site.start(1, "cleo", *MEMORY, *off)
        with subprocess.Popen(
            [*cleo_host.prefix, sys.executable, "-c", CARD], stdout=subprocess.PIPE, text=True
        ) as card:
            assert card.stdout is not None
            assert card.stdout.readline() == "listening\n"
            gone(anna, "cleo", after=0)
            assert cleo.wait().code == 0
            asked = ("generate", "a", "--model", str(parrots.alphabet), "--max-tokens", "3")
            generating = site.machines[0].begin_copy(*asked, "--json")
            sender, packet = card.stdout.readline().split()
            link = cleo_host.link_address
            assert (sender, packet) == (anna_host.address, magic_packet(link).hex())
            seen = len(anna.log)
            site.start(1, "cleo", *MEMORY)
            assert generating.wait().json["text"] == "bcd"
        here(anna, "cleo", after=seen)
        assert "cleo is awake, after" in anna.log
