"""Requests of programs: prompts, their options, and the messages that carry them.

Pure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, TypeAlias, TypedDict, TypeGuard, Unpack

import msgspec

from shardnet.api.chat_formats.choice import choose_format
from shardnet.api.chat_formats.marks import TokenText
from shardnet.api.validation import find_refused, find_unwritable, nearest
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.checkpoint.model_names import has_prefix, may_be_name
from shardnet.constraints import Constraint
from shardnet.errors import RemoteProtocolError, SamplingError, UsageError, shown
from shardnet.files import expanded
from shardnet.output_params import OutputParams
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages import generation
from shardnet.wire.messages.chat import MAX_PICTURES_BYTES, ChatMessage, Picture, TokenizerDescribed
from shardnet.wire.messages.control import ControlMessage, control_frame, read_control
from shardnet.wire.messages.generation import Generate, RecommendedName, Thought, ThoughtMark
from shardnet.wire.messages.plans import AdapterScale, ModelChoice


class GenerationOptions(TypedDict, total=False):
    """Options of a request beside its sampling. Those left out have the defaults of Generate.

    `max_tokens` (256): generate at most so many. `stop`: stop before one of these texts.
    `stop_token_ids`: stop after one of these tokens. `ignore_eos` (False): continue past the
    model's end-of-text tokens. `bos` ("auto"): prepend the BOS token, as the tokenizer says,
    always or never. `keep_special_tokens` (False): show them in the text. `priority` (0): from -100
    to 100, the larger runs first. `deadline_s` (None): fail with DeadlineError unless ended so many
    seconds after the ring received the request; loading a model does not count. `speculate`
    ("off"): draft tokens ahead, by look-up in the text with "ngram", with "mtp" by the model's own
    layer that predicts further tokens, with "auto" by that if the ring has it, or by the small
    model at a path on the head;
    `draft_tokens` (0): draft at most so many at once, 0 is as many as pay off.
    `deterministic` (False): no bit depends on what else runs (design decision 4). `lockstep`
    (False): the requests of the call are run in fixed sets, each in lockstep. `outputs` (none):
    prompt logprobs, logits, hidden states and routing. `recommended` (none): the names among
    temperature, top_k, top_p, min_p and repetition_penalty that are as the model's makers
    recommend, if they do; PlanReply tells the values. For messages: `tools` (none), objects with
    JSON schemas as in OpenAI's API, and `template_options` (none), values that the chat template
    knows, such as `enable_thinking` or `reasoning_effort`. `constraint` (None): what the output
    must match, such as a JSON schema. `trace` (False): the result has every step of the request.
    `key` (""): a name by which the requests of the call are found again, known to nobody else: they
    are copied to a deputy of the head, which goes on if the head is lost. `adapters` (none): LoRA
    adapters of the ring by name (ModelChoice has their paths), and what each is multiplied by.
    `pictures` (none): those of a prompt that is no messages, as bytes or paths; they stand where it
    has the model's own token for one, else before it. `thinking` (none): how many tokens the model
    may think, and by which marks; `Client.thinking` makes one. With
    `resume` (False) the answers to a call with the same `key` are gone on with, from their
    beginning.
    """

    max_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    bos: Literal["auto", "on", "off"]
    keep_special_tokens: bool
    priority: int
    deadline_s: float | None
    speculate: str
    draft_tokens: int
    deterministic: bool
    lockstep: bool
    outputs: OutputParams
    recommended: Sequence[RecommendedName]
    tools: Sequence[Mapping[str, Any]]
    template_options: Mapping[str, bool | int | float | str | None]
    constraint: Constraint | None
    trace: bool
    key: str
    adapters: Mapping[str, float]
    pictures: Sequence[bytes | Path]
    thinking: Thought | None
    resume: bool


class MessageToolCall(TypedDict):
    """A tool call in an assistant's message. `arguments` is the JSON text of an object."""

    id: NotRequired[str]
    name: str
    arguments: str


class TextContent(TypedDict):
    """A text of a message that has pictures too."""

    type: Literal["text"]
    text: str


class PictureContent(TypedDict):
    """A picture of a message: the bytes of a PNG, JPEG, WebP or GIF, or the path of its file.

    With the `detail` low it takes fewer tokens, where the model can.
    """

    type: Literal["image"]
    image: bytes | Path | str
    detail: NotRequired[Literal["auto", "low", "high"]]


ContentPart: TypeAlias = TextContent | PictureContent


class Message(TypedDict):
    """A message of a conversation. `role` is system, user, assistant or tool.

    `content` is a text, or texts and pictures in their order. `tool_call_id` and `name` say what a
    tool's message answers.
    """

    role: str
    content: str | Sequence[ContentPart] | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[Sequence[MessageToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, text, token ids or the messages of a conversation, with its own sampling and
    options. Messages are written in the model's chat template, up to where its answer begins.

    `sampling` None and options that are left out are those of the whole call. `sample_index` takes
    the place of the prompt's number in the list.
    """

    content: str | Sequence[int] | Sequence[Message]
    sampling: SamplingParams | None = field(default=None, kw_only=True)
    sample_index: int | None = field(default=None, kw_only=True)
    options: GenerationOptions = field(default_factory=GenerationOptions, kw_only=True)


OnePrompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Prompt
Prompts: TypeAlias = OnePrompt | Sequence[OnePrompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The message for one sample of one prompt: number `sample` of prompt number `index`.

    With `resumes` that was sent before, and the answer is wanted again.
    """

    index: int
    sample: int
    message: Generate
    resumes: bool = False


def thought_of(
    described: TokenizerDescribed, budget: int | None, message: str = ""
) -> Thought | None:
    """Return how long a model may think, None for a model that has no marks of reasoning.

    After `budget` tokens, None for any number, its own mark ends that, behind `message`.
    """
    tokens = {token.token_id: TokenText(token.text, token.is_special) for token in described.added}
    reader = choose_format(described.template, tokens).reader
    known = {described.template, *(token.text for token in tokens.values())}
    marks = [
        ThoughtMark(
            opening=opening,
            closing=closing,
            before=reader.BEFORE_THINK,
            also=[*reader.ENDS_THOUGHT],
        )
        for opening, closing in reader.THINK
        if any((reader.BEFORE_THINK or opening) in text for text in known)
    ]
    return Thought(marks=marks, budget=budget, message=message) if marks else None


def is_single(prompts: Prompts) -> bool:
    """Say whether `prompts` is one prompt, not a list of them. An empty list is a list."""
    return isinstance(prompts, str | Prompt) or _is_ids(prompts) or _is_messages(prompts)


def make_requests(
    prompts: Prompts,
    sampling: SamplingParams,
    choice: ModelChoice,
    *,
    n: int = 1,
    **options: Unpack[GenerationOptions],
) -> list[Request]:
    """Make the messages for `n` samples of each prompt.

    Sample number `s` of prompt number `i` gets the sample index of its sampling plus `i * n + s`:
    equal prompts with one seed differ, and each can be reproduced alone. Raises UsageError, which
    names the prompt and the field, for values outside their range.
    """
    if n < 1:
        raise UsageError(f"n must be 1 or more, not {n}")
    listed = _listed(prompts)
    requests = []
    for index, prompt in enumerate(listed):
        for sample in range(n):
            params = _params(prompt, sampling, index * n + sample, sample)
            given: GenerationOptions = {**options, **prompt.options}
            resumes = given.pop("resume", False)
            if given.get("key"):
                given["key"] = f"{given['key']}/{index}.{sample}"
            try:
                message = _message(prompt, params, choice, given)
            except (SamplingError, UsageError) as error:
                if len(listed) == 1:
                    raise
                raise error.at(f"prompt {index + 1} of {len(listed)}") from error
            requests.append(Request(index=index, sample=sample, message=message, resumes=resumes))
    return requests


def name_model(model: str) -> str:
    """Make a relative path absolute; nodes open the same path on their machines.

    What is not a folder here but may be a name, of the Hub or of a model that some node has, stays
    as it is. Raises UsageError for a URL, which may hold a password and is not repeated.
    """
    if "://" in model:
        raise UsageError(
            "a model is a path or a name of the Hub, not a URL",
            remedy="download the file and give its path",
        )
    path = expanded(model)
    if model == DEFAULT_MODEL_NAME or has_prefix(model):
        return model
    if may_be_name(model) and not os.path.exists(path):
        return model
    return str(path.absolute())


def check_request(message: ControlMessage) -> None:
    """Raise UsageError, which names the field, for values that do not fit into the message."""
    try:
        read_control(control_frame(message))
    except (OverflowError, UnicodeEncodeError) as error:
        raise UsageError(
            f"this request cannot be sent: {find_unwritable(message) or error}"
        ) from error
    except RemoteProtocolError as error:
        why = find_refused(message, type(message)) or str(error)
        raise UsageError(f"this request cannot be sent: {why}") from error


def _is_ids(prompts: object) -> TypeGuard[Sequence[int]]:
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)


def _is_messages(prompts: object) -> TypeGuard[Sequence[Message]]:
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], dict)


def _listed(prompts: Prompts) -> list[Prompt]:
    if isinstance(prompts, Prompt):
        return [prompts]
    if isinstance(prompts, str) or _is_ids(prompts) or _is_messages(prompts):
        return [Prompt(prompts)]
    if not isinstance(prompts, Iterable):
        raise _no_prompt(prompts)
    return [_prompt(prompt) for prompt in prompts]


def _prompt(prompt: object) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if not isinstance(prompt, Sequence):
        raise _no_prompt(prompt)
    return Prompt(prompt)


def _no_prompt(value: object) -> UsageError:
    return UsageError(
        f"{value!r} is not a prompt", remedy="give text, token ids or messages, or a list of these"
    )


def _params(prompt: Prompt, sampling: SamplingParams, number: int, sample: int) -> SamplingParams:
    params = prompt.sampling or sampling
    if prompt.sample_index is not None:
        return msgspec.structs.replace(params, sample_index=prompt.sample_index + sample)
    return msgspec.structs.replace(params, sample_index=params.sample_index + number)


def _message(
    prompt: Prompt, params: SamplingParams, choice: ModelChoice, options: GenerationOptions
) -> Generate:
    """Make one message. Raises UsageError or SamplingError as the node would."""
    params.check()
    choice = choice.drafting(options.get("speculate", "off"))
    if "adapters" in options:
        used = [AdapterScale(*named) for named in options.pop("adapters").items()]
        choice = msgspec.structs.replace(choice, used_adapters=used)
    fields: dict[str, Any] = {**options, **_prompt_fields(prompt.content)}
    if options.get("pictures"):  # those of messages are there already
        fields["pictures"] = [picture_of(each) for each in options["pictures"]]
    if "outputs" in options:
        options["outputs"].check()
        fields["outputs"] = options["outputs"]
    if "tools" in options:
        fields["tools"] = _tools_text(options["tools"])
    if "template_options" in options:
        fields["template_options"] = list(options["template_options"].items())
    fields["thought"] = fields.pop("thinking", None)
    constraint = options.get("constraint")
    if constraint is not None:
        constraint.check()
        fields["constraint"] = generation.Constraint(kind=constraint.kind, text=constraint.text)
    try:
        message = Generate(
            request=0,
            choice=choice,
            sampling=params,
            **fields,
        )
    except TypeError as error:
        raise UsageError(
            f"this request cannot be sent: {_unknown_option(fields) or error}"
        ) from error
    check_request(message)
    return message


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the JSON text of tools, "" for none. Raises UsageError for what is no JSON."""
    try:
        return json.dumps(list(tools), ensure_ascii=False, allow_nan=False) if tools else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the tools cannot be sent: {error}", remedy="give a list of JSON objects"
        ) from error


def _unknown_option(fields: Mapping[str, Any]) -> str:
    known = Generate.__struct_fields__
    for name in fields:
        if name not in known:
            return f"there is no option '{name}'{nearest(name, known)}"
    return ""


def picture_of(image: object, detail: Any = "auto") -> Picture:
    """Make a picture of its bytes, or of the path of its file. Raises UsageError."""
    if not isinstance(image, bytes | Path):
        raise UsageError(
            f"a picture is {shown(image)}", remedy="give its bytes, or a pathlib.Path of its file"
        )
    try:
        data = read_picture(image) if isinstance(image, Path) else image
    except OSError as error:
        raise UsageError(f"the picture {str(image)!r} cannot be read: {error.strerror}") from None
    if len(data) > MAX_PICTURES_BYTES:
        raise UsageError(
            f"a picture has more than {MAX_PICTURES_BYTES} bytes", remedy="make it smaller"
        )
    return Picture(data=data, detail=detail)


def read_picture(path: Path) -> bytes:
    """Read the file of a picture, one byte more than may be sent at most. Raises OSError."""
    with expanded(path).open("rb") as file:
        return file.read(MAX_PICTURES_BYTES + 1)


def _prompt_fields(content: str | Sequence[int] | Sequence[Message]) -> dict[str, Any]:
    """Return the fields of Generate that carry this prompt."""
    if isinstance(content, str):
        return {"prompt": content}
    if not _is_messages(content):
        return {"token_ids": list(content)}
    pictures: list[Picture] = []
    messages = [_with_parts(said, number, pictures) for number, said in enumerate(content)]
    try:
        fields: dict[str, Any] = {"messages": msgspec.convert(messages, list[ChatMessage])}
    except msgspec.ValidationError as error:
        why = find_refused(messages, list[ChatMessage]) or str(error)
        raise UsageError(
            f"the messages cannot be sent: {why}",
            remedy="give each a role, and a content: text, or a list of texts and pictures",
        ) from error
    return fields | {"pictures": pictures} if pictures else fields


def _with_parts(said: Message, number: int, pictures: list[Picture]) -> dict[str, Any]:
    """Return a message as it travels; its pictures go to `pictures`.

    Raises UsageError, which names the part, for one that is neither text nor a picture.
    """
    content = said.get("content")
    if not isinstance(content, list | tuple):
        return {**said}
    parts: list[str | int] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif kind == "image":
            parts.append(len(pictures))
            pictures.append(picture_of(part.get("image"), part.get("detail", "auto")))
        else:
            raise UsageError(
                f"messages[{number}].content[{place}] is of type {shown(kind)}: only text and "
                "image are read"
            )
    text = "\n".join(part for part in parts if isinstance(part, str))
    if all(isinstance(part, str) for part in parts):
        return {**said, "content": text}
    return {**said, "content": text, "parts": parts}


_MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
"""What stands before the text that is there, between that and what follows, and behind both."""
_SUFFIX_FIRST: Final = (
    ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),  # Seed-Coder
    ("[SUFFIX]", "[PREFIX]", ""),  # Codestral
)
"""The same for families that are shown what follows first."""
_ENDS: Final = ("<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<file_sep>", "<repo_name>")
"""Tokens with which another file would begin."""
_REPOSITORIES: Final = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
"""What begins a repository, and each file of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Infilling:
    """The prompt for the middle of a text, and the token ids at which that ends."""

    prompt: str
    stop_ids: Sequence[int]


def has_marks(added: Container[str]) -> bool:
    """Say whether a model with these tokens writes what stands between two texts."""
    families = (*_MARKS, *_SUFFIX_FIRST)
    return any(all(mark in added for mark in marks if mark) for marks in families)


def added_ids(described: TokenizerDescribed) -> dict[str, int]:
    """Return the ids of a tokenizer's added tokens by their texts."""
    return {token.text: token.token_id for token in described.added}


def infill(
    prefix: str,
    suffix: str,
    added: Mapping[str, int],
    extra: Sequence[tuple[str, str]] = (),
    field: str = "suffix",
) -> Infilling:
    """Write the prompt for what stands between two texts; `added` are ids of tokens by text.

    Before it stand `extra` texts, each with the name of its file. Raises UsageError, which begins
    with the request's `field`, for a model without tokens for it.
    """
    before = _before(extra, added)
    for marks, first, second in (
        *((marks, prefix, suffix) for marks in _MARKS),
        *((marks, suffix, prefix) for marks in _SUFFIX_FIRST),
    ):
        if all(mark in added for mark in marks if mark):
            ends = [mark for mark in (*marks, *_ENDS) if mark in added]
            return Infilling(
                prompt=f"{before}{marks[0]}{first}{marks[1]}{second}{marks[2]}",
                stop_ids=[added[end] for end in ends],
            )
    raise UsageError(
        f"{field} needs a model with tokens for the middle of a text, which this one has not",
        remedy="leave it out, or name a model that was trained for it, such as Qwen-Coder",
    )


def _before(extra: Sequence[tuple[str, str]], added: Mapping[str, int]) -> str:
    """Write other texts as files of a repository where the model has tokens for that."""
    if not extra:
        return ""
    for repository, file in _REPOSITORIES:
        if repository in added and file in added:
            files = "".join(f"{file}{name or 'filename'}\n{text}" for name, text in extra)
            return f"{repository}repository\n{files}{file}filename\n"
    return "".join(f"{text}\n" for _, text in extra)
