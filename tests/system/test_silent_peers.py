"""Peers that are there and say nothing: each is given up after some seconds, by name.

They all fall silent at the same time, so that the tests wait once.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.servers.proxy import Proxy
from support.soak import cases, is_soak
from support.system.nodes import Command, Crew, NodeProcess, Result, open_machine
from support.system.parrot import Parrots
from support.system.strangers import HELLO, answering, connected, read_to_the_end

from shardnet.api.client import connect
from shardnet.wire.framing.frames import LIMITS, PREAMBLE, Frame, FrameKind, pack_frame
from shardnet.wire.messages.plans import ModelChoice, NodeProgress

DELAY_S = 0.05
"""What a link adds to each token: rings that make thousands in a second would keep the cores busy
while others are silent, and replay them all."""
FROZEN = cases(["bert"], ["lena"])
"""The middle of its ring, and the tail."""
NO_HELLO = "no hello came within 5 s"
HALF_A_FRAME = b"".join(
    pack_frame(Frame(kind=FrameKind.CONTROL, meta=bytes(1000)), LIMITS, checked=True)
)[:-10]


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """How everything ended. Rings by the node that was lost."""

    recoveries: dict[str, str]
    """What the heads of the broken rings logged until their requests went on."""
    meanwhile: list[str]
    """What these heads said alone while the others were still frozen."""
    left_out: dict[str, str]
    """Whom a plan did without that was made meanwhile, and why."""
    mute_nodes: list[Result]
    stranger_log: str
    """What the node logged that the strangers talked to."""
    rings: dict[str, Crew]


async def plan_without(address: str, model: Path) -> dict[str, str]:
    """Have a node plan, and tell which nodes it leaves out, and why."""
    reports: list[NodeProgress] = []
    async with connect(address) as client:
        plan = await client.plan(ModelChoice(model=str(model)), reports.append)
    n_all = reports[0].total_bytes
    told = [(report.phase, report.done_bytes, report.total_bytes) for report in reports]
    assert told == [("measuring", n_done, n_all) for n_done in range(1, n_all + 1)]
    return {out.name: out.why for out in plan.left_out}


def recovery(head: NodeProcess, running: Command, n_said: int) -> str:
    """Wait until a text goes on, and end it: alone its head makes thousands of tokens.

    Return what the head has logged since it had said `n_said` characters.
    """
    log = head.stderr.wait_for("recovered in", after=n_said)
    running.stdout.wait_for("xyz", after=len(running.stdout.text))
    running.kill()
    return log[n_said:]


@pytest.fixture(scope="module")
def silence(
    trio: Crew, parrots: Parrots, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Silence]:
    """Let the middle of one ring, the link of another and the client of a third one fall silent, in
    the long form a tail too, and strangers that connect to a node, and nodes that never answer."""
    with ExitStack() as stack:
        machine = stack.enter_context(open_machine(tmp_path_factory.mktemp("silence") / "machine"))
        mona, nils, olga, pete = machine.start_nodes("mona", "nils", "olga", "pete")
        rings = {
            "bert": trio,
            "nils": Crew(machine=machine, nodes=[mona, nils]),
            "olga": Crew(machine=machine, nodes=[olga, pete]),
        }
        if is_soak():
            rings["lena"] = Crew(machine=machine, nodes=machine.start_nodes("karl", "lena"))
        between = stack.enter_context(ExitStack())
        to_last = {
            name: between.enter_context(
                Proxy("127.0.0.1", crew.nodes[-1].ready["port"], delay_s=DELAY_S)
            )
            for name, crew in rings.items()
        }
        mute = stack.enter_context(answering(b""))
        texts = {
            name: crew.begin(
                parrots.alphabet,
                f"{crew.addresses(*range(len(crew.nodes) - 1))},127.0.0.1:{to_last[name].port}",
            )
            for name, crew in rings.items()
        }
        strangers = [
            stack.enter_context(connected(olga, said))
            for said in (b"", PREAMBLE + HELLO[:30], PREAMBLE + HELLO + HALF_A_FRAME)
        ]
        n_said = {name: len(crew.nodes[0].log) for name, crew in rings.items()}

        frozen = [rings[name].nodes[1] for name in FROZEN]
        for node in frozen:
            node.freeze()
            stack.callback(node.thaw)
        to_last["nils"].stall()
        client = texts.pop("olga")
        client.signal(signal.SIGSTOP)
        waiting = between.enter_context(ThreadPoolExecutor(len(texts)))
        recoveries = {
            name: waiting.submit(recovery, rings[name].nodes[0], running, n_said[name])
            for name, running in texts.items()
        }
        questions = [machine.begin_copy("plan", "--nodes", mute)]
        questions.append(machine.begin_copy("plan", "--nodes", f"{olga.address},{mute}"))
        left_out = asyncio.run(plan_without(trio.nodes[0].address, parrots.alphabet))
        for stranger in strangers:
            read_to_the_end(stranger)  # fails unless the node hangs up
        result = Silence(
            recoveries={name: found.result() for name, found in recoveries.items()},
            meanwhile=[rings[name].says("m", parrots.alphabet, 0) for name in FROZEN],
            left_out=left_out,
            mute_nodes=[question.wait() for question in questions],
            stranger_log=olga.stderr.wait_for(re.compile(f"{NO_HELLO}.*{NO_HELLO}", re.DOTALL)),
            rings=rings,
        )
        for node in frozen:
            node.thaw()
        client.kill()
        between.close()  # nodes would connect again and again
        yield result


@pytest.mark.parametrize(
    ("lost", "why"),
    [*((name, "frozen") for name in FROZEN), ("nils", "network between is cut")],
    ids=[*cases(["a frozen middle"], ["a frozen tail"]), "a stalled link"],
)
def test_what_falls_silent_is_named_and_texts_go_on(silence: Silence, lost: str, why: str) -> None:
    recovering, *_, recovered = [
        line for line in silence.recoveries[lost].splitlines() if "recover" in line
    ]
    assert lost in recovering
    assert why in recovering
    assert recovered.partition(", 1 of them with")[0].endswith(f"without {lost}")


def test_the_others_serve_while_a_node_is_frozen(silence: Silence) -> None:
    assert silence.meanwhile == ["nop" for _ in FROZEN]


@pytest.mark.parametrize("lost", [*FROZEN, "nils", "olga"])
def test_every_node_serves_again(silence: Silence, parrots: Parrots, lost: str) -> None:
    assert silence.rings[lost].says("m", parrots.alphabet) == "nop"


def test_a_frozen_client_does_not_hold_its_ring(silence: Silence, parrots: Parrots) -> None:
    """Another model can be loaded, so the request of that client has ended."""
    assert silence.rings["olga"].says("z", parrots.signs) == "."


def test_a_node_that_never_answers_is_named(silence: Silence) -> None:
    """As the head, asked by the client, and as another node, asked by the head."""
    for result in silence.mute_nodes:
        assert "no answer within 5 s" in result.error


def test_a_plan_names_a_node_that_says_nothing(silence: Silence) -> None:
    """It was linked to when it was asked; its link ends before the wait for it does."""
    assert "frozen" in silence.left_out["bert"]


def test_strangers_that_say_no_hello_are_logged(silence: Silence) -> None:
    assert silence.stranger_log.count(NO_HELLO) == 2
