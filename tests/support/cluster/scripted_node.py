"""A node in a few lines: what it answers to a prompt is what the prompt says.

Texts are echoed, one token per character; of a conversation its last message. `fail…` fails,
`long…` is too long, for `unplanned…` there is no plan, `wait…` says its first character and then
nothing more until it is released, when it fails, `elsewhere…` is sent to another address. The
hidden state of a text is (3, 4, its length).
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace
from support.cluster.checkup_facts import reply, view

from shardnet.api.client import Client, open_client
from shardnet.cluster.deputy.copying import KeptValues
from shardnet.cluster.peers.control_link import ControlLink, Incoming, MessageHandlers
from shardnet.errors import CapacityError, ContextExceededError, PlanError, ShardnetError
from shardnet.transport.link import Link
from shardnet.transport.memory import memory_pair
from shardnet.types import LiveState
from shardnet.wire.messages.activity import TracedStep, TracePiece
from shardnet.wire.messages.chat import AddedToken, DescribeTokenizer, TokenizerDescribed
from shardnet.wire.messages.control import ControlMessage, Done, Redirect
from shardnet.wire.messages.diagnostics import (
    Drafted,
    LinkTraffic,
    RingLoad,
    RingWork,
    StageWork,
)
from shardnet.wire.messages.extras import StageTiming
from shardnet.wire.messages.generation import (
    Detokenize,
    Detokenized,
    Encode,
    Encoded,
    Finished,
    Generate,
    RowsPiece,
    StateChanged,
    TextPiece,
    Timing,
    Tokenize,
    Tokenized,
    Unload,
)
from shardnet.wire.messages.handshake import Capability, Hello, PeerRole, Purpose
from shardnet.wire.messages.household import HouseholdListed, ListHousehold
from shardnet.wire.messages.membership import (
    ListedModel,
    ListModels,
    ModelsListed,
    NodeInfo,
    ReportReply,
    ReportRequest,
    StageInfo,
    Status,
    StatusReply,
)
from shardnet.wire.messages.plans import ModelChoice, PlanReply, PlanRequest

MODELS = ("org/Tiny-Llama", "org/Big-Llama")
TEMPLATE = "{{ tools }} <tool_call> <think>"
"""That of a model which writes calls as Hermes does, and <think> around its reasoning."""
NO_TIME = Timing(load_s=0, ttft_s=0, decode_tok_s=0, total_s=0, per_stage=())


Before = Callable[[ControlLink, Incoming], Awaitable[None]]


async def _at_once(control: ControlLink, message: Incoming) -> None:
    """Answer at once."""


class ScriptedNode:
    """Remembers what it was asked, how many requests it had at once and who gave up."""

    def __init__(
        self, elsewhere: str = "", capabilities: Sequence[str] = tuple(Capability)
    ) -> None:
        self.asked: list[Generate] = []
        self.given_up: list[str] = []
        self.elsewhere = elsewhere
        self.capabilities = [*capabilities]
        self.before: Before = _at_once
        """Awaited before each answer."""
        self.stage: StageInfo | None = None
        self.until_released = asyncio.Event()
        """Until it is set `wait…` waits."""
        self.finish_reason = "stop"
        """Why answers end."""
        self.values = MessageHandlers()
        KeptValues(lambda: ()).register(self.values)
        self.link: Link
        self._n_now = 0
        self.n_most = 0
        self.changed = asyncio.Condition()

    async def handle(self, control: ControlLink, message: Incoming) -> None:
        await self.before(control, message)
        if type(message) in self.values.types:
            await self.values.handle(control, message)
            return
        if not isinstance(message, Generate):
            for answer in _short_answers(message, replace(_INFO, stage=self.stage)):
                control.send(answer)
            return
        self.asked.append(message)
        await self._tell()
        self._n_now += 1
        self.n_most = max(self.n_most, self._n_now)
        try:
            await self._answer(control, message)
        except asyncio.CancelledError:
            self.given_up.append(_text(message))
            raise
        finally:
            self._n_now -= 1
            await self._tell()

    async def until_asked(self, n: int) -> None:
        """Wait until so many requests have come."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.asked) >= n)

    async def until_given_up(self, n: int) -> None:
        """Wait until so many requests were given up."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.given_up) >= n)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _answer(self, control: ControlLink, message: Generate) -> None:
        number, prompt = message.request, _text(message)
        if prompt.startswith("elsewhere") and self.elsewhere:
            control.send(Redirect(request=number, address=self.elsewhere))
            return
        if prompt.startswith("fail"):
            raise CapacityError(f"no room for {prompt}")
        if prompt.startswith("long"):
            raise ContextExceededError.of("too long", 99, 64)
        if prompt.startswith("unplanned"):
            raise PlanError("the model fits nowhere")
        answers: list[ControlMessage] = [
            _plan(number, message.choice),
            StateChanged(request=number, state=LiveState.QUEUED, ahead=2),
            StateChanged(request=number, state=LiveState.RUNNING, n_prompt=2, n_kept=1),
        ]
        for answer in answers:
            control.send(answer)
        await asyncio.sleep(0)
        if message.outputs.hidden_rows is not None:
            data = struct.pack("<3f", 3, 4, len(prompt))
            control.send(RowsPiece(request=number, kind="hidden", position=0, width=3, data=data))
            prompt = ""
        for character in prompt[:-1]:
            token = [ord(character)]
            control.send(
                TextPiece(request=number, token_ids=token, tokens=[character], text=character)
            )
            if prompt.startswith("wait"):
                await self.until_released.wait()
                raise CapacityError("what waited is let go")
            await asyncio.sleep(0)
        if message.trace:
            control.send(
                TracePiece(
                    request=number,
                    nodes=["scripted"],
                    clocks_within_us=[0],
                    submitted_us=5,
                    steps=[TracedStep(1, 0, 2, 1, 2, 6, 9, [StageTiming(0, 2, 1, 6)])],
                )
            )
        control.send(
            Finished(
                request=number,
                finish_reason=self.finish_reason,
                prompt_token_ids=[1, 2],
                text=prompt[-1:],
                timing=NO_TIME,
            )
        )


FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
_INFO = NodeInfo(
    node="n",
    name="scripted",
    address="",
    version="0",
    device="cpu",
    memory_bytes=0,
    memory_free_bytes=0,
    cores=1,
    threads=1,
    dtypes=[],
    host_id="h",
)
_LOAD = RingLoad(
    running=3, waiting=2, paused=0, warm_slots=1, warm_blocks=1, used_blocks=4, room_blocks=9
)


_WORK = RingWork(
    load=_LOAD,
    n_steps=10,
    wire_us=3_000_000,
    stages=[
        StageWork(rank=rank, name=name, compute_us=2_000_000, queue_us=500_000)
        for rank, name in enumerate(("anna", "bert"))
    ],
    n_prompts=4,
    n_prefix_hits=1,
    n_prompt_tokens=100,
    n_prefix_tokens=40,
    drafters=[Drafted(drafter="mtp", n_drafted=30, n_accepted=20, n_steps=12, n_tokens=32)],
    n_flown=6,
    n_wasted=2,
    n_disk_tokens=10,
)
_LINK = LinkTraffic(
    name="bert", purpose="data", n_links=1, n_failed=2, sent_bytes=1000, received_bytes=10
)
REPORTS = (
    reply("anna", view("bert"), ring=_WORK, links=[_LINK, replace(_LINK, purpose="control")]),
    reply("bert", links=[replace(_LINK, name="anna", round_trip_us=250, n_resent=7)]),
    ReportReply(request=0, node="c", name="cleo", failure="it runs shardnet 0"),
)
"""What the node reports of itself, of a peer, and of one that does not answer."""


def _text(message: Generate) -> str:
    if message.token_ids is not None:
        return "".join(chr(token_id % sys.maxunicode) for token_id in message.token_ids)
    return message.messages[-1].content or "" if message.messages else message.prompt


def _short_answers(message: Incoming, info: NodeInfo) -> list[ControlMessage]:
    """Answer what is not generated."""
    match message:
        case Unload(request=number):
            return [Done(request=number)]
        case PlanRequest(request=number, choice=choice):
            return [_plan(number, choice)]
        case Status(request=number):
            return [StatusReply(request=number, node=info, peers=[], load=_LOAD)]
        case ReportRequest(request=number):
            return [*(replace(reply, request=number) for reply in REPORTS), Done(request=number)]
        case ListModels(request=number):
            models = [
                ListedModel(
                    name=name,
                    store="here",
                    size_bytes=8,
                    form="Q4_K",
                    family="llama",
                    parameters=8_030_261_248,
                    licence="mit",
                    modified_s=86400,
                    context=4096,
                )
                for name in MODELS
            ]
            return [
                ModelsListed(request=number, node="n", name="n", models=models),
                Done(request=number),
            ]
        case ListHousehold(request=number):
            return [HouseholdListed(request=number, models=[])]
        case Encode(request=number):
            return [Encoded(request=number, kind="")]
        case Tokenize(request=number, generate=generate):
            ids = [ord(character) for character in _text(generate)]
            return [Tokenized(request=number, token_ids=ids, context=64)]
        case Detokenize(request=number, token_ids=token_ids):
            tokens = [*map(chr, token_ids)]
            return [Detokenized(request=number, text="".join(tokens), tokens=tokens)]
        case DescribeTokenizer(request=number):
            return [
                TokenizerDescribed(
                    request=number,
                    bos_id=None,
                    eos_ids=[42],
                    added=[AddedToken(900 + place, mark, True) for place, mark in enumerate(FIM)],
                    template=TEMPLATE,
                )
            ]
        case _:
            raise AssertionError(f"nothing is scripted for {message}")


def _plan(number: int, choice: ModelChoice) -> PlanReply:
    return PlanReply(
        request=number,
        model=choice.model,
        model_id="0" * 64,
        dtype="float32",
        wire_dtype="float32",
        context=64,
        stages=[],
        why="it is scripted",
    )


@asynccontextmanager
async def client_of(node: ScriptedNode) -> AsyncIterator[Client]:
    """Give a client that is linked to the node in memory."""
    async with serving(node) as link, open_client(link, node_name="scripted") as client:
        yield client


@asynccontextmanager
async def serving(node: ScriptedNode) -> AsyncIterator[Link]:
    """Let the node serve one link, and give its other end."""
    hello = Hello(
        purpose=Purpose.CONTROL,
        role=PeerRole.NODE,
        node="n",
        name="n",
        version="0",
        capabilities=node.capabilities,
    )
    near, node.link = await memory_pair(hello, hello)
    serving = asyncio.create_task(_serve(node))
    try:
        yield near
    finally:
        await near.close()
        await serving


async def _serve(node: ScriptedNode) -> None:
    try:
        await ControlLink(node.link, node.handle).serve()
    except ShardnetError:
        return
