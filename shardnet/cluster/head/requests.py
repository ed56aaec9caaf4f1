"""A client's request, checked against the model, its constraint compiled, ready for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from shardnet.cluster.head.lead import Lead
from shardnet.constraints import Constraint
from shardnet.errors import ContextExceededError, UsageError
from shardnet.model.vision.picture import PictureProcessor
from shardnet.output_params import OutputKind, OutputParams
from shardnet.runtime.engine.guide import Constrained
from shardnet.runtime.engine.outputs import output_bytes
from shardnet.runtime.engine.requests import GenerationRequest, MadeToken
from shardnet.runtime.engine.thoughts import MOST_MARK_TOKENS, Marks, Stands, Thoughts
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.routing import MAX_ROUTING_BYTES
from shardnet.sampling_params import MAX_DRY_BREAKERS, SamplingParams
from shardnet.slot_operations import MAX_PICTURES, AdapterUse
from shardnet.tokenizers.chat.chat_template import CONTINUES, TemplateOptions
from shardnet.tokenizers.detokenizer import TextStream
from shardnet.tokenizers.grammar.grammars import Grammars
from shardnet.tokenizers.tokenizer import check_token_ids, no_tokenizer
from shardnet.types import BLOCK_POSITIONS, PREFILL_CHUNK_ROWS, U32_MAX
from shardnet.wire.messages.chat import (
    MAX_ADDED_TEXT,
    MAX_ADDED_TOKENS,
    AddedToken,
    ChatMessage,
    DescribeTokenizer,
    Picture,
    TokenizerDescribed,
)
from shardnet.wire.messages.generation import (
    MAX_PROMPT_TAIL,
    MAX_ROWS_BYTES,
    MAX_TOKENIZED,
    Detokenize,
    Detokenized,
    Generate,
    Turn,
)
from shardnet.wire.messages.handshake import Capability

DRY_BREAKERS = ("\n", ":", '"', "*")
"""Texts over which no repeat goes unless a request names others: llama.cpp's."""
_TAIL_TOKENS = 64
"""More than a template writes behind the last message."""
_MAX_STATES_BYTES = 1 << 28
"""Hidden states of one step that one request may have: half of what its frames may carry."""


def needs_tokenizer(message: Generate) -> str:
    """Say what of a request needs a tokenizer, "" for nothing."""
    if message.token_ids is None:
        return "text"
    return "--stop" if message.stop else ""


def prompt_ids(
    message: Generate,
    lead: Lead,
    *,
    may_be_long: bool = False,
    processor: PictureProcessor | None = None,
) -> list[int]:
    """Return the prompt's token ids, checked against the vocabulary.

    Each of its pictures, which `processor` prepares, is one token, wherever it stands. One that
    `may_be_long` may have more tokens than the context, up to what a reply carries.

    Raises UsageError for an id the model does not have and for an empty prompt, CheckpointError for
    text where the checkpoint has no tokenizer, ContextExceededError for a prompt that fills the
    context; otherwise what Tokenizer.encode, chat_prompt and ready raise.
    """
    most_tokens = MAX_TOKENIZED if may_be_long else lead.ring.spec.form.context
    vocab_size = lead.ring.spec.config.vocab_size
    if message.token_ids is not None:
        token_ids = list(message.token_ids)
        if message.turn and lead.tokenizer is not None:
            lead.tokenizer.chat_template()  # whose stops end the answer
    elif lead.tokenizer is None:
        raise no_tokenizer(lead.plan.facts.path, needs_tokenizer(message))
    elif message.messages is not None:
        options = TemplateOptions(tools=message.tools, values=dict(message.template_options))
        shown = [_shown(said) for said in message.messages]
        text = lead.tokenizer.chat_prompt(shown, options)
        if processor is not None:
            text = processor.surround(text)
        token_ids = lead.tokenizer.encode(  # the template writes bos where it belongs
            text, bos="off", most_tokens=most_tokens
        )
    elif not message.prompt:
        raise UsageError("the prompt is empty", remedy="give some text, or ids with --token-ids")
    else:
        text = message.prompt
        if processor is not None:
            if processor.placeholder not in text:
                text = processor.placeholder * len(message.pictures) + text
            if processor.templated not in text:
                text = text.replace(processor.placeholder, processor.templated)
            text = processor.surround(text)
        token_ids = lead.tokenizer.encode(text, bos=message.bos, most_tokens=most_tokens)
    if lead.tokenizer is not None:
        lead.tokenizer.ready()
    for token_id, _ in message.sampling.logit_bias:
        if token_id >= vocab_size:
            raise UsageError(f"logit-bias names token {token_id}, ids end at {vocab_size - 1}")
    check_prompt(token_ids, message, lead, may_be_long=may_be_long)
    return token_ids


def check_prompt(
    token_ids: Sequence[int], message: Generate, lead: Lead, *, may_be_long: bool
) -> None:
    """Raise UsageError for an id the model does not have, ContextExceededError for a prompt that
    fills the context; see `prompt_ids`.
    """
    check_token_ids(token_ids, lead.ring.spec.config.vocab_size, lead.tokenizer)
    n_prompt = len(token_ids)
    least = n_prompt + min(message.max_tokens, 1)
    if least > (MAX_TOKENIZED if may_be_long else lead.ring.spec.form.context):
        raise too_long(
            n_prompt,
            message.max_tokens,
            context=lead.ring.spec.form.context,
            most_positions=lead.plan.facts.config.max_positions,
            room_positions=lead.ring.engine.counters.room_blocks * BLOCK_POSITIONS,
        )


def turn_of(message: Generate) -> Turn:
    """Say whether a request's answer is a new message, goes on with one, or with a text."""
    if message.messages is None:
        return message.turn
    return "begun" if dict(message.template_options).get(CONTINUES) else "new"


def in_order(message: Generate) -> list[Picture]:
    """Return the pictures of a request as they stand in its prompt.

    Raises UsageError for the number of none, and for more than MAX_PICTURES.
    """
    if message.messages is None:
        return [*message.pictures]
    numbers = [part for said in message.messages for part in said.parts if isinstance(part, int)]
    if max(numbers, default=-1) >= len(message.pictures):
        raise UsageError(f"a message shows picture {max(numbers)} of {len(message.pictures)}")
    if len(numbers) > MAX_PICTURES:
        raise UsageError(
            f"messages show {len(numbers)} pictures, at most {MAX_PICTURES} are read",
            remedy="show each of them once",
        )
    return [message.pictures[number] for number in numbers]


def check_made(message: Generate, made: Sequence[MadeToken], n_prompt: int, lead: Lead) -> None:
    """Check the tokens that an answer begins with.

    Raises UsageError for an id the model does not have, and for more than were asked for or the
    context holds.
    """
    if made:
        check_token_ids(
            [token.token_id for token in made], lead.ring.spec.config.vocab_size, lead.tokenizer
        )
    most = min(message.max_tokens, lead.ring.spec.form.context - n_prompt + 1)
    if len(made) > most:
        raise UsageError(f"{len(made)} tokens were made before, and the answer has {most} at most")


def with_ids(message: Generate, prompt: Sequence[int]) -> Generate:
    """Return the request with its prompt as token ids, which mean the same on every node."""
    return structs.replace(
        message,
        request=0,
        prompt="",
        messages=None,
        tools="",
        template_options=[],
        token_ids=list(prompt),
        pictures=in_order(message),
        turn=turn_of(message),
    )


def too_long(
    n_prompt: int, max_tokens: int, *, context: int, most_positions: int, room_positions: int
) -> ContextExceededError:
    """Make the error of a prompt that fills the context: what it has, and what would do.

    `most_positions` is what the model takes, `room_positions` what the ring's nodes have room for.
    """
    least = n_prompt + min(max_tokens, 1)
    if least > most_positions:
        remedy = f"shorten the prompt: the model takes {most_positions} tokens at most"
    elif least > room_positions:
        remedy = (
            f"shorten the prompt, or give the nodes more --memory or the ring --kv-dtype int8: the "
            f"model takes up to {most_positions}, and the nodes have room for {room_positions}"
        )
    else:
        wanted = min(n_prompt + max_tokens, most_positions, room_positions)
        remedy = (
            f"give --context {wanted}: the model takes up to {most_positions}, and the nodes have "
            f"room for {room_positions}"
        )
    return ContextExceededError.of(
        f"the prompt has {n_prompt} tokens and the context holds {context}",
        n_prompt,
        context,
        remedy=remedy,
    )


def sampling_params(message: Generate, lead: Lead) -> SamplingParams:
    """Return the request's sampling, with what it leaves to the model's makers as they recommend.

    Raises SamplingError for values outside their range.
    """
    made = lead.plan.facts.recommended
    left: dict[str, Any] = {name: made[name] for name in message.recommended if name in made}
    params = structs.replace(message.sampling, **left)
    params.check()
    if params.is_newer:
        lead.ring.ports[-1].require(Capability.SAMPLERS)
    if params.dry_multiplier:
        breakers = _breakers(params.dry_breakers or DRY_BREAKERS, lead)
        params = structs.replace(params, dry_breakers=breakers)
    return params


def _breakers(texts: Sequence[str | int], lead: Lead) -> tuple[int, ...]:
    """Return the tokens that have one of the texts; none without a tokenizer.

    Raises UsageError for too many, and for a text that no token has.
    """
    if (tokenizer := lead.tokenizer) is None:
        return ()
    pieces = [*map(tokenizer.token_bytes, range(tokenizer.n_tokens))]
    found: set[int] = set()
    for text in filter(None, map(str, texts)):
        ids = {token_id for token_id, piece in enumerate(pieces) if text.encode() in piece}
        if not ids:
            raise UsageError(f"dry-sequence-breaker: no token of this model has {text!r}")
        found |= ids
    if len(found) > MAX_DRY_BREAKERS:
        raise UsageError(f"dry-sequence-breaker: {len(found)} tokens have one of these texts")
    return tuple(sorted(found))


def detokenized(message: Detokenize, lead: Lead) -> Detokenized:
    """Return the text of token ids, and of each of them.

    Raises UsageError for an id the model does not have, or if the checkpoint has no tokenizer.
    """
    tokenizer, token_ids = lead.tokenizer, message.token_ids
    if tokenizer is None:
        raise UsageError(f"{lead.plan.facts.path} has no tokenizer")
    if token_ids:
        check_token_ids(token_ids, lead.ring.spec.config.vocab_size, tokenizer)
    text = tokenizer.decode(token_ids, keep_special_tokens=message.keep_special_tokens)
    tokens = [tokenizer.token_text(token_id) for token_id in token_ids]
    return Detokenized(request=message.request, text=text, tokens=tokens)


def _shown(said: ChatMessage) -> dict[str, Any]:
    """Return what a template gets of a message: its role, its content, and what is not empty."""
    fields = structs.asdict(said) | {"tool_calls": [*map(structs.asdict, said.tool_calls)]}
    if parts := fields.pop("parts"):
        fields["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in parts
        ]
    return {name: value for name, value in fields.items() if value or name in ("role", "content")}


def prompt_tail(prompt: Sequence[int], lead: Lead) -> str:
    """Return the text of a prompt's last tokens, "" without a tokenizer. Blocks."""
    if lead.tokenizer is None:
        return ""
    last = prompt[-_TAIL_TOKENS:]
    return lead.tokenizer.decode(last, keep_special_tokens=True)[-MAX_PROMPT_TAIL:]


def described(message: DescribeTokenizer, lead: Lead) -> TokenizerDescribed:
    """Describe the tokenizer of a ring to a client. Blocks.

    Raises UsageError if the checkpoint has none, CheckpointError for a template that cannot be
    read.
    """
    tokenizer = lead.tokenizer
    if tokenizer is None:
        raise UsageError(
            f"{lead.plan.facts.path} has no tokenizer", remedy="ask for token ids instead of text"
        )
    try:
        found = tokenizer.chat_template()
        template = found.with_tools or found.source  # what calls look like
    except UsageError:
        template = ""
    added = [AddedToken(*token) for token in tokenizer.added_tokens(MAX_ADDED_TEXT)]
    return TokenizerDescribed(
        request=message.request,
        bos_id=tokenizer.bos_id,
        eos_ids=[*dict.fromkeys([*lead.eos_ids, *sorted(tokenizer.template_stop_ids)])],
        added=added[:MAX_ADDED_TOKENS],
        template=template,
        sees=bool(lead.plan.facts.tower_bytes),
    )


def stop_ids(message: Generate, lead: Lead) -> frozenset[int]:
    """Return the token ids that end an answer."""
    ids = frozenset(message.stop_token_ids)
    if message.ignore_eos:
        return ids
    if lead.tokenizer is not None and turn_of(message):
        ids |= lead.tokenizer.template_stop_ids
    return ids | frozenset(lead.eos_ids)


def thoughts(message: Generate, lead: Lead, prompt: Sequence[int]) -> Thoughts | None:
    """Return what follows the reasoning of an answer, None where nothing is asked of it. Blocks.

    Raises UsageError where the model has no tokenizer.
    """
    asked, tokenizer = message.thought, lead.tokenizer
    if asked is None:
        return None
    if tokenizer is None:
        raise UsageError(f"{lead.plan.facts.path} has no tokenizer, so no marks of reasoning")
    added, bytes_of = frozenset(tokenizer.table.added_ids()), tokenizer.token_bytes

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, bos="off")) if text else ()

    def text_of(tail: Sequence[int]) -> bytes:
        return b"".join(map(bytes_of, tail))

    def is_token(text: str) -> bool:
        return not added.isdisjoint(ids(text))

    def ends(text: str) -> Stands:
        if not is_token(text):
            return lambda tail: text.encode() in text_of(tail)
        mark = ids(text)
        return lambda tail: tuple(tail[-len(mark) :]) == mark

    def begins(text: str) -> Stands:
        if is_token(text):
            return ends(text)
        mark = text.encode()  # with nothing before it
        return lambda tail: len(tail) < MOST_MARK_TOKENS and text_of(tail).lstrip().startswith(mark)

    tail, opened = prompt_tail(prompt, lead).rstrip(), None
    known = []
    for each in asked.marks:
        if not (each.opening and each.closing):
            raise UsageError("thought: a mark of reasoning is empty")
        whole, before = each.before + each.opening, ids(each.before)
        marks = Marks(
            opening=begins(whole),
            closings=tuple(map(ends, (each.closing, *filter(is_token, each.also)))),
            written=ids(asked.message) + ids(each.closing),
            before=before,
            barred=ids(whole)[len(before)] if is_token(whole) else None,
        )
        known.append(marks)
        if tail.endswith(whole):
            opened = marks
    budget = U32_MAX if asked.budget is None else asked.budget
    until = U32_MAX if asked.until is None else asked.until
    return Thoughts(known, budget, until, opened)


def text_stream(message: Generate, lead: Lead, prompt: Sequence[int]) -> TextStream:
    """Make the stream that turns token ids into text, which goes on behind that of the prompt
    unless it is a new message.

    Raises CheckpointError for stop texts if the checkpoint has no tokenizer.
    """
    if lead.tokenizer is None and message.stop:
        raise no_tokenizer(lead.plan.facts.path, needs_tokenizer(message))
    stops = [*message.stop]
    if lead.tokenizer is not None and turn_of(message):
        stops += lead.tokenizer.template_stops
    return TextStream(
        lead.tokenizer,
        stops=stops,
        keep_special_tokens=message.keep_special_tokens,
        behind=() if turn_of(message) == "new" else prompt[-_TAIL_TOKENS:],
    )


def adapter_uses(message: Generate, lead: Lead) -> tuple[AdapterUse, ...]:
    """Return the adapters of a request in the order of their ids, without those scaled by 0.

    Raises UsageError, which names those that there are, for one that the ring does not have, and
    for one that is named twice.
    """
    known = {adapter.name: adapter.adapter_id for adapter in lead.plan.facts.adapters}
    scales: dict[str, float] = {}
    for asked in message.choice.used_adapters:
        if asked.name not in known:
            raise UsageError(
                f"the ring has no LoRA adapter {asked.name!r}"
                f"{', only ' + ', '.join(known) if known else ''}",
                remedy="load it with --lora NAME=PATH",
            )
        if known[asked.name] in scales:
            raise UsageError(f"the LoRA adapter {asked.name} is asked for twice")
        scales[known[asked.name]] = asked.scale
    return tuple(
        AdapterUse(adapter_id=name, scale=scale) for name, scale in sorted(scales.items()) if scale
    )


def output_params(message: Generate, lead: Lead) -> OutputParams:
    """Return what a request gives beside its tokens, all layers written out.

    Raises SamplingError for values outside their range and layers that the model does not have.
    """
    params = message.outputs
    params.check()
    return params.for_layers(lead.plan.facts.config.n_layers)


def reserved_bytes(request: GenerationRequest, lead: Lead) -> int:
    """Return the most bytes that the rows a request asks for may take.

    Raises UsageError for rows that are wider than any message, and for routing of a dense model.
    """
    config = lead.ring.spec.config
    if request.outputs.logit_rows is not None and 4 * config.vocab_size > MAX_ROWS_BYTES:
        raise UsageError(
            f"logits of {config.vocab_size} columns take more than the {MAX_ROWS_BYTES} bytes that "
            "one message carries: this model's cannot be asked for"
        )
    if request.outputs.routing:
        _check_routing(lead)
    outputs = request.outputs
    if config.streams is not None and (outputs.hidden_layers or outputs.before_norm):
        raise UsageError(
            f"rows of this model have {config.streams.count} residual streams between its layers: "
            "of hidden states only those behind the last norm can be asked for"
        )
    if outputs.hidden_layers:
        _check_states(outputs, config.hidden_size)
    n_positions = min(len(request.prompt) + request.max_tokens, lead.ring.spec.form.context)
    return output_bytes(
        request.outputs,
        n_positions,
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        routing=config.routing.width if config.routing else 0,
    )


def _check_states(outputs: OutputParams, width: int) -> None:
    """Raise UsageError for more hidden states than a message or the frames of a step carry."""
    row_bytes = 4 * width * outputs.n_states
    n_rows = min(outputs.hidden_rows or PREFILL_CHUNK_ROWS, PREFILL_CHUNK_ROWS)
    if row_bytes > MAX_ROWS_BYTES or n_rows * row_bytes > _MAX_STATES_BYTES:
        raise UsageError(
            f"{outputs.n_states} hidden states of {width} columns take {row_bytes} bytes for each "
            f"of up to {n_rows} rows of a step; a row may take {MAX_ROWS_BYTES} and a step "
            f"{_MAX_STATES_BYTES}",
            remedy="ask for fewer layers, or for fewer of the last rows",
        )


def _check_routing(lead: Lead) -> None:
    """Raise UsageError if the model has no routing, or more of it than one message carries."""
    config, shape = lead.plan.facts.config, lead.ring.spec.config.routing
    if shape is None:
        raise UsageError(
            f"{lead.plan.facts.path} is a {config.family} model without experts: "
            "there is no routing to record",
            remedy="omit routing",
        )
    row_bytes = shape.width * OutputKind.ROUTING.element_bytes
    if row_bytes > MAX_ROUTING_BYTES:
        raise UsageError(
            f"{shape.top_k} experts in each of {shape.n_layers} layers take {row_bytes} bytes for "
            f"each token and {MAX_ROUTING_BYTES} travel: this model's routing cannot be recorded"
        )


class Constraints:
    """Makes what constrains the output of a request.

    A constraint that is slow to compile delays those behind it, and no other request.
    """

    def __init__(self) -> None:
        self._compiler = Executor("constraints")
        self._masks = Executor("masks")

    async def constrained(
        self, constraint: Constraint | None, grammars: Grammars | None
    ) -> Constrained | None:
        """Compile a constraint; None for none. `grammars` are those of the model.

        Raises UsageError where the model has no tokenizer, and what Grammars.matcher raises.
        """
        if constraint is None:
            return None
        if grammars is None:
            raise UsageError(
                "constraint: the model has no tokenizer, so its output has no text to constrain",
                remedy="leave the constraint out, or take another model",
            )
        matcher = await self._compiler.run(lambda: grammars.matcher(constraint))
        return Constrained(matcher=matcher, thread=self._masks)

    def close(self) -> None:
        """End the threads."""
        self._compiler.close()
        self._masks.close()
