"""How text is generated: the flags that `generate` and `chat` share, and those of a prompts file.

A line that begins with `{` or `[` is JSON: an object with the keys of `PromptLine`, or a list of
token ids. A line that is a JSON string is its text; any other line is the prompt itself. Empty
lines are skipped.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, cast, get_args

import msgspec
import typer
from msgspec import UNSET, UnsetType, structs

from shardnet.api.requests import GenerationOptions, Prompt, name_model
from shardnet.api.validation import find_half_pair, find_refused
from shardnet.constraints import MAX_CONSTRAINT_CHARACTERS, Constraint, ConstraintKind
from shardnet.errors import UsageError
from shardnet.files import decode_text, expanded, read_text
from shardnet.sampling_params import NEWER, SamplingParams
from shardnet.wire.messages.generation import RecommendedName
from shardnet.wire.messages.plans import ModelChoice

from .options import check_choices, flag, naming, option, reading

RECOMMENDED: Final[tuple[RecommendedName, ...]] = get_args(RecommendedName)

SETTLED: Final = ("presence_penalty", "frequency_penalty", "min_tokens", *NEWER)
"""Those that no model recommends."""

MaxTokens = Annotated[
    int,
    option("--max-tokens N", "Generate at most this many tokens; 0 only reads the prompt.", min=0),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The flags, in the order in which --help shows them; None where one was not given."""

    DEFAULTS: ClassVar[SamplingParams] = SamplingParams()
    """What holds for flags that were not given, of those that models recommend."""

    system: str = flag("", "--system TEXT", "System message of the conversation.")
    max_tokens: MaxTokens = 256
    min_tokens: int = flag(0, "--min-tokens N", "Sample no stop id before this many tokens.")
    temperature: float | None = flag(
        None,
        "--temperature X",
        "0 always takes the most likely token. Default: 0; in chat as the model recommends, "
        "else 0.7.",
    )
    top_k: int | None = flag(None, "--top-k K", "Sample from the K most likely tokens; 0 is off.")
    top_p: float | None = flag(
        None, "--top-p P", "Sample from the most likely tokens whose probabilities sum up to P."
    )
    min_p: float | None = flag(
        None, "--min-p P", "Sample from tokens at least P times as likely as the most likely one."
    )
    repetition_penalty: float | None = flag(
        None,
        "--repetition-penalty X",
        "Above 1: make tokens of the prompt and the output less likely; 1 is off.",
    )
    presence_penalty: float = flag(
        0.0, "--presence-penalty X", "Lower the logit of tokens of the output by X."
    )
    frequency_penalty: float = flag(
        0.0,
        "--frequency-penalty X",
        "Lower the logit of tokens of the output by X for each time they occur.",
    )
    top_n_sigma: float | None = flag(
        None, "--top-n-sigma X", "Sample from logits within X deviations of the best; 0 is off."
    )
    typical_p: float | None = flag(
        None, "--typical-p P", "Sample from tokens about as surprising as expected, P together."
    )
    dry_multiplier: float | None = flag(
        None, "--dry-multiplier X", "Lower what would go on with a repeat (DRY) by X; 0 is off."
    )
    dry_base: float | None = flag(
        None, "--dry-base X", "X times more for each token it is longer. Default: 1.75."
    )
    dry_allowed_length: int | None = flag(
        None,
        "--dry-allowed-length N",
        "Repeats of N tokens get the multiplier, shorter ones nothing. Default: 2.",
    )
    dry_sequence_breaker: list[str] | None = flag(
        None,
        "--dry-sequence-breaker STR",
        'No repeat goes over this text; may be given several times. Default: a new line, : " *',
    )
    logit_bias: list[str] | None = flag(
        None,
        "--logit-bias ID=X",
        "Add X, from -100 to 100, to a token's logit; may be given several times.",
    )
    seed: int | None = flag(
        None,
        "--seed N",
        "Seed of the draws; the same one gives the same text. Default: random, reported.",
    )
    stop: list[str] | None = flag(
        None, "--stop STR", "Stop before this text; may be given several times."
    )
    stop_token_id: list[int] | None = flag(
        None, "--stop-token-id ID", "Stop after this token; may be given several times.", min=0
    )
    ignore_eos: bool = flag(False, "--ignore-eos", "Continue where the model would end.")
    bos: str = flag(
        "auto",
        "--bos auto|on|off",
        "Prepend the BOS token: as the tokenizer says, always, or never.",
    )
    keep_special_tokens: bool = flag(
        False, "--keep-special-tokens", "Show special tokens in the text."
    )
    json_schema: str = flag(
        "",
        "--json-schema FILE|JSON",
        "Write JSON that is valid by this schema, a file or its text.",
    )
    regex: str = flag("", "--regex RE", "Write what this regular expression matches as a whole.")
    grammar: str = flag("", "--grammar FILE", "Write what this grammar, in Lark's form, matches.")
    speculate: str = flag(
        "off",
        "--speculate off|ngram|mtp|auto|NAME[@NODE]",
        "Draft tokens and verify several at once: by look-up in the text, by the layer of the "
        "model that predicts further tokens, or by the small model or drafter (EAGLE-3, DFlash) "
        "NAME, where it drafts best or on NODE. auto: by what the model ships with, and look-up.",
        env=True,
    )
    draft_tokens: int = flag(
        0,
        "--draft-tokens N",
        "Draft at most N tokens at once. Default: as many as pay off.",
        min=0,
        hides_default=True,
    )
    deterministic: bool = flag(
        False,
        "--deterministic",
        "Give the same tokens whatever else runs, with speculation or without; slower.",
    )

    use_lora: list[str] | None = flag(
        None,
        "--use-lora NAME[=X]",
        "Compute with this LoRA adapter of the ring, multiplied by X; can be repeated. "
        "Not needed with a single --lora.",
    )

    def adapters(self, choice: ModelChoice) -> dict[str, float]:
        """Return which adapters to use of those of `choice`, or of the ring.

        Raises typer.BadParameter for a wrong value, and for several of which none is named.
        """
        if self.use_lora:
            return dict(map(_parse_use, self.use_lora))
        if len(choice.adapters) > 1:
            names = ", ".join(adapter.name for adapter in choice.adapters)
            raise typer.BadParameter(f"choose of {names}", param_hint="--use-lora")
        return {adapter.name: 1.0 for adapter in choice.adapters}

    def params(self, n_logprobs: int | None = None) -> SamplingParams:
        """Make the sampling parameters; `n_logprobs` None reports no log-probabilities.

        Raises typer.BadParameter for a value outside its range.
        """
        given: dict[str, Any] = {name: getattr(self, name) for name in RECOMMENDED}
        params = structs.replace(
            self.DEFAULTS,
            **{name: value for name, value in given.items() if value is not None},
            **{name: getattr(self, name) for name in SETTLED},
            dry_breakers=tuple(self.dry_sequence_breaker or ()),
            logit_bias=tuple(_parse_bias(entry) for entry in self.logit_bias or ()),
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            n_logprobs=n_logprobs,
        )
        with naming(None):
            params.check()
        return params

    def left_to_the_model(self) -> list[RecommendedName]:
        """Name the parameters that were not given and that models may recommend."""
        return [name for name in RECOMMENDED if getattr(self, name) is None]

    def generation(self) -> GenerationOptions:
        """Make the options of a request. Raises typer.BadParameter for a wrong value."""
        check_choices(self)
        with naming("--speculate"):
            speculate = read_speculate(self.speculate)
        return {
            "max_tokens": self.max_tokens,
            "stop": self.stop or [],
            "stop_token_ids": self.stop_token_id or [],
            "ignore_eos": self.ignore_eos,
            "bos": self.bos,  # type: ignore[typeddict-item]  # checked above
            "keep_special_tokens": self.keep_special_tokens,
            "speculate": speculate,
            "draft_tokens": self.draft_tokens,
            "deterministic": self.deterministic,
            "constraint": self._constraint(),
        }

    def _constraint(self) -> Constraint | None:
        """Read what the output must match. Raises typer.BadParameter for more than one."""
        given = [
            ("--json-schema", "json_schema", self.json_schema),
            ("--regex", "regex", self.regex),
            ("--grammar", "lark", self.grammar),
        ]
        said = [(flag, kind, text) for flag, kind, text in given if text]
        if len(said) > 1:
            raise typer.BadParameter(f"choose one of {' and '.join(flag for flag, _, _ in said)}")
        for name, kind, text in said:
            if name == "--grammar" or (name == "--json-schema" and text.strip()[:1] != "{"):
                with reading(text, name):
                    text = read_text(expanded(text), MAX_CONSTRAINT_CHARACTERS + 1)
            constraint = Constraint(kind=cast("ConstraintKind", kind), text=text)
            with naming(name):
                constraint.check()
            return constraint
        return None


def read_speculate(text: str) -> str:
    """Return `off`, `ngram`, `mtp`, `auto` or the draft model's name. Raises UsageError for a
    URL.
    """
    return text if text in ("off", "ngram", "mtp", "auto") else name_model(text)


def _parse_use(entry: str) -> tuple[str, float]:
    """Read NAME or NAME=X. Raises typer.BadParameter for an X that is no number."""
    name, equals, scale = entry.partition("=")
    try:
        return name, float(scale) if equals else 1.0
    except ValueError:
        what = f"'{entry}' is not NAME=X, such as stories=0.5"
        raise typer.BadParameter(what, param_hint="--use-lora") from None


def _parse_bias(entry: str) -> tuple[int, float]:
    """Read ID=X. Raises typer.BadParameter for anything else."""
    token_id, equals, bias = entry.partition("=")
    try:
        if equals:
            return int(token_id), float(bias)
    except ValueError:
        pass
    raise typer.BadParameter(f"'{entry}' is not ID=X, such as 50=-3.5", param_hint="--logit-bias")


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
    top_n_sigma: float | UnsetType = UNSET
    typical_p: float | UnsetType = UNSET
    dry_multiplier: float | UnsetType = UNSET
    dry_base: float | UnsetType = UNSET
    dry_allowed_length: int | UnsetType = UNSET
    dry_breakers: tuple[str, ...] | UnsetType = UNSET
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


_SAMPLING_KEYS: Final = {*SamplingParams.__struct_fields__} - {
    "logit_bias",
    "sample_index",
    "dry_breakers",
}
_OPTION_KEYS: Final = GenerationOptions.__annotations__.keys()
"""What a line may change of the command's: `logit_bias` and `sample_index` have another form."""

_text = msgspec.json.Decoder(str)
T = TypeVar("T")


def read_prompts(name: str, sampling: SamplingParams) -> tuple[list[int], list[Prompt]]:
    """Read the file, `-` for standard input; return line numbers (from 1) and prompts.

    Raises typer.BadParameter, which names the line, for a line that is not a prompt.
    """
    with reading(name, FLAG):
        raw = sys.stdin.buffer.read() if name == "-" else expanded(name).read_bytes()
        lines = decode_text(raw).split("\n")
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
        except msgspec.DecodeError as error:
            if why := find_half_pair(line):
                raise ValueError(why) from error
            return Prompt(line)  # text in quotation marks, and more after them
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
        why = f"it begins like JSON and is not valid JSON ({error})"
        raise ValueError(find_half_pair(line) or why) from error
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
    changes = _given(said, _SAMPLING_KEYS)
    if not isinstance(said.logit_bias, UnsetType):
        changes["logit_bias"] = tuple(said.logit_bias.items())
    if not isinstance(said.logprobs, UnsetType):
        changes["n_logprobs"] = said.logprobs
    options = _given(said, _OPTION_KEYS)
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
    return {key: value for key in keys if (value := getattr(said, key, UNSET)) is not UNSET}
