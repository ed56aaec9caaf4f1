"""Reads a model's output as it comes: the parts that all formats share.

A format is a generator that reads on from `_at` and yields where it needs more text. What may be a
tool call is read as an attempt: its deltas are held back until it is whole, or longer than `hold`
characters; until then it can still turn out to be content. Must not know any format.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeAlias, TypeVar

from shardnet.api.chat_formats.json_text import JsonFollower, Tool, escape_halves
from shardnet.api.chat_formats.marks import (
    SURROGATES,
    CallDelta,
    ContentDelta,
    MarkFinder,
    Marks,
    OutputDelta,
    ReasoningDelta,
    TokenText,
    ToolCallCut,
    ToolCallDelta,
    ToolCallStarted,
)

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
Sink: TypeAlias = Callable[[str], None]
Decide: TypeAlias = Callable[[str], int | None]
"""Takes text that may begin with the end of a value. Returns how much of it to take as that end, -1
if it is none, None if more text is needed."""

HOLD: Final = 512
MAX_NAME: Final = 512
_LOOK_AHEAD: Final = 512
SPACE: Final = " \t\r\n"
_SPACE_RUN = re.compile(r"[ \t\r\n]*")


class NotACallError(Exception):
    """What is read is no tool call."""


class OutputEndedError(Exception):
    """The output has ended within what is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """What a reader needs to know beside the format.

    `tokens` are added tokens by their ids, `tools` those that were offered by their names, none to
    read no calls. `prompt_tail` is the end of the prompt. A call of at most `hold` characters comes
    whole, a longer one as it is written; with None each comes whole. Calls beyond `max_calls` are
    dropped.
    """

    tokens: Mapping[int, TokenText] = field(default_factory=dict)
    tools: Mapping[str, Tool] = field(default_factory=dict)
    prompt_tail: str = ""
    hold: int | None = HOLD
    max_calls: int | None = None


class _Prose:
    """Text of one kind. White space at its end waits until more text, or a mark, follows."""

    def __init__(self, kind: type[ContentDelta] | type[ReasoningDelta]) -> None:
        self._kind = kind
        self._space = ""
        self._has_begun = False
        self._drops_space = False
        self.is_empty = True
        """Whether there was nothing but space."""

    def push(self, text: str) -> list[OutputDelta]:
        """Add text."""
        body = text.rstrip(SPACE)
        if not body:
            self._space += text
            return []
        shown = self._space + body
        self._space = text[len(body) :]
        if self._drops_space:
            shown, self._drops_space = shown.lstrip(SPACE), False
        self._has_begun, self.is_empty = True, False
        return [self._kind(shown)]

    def end(self, *, keeps_space: bool) -> list[OutputDelta]:
        """End a run of text. Space at its end is dropped, or kept behind other text."""
        space, self._space = self._space, ""
        kept = keeps_space and self._has_begun
        self._has_begun = False
        return [self._kind(space)] if kept and space else []

    def drop_space(self) -> None:
        """Drop the space that comes next."""
        self._drops_space = True


class Reader(ABC):
    """An OutputParser for one output."""

    MARKS: ClassVar[tuple[str, ...]] = ()
    THINK: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Marks around reasoning."""
    BEFORE_THINK: ClassVar[str] = ""
    """What stands before these, and before other things too."""
    ENDS_THOUGHT: ClassVar[tuple[str, ...]] = ()
    """Marks that end reasoning which is still open, beside its own."""
    KEEPS_SPACE: ClassVar[bool] = False
    """Whether space between content and a call is content."""

    def __init__(self, settings: ReaderSettings) -> None:
        self.settings = settings
        self.tools = settings.tools
        self.marks = Marks(self.MARKS, settings.tokens)
        self._finder = MarkFinder(self.marks)
        self._text = ""
        self._at = 0
        self._ended = False
        self._out: list[OutputDelta] = []
        self._held: list[OutputDelta] | None = None
        self._start = 0
        self._given_at = 0
        """Up to where the deltas of an attempt tell the text."""
        self._n_calls = 0
        self.content_text = _Prose(ContentDelta)
        self.reasoning_text = _Prose(ReasoningDelta)
        self._steps = self.read()

    @abstractmethod
    def read(self) -> Steps[None]:
        """Read the whole output."""

    # --- OutputParser ---------------------------------------------------------------------------

    def feed(self, token_ids: Sequence[int], text: str) -> list[OutputDelta]:
        """Take the next tokens and the text that they complete; return what is known by now."""
        self._text += self._finder.feed(token_ids, text)
        return self._advance()

    def finish(self) -> list[OutputDelta]:
        """Return what was held back."""
        self._text += self._finder.finish()
        self._ended = True
        self._advance_steps()
        self._out += self.reasoning_text.end(keeps_space=True)
        self._out += self.content_text.end(keeps_space=True)
        return self._advance()

    def _advance(self) -> list[OutputDelta]:
        self._advance_steps()
        out, self._out = self._out, []
        return out

    def _advance_steps(self) -> None:
        next(self._steps, None)

    # --- reading --------------------------------------------------------------------------------

    def need(self) -> Steps[None]:
        """Wait for a character. Raises OutputEndedError if none comes."""
        while self._at >= len(self._text):
            if self._ended:
                raise OutputEndedError
            yield

    def peek(self, n: int = 1) -> Steps[str]:
        """Return the next `n` characters, fewer at the end, without taking them."""
        while len(self._text) - self._at < n and not self._ended:
            yield
        return self._text[self._at : self._at + n]

    def cut(self) -> None:
        """Forget the text that was read, where nothing goes back to it."""
        if self._held is None:
            self._text, self._at = self._text[self._at :], 0
        elif self._is_given:
            self._text, self._at = self._text[self._given_at :], self._at - self._given_at
            self._given_at = 0

    def take(self, n: int = 1) -> None:
        """Take characters that were seen."""
        self._at += n

    def skip_space(self) -> Steps[None]:
        """Take white space."""
        while True:
            found = _SPACE_RUN.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text) or self._ended:
                return
            yield

    def look(self) -> Steps[str]:
        """Take space; return the character behind it. Raises OutputEndedError if none comes."""
        yield from self.skip_space()
        yield from self.need()
        return (yield from self.peek())

    def expect(self, word: str) -> Steps[None]:
        """Take `word`. Raises NotACallError if something else stands there."""
        for char in word:
            yield from self.need()
            if self._text[self._at] != char:
                raise NotACallError
            self.take()

    def optional(self, word: str) -> Steps[bool]:
        """Take `word` if it stands there; say whether it did."""
        for length in range(1, len(word) + 1):
            if (yield from self.peek(length)) != word[:length]:
                return False
        self.take(len(word))
        return True

    def until(self, ends: str) -> Steps[str]:
        """Take a name, up to one of these characters, which stays.

        Raises NotACallError for one that is long or has marks in it.
        """
        pattern = re.compile(f"[{re.escape(ends)}]")
        start = self._at
        while True:
            found = pattern.search(self._text, self._at)
            self._at = found.start() if found else len(self._text)
            if self._at - start > MAX_NAME:
                raise NotACallError
            if SURROGATES.search(self._text, start, self._at):
                raise NotACallError
            if found:
                return self._text[start : self._at]
            yield from self.need()

    def value(self, first: str, decide: Decide, sink: Sink) -> Steps[None]:
        """Pass text on up to its end, which begins with the character `first`."""
        while True:
            place = self._text.find(first, self._at)
            end = len(self._text) if place < 0 else place
            if end > self._at:
                text, self._at = self.marks.plain(self._text[self._at : end]), end
                sink(text)
            if place < 0:
                self.cut()
                yield from self.need()
                continue
            length = decide(self._text[place : place + _LOOK_AHEAD])
            if length is None:
                if self._ended:
                    raise OutputEndedError
                yield
            elif length < 0:
                self.take()
                sink(self.marks.plain(first))
            else:
                self.take(length)
                return

    def json_value(self, sink: Sink) -> Steps[None]:
        """Pass a JSON value on. Raises NotACallError for what is none."""
        yield from self.skip_space()
        follower = JsonFollower(self.marks.plain)
        while not follower.is_done:
            if self._at >= len(self._text) and self._ended and (rest := follower.finish()):
                sink(rest)
                return
            yield from self.need()
            text, end = follower.feed(self._text, self._at)
            self._at = end - follower.n_unsettled
            if text:
                sink(text)
            self._at = end
            if follower.has_failed:
                raise NotACallError
            self.cut()

    def json_string(self) -> Steps[str]:
        """Read a short JSON string."""
        if (yield from self.peek()) != '"':
            yield from self.need()
            raise NotACallError
        parts: list[str] = []
        size = 0

        def collect(text: str) -> None:
            nonlocal size
            size += len(text)
            if size > MAX_NAME:
                raise NotACallError
            parts.append(text)

        yield from self.json_value(collect)
        name = str(json.loads("".join(parts)))
        if escape_halves(name) != name:
            raise NotACallError
        return name

    # --- writing --------------------------------------------------------------------------------

    def emit(self, *deltas: OutputDelta) -> None:
        """Give deltas out, or hold them back within an attempt."""
        if self._held is None:
            self._out += deltas
            return
        most = self.settings.max_calls
        self._given_at = self._at
        self._held += (
            delta
            for delta in deltas
            if not (isinstance(delta, CallDelta) and most is not None and delta.index >= most)
        )
        if self._is_given or (
            self.settings.hold is not None and self._at - self._start > self.settings.hold
        ):
            self._give_held()

    def start_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a tool call."""
        if not name:
            raise NotACallError
        self.emit(ToolCallStarted(self._n_calls, call_id, name))
        self._n_calls += 1

    def json_call(self, name: str, call_id: str | None = None) -> Steps[None]:
        """Read a tool call's arguments. Raises NotACallError for what is no JSON object."""
        if (yield from self.look()) != "{":
            raise NotACallError
        self.start_call(name, call_id)
        yield from self.json_value(self.arguments)

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that was begun last."""
        if text:
            self.emit(ToolCallDelta(self._n_calls - 1, text))

    def content(self, text: str) -> None:
        """Add content."""
        if text := self.marks.without(text):
            self.emit(*self.content_text.push(text))

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        if text := self.marks.without(text):
            self.emit(*self.reasoning_text.push(text))

    # --- attempts -------------------------------------------------------------------------------

    def attempt(self, steps: Steps[None], *, drops: bool = True) -> Steps[bool]:
        """Read what may be a call. Return False, as if nothing had been read, if it is none.

        A call that the end of the output cuts off is dropped with `drops`, else it is none. What
        was given out already stays, and is told to be no call: reading goes on behind it.
        """
        self._start, self._held, self._is_given = self._at, [], False
        self._given_at = self._at
        n_calls = self._n_calls
        try:
            yield from steps
            self._give_held()
        except (NotACallError, OutputEndedError) as why:
            has_ended = isinstance(why, OutputEndedError)
            if self._is_given:
                self._at = len(self._text) if has_ended else self._given_at
                if self._n_calls > n_calls:
                    self.emit(ToolCallCut(self._n_calls - 1))
                return True
            self._n_calls = n_calls
            if not has_ended or not drops:
                self._at = self._start
                return False
            self._at = len(self._text)
            self._end_prose()
        finally:
            self._held = None
        return True

    _is_given = False
    """Whether deltas of the attempt were given out."""

    def _give_held(self) -> None:
        if not self._is_given:
            self._end_prose()
        self._is_given = True
        self._out += self._held or []
        self._held = []

    def _end_prose(self) -> None:
        self._out += self.reasoning_text.end(keeps_space=False)
        self._out += self.content_text.end(keeps_space=self.KEEPS_SPACE)
