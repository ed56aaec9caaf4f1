"""The program that compiles constraints of strangers first, in a process of its own.

Its jobs are those that grammars.py asks for. What it has compiled, and used for a token, a
node may compile too.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from shardnet.constraints import ConstraintKind
from shardnet.errors import UsageError
from shardnet.guard.job_loop import serve
from shardnet.json_schemas import for_grammars
from shardnet.tokenizers.grammar.vocabulary import NO_TOKEN, Vocabulary, parser_limits

T = TypeVar("T")

STACK_BYTES = 1 << 20
"""Half of what any thread of a node has: grammars that nest deeply end this process instead."""

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Where only one text can follow, all tokens that begin it are allowed, not only those that a
tokenizer would write it with. Stands last, where it counts whatever a grammar says of it itself.
"""
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is spaced, unless its schema says otherwise: models that may write any number of spaces
do so, until their tokens are used up.
"""
_MOST_REASON = 400


class _Jobs:
    """The jobs, by name."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None

    def load(self, vocabulary: Mapping[str, Any], block: bytes) -> tuple[object, bytes]:
        """Take the tokens of the model."""
        self._tokenizer = Vocabulary.unpack(vocabulary, block).tokenizer()
        return None, b""

    def compile(self, kind: ConstraintKind, text: str) -> tuple[object, bytes]:
        """Compile a constraint and use it for one token; give its grammar for llguidance."""
        tokenizer = self._tokenizer
        assert tokenizer is not None
        grammar = grammar_of(kind, text)
        _on_small_stack(lambda: _try(kind, tokenizer, grammar))
        return None, grammar.encode()


def grammar_of(kind: ConstraintKind, text: str) -> str:
    """Write a constraint as a grammar. Raises UsageError for text that is not of its kind."""
    match kind:
        case "lark":
            return text + _NO_FORCING
        case "regex":
            return f"start: /{regex_to_lark(text, '')}/{_NO_FORCING}"
        case "json":
            return _schema_grammar({"type": "object"})
        case "json_schema":
            schema = _json(kind, text)
            try:
                return _schema_grammar(for_grammars(schema) if isinstance(schema, dict) else schema)
            except UsageError as error:
                raise _refused(kind, str(error)) from None
            except RecursionError:
                raise _refused(kind, "it is nested too deeply") from None
        case "choice":
            texts = _json(kind, text)
            if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
                raise _refused(kind, "it is not a list of texts")
            if not texts:
                raise _refused(kind, "the list is empty")
            return f"start: {' | '.join(map(json.dumps, texts))}{_NO_FORCING}"


def _schema_grammar(schema: Any) -> str:
    if schema is True:  # the short form of a schema for anything
        schema = {}
    if isinstance(schema, dict):
        said = schema.get("x-guidance", {})
        schema = {**schema, "x-guidance": {**_ONE_LINE, **said} if isinstance(said, dict) else said}
    return f"start: %json {json.dumps(schema)}{_NO_FORCING}"


def _json(kind: ConstraintKind, text: str) -> Any:
    def no_number(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number in JSON")

    try:
        return json.loads(text, parse_constant=no_number)
    except ValueError as error:
        raise _refused(kind, f"it is not JSON: {error}") from None
    except RecursionError:
        raise _refused(kind, "it is nested too deeply") from None


def _try(kind: ConstraintKind, tokenizer: LLTokenizer, grammar: str) -> None:
    """Compile, and make two masks. Raises UsageError with llguidance's reason."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    for _ in range(2):
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if bits:
            matcher.consume_token((bits & -bits).bit_length() - 1)
    if matcher.is_error():
        raise _refused(kind, matcher.get_error())


def _refused(kind: ConstraintKind, why: str) -> UsageError:
    lines = why.strip().splitlines()
    details = [line for line in lines[1:] if line.startswith("error: ")]  # a regex's own
    reason = " ".join([*lines[:1], *details[:1]])
    if reason == NO_TOKEN:
        reason = "no token of this model can write what it allows"
    if kind != "lark":  # places are those of a grammar that its author has not seen
        reason = reason.partition("): ")[2] if reason.startswith("at ") else reason
    return UsageError(
        f"constraint: the {kind} cannot be compiled: {reason[:_MOST_REASON]}",
        remedy="change the constraint, or leave it out",
    )


def _on_small_stack(job: Callable[[], T]) -> T:
    """Run a job on a thread with little room to nest; raise what it raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(job())
        except BaseException as error:
            errors.append(error)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def main() -> None:
    """Do jobs until nobody asks."""
    jobs = _Jobs()
    serve({"load": jobs.load, "compile": jobs.compile})
