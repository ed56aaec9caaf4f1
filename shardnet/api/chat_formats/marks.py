"""Finds the marks of a format in what a model writes; the deltas of which that consists.

A mark that the tokenizer has as a token counts only where that token is; another counts wherever
its text stands. In the text that leaves here a mark is one lone surrogate: text that a tokenizer
decodes never has any, so nothing that a model writes can pass for a mark.

How a parser is fed: `Generate` is sent with `keep_special_tokens`, so that special tokens stand in
the text. `feed` is called once for each event of the request, with the event's `token_ids` and
`text`, in order and without joining events: an event has one token, so that a token that marks the
beginning or the end of something is told from the same characters written with other tokens. Text
may lag behind its ids (an incomplete character, the possible start of a stop string): it is taken
when it comes. The FINISHED event's `text` is fed without ids, then `finish` is called. A stop token
has an id and no text. Several ids in one call are accepted: a special token is then taken to be the
first place of the text that reads like it.

The deltas of all calls, joined by kind, do not depend on how ids and text were divided.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

_FIRST: Final = 0xD800
_MOST: Final = 0x800
"""Lone surrogates."""

SURROGATES: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token beside those that text is split into. Special ones are no part of an answer."""

    text: str
    is_special: bool


class Marks:
    """The characters of marks, in one output.

    Special tokens that are no mark of the format become marks when they come: they are left out of
    an answer, but stay in a string that a tool is called with.
    """

    def __init__(self, texts: Iterable[str], tokens: Mapping[int, TokenText]) -> None:
        self._tokens = tokens
        self._text_of: dict[str, str] = {}
        self._char_of: dict[str, str] = {}
        for text in texts:
            self._add(text)
        self.known: Final = frozenset(self._text_of)
        """The characters of the format's own marks."""
        self._written = {token.text for token in tokens.values()}

    def char(self, text: str) -> str:
        """Return the character of one of the format's marks."""
        return self._char_of[text]

    def is_token(self, text: str) -> bool:
        """Say whether the tokenizer has this text as a token."""
        return text in self._written

    def char_of_token(self, token_id: int) -> str:
        """Return the character of a token that is a mark, "" for all others."""
        token = self._tokens.get(token_id)
        if token is None:
            return ""
        found = self._char_of.get(token.text, "")
        if found or not token.is_special or len(self._char_of) >= _MOST:
            return found
        return self._add(token.text)

    def plain(self, text: str) -> str:
        """Write every mark as its text."""
        return SURROGATES.sub(lambda found: self._text_of[found[0]], text)

    def without(self, text: str) -> str:
        """Leave out special tokens that are no marks of the format; write others as their text."""
        return SURROGATES.sub(
            lambda found: self._text_of[found[0]] if found[0] in self.known else "", text
        )

    def _add(self, text: str) -> str:
        char = chr(_FIRST + len(self._char_of))
        self._char_of[text] = char
        self._text_of[char] = text
        return char


class MarkFinder:
    """Makes text with marks of the ids and the text that come."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._awaited: deque[str] = deque()
        """Marks whose tokens have come, but not yet their text."""
        self._ahead = ""
        """Text in which the next awaited mark may begin."""
        self._loose = ""
        """Text at the end that may be the beginning of a mark that is no token."""
        texts = [marks.plain(char) for char in sorted(marks.known)]
        self._texts = [text for text in texts if not marks.is_token(text)]
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")

    def feed(self, token_ids: Sequence[int], text: str) -> str:
        """Take ids and text; return the text that is settled, with its marks."""
        new = [char for token_id in token_ids if (char := self._marks.char_of_token(token_id))]
        self._awaited += new
        self._ahead += text
        settled = ""
        while self._awaited:
            char = self._awaited[0]
            word = self._marks.plain(char)
            # One token's text ends with it; before it the same characters may stand.
            alone = len(token_ids) == 1 and len(self._awaited) == 1 and bool(new)
            place = self._ahead.rfind(word) if alone else self._ahead.find(word)
            if alone and not self._ahead.endswith(word):
                place = -1
            if place < 0:
                if len(self._awaited) > 1 and self._comes_later():
                    self._awaited.popleft()
                    continue
                break
            settled += self._plain(self._ahead[:place], is_end=True) + char
            self._ahead = self._ahead[place + len(word) :]
            self._awaited.popleft()
        return settled + self._plain(self._take_ahead(), is_end=False)

    def finish(self) -> str:
        """Return what was held back."""
        rest, self._ahead = self._ahead, ""
        self._awaited.clear()
        return self._plain(rest, is_end=True)

    def _comes_later(self) -> bool:
        """Say whether the text has a later awaited mark, so that the first has no text."""
        return any(self._marks.plain(char) in self._ahead for char in list(self._awaited)[1:])

    def _take_ahead(self) -> str:
        """Take the text in which no awaited mark can begin."""
        held = 0
        if self._awaited:
            held = _overlap(self._ahead, self._marks.plain(self._awaited[0]))
        end = len(self._ahead) - held
        taken, self._ahead = self._ahead[:end], self._ahead[end:]
        return taken

    def _plain(self, text: str, *, is_end: bool) -> str:
        """Find the marks that are no tokens."""
        if not self._texts:
            return text
        text = self._loose + text
        found = self._pattern.sub(lambda match: self._marks.char(match[0]), text)
        held = 0 if is_end else max(_overlap(found, word) for word in self._texts)
        self._loose = found[len(found) - held :]
        return found[: len(found) - held]


def _overlap(text: str, word: str) -> int:
    """Return how long the longest end of `text` is that `word` begins with, but is not all of."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning, without the marks around it. `text` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer itself. `text` is not empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A tool call begins: number `index` of this output, from 0.

    `call_id` is what the model wrote, or None where the format has no ids: the server makes one
    (call_ids.py). `name` is one of the tools that were offered, unless the format names another.
    """

    index: int
    call_id: str | None
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the arguments of call `index`: a piece of the text of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallCut:
    """Call `index`, whose beginning was given, is none: the output ended in it, or it is broken."""

    index: int


CallDelta: TypeAlias = ToolCallStarted | ToolCallDelta | ToolCallCut
OutputDelta: TypeAlias = ReasoningDelta | ContentDelta | CallDelta
"""One piece. All pieces of a call follow its ToolCallStarted, before the next call starts."""


class OutputParser(Protocol):
    """Divides the output of one request. It never raises for what a model wrote."""

    def feed(self, token_ids: Sequence[int], text: str) -> list[OutputDelta]:
        """Take the next tokens and the text that they complete; return what is known by now."""

    def finish(self) -> list[OutputDelta]:
        """Return what was held back. To be called once, after the last text."""
