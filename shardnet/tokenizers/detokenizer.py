"""Incremental detokenization: single tokens to whole characters, and detection of stop strings.

Knows how a tokenizer's pieces join, not where tokens come from. Must not know torch.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from shardnet.errors import SamplingError
from shardnet.tokenizers.token_table import HAS_TOKEN, IS_BYTE, IS_SPECIAL
from shardnet.tokenizers.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes one sequence's tokens, releasing only text that no later token can change.

    The released parts joined, `finish` included, equal `Tokenizer.decode` of all ids; behind others
    they equal what these ids add to the text of those. The work per token does not grow with the
    text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        keep_special_tokens: bool = False,
        behind: Sequence[int] = (),
    ) -> None:
        """`behind` are the ids, or the last of them, behind whose text the sequence goes on."""
        self._tokenizer = tokenizer
        self._keep_special_tokens = keep_special_tokens
        self._released = [token_id for token_id in behind if self._is_shown(token_id)][-1:]
        """The ids released last: later ones are decoded after them, to get spaces between right."""
        self._has_begun = bool(self._released) and tokenizer.decodes_behind
        """Whether there is text, behind which tokens are decoded without those before them."""
        self._held: list[int] = []
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Add the next token; return the text that is now final, often empty."""
        if not self._is_shown(token_id):
            return ""
        self._held.append(token_id)
        return self._release() if self._ends_whole(token_id) else ""

    def finish(self) -> str:
        """Return the remaining text; incomplete characters become U+FFFD."""
        return self._release() if self._held else ""

    def _is_shown(self, token_id: int) -> bool:
        flags = self._tokenizer.flags(token_id)
        return bool(flags & HAS_TOKEN and (self._keep_special_tokens or not flags & IS_SPECIAL))

    def _ends_whole(self, token_id: int) -> bool:
        """Say whether the text after this token ends on a character boundary, whatever follows."""
        if self._tokenizer.flags(token_id) & IS_BYTE:
            return False  # a run of byte pieces is valid or invalid as a whole
        if self._tokenizer.is_byte_level:
            self._characters.decode(self._tokenizer.token_bytes(token_id))
            return not self._characters.getstate()[0]
        return True

    def _release(self) -> str:
        if self._has_begun:
            text = self._tokenizer.decode_behind(self._held)
            self._held.clear()
            return text
        before = self._decode(self._released) if self._released else ""
        text = self._decode(self._released + self._held)
        self._released, self._held = self._held, []
        added = text[len(before) :]
        self._has_begun = added != "" and self._tokenizer.decodes_behind
        return added

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, keep_special_tokens=self._keep_special_tokens)


class StopScanner:
    """Finds stop strings in text that comes in parts, and withholds them.

    The match that completes first ends the text, however it is split into parts; of matches that
    complete at the same character, the longest. Text is held back only while it may be the start of
    a match. Each stop string is matched by the automaton of Knuth, Morris and Pratt.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Take the stop strings. Raises SamplingError if one is empty."""
        if "" in stops:
            raise SamplingError(
                "a stop string must not be empty",
                remedy="leave --stop out instead",
            )
        self._stops = [(stop, _borders(stop)) for stop in dict.fromkeys(stops)]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string was found."""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return what may be shown and whether a stop string was found.

        After a match all further text is dropped.
        """
        if self.stopped:
            return "", True
        self._held += text
        start = len(self._held) - len(text)
        for end, character in enumerate(text, start + 1):
            longest = self._advance(character)
            if longest:
                self.stopped = True
                return self._take(end - longest), True
        return self._take(len(self._held) - max(self._matched, default=0)), False

    def finish(self) -> str:
        """Return what is still held back, when the text ends without a match."""
        return "" if self.stopped else self._take(len(self._held))

    def _take(self, end: int) -> str:
        shown = self._held[:end]
        self._held = "" if self.stopped else self._held[end:]
        return shown

    def _advance(self, character: str) -> int:
        """Advance every automaton by one character; return the longest match's length, or 0."""
        longest = 0
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            self._matched[index] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest


class TextStream:
    """One sequence's text as it may be shown: whole characters, up to a stop string.

    Without a tokenizer the text is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stops: Sequence[str] = (),
        keep_special_tokens: bool = False,
        behind: Sequence[int] = (),
    ) -> None:
        """Raise SamplingError if a stop string is empty. `behind` is as in IncrementalDecoder."""
        self._decoder = (
            IncrementalDecoder(tokenizer, keep_special_tokens=keep_special_tokens, behind=behind)
            if tokenizer
            else None
        )
        self._scanner = StopScanner(stops)

    def push(self, token_id: int) -> tuple[str, bool]:
        """Add a token; return what may be shown and whether a stop string was found."""
        return self._scanner.push(self._decoder.push(token_id) if self._decoder else "")

    def finish(self) -> str:
        """Return the text that is still held back, after the last token."""
        shown, _ = self._scanner.push(self._decoder.finish() if self._decoder else "")
        return shown + self._scanner.finish()


def _borders(word: str) -> list[int]:
    """For each prefix, the length of the longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for end in range(1, len(word)):
        while length and word[end] != word[length]:
            length = borders[length - 1]
        length += word[end] == word[length]
        borders[end] = length
    return borders
