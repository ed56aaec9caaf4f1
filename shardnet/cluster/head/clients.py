"""What a node does for clients: plans, generations, unloading.

Knows the client messages and turns the engine's events into them. Must not plan or load itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from shardnet.cluster.deputy.copied_requests import CopiedRequest
from shardnet.cluster.deputy.copying import Copy, Copying
from shardnet.cluster.head.drafts import Drafts
from shardnet.cluster.head.encoders import Encoders
from shardnet.cluster.head.energy import EnergyWindow
from shardnet.cluster.head.head import Head
from shardnet.cluster.head.last_run import write_last_run
from shardnet.cluster.head.lead import Lead, LockstepSets, Member
from shardnet.cluster.head.model_lists import ModelLists
from shardnet.cluster.head.pictures import Pictures
from shardnet.cluster.head.replies import (
    finished,
    output_pieces,
    report_progress,
    timing_reply,
    token_piece,
    trace_pieces,
)
from shardnet.cluster.head.requests import (
    Constraints,
    adapter_uses,
    check_made,
    check_prompt,
    described,
    detokenized,
    needs_tokenizer,
    output_params,
    prompt_ids,
    prompt_tail,
    reserved_bytes,
    sampling_params,
    stop_ids,
    text_stream,
    thoughts,
    turn_of,
    with_ids,
)
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers, RedirectedError
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.planning.planning import Elsewhere, Planner
from shardnet.cluster.planning.wire_loss import WireLoss
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import CheckpointError, ShardnetError, SupersededError, UsageError
from shardnet.model.vision.picture import PictureProcessor
from shardnet.runtime.engine.outputs import OutputBudget, PromptLogprobsReady, RowsReady
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    MadeToken,
    RequestMoved,
    RequestPicture,
    TokenGenerated,
)
from shardnet.runtime.scheduling.drafting import FORCED, MTP, NGRAM
from shardnet.runtime.stage.executor import Executor
from shardnet.types import LiveState
from shardnet.wire.messages.chat import DescribeTokenizer
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.deputies import CopiedTo
from shardnet.wire.messages.diagnostics import Drafted
from shardnet.wire.messages.drafting import LoadDrafter
from shardnet.wire.messages.generation import (
    Detokenize,
    ExpertCount,
    Generate,
    LastRun,
    LastRunRequest,
    StateChanged,
    Tokenize,
    Tokenized,
    Unload,
)
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.plans import ModelChoice, PlanRequest


@dataclass(slots=True, eq=False)
class _Served:
    """A request whose answer begins with `made`; the client has `n_sent` tokens of it."""

    control: ControlLink
    message: Generate
    member: Member
    made: Sequence[MadeToken]
    n_sent: int
    copied: CopiedRequest | None
    """What it goes on with."""
    load_s: float = 0.0
    """How long its ring was built."""


@dataclass(eq=False, repr=False)
class Clients:
    """Serves the client messages of all control links of a node.

    `reader` is the thread that tokenises prompts, `drafts` gives draft models, `constraints` what
    outputs must match, `wire_loss` measures what a narrower wire costs, `lists` finds models by
    parts of their names, `encoders` are planned for too, `pictures` reads those of requests,
    `copying` keeps requests that have a key. The last run is kept in the folder `cache` too, which
    `disk` writes; it also reads chat templates.
    """

    head: Head
    planner: Planner
    reader: Executor
    disk: DiskJobs
    drafts: Drafts
    constraints: Constraints
    wire_loss: WireLoss
    lists: ModelLists
    encoders: Encoders
    pictures: Pictures
    copying: Copying
    cache: Path
    log: Callable[[str], None]

    def __post_init__(self) -> None:
        self._outputs = OutputBudget()
        self._sets = LockstepSets()
        self._has_logged = False
        """Whether the log says already that the last run cannot be kept on disk."""
        self._last_run: LastRun | None = None
        self._corrected = ""
        """The ring by which figures were corrected last: its plan stays, so once is enough."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register what the router (router/router.py) does not look at first."""
        handlers.register(LastRunRequest, self.last_run)

    async def plan(self, control: ControlLink, message: PlanRequest) -> None:
        """Reply with the plan, or Redirect. A wire dtype that is asked for is measured."""
        choice = await self.settled(message.choice)
        encoder = await self.encoders.find(choice.model)
        if encoder is not None:
            control.send(self.encoders.plan(message, choice.model, encoder))
            return
        with self._hinting(choice):
            plan = await self.planner.plan(
                choice,
                partial(report_progress, control, message.request, 0, "measuring"),
                measure_one=True,
                again=message.again,
                without=message.without,
                added=message.added,
            )
        if isinstance(plan, Elsewhere):
            raise RedirectedError(plan.address)
        if not plan.choice.wire_dtype:
            control.send(replace(plan.reply(message.request), drafters=self._drafters(plan)))
        else:
            wire = await self.wire_loss.narrow(
                plan,
                partial(report_progress, control, message.request, 0, "loading"),
            )
            control.send(plan.reply(message.request, wire))

    def _drafters(self, plan: Plan) -> list[Drafted]:
        """Return what was drafted, and where, on the ring that is there, if it is of the model."""
        lead = self.head.latest
        if lead is None or lead.plan.facts.model_id != plan.facts.model_id:
            return []
        return self.drafted(lead)

    def drafted(self, lead: Lead) -> list[Drafted]:
        """Return what was drafted on a ring of this head, by whom and where."""
        names = [node.name for node in lead.plan.nodes]
        places = {} if self.drafts.drafters is None else self.drafts.drafters.places_by_name
        where = dict.fromkeys((NGRAM, FORCED), names[0]) | {MTP: names[-1]}
        return [
            replace(each, node=place.name, why=place.why)
            if (place := places.get(each.drafter)) is not None
            else replace(each, node=where.get(each.drafter, names[0]))
            for each in lead.ring.engine.totals.drafters
        ]

    async def last_run(self, control: ControlLink, message: LastRunRequest) -> None:
        """Reply with the last generation led from here, or Redirect to the ring's head.

        Raises UsageError if there is neither.
        """
        self.head.check_leads()
        if self._last_run is None:
            raise UsageError(
                "this node has led no generation yet", remedy="run `shardnet generate` first"
            )
        control.send(replace(self._last_run, request=message.request))

    async def unload(self, control: ControlLink, message: Unload) -> None:
        """Free the model of the ring that this node leads, or reply Redirect."""
        choice = ModelChoice(model=message.model)
        model = (await self.settled(choice)).model if message.model else ""
        elsewhere = await self.head.unload(model, message.idle_s)
        if elsewhere is not None:
            raise RedirectedError(elsewhere.address)
        control.send(Done(request=message.request))

    async def settled(self, choice: ModelChoice) -> ModelChoice:
        """Return what a ring is made for: the model's name in full, and nothing of one request.

        Raises as ModelLists.resolve.
        """
        elsewhere = self.head.elsewhere()
        in_use = (self.head.model, elsewhere.model if elsewhere is not None else None)
        model = await self.lists.resolve(choice.model, in_use)
        return replace(choice, model=model, used_adapters=[])

    @contextlib.contextmanager
    def _hinting(self, choice: ModelChoice) -> Iterator[None]:
        """Name the nearest model where none was found."""
        try:
            yield
        except CheckpointError as error:
            raise self.lists.hinted(choice.model, error) from error

    async def generate(self, control: ControlLink, message: Generate) -> None:
        """Run one request and stream its tokens and rows, or reply Redirect."""
        made = tuple(MadeToken(token_id=token_id) for token_id in message.made)
        await self._generate(control, message, made, len(made), None)

    async def resume(
        self, control: ControlLink, request: int, copied: CopiedRequest, n_tokens: int
    ) -> None:
        """Go on with an answer, from its token number `n_tokens` on, or reply Redirect."""
        message = replace(copied.generate, request=request, lockstep_size=0)
        await self._generate(control, message, tuple(copied.tokens), n_tokens, copied)

    async def _generate(
        self,
        control: ControlLink,
        message: Generate,
        made: Sequence[MadeToken],
        n_sent: int,
        copied: CopiedRequest | None,
    ) -> None:
        """Run a request whose answer begins with `made`; the client has `n_sent` tokens of it."""
        with self._sets.member(control, message) as member:
            message.sampling.check()
            await self._lead_and_stream(_Served(control, message, member, made, n_sent, copied))

    async def _lead_and_stream(self, served: _Served) -> None:
        """Have a ring, built if need be, that runs it; else reply Redirect."""
        control, message = served.control, served.message

        def on_plan(plan: Plan) -> None:
            control.send(plan.reply(message.request))

        def on_loaded(took_s: float) -> None:
            served.load_s = took_s

        needed = needs_tokenizer(message)
        async with self.leading(
            control, message.request, message.choice, needed, on_plan, on_loaded
        ) as lead:
            if served.copied is not None:
                served.copied.check_model(lead.plan.facts.model_id)
            try:
                await self._stream(served, lead)
            except SupersededError as error:
                if message.outputs.asks or not error.address or control.link.closed:
                    raise
                raise RedirectedError(error.address) from error

    async def tokenize(self, control: ControlLink, message: Tokenize) -> None:
        """Reply with the token ids of a prompt, or Redirect."""
        generate = message.generate
        needed = needs_tokenizer(generate)
        async with self.leading(control, message.request, generate.choice, needed) as lead:
            with self.pictures.held(generate.pictures) as held:
                _, token_ids, _ = await self._prompt(generate, lead, held, may_be_long=True)
            context = lead.ring.spec.form.context
            control.send(Tokenized(request=message.request, token_ids=token_ids, context=context))

    async def detokenize(self, control: ControlLink, message: Detokenize) -> None:
        """Reply with the text of token ids, or Redirect."""
        async with self.leading(control, message.request, message.choice, "text") as lead:
            control.send(await self.reader.run(lambda: detokenized(message, lead)))

    @contextlib.asynccontextmanager
    async def leading(
        self,
        control: ControlLink,
        request: int,
        choice: ModelChoice,
        tokenizer_for: str = "",
        on_plan: Callable[[Plan], None] = lambda _: None,
        on_loaded: Callable[[float], None] = lambda load_s: None,
    ) -> AsyncIterator[Lead]:
        """Yield a ring for `choice`, built if needed. Raises RedirectedError.

        `tokenizer_for` says what needs a tokenizer, "" for nothing.
        """
        choice = await self.settled(choice)
        async with contextlib.AsyncExitStack() as stack:
            with self._hinting(choice):
                lead = await stack.enter_async_context(
                    self.head.lead(
                        choice,
                        tokenizer_for=tokenizer_for,
                        on_plan=on_plan,
                        on_progress=partial(report_progress, control, request),
                        on_loaded=on_loaded,
                    )
                )
            if isinstance(lead, Elsewhere):
                raise RedirectedError(lead.address)
            yield lead

    async def describe_tokenizer(self, control: ControlLink, message: DescribeTokenizer) -> None:
        """Reply with what a client needs to know of a model's tokenizer, or Redirect."""
        async with self.leading(control, message.request, message.choice) as lead:
            chats = self.disk.at(f"the chat template of {lead.plan.facts.path}")
            job = partial(described, message, lead)
            control.send(await chats.run(job, alive=time.monotonic))

    async def _prompt(
        self, message: Generate, lead: Lead, held: set[bytes], *, may_be_long: bool = False
    ) -> tuple[list[int], list[int], tuple[RequestPicture, ...]]:
        """Return the token ids of a prompt, those with all that stand for pictures, and these.

        Digests of pictures go to `held`.
        """
        processor = await self.pictures.processor(lead) if message.pictures else None
        ids = await self._prompt_ids(message, lead, processor, may_be_long=may_be_long)
        if processor is None:
            return ids, ids, ()
        tower = lead.plan.choice.mmproj
        whole, pictures = await self.pictures.placed(message, ids, processor, held, tower=tower)
        check_prompt(whole, message, lead, may_be_long=may_be_long)
        return ids, whole, pictures

    async def _prompt_ids(
        self,
        message: Generate,
        lead: Lead,
        processor: PictureProcessor | None,
        *,
        may_be_long: bool,
    ) -> list[int]:
        """Return the token ids of a prompt, each of its pictures as one."""
        job = partial(prompt_ids, message, lead, may_be_long=may_be_long, processor=processor)
        if not turn_of(message):
            return await self.reader.run(job)
        # A chat template is an untrusted program: it must not delay other prompts. Its process has
        # limits of its own, so that the disk is not blamed for the time it takes.
        chats = self.disk.at(f"the chat template of {lead.plan.facts.path}")
        return await chats.run(job, alive=time.monotonic)

    async def _stream(self, served: _Served, lead: Lead) -> None:
        message = served.message
        with self.pictures.held(message.pictures) as held:
            ids, prompt, pictures = await self._prompt(message, lead, held)
            request = await self._request(served, lead, prompt, pictures)
            with (
                self._outputs.room_for(reserved_bytes(request, lead)),
                self.copying.copied(
                    served.control, with_ids(message, ids), request.made, lambda: lead.told
                ) as copy,
            ):
                await self._answer(served, lead, request, copy)

    async def _request(
        self,
        served: _Served,
        lead: Lead,
        prompt: Sequence[int],
        pictures: tuple[RequestPicture, ...],
    ) -> GenerationRequest:
        """Make what the engine runs of a request."""
        message = served.message
        spec = lead.ring.spec
        check_made(message, served.made, len(prompt), lead)
        speculation = await self.drafts.speculation(
            LoadDrafter(
                request=0,
                drafter=message.speculate,
                form=spec.form,
                vocab_size=spec.config.vocab_size,
            ),
            message.draft_tokens,
            rewinds=spec.config.rewinds,
            has_mtp=spec.form.mtp,
            on_progress=partial(report_progress, served.control, message.request, 0, "downloading"),
        )
        asked = None if message.constraint is None else message.constraint.params()
        constrained = await self.constraints.constrained(asked, lead.grammars)
        return GenerationRequest(
            prompt=tuple(prompt),
            sampling=await self.reader.run(lambda: sampling_params(message, lead)),
            max_tokens=message.max_tokens,
            stop_ids=stop_ids(message, lead),
            text=text_stream(message, lead, prompt),
            priority=message.priority,
            deadline_s=message.deadline_s,
            speculation=speculation,
            deterministic=message.deterministic,
            lockstep=message.lockstep,
            outputs=output_params(message, lead),
            constrained=constrained,
            is_traced=message.trace,
            stops_by_text=bool(message.stop),
            made=tuple(served.made),
            adapters=adapter_uses(message, lead),
            pictures=pictures,
            thoughts=await self.reader.run(lambda: thoughts(message, lead, prompt)),
        )

    async def _answer(
        self, served: _Served, lead: Lead, request: GenerationRequest, copy: Copy | None
    ) -> None:
        control, message = served.control, served.message
        n_tokens, told, copied_to = 0, lead.plan, ""
        tail = await self.reader.run(lambda: prompt_tail(request.prompt, lead))
        clocks = await lead.ring.clocks() if request.is_traced else []
        if served.member.waits:  # the client sends the others of a set when the first is accepted
            control.send(
                StateChanged(request=message.request, state=LiveState.QUEUED, prompt_tail=tail)
            )
            await served.member.begin()
        energy = EnergyWindow(lead, self.planner.directory)
        async with aclosing(lead.ring.engine.generate(request)) as events, energy:
            async for event in events:
                if copy is not None and copy.address != copied_to:
                    copied_to = copy.address
                    control.send(CopiedTo(request=message.request, address=copied_to))
                match event:
                    case TokenGenerated():
                        n_tokens += 1
                        energy.take(n_tokens)
                        if copy is not None and n_tokens > len(request.made):
                            made = MadeToken(token_id=event.token_id, logprobs=event.logprobs)
                            copy.add(made)
                        if n_tokens > served.n_sent:
                            control.send(token_piece(message, event, lead.tokenizer))
                            await control.link.drain(shared=True)
                    case PromptLogprobsReady() | RowsReady():
                        for piece in output_pieces(message, event, lead):
                            control.send(piece)
                            await control.link.drain(shared=True)
                    case RequestMoved(state=state, ahead=ahead, n_kept=n_kept):
                        if lead.plan is not told:
                            told = lead.plan
                            control.send(told.reply(message.request))
                        control.send(
                            StateChanged(
                                request=message.request,
                                state=state,
                                ahead=ahead,
                                n_prompt=len(request.prompt) if state is LiveState.RUNNING else 0,
                                n_kept=n_kept,
                                prompt_tail="" if n_tokens else tail,
                                why=explanation(event.why),
                                expected_s=event.expected_s,
                            )
                        )
                    case GenerationFinished():
                        if event.trace is not None:
                            now, nodes = await lead.ring.clocks() or clocks, lead.ring.node_names
                            if len(now) != len(clocks):  # another ring took the place of the first
                                clocks = now
                            for part in trace_pieces(message, event.trace, nodes, clocks, now):
                                control.send(part)
                                await control.link.drain(shared=True)
                        event = await energy.finished(event)
                        await self._keep(lead, event, n_tokens, served.load_s)
                        control.send(finished(message, event, request.prompt, served.load_s))

    async def _keep(
        self, lead: Lead, event: GenerationFinished, n_tokens: int, load_s: float
    ) -> None:
        """Keep the timing of a generation of more than one token, for comparison with its plan."""
        if not event.timing.per_stage:
            return
        experts: list[ExpertCount] = []
        plan = lead.plan.reply(0)
        if any(stage.streamed_layers for stage in plan.stages):
            with contextlib.suppress(ShardnetError):  # its ring may have broken since
                experts = await lead.ring.expert_counts()
        run = self._last_run = LastRun(
            request=0,
            plan=plan,
            timing=timing_reply(event.timing, load_s),
            n_tokens=n_tokens,
            ended_at_s=time.time(),
            experts=experts,
        )
        try:
            await self.disk.run(self.cache, lambda: write_last_run(self.cache, run))
        except (OSError, ShardnetError) as error:
            if not self._has_logged:
                self.log(f"the last run is not kept in {self.cache}: {error}")
            self._has_logged = True
        runs = lead.plan.disproved_by(event.alone_s, run.timing)
        if runs and lead.ring.name != self._corrected:
            self._corrected = lead.ring.name
            await self.planner.learn(lead.plan, runs)
