"""Audits of a ring: a node that computes wrong bits is named and done without, others are not."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cluster.checkup_facts import facts, reply, the_one, view
from support.cluster.machines import Machine, machines
from support.models.checkpoints import make_llama
from support.needs import needs_vectors
from support.rings.stage_chain import random_prompt
from support.soak import cases
from torch import Tensor

from shardnet.api.client import connect
from shardnet.api.dashboard.node_history import NodeHistory
from shardnet.api.server.metrics import RingMetrics
from shardnet.cluster.machine.profile import MemoryBudget, find_devices
from shardnet.cluster.recovery.audits import Answer, Audits, judge
from shardnet.cluster.ring.stage_port import Order, RemotePort
from shardnet.model.fused.decoder import DecoderStage
from shardnet.model.layers.attention import ForwardStep
from shardnet.runtime.shards.spanning_stage import SpanningCompute
from shardnet.stage.stage_model import StageModel
from shardnet.wire.messages.diagnostics import AuditFinding, AuditState
from shardnet.wire.messages.plans import ModelChoice
from shardnet.wire.messages.stages import ComputeLayer, LayerComputed
from shardnet_cli.commands.status import _as_json, _as_lines

NAMES = cases(["anna", "bert"], ["cleo", "dora"])
N_TOKENS, DEADLINE_S = 60, 120.0
PROMPTS = [random_prompt(n, 300, seed=n) for n in (9, 20)]

pytestmark = [pytest.mark.usefixtures("unmeasured"), needs_vectors]


def at_once() -> bool:
    """Audit nothing."""
    return True


class Audited:
    """A ring of nodes on loopback that says `whole` undisturbed."""

    def __init__(self, nodes: list[Machine], client: Any, choice: ModelChoice) -> None:
        self.nodes, self._client, self._choice = nodes, client, choice
        self.head = nodes[0].node

    async def say(self, until: Callable[[], bool] = at_once) -> list[list[int]]:
        """Generate from all prompts, and audit once each has some tokens until something is so."""
        made: list[list[int]] = [[] for _ in PROMPTS]
        is_audited = False
        events = self._client.generate(
            PROMPTS, model=self._choice, max_tokens=N_TOKENS, ignore_eos=True
        )
        async with aclosing(events):
            async for event in events:
                assert event.error is None, event.error
                made[event.index] += event.token_ids
                if not is_audited and min(map(len, made)) > 4:
                    is_audited = True
                    await self.audit(until)
        return made

    async def audit(self, until: Callable[[], bool]) -> None:
        while not until():
            await self.head.audits.audit()
            await asyncio.sleep(0.005)  # without a ring it comes back at once

    @property
    def used(self) -> set[str]:
        assert self.head.head.latest is not None
        return {node.name for node in self.head.head.latest.plan.ring_nodes}

    @property
    def reads_prompts(self) -> bool:
        """Whether the ring has beginnings of prompts read from disk."""
        assert self.head.head.latest is not None
        return self.head.head.latest.ring.engine._restoring.prefixes is not None

    @property
    def found(self) -> list[tuple[str, bool]]:
        state = self.head.audits.state
        return [(each.name, each.is_left_out) for each in state.findings] if state else []

    @property
    def n_confirmed(self) -> int:
        state = self.head.audits.state
        return 0 if state is None else state.n_confirmed

    def model(self, name: str) -> Any:
        """Return the stage of a node."""
        [node] = [each.node for each in self.nodes if each.node.settings.name == name]
        assert node.stage.host.loaded is not None
        compute: Any = node.stage.host.loaded.compute
        return (compute._own if isinstance(compute, SpanningCompute) else compute)._model


@asynccontextmanager
async def ring(folder: Path, *names: str, nodes_per_stage: int = 0) -> AsyncIterator[Audited]:
    model = make_llama(folder / "model", num_hidden_layers=len(names) * 2)
    budget = MemoryBudget(device=find_devices("cpu")[0], asked_bytes=1 << 28)
    async with (
        asyncio.timeout(DEADLINE_S),
        machines(folder, *names, budget=budget, prefix_cache_bytes=1 << 26) as nodes,
        connect(nodes[0].node.address) as client,
    ):
        choice = ModelChoice(
            model=str(model),
            nodes=[one.node.address for one in nodes],
            nodes_per_stage=nodes_per_stage,
        )
        yield Audited(nodes, client, choice)


def flip_a_weight(model: Any) -> None:
    model.digests.look_at_all()  # the first turn notes what they are
    [piece] = [p for p in model.digests._pieces if "mlp.down_proj" in p.name][:1]
    piece.tensor().view(-1).view(torch.uint8)[7] ^= 0x40


def test_nothing_is_found_in_a_ring_that_computes_right(tmp_path: Path) -> None:
    async def main() -> None:
        async with ring(tmp_path, *NAMES) as audited:
            whole = await audited.say()
            assert await audited.say(lambda: audited.n_confirmed == 2 * len(NAMES)) == whole
            assert not audited.found
            assert audited.used == {*NAMES}

    asyncio.run(main())


@pytest.mark.parametrize("name", NAMES)
def test_a_bit_that_flips_in_a_weight_is_noticed_and_requests_go_on(
    name: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with ring(tmp_path, *NAMES) as audited:
            whole = await audited.say(lambda: audited.n_confirmed >= len(NAMES))
            before = audited.model(name)
            assert audited.reads_prompts
            flip_a_weight(before)
            made = await audited.say(lambda: bool(audited.found))
            assert [len(each) for each in made] == [N_TOKENS] * len(PROMPTS)
            assert audited.found == [(name, name != "anna")]
            assert any(
                "mlp.down_proj have changed" in line and "memtest" in line
                for line in audited.nodes[0].lines
            )
            assert await audited.say() == whole
            assert audited.used == {*NAMES} - ({name} - {"anna"})
            assert name != "anna" or audited.model(name) is not before
            assert not audited.reads_prompts

    asyncio.run(main())


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_bit_that_flips_in_a_part_of_a_shared_stage_is_noticed(name: str, tmp_path: Path) -> None:
    """Of the two nodes of a stage that one is named which has it."""

    async def main() -> None:
        async with ring(tmp_path, *NAMES[:2], nodes_per_stage=2) as audited:
            whole = await audited.say()
            flip_a_weight(audited.model(name))
            await audited.say(lambda: bool(audited.found))
            assert audited.found == [(name, name != "anna")]
            assert await audited.say() == whole
            assert audited.used == {*NAMES[:2]} - ({name} - {"anna"})

    asyncio.run(main())


def one_bit(rows: Tensor) -> None:
    """Flip a bit of an activation."""
    rows.view(torch.int16 if rows.element_size() == 2 else torch.int32)[0, 3] ^= 1 << 14


def half_of_the_columns(rows: Tensor) -> None:
    """Change what one of two threads has computed."""
    rows[:, rows.shape[1] // 2 :] *= 1.25


def perturb(monkeypatch: pytest.MonkeyPatch, stage: Any, change: Callable[[Tensor], None]) -> None:
    """Have a stage change what its last layer gives."""
    plain = DecoderStage.walk

    def walk(self: DecoderStage, hidden: Tensor, step: ForwardStep) -> Iterator[Tensor]:
        last = len(self._layers) - 1
        for place, rows in enumerate(plain(self, hidden, step)):
            if self is stage.family and place == last:
                change(rows)
            yield rows

    monkeypatch.setattr(DecoderStage, "walk", walk)


@pytest.mark.parametrize(
    ("name", "change"),
    cases(
        [("anna", half_of_the_columns), ("bert", one_bit)],
        [("bert", half_of_the_columns), ("cleo", half_of_the_columns), ("dora", one_bit)],
    ),
)
def test_a_stage_that_begins_to_compute_wrong_is_noticed(
    name: str, change: Callable[[Tensor], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with ring(tmp_path, *NAMES) as audited:
            whole = await audited.say(lambda: audited.n_confirmed >= len(NAMES))
            perturb(monkeypatch, audited.model(name), change)
            made = await audited.say(lambda: bool(audited.found))
            assert [len(each) for each in made] == [N_TOKENS] * len(PROMPTS)
            assert audited.found == [(name, name != "anna")]
            assert any("other bits for the same rows" in line for line in audited.nodes[0].lines)
            assert await audited.say() == whole
            assert audited.used == {*NAMES} - ({name} - {"anna"})

    asyncio.run(main())


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_that_was_wrong_from_the_start_is_noticed_by_others_while_nothing_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with ring(tmp_path, *NAMES) as audited:
            whole = await audited.say()
            perturb(monkeypatch, audited.model(name), one_bit)
            await audited.audit(lambda: bool(audited.found))
            assert audited.found == [(name, name != "anna")]
            assert any("other bits than by" in line for line in audited.nodes[0].lines)
            assert await audited.say() == whole
            assert audited.used == {*NAMES} - ({name} - {"anna"})

    asyncio.run(main())


def test_of_two_that_stand_by_their_word_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = RemotePort.order

    async def unlike(port: RemotePort, message: Order, expected: type[Any]) -> Any:
        if isinstance(message, ComputeLayer):
            return LayerComputed(request=1, took_s=0.0, after=b"unlike")
        return await order(port, message, expected)

    async def main() -> None:
        async with ring(tmp_path, "anna", "bert") as audited:
            whole = await audited.say()
            monkeypatch.setattr(RemotePort, "order", unlike)
            assert await audited.say(lambda: bool(audited.found)) == whole
            assert audited.found == [("anna", False)]
            assert any("it and bert compute the same rows" in x for x in audited.nodes[0].lines)
            assert audited.used == {"anna", "bert"}

    asyncio.run(main())


def test_rows_that_are_unlike_on_every_machine_are_no_machine_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is loaded computes wrong: one is left out, no second one, and rows count no more."""

    async def main() -> None:
        async with ring(tmp_path, "anna", "bert") as audited:
            await audited.say(lambda: audited.n_confirmed >= 2)
            plain, n_trials = StageModel.trial, itertools.count(1)

            def trial(self: StageModel, hidden: Tensor | None, n_rows: int) -> list[Tensor]:
                nudge = next(n_trials)
                return [state + nudge for state in plain(self, hidden, n_rows)]

            monkeypatch.setattr(StageModel, "trial", trial)
            lines = audited.nodes[0].lines
            await audited.audit(lambda: any("bug of shardnet" in line for line in lines))
            found = audited.found
            assert not found[-1][1]
            assert audited.head.audits.state is not None
            n_audits = audited.head.audits.state.n_audits
            assert len((await audited.say())[0]) == N_TOKENS
            await audited.audit(lambda: audited.head.audits.state.n_audits > n_audits + 3)
            assert audited.found == found

    asyncio.run(main())


def test_pauses_keep_audits_within_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    took_s, paused_s = [0.0, 0.1, 0.02], list[float]()

    async def sleep(seconds: float) -> None:
        paused_s.append(seconds)

    async def audit(self: Audits) -> float:
        if not took_s:
            raise asyncio.CancelledError
        return took_s.pop(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(Audits, "audit", audit)
    for share in (0.0, 0.005):
        audits = Audits(head=None, share=share, distrust=lambda: None, log=print)  # type: ignore[arg-type]
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(audits.run())
    assert paused_s == [2.0, 2.0, pytest.approx(20.0), pytest.approx(4.0)]


RIGHT, WRONG = b"right", b"wrong"


@pytest.mark.parametrize(
    ("audited", "answers", "wrong"),
    [
        (Answer(1, WRONG), [Answer(0, RIGHT), Answer(2, RIGHT)], 1),
        (Answer(1, RIGHT), [Answer(0, WRONG), Answer(2, RIGHT)], 0),
        (Answer(1, WRONG), [Answer(0, RIGHT), Answer(1, RIGHT)], 1),
        (Answer(1, WRONG), [Answer(1, RIGHT)], 1),
        (Answer(1, RIGHT), [Answer(0, WRONG)], None),
        (Answer(1, RIGHT), [Answer(0, WRONG), Answer(1, RIGHT)], None),
        (Answer(1, b"1"), [Answer(0, b"2"), Answer(2, b"3")], None),
    ],
)
def test_who_is_wrong_is_what_two_machines_say(
    audited: Answer, answers: list[Answer], wrong: int | None
) -> None:
    assert judge(audited, answers) == wrong


def test_what_was_found_is_told_by_doctor_status_dashboard_and_metrics() -> None:
    found = AuditFinding(
        node="bert-id",
        name="bert",
        layer=7,
        at=1e9 - 300,
        good_at=1e9 - 360,
        what="the same rows have other bits than by anna",
        remedy="test its memory",
        is_left_out=True,
    )
    audit = AuditState(
        n_audits=5, busy_s=0.5, looked_bytes=3 << 30, n_confirmed=2, findings=[found]
    )
    anna, bert = reply("anna", view("bert"), audit=audit), reply("bert", view("anna"))
    line = the_one(facts(anna, bert), "bits").line
    assert line.startswith("bert: wrong bits in layer 7 5 min ago: the same rows")
    assert line.endswith("(nothing was found 60 s before); test its memory")
    assert anna.info is not None
    assert anna.report is not None
    shown = "\n".join(_as_lines(anna.info, anna.report))
    assert "audits   5, 3.00 GiB of memory looked at, 2 layers computed alike by others" in shown
    assert "wrong    bert computed wrong bits in layer 7 5 min ago, and was left out: the" in shown
    assert _as_json(anna.info, anna.report)["audit"]["findings"][0]["name"] == "bert"
    book = NodeHistory()
    book.take([anna, bert], 0.0)
    wrong = {node.name: node.wrong_bits for node in book.nodes(0.0)}
    assert wrong == {"anna": None, "bert": f"layer 7: {found.what}; test its memory"}
    metrics = RingMetrics()
    metrics.take([anna, bert], None)
    values = {
        (sample.name, sample.labels.get("node")): sample.value
        for metric in metrics.collect()
        for sample in metric.samples
    }
    assert values["shardnet_audits_total", "anna"] == 5
    assert values["shardnet_audit_seconds_total", "anna"] == 0.5
    assert values["shardnet_audited_weight_bytes_total", "anna"] == 3 << 30
    assert values["shardnet_wrong_bits_total", "bert"] == 1
