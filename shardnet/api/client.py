"""The client of a node: requests plans and text, and follows redirects to the head.

Knows the client messages. Imports no torch: nodes compute.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Unpack
from weakref import WeakSet

from msgspec.structs import replace

from shardnet import __version__
from shardnet.api.events import GenerationEvent, GenerationResult
from shardnet.api.generation import (
    MAX_REDIRECTS,
    Generations,
    Hooks,
    OnLoading,
    OnPlan,
    ShouldStop,
    too_many_redirects,
)
from shardnet.api.requests import (
    GenerationOptions,
    Message,
    Prompt,
    Prompts,
    check_request,
    is_single,
    make_requests,
    name_model,
    thought_of,
)
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.cluster.peers.control_link import Answer, ControlLink, ControlRequest, Incoming
from shardnet.errors import (
    BusyError,
    LinkClosedError,
    LinkError,
    RemoteProtocolError,
    ShardnetError,
    TakenError,
    UsageError,
)
from shardnet.sampling_params import SamplingParams
from shardnet.transport import tcp
from shardnet.transport.address import split_address
from shardnet.transport.link import Link, LinkOptions
from shardnet.wire.framing.schema import Numbered
from shardnet.wire.messages.activity import CancelSequence, GetActivity, RingActivity
from shardnet.wire.messages.chat import DescribeTokenizer, TokenizerDescribed
from shardnet.wire.messages.control import Done, Redirect
from shardnet.wire.messages.deputies import (
    DropValue,
    FindValue,
    KeepValue,
    ListedValue,
    ListValues,
    ValueFound,
    ValueName,
    ValuesListed,
)
from shardnet.wire.messages.generation import (
    Detokenize,
    Detokenized,
    Encode,
    Encoded,
    LastRun,
    LastRunRequest,
    Thought,
    Tokenize,
    Tokenized,
    Unload,
)
from shardnet.wire.messages.handshake import Capability, Hello, PeerRole, Purpose
from shardnet.wire.messages.household import (
    HouseholdListed,
    HouseholdModel,
    HouseholdModelState,
    ListHousehold,
    NameModels,
)
from shardnet.wire.messages.membership import (
    KeyTaken,
    ListModels,
    ModelsListed,
    ReportReply,
    ReportRequest,
    Status,
    StatusReply,
    TakeKey,
    Wake,
)
from shardnet.wire.messages.plans import ModelChoice, NodeProgress, PlanReply, PlanRequest
from shardnet.wire.messages.stages import Drain, LoadProgress

if TYPE_CHECKING:  # not every client needs the library behind it
    from shardnet.transport.identity import Identity

HANDSHAKE_S = 5.0
"""Deadline for the TLS and Hello handshake, in seconds."""

GREEDY = SamplingParams()
"""Always takes the most likely token."""


async def dial(
    address: str,
    identity: Identity | None = None,
    *,
    handshake_s: float = HANDSHAKE_S,
    purpose: Purpose = Purpose.CONTROL,
) -> Link:
    """Open a client's link to the node at `address` (host:port), within `handshake_s`.

    Raises UsageError unless `address` is host:port, LinkError when no node answers there,
    AuthenticationError when that node does not hold the key of `identity`.
    """
    if identity is not None and identity.keeper is not None:
        identity.keeper.forget_if_due()
    host, port = split_address(address)
    hello = Hello(
        purpose=purpose,
        role=PeerRole.CLIENT,
        node=secrets.token_hex(16),
        name="client",
        version=__version__,
        capabilities=[*Capability],
    )
    options = LinkOptions(identity=identity, handshake_s=handshake_s)
    return await tcp.connect(host, port, hello, options=options)


class Client:
    """A client of one node. Use `shardnet.api.connect`, or `open_client` over an open link.

    `identity` authenticates the links to redirect addresses. `choice` is the model, with its nodes,
    for calls that name none. Calls may run concurrently. A call on a link that has ended, or that
    ends before any answer, opens a new one with `redial`, where that is given; so does one that
    comes when the cluster has a new key.
    """

    def __init__(
        self,
        link: Link,
        identity: Identity | None,
        *,
        node_name: str = "",
        redial: Callable[[], Awaitable[Link]] | None = None,
    ) -> None:
        self.choice = ModelChoice(model=DEFAULT_MODEL_NAME)
        self.speculate = "off"
        """How to draft for calls that do not say."""
        self.if_busy = ""
        """What a person can do while the node works for others, in place of the node's words."""
        self._reading: dict[ControlLink, asyncio.Task[None]] = {}
        """The links that have not ended."""
        self._control = self._serve(link, node_name)
        self._identity = identity
        self._redial = redial
        self._elsewhere: dict[str, ControlLink] = {}
        self._dialling = asyncio.Lock()
        self._deputy = ""
        """The node that goes on if ours is lost, as far as is known."""
        self._is_over = False
        self._calls: WeakSet[Generations] = WeakSet()
        self._ids = count(1)

    @property
    def address(self) -> str:
        """Address of the node, host:port."""
        return self._control.link.peer_address

    @property
    def node_name(self) -> str:
        """Name of the node."""
        return self._control.link.peer.name

    @property
    def capabilities(self) -> Collection[str]:
        """What the node says it can do."""
        return self._control.link.peer.capabilities

    async def status(self, *, with_peers: bool = False) -> StatusReply:
        """Return the node's own status and, `with_peers`, those of the nodes it knows."""
        message = Status(request=0, with_peers=with_peers)
        control = await self._reach()
        try:
            return await control.ask(message, StatusReply)
        except LinkError:  # as in `_conversation`
            if not _has_ended(control):
                raise
        control = await self._reach()
        return await control.ask(message, StatusReply)

    async def report(
        self, *, probe: bool = False, with_peers: bool = False, model: str = ""
    ) -> AsyncGenerator[ReportReply, None]:
        """Ask the node for its report and, `with_peers`, for those of all nodes it is linked to.

        With `probe` each first tries to connect to every address it knows. `model` is a path whose
        model id is reported too, "" for none. Yields the reports as they come. Raises
        AuthenticationError where the node answers members of its cluster only, LinkError when the
        link ends.
        """
        message = ReportRequest(request=0, probe=probe, with_peers=with_peers, model=model)
        async with self._conversation(message) as (_, answers):
            async for answer in answers:
                if not isinstance(answer, ReportReply):
                    return
                yield answer

    async def reports(
        self, within_s: float, *, probe: bool = False, with_peers: bool = True, model: str = ""
    ) -> tuple[list[ReportReply], str]:
        """Return the reports that come in time, as of `report`, and what cut them short, or ""."""
        replies: list[ReportReply] = []
        reports = self.report(probe=probe, with_peers=with_peers, model=model)
        try:
            async with asyncio.timeout(within_s), contextlib.aclosing(reports) as answers:
                async for reply in answers:
                    replies.append(reply)
        except ShardnetError as error:
            return replies, str(error)
        except TimeoutError:
            return replies, f"it took longer than {within_s:g} s"
        return replies, ""

    async def models(
        self, *, with_peers: bool = True, names_only: bool = False, model: str = ""
    ) -> AsyncGenerator[ModelsListed, None]:
        """Ask the node which models it has and, `with_peers`, the nodes it is linked to.

        With `names_only` no model is opened. `model` is the path of one that the node describes
        though no store of its lists it. Yields the lists as they come: some models of one
        node, or why it does not say. Raises LinkError when the link ends.
        """
        message = ListModels(request=0, with_peers=with_peers, names_only=names_only, model=model)
        async with self._conversation(message) as (_, answers):
            async for answer in answers:
                if not isinstance(answer, ModelsListed):
                    return
                yield answer

    async def plan(
        self,
        model: str | ModelChoice | None = None,
        on_progress: OnLoading | None = None,
        *,
        again: bool = False,
        without: Sequence[str] = (),
        added: Sequence[str] = (),
    ) -> PlanReply:
        """Return the plan that `model` would get; with `again` after measuring everything again.

        Nodes whose ids are in `without` are not used. Machines that are `added` are planned for as
        if they were there: each is a text as `shardnet plan --add` takes it.
        `on_progress` is called while nodes and links are measured, with counts of these, and while
        the error of the wire dtype is measured, which reads the whole checkpoint on the head.

        Raises PlanError where no plan fits, CheckpointError where the model cannot be read or got,
        UsageError for a choice that cannot be sent.
        """
        message = PlanRequest(
            request=0,
            choice=self._chosen(model),
            again=again,
            without=list(without),
            added=list(added),
        )
        return await self.ask(message, PlanReply, on_progress)

    async def last_run(self) -> LastRun:
        """Return the timing of the last generation that the node, or its ring's head, has led.

        Raises UsageError when there was none.
        """
        return await self.ask(LastRunRequest(request=0), LastRun)

    async def activity(
        self, *, known_ring: str = "", after_step: int = 0, at: str = ""
    ) -> RingActivity:
        """Return the requests and the last steps of the ring that the node is in.

        Of the ring `known_ring` the plan is left out, and steps up to number `after_step`. `at` is
        the address of another node to ask.
        """
        message = GetActivity(request=0, known_ring=known_ring, after_step=after_step)
        return await self.ask(message, RingActivity, at=at)

    async def cancel(self, ring: str, sequence: int, *, at: str = "") -> None:
        """Cancel a request of `ring`, whoever sent it; both are named as `activity` does.

        Raises UsageError for one that has ended.
        """
        message = CancelSequence(request=0, ring=ring, sequence=sequence)
        await self.ask(message, Done, at=at)

    async def describe_tokenizer(
        self,
        *,
        model: str | ModelChoice | None = None,
        on_progress: OnLoading | None = None,
    ) -> TokenizerDescribed:
        """Return what is special about a model's tokenizer, and its chat template.

        The model is loaded if it is not. Raises UsageError if it has no tokenizer.
        """
        message = DescribeTokenizer(request=0, choice=self._chosen(model))
        return await self.ask(message, TokenizerDescribed, on_progress)

    async def unload(self, *, model: str = "", idle_s: float = 0.0) -> None:
        """Free the model on every node of the ring; with `model` only if the ring has that one.

        Raises BusyError while requests run, and if one ended less than `idle_s` seconds ago.
        """
        await self.ask(Unload(request=0, model=model, idle_s=idle_s), Done)

    async def drain(self, deadline_s: float) -> None:
        """Have the node give its layers to others and end when it is empty.

        After `deadline_s` seconds it ends in any case. Requests go on, but for those that this very
        node leads and that are not done by then.
        """
        await self.ask(Drain(request=0, deadline_s=deadline_s), Done)

    async def take_key(self, secret: bytes, grace_s: int, node: str = "") -> KeyTaken:
        """Have the node, or the peer of it with id `node`, take a cluster key of these 16 bytes.

        Holders of the key before stay members for `grace_s` seconds; the present key and 0 ends
        that. Raises ShardnetError where a node cannot take it, or takes another one.
        """
        message = TakeKey(request=0, key=secret, grace_s=grace_s, node=node)
        return await self.ask(message, KeyTaken)

    async def household(self) -> list[HouseholdModelState]:
        """Return how the models of the household are, the most important first."""
        return (await self.ask(ListHousehold(request=0), HouseholdListed)).models

    async def name_models(
        self, models: Sequence[HouseholdModel] = (), *, dropped: Sequence[str] = ()
    ) -> None:
        """Have the household have these models, and not those called `dropped`.

        The node leads it from now on where none does. Raises UsageError for too many models.
        """
        message = NameModels(request=0, models=list(models), dropped=list(dropped))
        await self.ask(message, Done)

    async def wake(self, node: str) -> None:
        """Have the node wake the node of the id `node`. Raises UsageError if it does not wake."""
        await self.ask(Wake(request=0, node=node), Done)

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams = GREEDY,
        *,
        n: int = 1,
        model: str | ModelChoice | None = None,
        should_stop: ShouldStop | None = None,
        on_plan: OnPlan | None = None,
        on_loading: OnLoading | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Generate `n` continuations of each prompt and yield their events as they come.

        `prompts` is a text, token ids, messages, a Prompt with options of its own, or a list of
        these; the events of several requests come interleaved. `model` is a path, a name of the Hub
        or a whole ModelChoice, None for `self.choice`. After each event `should_stop` may name
        requests to end; `on_plan` gets the plan that is used, `on_loading` the progress of its
        nodes. Closing the iterator cancels the requests that still run.

        The error of one of several requests is in its FAILED event and ends no other; a single
        request raises it. Raises UsageError at once, before anything is sent, for values that no
        node would accept.
        """
        options.setdefault("speculate", self.speculate)
        requests = make_requests(prompts, sampling, self._chosen(model), n=n, **options)
        hooks = Hooks(should_stop=should_stop, on_plan=on_plan, on_loading=on_loading)
        generations = Generations(requests, self._ids, self._reach, hooks, self._note_deputy)
        self._calls.add(generations)
        events = self._explained(generations.events())
        return raising(events) if is_single(prompts) and n == 1 else events

    async def thinking(
        self,
        budget: int | None = None,
        *,
        message: str = "",
        model: str | ModelChoice | None = None,
    ) -> Thought | None:
        """Return an option `thinking` for `generate`: at most `budget` tokens of reasoning.

        Behind these `message` and the model's own mark end it. None for a model that has no marks
        of reasoning. Raises as `describe_tokenizer`.
        """
        return thought_of(await self.describe_tokenizer(model=model), budget, message)

    def end_thought(self, request_id: int) -> None:
        """Have a running request, named as in its events, end its reasoning and answer.

        Raises UsageError if it does not run, or was sent without the option `thinking`.
        """
        if not any(call.end_thought(request_id) for call in self._calls):
            raise UsageError(f"no request {request_id} of this client runs")

    async def complete(
        self,
        prompts: Prompts,
        sampling: SamplingParams = GREEDY,
        *,
        n: int = 1,
        model: str | ModelChoice | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[GenerationResult]:
        """Generate as `generate` does and return the results, by prompt and then by sample.

        Raises the first error of any request, and cancels the others then.
        """
        results = []
        events = self.generate(prompts, sampling, n=n, model=model, **options)
        async with contextlib.aclosing(raising(events)) as told:
            async for event in told:
                if event.result is not None:
                    results.append(event.result)
        return sorted(results, key=lambda result: (result.index, result.sample))

    async def tokenize(
        self,
        prompt: str | Sequence[int] | Sequence[Message] | Prompt,
        *,
        model: str | ModelChoice | None = None,
        on_progress: OnLoading | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Tokenized:
        """Return the token ids that `generate` would begin with, and the context of the ring.

        The model is loaded if it is not. Raises what `generate` raises for a prompt.
        """
        [request] = make_requests(prompt, GREEDY, self._chosen(model), **options)
        message = Tokenize(request=0, generate=request.message)
        return await self.ask(message, Tokenized, on_progress)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str | ModelChoice | None = None,
    ) -> Detokenized:
        """Return the text of token ids, whole and token by token.

        Raises UsageError for an id that the model does not have.
        """
        message = Detokenize(
            request=0,
            choice=self._chosen(model),
            token_ids=list(token_ids),
            keep_special_tokens=keep_special_tokens,
        )
        return await self.ask(message, Detokenized)

    async def encode(self, message: Encode, on_progress: OnLoading | None = None) -> Encoded:
        """Return vectors or scores of texts by an encoder, which is no model of the ring.

        `Encode` says what is asked; `shardnet.api.embedding` sends it for any number of texts.
        Raises ContextExceededError for a text that is too long, UsageError for the wrong kind.
        """
        return await self.ask(message, Encoded, on_progress)

    async def keep_value(self, owner: str, name: str, value: bytes) -> None:
        """Have the node, and one more, keep up to 2 MiB in memory, as long as there is room."""
        of = ValueName(owner=owner, name=name)
        await self.ask(KeepValue(request=0, of=of, value=value), Done)

    async def find_value(self, owner: str, name: str) -> bytes | None:
        """Return what some node of the cluster keeps under a name, None where none does."""
        of = ValueName(owner=owner, name=name)
        return (await self.ask(FindValue(request=0, of=of), ValueFound)).value

    async def list_values(self, owner: str, prefix: str) -> list[ListedValue]:
        """Return the owner's small values whose names begin with `prefix`, the latest first."""
        of = ValueName(owner=owner, name=prefix)
        return (await self.ask(ListValues(request=0, of=of), ValuesListed)).values

    async def drop_value(self, owner: str, name: str) -> None:
        """Have no node keep a value any longer."""
        await self.ask(DropValue(request=0, of=ValueName(owner=owner, name=name)), Done)

    def _chosen(self, model: str | ModelChoice | None) -> ModelChoice:
        if model is None:
            return self.choice
        return replace(self.choice, model=name_model(model)) if isinstance(model, str) else model

    async def ask(
        self,
        message: ControlRequest,
        expected: type[Answer],
        on_progress: OnLoading | None = None,
        at: str = "",
    ) -> Answer:
        """Send `message` to the node, or to that `at` another address; return the answer.

        Redirects are followed.
        Raises RemoteProtocolError for an answer of another type, PeerFailedError for too many
        redirects, and the error that the node reports.
        """
        check_request(message)
        address = at
        for _ in range(MAX_REDIRECTS + 1):
            try:
                async with self._conversation(message, address) as (control, answers):
                    while isinstance(answer := await anext(answers), NodeProgress | LoadProgress):
                        if on_progress is not None and isinstance(answer, NodeProgress):
                            on_progress(answer)
            except BusyError as error:
                self._explain(error)
                raise
            if isinstance(answer, expected):
                return answer
            if not isinstance(answer, Redirect):
                raise RemoteProtocolError(
                    f"{control.peer_name} answered with an unexpected {type(answer).__name__}"
                )
            address = answer.address
        raise too_many_redirects(self.address)

    async def _explained(
        self, events: AsyncGenerator[GenerationEvent, None]
    ) -> AsyncGenerator[GenerationEvent, None]:
        async with contextlib.aclosing(events):
            async for event in events:
                self._explain(event.error)
                yield event

    def _explain(self, error: ShardnetError | None) -> None:
        """Put `if_busy` into the error of a node that works for others."""
        if self.if_busy and error is not None and type(error) in (BusyError, TakenError):
            error.remedy = self.if_busy

    @asynccontextmanager
    async def _conversation(
        self, message: ControlRequest, address: str = ""
    ) -> AsyncIterator[tuple[ControlLink, AsyncIterator[Numbered]]]:
        """Number and send a request; yield the link that it went over, and its answers.

        If that link ends before any answer, the request goes once more over a new one: the node may
        have cut it while this program's event loop stood still, which then learns it too late.
        """
        for may_repeat in (True, False):
            control = await self._reach(address)
            if isinstance(message, PlanRequest) and message.added:
                control.link.peer.require(Capability.WHAT_IF)
            async with control.conversation(message) as answers:
                try:
                    first = await anext(answers)
                except LinkError:
                    if not may_repeat or not _has_ended(control):
                        raise
                    continue
                yield control, _preceded(first, answers)
                return

    async def _reach(self, address: str = "") -> ControlLink:
        """Return the link to the node, or to another one at `address`, opened again if it has
        ended. Where the node is not there any more its deputy is asked. Raises LinkError.
        """
        if address:
            return await self._link_to(address)
        if self._redial is None or self._is_good(self._control):
            return self._control
        try:
            async with self._dialling:
                if not self._is_good(self._control):
                    self._control = self._adopt(await self._redial())
                return self._control
        except LinkError:
            if not _has_ended(self._control):
                return self._control
            if not self._deputy:
                raise
        return await self._link_to(self._deputy)

    def _note_deputy(self, address: str) -> None:
        self._deputy = address

    async def _link_to(self, address: str) -> ControlLink:
        """Return the link to another node; it stays open as long as the client."""
        async with self._dialling:
            control = self._elsewhere.get(address)
            if control is None or not self._is_good(control):
                control = self._adopt(await dial(address, self._identity))
                self._elsewhere[address] = control
            return control

    def _adopt(self, link: Link) -> ControlLink:
        """Serve a link as long as the client is open."""
        if self._is_over:
            link.abort("the client was closed")
            raise LinkClosedError(f"{link.peer_address}: the client was closed meanwhile")
        return self._serve(link)

    def _serve(self, link: Link, node_name: str = "") -> ControlLink:
        control = ControlLink(link, self._handle, peer_name=node_name)
        reading = self._reading[control] = asyncio.create_task(control.serve_to_the_end())
        reading.add_done_callback(lambda _: self._reading.pop(control))
        return control

    def _is_good(self, control: ControlLink) -> bool:
        """Whether a link has not ended, and was opened with the key that the cluster has now."""
        signers, identity = control.link.signers, self._identity
        is_present = signers is None or identity is None or signers.own == identity.signer
        return is_present and not _has_ended(control)

    async def _handle(self, control: ControlLink, message: Incoming) -> None:
        """Take a new cluster key from a node, all that clients are asked."""
        if not isinstance(message, TakeKey):
            raise RemoteProtocolError(f"a client received the request {type(message).__name__}")
        if self._identity is None or self._identity.keeper is None:
            raise UsageError("this client has no cluster key in a file")
        self._identity.keeper.take(message.key, message.grace_s, message.after)
        control.send(KeyTaken(request=message.request))

    async def _close(self) -> None:
        """Close all links; calls that still run fail."""
        self._is_over = True
        async with contextlib.AsyncExitStack() as closing:
            for control, reading in self._reading.items():
                closing.push_async_callback(_end, control, reading)


async def _preceded(first: Numbered, answers: AsyncIterator[Numbered]) -> AsyncIterator[Numbered]:
    yield first
    async for answer in answers:
        yield answer


async def raising(
    events: AsyncGenerator[GenerationEvent, None],
) -> AsyncGenerator[GenerationEvent, None]:
    """Raise the error of the first event that has one."""
    async with contextlib.aclosing(events):
        async for event in events:
            if event.error is not None:
                raise event.error
            yield event


@asynccontextmanager
async def open_client(
    link: Link,
    identity: Identity | None = None,
    *,
    node_name: str = "",
    redial: Callable[[], Awaitable[Link]] | None = None,
) -> AsyncIterator[Client]:
    """Make a client over an open control link; the link is closed at the end.

    `node_name` names the node in errors, "" for its name and address. `identity` authenticates the
    links to redirect addresses. `redial` opens the link again for the next call after its end.
    """
    client = Client(link, identity, node_name=node_name, redial=redial)
    try:
        yield client
    finally:
        await client._close()


@asynccontextmanager
async def connect(address: str, identity: Identity | None = None) -> AsyncIterator[Client]:
    """Connect to the node at `address` (host:port). Raises what `dial` raises.

    When the link has ended, the next call connects again.
    """

    async def dial_again() -> Link:
        return await dial(address, identity)

    link = await dial_again()
    async with open_client(link, identity, redial=dial_again) as client:
        yield client


def _has_ended(control: ControlLink) -> bool:
    return control.link.closed or control.ended is not None


async def _end(control: ControlLink, reading: asyncio.Task[None]) -> None:
    await control.link.close()
    await reading
