"""The file of `--prompts-file`: one prompt a line, as text or JSON.

Knows the format of a line. Must not know how requests are sent.

A line that begins with `{` or `[` is JSON: an object with the keys of `PromptLine`, or a list of
token ids. A line that is a JSON string is its text; any other line is the prompt itself. Empty
lines are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import typer
from msgspec import UNSET, UnsetType

from shardnet.api.requests import Prompt
from shardnet.api.validation import find_refused
from shardnet.constraints import Constraint
from shardnet.errors import UsageError
from shardnet.sampling_params import SamplingParams

from .sampling_options import read_speculate

FLAG = "--prompts-file"


class PromptLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt with its own options; those left out are the command's."""

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None
    max_tokens: int | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    top_p: float | UnsetType = UNSET
    min_p: float | UnsetType = UNSET
    repetition_penalty: float | UnsetType = UNSET
    presence_penalty: float | UnsetType = UNSET
    frequency_penalty: float | UnsetType = UNSET
    min_tokens: int | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    logit_bias: dict[int, float] | UnsetType = UNSET
    logprobs: int | UnsetType | None = UNSET
    sample_index: int | None = None
    stop: list[str] | UnsetType = UNSET
    stop_token_ids: list[int] | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    bos: Literal["auto", "on", "off"] | UnsetType = UNSET
    keep_special_tokens: bool | UnsetType = UNSET
    speculate: str | UnsetType = UNSET
    draft_tokens: int | UnsetType = UNSET
    deterministic: bool | UnsetType = UNSET
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    priority: int | UnsetType = UNSET
    deadline_s: float | UnsetType = UNSET


SAMPLING_KEYS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
OPTION_KEYS = (
    *("max_tokens", "stop", "stop_token_ids", "ignore_eos", "priority", "deadline_s"),
    *("bos", "keep_special_tokens", "speculate", "draft_tokens", "deterministic"),
)

_text = msgspec.json.Decoder(str)
T = TypeVar("T")


def read_prompts(name: str, sampling: SamplingParams) -> tuple[list[int], list[Prompt]]:
    """Read the file, `-` for standard input; return line numbers (from 1) and prompts.

    Raises typer.BadParameter, which names the line, for a line that is not a prompt.
    """
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
        lines = raw.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise typer.BadParameter(f"{name}: {error.strerror}", param_hint=FLAG) from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not UTF-8 text: {error}", param_hint=FLAG) from error
    numbered = list(_prompts(name, lines, sampling))
    if not numbered:
        raise typer.BadParameter(f"{name} has no prompts", param_hint=FLAG)
    return [number for number, _ in numbered], [prompt for _, prompt in numbered]


def _prompts(
    name: str, lines: Iterable[str], sampling: SamplingParams
) -> Iterator[tuple[int, Prompt]]:
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        try:
            prompt = read_prompt(line, sampling)
        except (ValueError, UsageError) as error:
            raise typer.BadParameter(f"{name} line {number}: {error}", param_hint=FLAG) from error
        yield number, prompt


def read_prompt(line: str, sampling: SamplingParams) -> Prompt:
    """Parse one line. Raises ValueError or UsageError for one that is not a prompt."""
    start = line.lstrip()[:1]
    if start == "[":
        return Prompt(_read_json(line, list[int]))
    if start == "{":
        return _read_object(_read_json(line, PromptLine), sampling)
    if start == '"':
        try:
            return Prompt(_text.decode(line))
        except msgspec.DecodeError:  # text in quotation marks, and more after them
            return Prompt(line)
    return Prompt(line)


def _part(value: object) -> str:
    """Say which message has parts in the place of text, as pictures come; "" where none has."""
    messages = value.get("messages") if isinstance(value, dict) else None
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            return f"messages[{number}].content is a list: a prompts file takes text only"
    return ""


def _read_json(line: str, kind: type[T]) -> T:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"it begins like JSON and is not valid JSON ({error})") from error
    if why := _part(value) or find_refused(value, kind):
        raise ValueError(why)
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def _read_object(said: PromptLine, sampling: SamplingParams) -> Prompt:
    given = [c for c in (said.prompt, said.token_ids, said.messages) if c is not None]
    if len(given) != 1:
        raise ValueError("give one of prompt, token_ids and messages")
    changes = _given(said, SAMPLING_KEYS)
    if not isinstance(said.logit_bias, UnsetType):
        changes["logit_bias"] = tuple(said.logit_bias.items())
    if not isinstance(said.logprobs, UnsetType):
        changes["n_logprobs"] = said.logprobs
    options = _given(said, OPTION_KEYS)
    if not isinstance(said.speculate, UnsetType):
        options["speculate"] = read_speculate(said.speculate)
    if constraint := _constraint(said):
        options["constraint"] = constraint
    return Prompt(
        given[0],  # type: ignore[arg-type]  # messages are checked when they are asked
        sampling=msgspec.structs.replace(sampling, **changes) if changes else None,
        sample_index=said.sample_index,
        options=options,  # type: ignore[arg-type]  # these are its keys
    )


def _constraint(said: PromptLine) -> Constraint | None:
    """Return what the output must match, None if the line does not say."""
    given = [
        *([Constraint.json_schema(said.json_schema)] if said.json_schema is not None else []),
        *([Constraint(kind="regex", text=said.regex)] if said.regex is not None else []),
        *([Constraint(kind="lark", text=said.grammar)] if said.grammar is not None else []),
    ]
    if len(given) > 1:
        raise ValueError("give one of json_schema, regex and grammar")
    return given[0] if given else None


def _given(said: PromptLine, keys: Iterable[str]) -> dict[str, Any]:
    return {key: getattr(said, key) for key in keys if getattr(said, key) is not UNSET}
