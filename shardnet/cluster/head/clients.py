"""What a node does for clients: plans, generations, unloading.

Knows the client messages and turns the engine's events into them. Must not plan or load itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from shardnet.cluster.head.drafts import Drafts
from shardnet.cluster.head.head import Elsewhere, Head, Lead
from shardnet.cluster.head.last_run import write_last_run
from shardnet.cluster.head.wire_loss import WireErrors
from shardnet.cluster.peers.control_link import ControlLink
from shardnet.errors import UsageError
from shardnet.runtime.engine.outputs import OutputBudget, PromptScored, RowsGiven, output_bytes
from shardnet.runtime.engine.requests import (
    GenerationFinished,
    GenerationRequest,
    RequestMoved,
    TokenGenerated,
)
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.routing import MAX_ROUTING_BYTES
from shardnet.tokenizers.chat.chat_template import ChatTemplate
from shardnet.tokenizers.detokenizer import TextStream
from shardnet.tokenizers.tokenizer import Tokenizer, check_token_ids
from shardnet.types import OutputKind, TokenLogprobs
from shardnet.wire.framing.schema import Phase
from shardnet.wire.messages.control import Done, Redirect
from shardnet.wire.messages.generation import (
    MAX_ROWS_BYTES,
    Finished,
    Generate,
    LastRun,
    LastRunRequest,
    RowsPiece,
    StateChanged,
    TextPiece,
    Timing,
    TokenDetail,
    TopToken,
    Unload,
)
from shardnet.wire.messages.plans import NodeProgress, PlanRequest

_PIECE_BYTES = 1 << 20
_PIECE_LOGPROBS = 64
"""What one message takes of rows and of prompt logprobs, whose top entries are texts too."""


class Clients:
    """Serves the client messages of all control links of a node."""

    def __init__(
        self,
        head: Head,
        reader: Executor,
        drafts: Drafts,
        wire_errors: WireErrors,
        cache: Path,
        log: Callable[[str], None],
    ) -> None:
        """Take the head that makes rings, the thread that turns prompts into token ids, what
        guesses tokens ahead, and what measures narrower wires.

        The last run is kept in the folder `cache` too.
        """
        self._head = head
        self._reader = reader
        self._outputs = OutputBudget()
        self._drafts = drafts
        self._wire_errors = wire_errors
        self._cache = cache
        self._log = log
        self._has_told = False
        """That the last run cannot be kept on disk."""
        self._last_run: LastRun | None = None

    async def plan(self, control: ControlLink, message: PlanRequest) -> None:
        """Answer with the plan, or with where to ask. A wire that is asked for is measured."""
        plan = await self._head.plan(
            message.choice,
            lambda done, total: _report(control, message.request, 0, "measuring", done, total),
            measure_one=True,
            again=message.again,
        )
        if isinstance(plan, Elsewhere):
            control.send(Redirect(request=message.request, address=plan.address))
        elif not plan.choice.wire_dtype:
            control.send(plan.reply(message.request))
        else:
            wire = await self._wire_errors.narrow(
                plan,
                lambda done, total: _report(control, message.request, 0, "loading", done, total),
            )
            control.send(plan.reply(message.request, wire))

    async def last_run(self, control: ControlLink, message: LastRunRequest) -> None:
        """Tell the last generation led from here, or who leads the ring that this node is in.

        Raises UsageError when there is neither.
        """
        elsewhere = self._head.elsewhere()
        if elsewhere is not None:
            control.send(Redirect(request=message.request, address=elsewhere.address))
        elif self._last_run is not None:
            control.send(replace(self._last_run, request=message.request))
        else:
            raise UsageError("this node has led no generation yet: run `shardnet generate` first")

    async def unload(self, control: ControlLink, message: Unload) -> None:
        """Free the model of the ring this node leads, or tell where to ask."""
        elsewhere = await self._head.unload()
        if elsewhere is None:
            control.send(Done(request=message.request))
        else:
            control.send(Redirect(request=message.request, address=elsewhere.address))

    async def generate(self, control: ControlLink, message: Generate) -> None:
        """Run one request and stream what it makes."""
        message.sampling.params().check()
        async with self._head.lead(
            message.choice,
            on_plan=lambda plan: control.send(plan.reply(message.request)),
            on_progress=partial(_report, control, message.request),
        ) as lead:
            if isinstance(lead, Elsewhere):
                control.send(Redirect(request=message.request, address=lead.address))
            else:
                await self._stream(control, message, lead)

    async def _stream(self, control: ControlLink, message: Generate, lead: Lead) -> None:
        # A chat template is a stranger's program: nobody else's prompt shall wait for its end.
        run = self._reader.run if message.messages is None else asyncio.to_thread
        prompt = await run(lambda: _prompt_ids(message, lead))
        spec = lead.ring.spec
        speculation = await self._drafts.speculation(
            message.speculate,
            message.draft_tokens,
            vocab_size=spec.vocab_size,
            context=spec.context,
        )
        request = GenerationRequest(
            prompt=tuple(prompt),
            sampling=message.sampling.params(),
            max_tokens=message.max_tokens,
            stop_ids=frozenset(message.stop_token_ids)
            | (frozenset() if message.ignore_eos else frozenset(lead.eos_ids)),
            text=_text_stream(message, lead),
            priority=message.priority,
            deadline_s=message.deadline_s,
            speculation=speculation,
            deterministic=message.deterministic,
            outputs=message.outputs.params(),
        )
        with self._outputs.room_for(_output_bytes(request, lead)):
            await self._answer(control, message, request, lead)

    async def _answer(
        self, control: ControlLink, message: Generate, request: GenerationRequest, lead: Lead
    ) -> None:
        n_tokens = 0
        async with aclosing(lead.ring.engine.generate(request)) as events:
            async for event in events:
                match event:
                    case TokenGenerated():
                        n_tokens += 1
                        control.send(_piece(message, event, lead.tokenizer))
                        await control.link.drain(shared=True)
                    case PromptScored() | RowsGiven():
                        for piece in _output_pieces(message, event, lead):
                            control.send(piece)
                            await control.link.drain(shared=True)
                    case RequestMoved(state=state, ahead=ahead, n_kept=n_kept):
                        control.send(
                            StateChanged(
                                request=message.request, state=state, ahead=ahead, n_kept=n_kept
                            )
                        )
                    case GenerationFinished():
                        await self._keep(lead, event, n_tokens)
                        control.send(_finished(message, event, request.prompt, lead.load_s))

    async def _keep(self, lead: Lead, event: GenerationFinished, n_tokens: int) -> None:
        """Remember a generation of more than one token, which has something to compare."""
        if not event.timing.per_stage:
            return
        run = self._last_run = LastRun(
            request=0,
            plan=lead.plan.reply(0),
            timing=_with_load(event.timing, lead.load_s),
            n_tokens=n_tokens,
            ended_at_s=time.time(),
        )
        try:
            await self._reader.run(lambda: write_last_run(self._cache, run))
        except OSError as error:
            if not self._has_told:
                self._log(f"the last run is not kept in {self._cache}: {error}")
            self._has_told = True


def _report(
    control: ControlLink, request: int, rank: int, phase: Phase, done_bytes: int, total_bytes: int
) -> None:
    """Tell a client how far a node is; one that has gone need not know."""
    if not control.link.closed:
        control.send(
            NodeProgress(
                request=request,
                rank=rank,
                done_bytes=done_bytes,
                total_bytes=total_bytes,
                phase=phase,
            )
        )


def _prompt_ids(message: Generate, lead: Lead) -> list[int]:
    """Return the prompt's token ids, checked against the vocabulary.

    Raises UsageError for an id the model does not have, an empty prompt, or text where the
    checkpoint has no tokenizer; for messages what ChatTemplate.find and render raise.
    """
    vocab_size = lead.ring.spec.vocab_size
    if message.token_ids is not None:
        token_ids = list(message.token_ids)
    elif lead.tokenizer is None:
        raise UsageError(f"{lead.plan.facts.path} has no tokenizer: give the prompt as --token-ids")
    elif message.messages is not None:
        template = ChatTemplate.find(Path(lead.plan.facts.path), lead.tokenizer.template)
        text = template.render([msgspec.to_builtins(said) for said in message.messages])
        token_ids = lead.tokenizer.encode(
            text, bos="off"
        )  # the template writes it where it belongs
    elif not message.prompt:
        raise UsageError("the prompt is empty: give some text, or ids with --token-ids")
    else:
        token_ids = lead.tokenizer.encode(message.prompt, bos=message.bos)
    check_token_ids(token_ids, vocab_size, lead.tokenizer)
    for token_id, _ in message.sampling.logit_bias:
        if token_id >= vocab_size:
            raise UsageError(f"logit-bias names token {token_id}, ids end at {vocab_size - 1}")
    return token_ids


def _text_stream(message: Generate, lead: Lead) -> TextStream:
    if lead.tokenizer is None and message.stop:
        raise UsageError(f"{lead.plan.facts.path} has no tokenizer: --stop needs one")
    return TextStream(
        lead.tokenizer, stops=message.stop, keep_special_tokens=message.keep_special_tokens
    )


def _piece(message: Generate, event: TokenGenerated, tokenizer: Tokenizer | None) -> TextPiece:
    detail = None if event.logprobs is None else [_detail(event.logprobs, tokenizer)]
    return TextPiece(
        request=message.request,
        token_ids=[event.token_id],
        tokens=[_token_text(event.token_id, tokenizer)],
        text=event.text,
        logprobs=detail,
    )


def _output_bytes(request: GenerationRequest, lead: Lead) -> int:
    """Give the most bytes that a request's rows may take.

    Raises UsageError for rows that are wider than any message.
    """
    request.outputs.check()
    spec, width = lead.ring.spec, lead.plan.facts.config.hidden_size
    if request.outputs.logit_rows is not None and 4 * spec.vocab_size > MAX_ROWS_BYTES:
        raise UsageError(
            f"logits of {spec.vocab_size} columns take more than the {MAX_ROWS_BYTES} bytes that "
            "one message carries: this model's cannot be asked for"
        )
    if request.outputs.routing:
        _check_routing(lead)
    n_positions = min(len(request.prompt) + request.max_tokens, spec.context)
    return output_bytes(
        request.outputs,
        n_positions,
        vocab_size=spec.vocab_size,
        width=width,
        routing=spec.routing.width if spec.routing else 0,
    )


def _check_routing(lead: Lead) -> None:
    """Raise UsageError where there is no routing to tell, or more than travels."""
    config, shape = lead.plan.facts.config, lead.ring.spec.routing
    if shape is None:
        raise UsageError(
            f"{lead.plan.facts.path} is a {config.family} model without experts: "
            "there is no routing to record; ask without it"
        )
    row_bytes = shape.width * OutputKind.ROUTING.element_bytes
    if row_bytes > MAX_ROUTING_BYTES:
        raise UsageError(
            f"{shape.top_k} experts in each of {shape.n_layers} layers take {row_bytes} bytes for "
            f"each token and {MAX_ROUTING_BYTES} travel: this model's routing cannot be recorded"
        )


def _output_pieces(
    message: Generate, event: PromptScored | RowsGiven, lead: Lead
) -> Iterator[TextPiece | RowsPiece]:
    """Cut an event into messages."""
    if isinstance(event, PromptScored):
        for start in range(0, len(event.logprobs), _PIECE_LOGPROBS):
            part = event.logprobs[start : start + _PIECE_LOGPROBS]
            details = [_detail(logprobs, lead.tokenizer) for logprobs in part]
            yield TextPiece(
                request=message.request, token_ids=[], tokens=[], text="", prompt_logprobs=details
            )
        return
    shape = lead.ring.spec.routing
    top_k = shape.top_k if shape and event.block.kind is OutputKind.ROUTING else 0
    for block in event.block.parts(_PIECE_BYTES):
        yield RowsPiece(
            request=message.request,
            kind=block.kind.value,
            position=block.position,
            width=block.width,
            top_k=top_k,
            data=bytes(block.payload),
        )


def _detail(logprobs: TokenLogprobs, tokenizer: Tokenizer | None) -> TokenDetail:
    raw = tokenizer.token_bytes(logprobs.token_id) if tokenizer else b""
    return TokenDetail(
        token_id=logprobs.token_id,
        token=_token_text(logprobs.token_id, tokenizer),
        bytes=list(raw),
        logprob=logprobs.logprob,
        top=[
            TopToken(token_id=token_id, token=_token_text(token_id, tokenizer), logprob=logprob)
            for token_id, logprob in logprobs.top
        ],
    )


def _token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    return tokenizer.token_text(token_id) if tokenizer else ""


def _finished(
    message: Generate, event: GenerationFinished, prompt: Sequence[int], load_s: float
) -> Finished:
    return Finished(
        request=message.request,
        finish_reason=event.reason.value,
        prompt_token_ids=list(prompt),
        text=event.text,
        timing=_with_load(event.timing, load_s),
    )


def _with_load(timing: Timing, load_s: float) -> Timing:
    """Count the loading before a request, which the engine does not know of."""
    return replace(timing, load_s=load_s, total_s=load_s + timing.total_s)
