"""Control messages between a client and the head of a ring: a prompt, and all that comes of it.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Also those about
texts alone: to ids and back, and to vectors. Knows nothing of how text is made, tokenizers or
encoders.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from shardnet import constraints
from shardnet.constraints import MAX_CONSTRAINT_CHARACTERS
from shardnet.output_params import NO_OUTPUTS, OutputParams
from shardnet.sampling_params import MAX_LOGPROBS, SamplingParams
from shardnet.slot_operations import MAX_PICTURES
from shardnet.types import MAX_LAYERS, U32, LiveState, PathText, Positions, Report, Row, Strict
from shardnet.wire.framing import schema
from shardnet.wire.messages.chat import ChatMessage, Picture, TemplateOptions, ToolsText
from shardnet.wire.messages.diagnostics import Drafters
from shardnet.wire.messages.handshake import Capability
from shardnet.wire.messages.plans import ModelChoice, PlanReply

MAX_PROMPT_TAIL: Final = 256
MAX_LOCKSTEP_SET: Final = 1024
MAX_ROWS_BYTES: Final = 3 << 20
"""The most that one RowsPiece carries: one row of 786 432 elements, or several of fewer."""


RecommendedName = Literal["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]


MAX_DETOKENIZED: Final = 1 << 17
"""Most ids of one request: the answer fits into a frame."""
MAX_TOKENIZED: Final = 1 << 19
"""Most ids of one text, which may be longer than the context."""
MAX_ENCODED: Final = 32
"""Most texts of one request."""
MAX_ENCODED_WIDTH: Final = 1 << 14
"""Most numbers of one vector."""
_MAX_BYTES: Final = 4 * MAX_ENCODED * MAX_ENCODED_WIDTH


class Constraint(Strict, frozen=True, kw_only=True):
    """The fields of `constraints.Constraint` that travel."""

    kind: constraints.ConstraintKind
    text: Annotated[str, Meta(max_length=MAX_CONSTRAINT_CHARACTERS)] = ""

    def params(self) -> constraints.Constraint:
        """Return the constraint, not checked."""
        return constraints.Constraint(kind=self.kind, text=self.text)


Turn = Literal["", "new", "begun"]
_Mark = Annotated[str, Meta(max_length=64)]


class ThoughtMark(Strict, frozen=True, kw_only=True):
    """What a model writes around reasoning: it begins with `before` and `opening`, where `before`
    begins other things, too, and ends with `closing`, or where one of the texts `also` begins.
    """

    opening: _Mark
    closing: _Mark
    before: Annotated[str, Meta(max_length=64)] = ""
    also: Annotated[list[_Mark], Meta(max_length=16)] = []


class Thought(Strict, frozen=True, kw_only=True):
    """How long a model may think: after `budget` tokens of reasoning, or with token number `until`
    of the answer, `message` and the closing mark follow, and no other reasoning. Null is no bound.
    """

    marks: Annotated[list[ThoughtMark], Meta(max_length=4)]
    budget: U32 | None = None
    until: U32 | None = None
    message: Annotated[str, Meta(max_length=4096)] = ""


class Generate(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the continuation of one prompt: `token_ids` if there are any, else `messages` in the
    model's chat template, else `prompt`. The template gets `tools` and `template_options` too.

    `speculate` is off, ngram, mtp or the path of a draft model on the head; `draft_tokens` 0 drafts
    as many as pay. `deterministic` is design decision 4's; with `lockstep` it decodes in one step
    with all that run, once no prompt is left to compute, and begins when all `lockstep_size`
    requests of the set `lockstep_set` on its link are ready or gone. A larger `priority` goes
    first; `deadline_s` counts from when the ring has the request. Fields of `sampling` that are
    named in `recommended` are as the model's makers recommend, if they do. All of the output
    matches `constraint`. With `trace` TracePieces precede Finished. With a `key` it is copied to a
    deputy, and Resume finds it by that. The answer begins with the tokens `made`, which are not
    sent again. `token_ids` that messages became say by `turn` whether the answer is a new message,
    or goes on with one that was begun; "" is the continuation of a text. `thought` says how long
    the model may think.
    """

    choice: ModelChoice
    sampling: SamplingParams
    prompt: schema.Text = ""
    token_ids: schema.TokenIds | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=1 << 14)] | None = None
    tools: ToolsText = ""
    template_options: TemplateOptions = []
    max_tokens: U32 = 256
    stop: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=64)] = []
    stop_token_ids: Annotated[list[U32], Meta(max_length=1024)] = []
    ignore_eos: bool = False
    bos: Literal["auto", "on", "off"] = "auto"
    keep_special_tokens: bool = False
    speculate: PathText = "off"
    draft_tokens: U32 = 0
    deterministic: bool = False
    lockstep: bool = False
    lockstep_set: U32 = 0
    lockstep_size: Annotated[int, Meta(ge=0, le=MAX_LOCKSTEP_SET)] = 0
    priority: schema.Priority = 0
    deadline_s: schema.Seconds | None = None
    outputs: OutputParams = NO_OUTPUTS
    recommended: Annotated[list[RecommendedName], Meta(max_length=5)] = []
    constraint: Constraint | None = None
    trace: bool = False
    key: schema.RequestKey = ""
    made: schema.TokenIds = []
    pictures: Annotated[list[Picture], Meta(max_length=MAX_PICTURES)] = []
    turn: Turn = ""
    thought: Thought | None = None

    @property
    def needed(self) -> list[Capability]:
        """What its receiver has to understand."""
        needs = {
            Capability.SAMPLERS: self.sampling.is_newer,
            Capability.THOUGHTS: self.thought is not None,
        }
        return [capability for capability, is_needed in needs.items() if is_needed]


class StateChanged(schema.Reply, frozen=True, kw_only=True):
    """Tells how a Generate stands that has not ended. `ahead` requests go before it in the queue.

    When it begins to run its prompt has `n_prompt` tokens, and the first `n_kept` positions of
    these were there already.
    `prompt_tail` is the text of the prompt's last tokens, special ones too. While its ring
    recovers, `why` says what happened or what is waited for, and `expected_s` how long that may
    take, 0 if not known; while it runs again, how many tokens are read before it goes on.
    """

    state: LiveState
    ahead: U32 = 0
    n_prompt: Positions = 0
    n_kept: Positions = 0
    prompt_tail: Annotated[str, Meta(max_length=MAX_PROMPT_TAIL)] = ""
    why: schema.Explanation = ""
    expected_s: schema.Seconds = 0.0


class Cancel(schema.Numbered, frozen=True, kw_only=True):
    """Give a running request up. It is answered by Failed with code 41 or its own end."""


class TopToken(Row, frozen=True, array_like=True):
    """One of the most likely tokens of a row, with its text."""

    token_id: U32
    token: schema.Text
    logprob: schema.Logprob


class TokenDetail(Report, frozen=True, kw_only=True):
    """The logprob of a generated token and of the most likely ones in its place."""

    token_id: U32
    token: schema.Text
    bytes: Annotated[list[Annotated[int, Meta(ge=0, le=255)]], Meta(max_length=4096)]
    logprob: schema.Logprob
    top: Annotated[list[TopToken], Meta(max_length=MAX_LOGPROBS)]


class TextPiece(schema.Reply, frozen=True, kw_only=True):
    """More of the answer: new tokens, and the text that is whole by now.

    `prompt_logprobs` are those of the prompt's next tokens, the second one first.
    """

    token_ids: schema.TokenIds
    tokens: Annotated[list[schema.Text], Meta(max_length=1 << 20)]
    text: schema.Text
    logprobs: Annotated[list[TokenDetail], Meta(max_length=1 << 14)] | None = None
    prompt_logprobs: Annotated[list[TokenDetail], Meta(max_length=1 << 14)] | None = None


class RowsPiece(schema.Reply, frozen=True, kw_only=True):
    """The next rows of what a Generate's `outputs` ask for, the first at `position`.

    `data` is float32, little-endian, row after row of `width` elements. A mean is at position 0.
    A row has `n_states` hidden states, one behind the other. Routing is int16: a row has the
    experts of each layer, `top_k` of them, -1 where there are none.
    """

    kind: Literal["logits", "hidden", "routing"]
    position: Positions
    width: U32
    top_k: U32 = 0
    n_states: Annotated[int, Meta(ge=1, le=MAX_LAYERS)] = 1
    data: Annotated[bytes, Meta(max_length=MAX_ROWS_BYTES)]


class MeanStageTime(Report, frozen=True, kw_only=True):
    """Where the time of a mean decode step went, for one stage."""

    rank: schema.Rank
    compute_ms: schema.Figure
    queue_ms: schema.Figure
    wire_ms: schema.Figure


class StageEnergy(Report, frozen=True, kw_only=True):
    """What the nodes of a stage took for each token that the ring made, and what measured it."""

    rank: schema.Rank
    joules_per_token: schema.Figure
    source: schema.Name


class Timing(Report, frozen=True, kw_only=True):
    """Timing of a request by the head's clock, and what was drafted for it.

    `energy` is of the stages that know it. `joules_per_token` is what all took, what several of
    their nodes share counted once; null where one does not know it.
    """

    load_s: schema.Seconds
    ttft_s: schema.Seconds
    decode_tok_s: schema.Figure
    total_s: schema.Seconds
    per_stage: Annotated[tuple[MeanStageTime, ...], Meta(max_length=schema.MAX_STAGES)]
    drafters: Drafters = []
    joules_per_token: schema.Figure | None = None
    energy: Annotated[tuple[StageEnergy, ...], Meta(max_length=schema.MAX_STAGES)] = ()

    @property
    def n_drafted(self) -> int:
        """How many tokens were drafted."""
        return sum(each.n_drafted for each in self.drafters)

    @property
    def n_accepted(self) -> int:
        """How many of these were right."""
        return sum(each.n_accepted for each in self.drafters)


class Finished(schema.Reply, frozen=True, kw_only=True):
    """The answer is complete. `text` is what was held back until now."""

    finish_reason: schema.Name
    prompt_token_ids: schema.TokenIds
    text: schema.Text
    timing: Timing


class ExpertCount(Report, frozen=True, kw_only=True):
    """Experts of streamed layers that steps have used since their stage was loaded, each once a
    step, and how many of these had to be read from disk.
    """

    rank: schema.Rank
    n_used: schema.Count
    n_read: schema.Count


class LastRunRequest(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the last generation of the ring this node leads. Answered by LastRun or Redirect."""


class LastRun(schema.Reply, frozen=True, kw_only=True):
    """Answers LastRunRequest: a generation's plan, and what became of it. It ended at `ended_at_s`,
    counted from 1970.
    """

    plan: PlanReply
    timing: Timing
    n_tokens: U32
    ended_at_s: schema.Moment
    experts: Annotated[list[ExpertCount], Meta(max_length=schema.MAX_STAGES)] = []


class Unload(schema.Numbered, frozen=True, kw_only=True):
    """Ask a node to free the model of its ring on every node. Answered by Done or Redirect.

    With `model` nothing is done unless the ring has that model. A ring that a request has used less
    than `idle_s` seconds ago is kept: the answer is BusyError.
    """

    model: PathText = ""
    idle_s: schema.Seconds = 0.0


class Tokenize(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the token ids of the prompt of `generate`, which is not generated.

    Answered by Tokenized or Redirect; the ring is built if needed, as for Generate.
    """

    generate: Generate


class Tokenized(schema.Reply, frozen=True, kw_only=True):
    """Answers Tokenize. `context` is the most tokens of one sequence; there may be more ids."""

    token_ids: schema.TokenIds
    context: Positions


class Detokenize(schema.Numbered, frozen=True, kw_only=True):
    """Ask for the text of token ids. Answered by Detokenized or Redirect."""

    choice: ModelChoice
    token_ids: Annotated[list[U32], Meta(max_length=MAX_DETOKENIZED)]
    keep_special_tokens: bool = False


class Detokenized(schema.Reply, frozen=True, kw_only=True):
    """Answers Detokenize: the whole text, and the text of each token by itself."""

    text: schema.Text
    tokens: Annotated[list[schema.Text], Meta(max_length=MAX_DETOKENIZED)]


class Encode(schema.Numbered, frozen=True, kw_only=True):
    """Ask an encoder for the vectors of texts, or with a `query` how well each answers that.

    Without texts it is only described. `pooling` "" is the model's own. `instruction` says what a
    good answer is, "" for the usual one, to models that are told. Texts that are too long are
    refused unless they are to `truncate`. `first` is the number of the first one, for errors. The
    model stays loaded for `keep_s` after it was used last, null for the usual time.
    Answered by Encoded, after NodeProgress while the model is downloaded, or by Redirect.
    """

    model: PathText
    texts: Annotated[list[schema.Text | schema.TokenIds], Meta(max_length=MAX_ENCODED)] = []
    query: schema.Text | None = None
    instruction: schema.Text = ""
    pooling: Literal["", "mean", "cls", "last"] = ""
    special_tokens: bool = True
    truncate: bool = False
    first: U32 = 0
    keep_s: schema.Seconds | None = None


class Encoded(schema.Reply, frozen=True, kw_only=True):
    """Answers Encode: what the model is, "" for no encoder, and how many tokens each text had.

    `values` are float32, little-endian, `width` for each text: a vector, which is not scaled, or a
    score; without texts `width` is what they would have. `normalized` says whether the model's
    vectors should have length 1, null where its files do not. `context` is the most tokens of one
    text.
    """

    kind: Literal["", "embedding", "reranker"]
    context: Positions = 0
    normalized: bool | None = None
    n_tokens: Annotated[list[U32], Meta(max_length=MAX_ENCODED)] = []
    width: Annotated[int, Meta(ge=0, le=MAX_ENCODED_WIDTH)] = 0
    values: Annotated[bytes, Meta(max_length=_MAX_BYTES)] = b""


TextRequest: TypeAlias = LastRunRequest | Generate | Unload | Tokenize | Detokenize | Encode
"""Requests about texts and tokens."""
TextMessage: TypeAlias = (
    TextRequest
    | LastRun
    | StateChanged
    | Cancel
    | Tokenized
    | Detokenized
    | Encoded
    | TextPiece
    | RowsPiece
    | Finished
)
"""These, their answers, and what is sent unasked."""
