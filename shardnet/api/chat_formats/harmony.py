"""The messages of gpt-oss: each has a header with a channel and perhaps a recipient, and a body.

Analysis is reasoning. What goes to `functions.NAME` is a call, on whatever channel. The rest is
content, but what goes to a tool that was not offered.
"""

from __future__ import annotations

import re

from shardnet.api.chat_formats.reader import Reader, Sink, Steps

_START, _END, _MESSAGE, _CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
_CALL, _RETURN, _CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
_RECIPIENT = re.compile("to=([^\\s\ud800-\udfff]+)")
_WORD = re.compile("[^\\s\ud800-\udfff]*")
_MOST_HEADER = 4096
_PEOPLE = ("", "assistant", "user", "all")


class HarmonyReader(Reader):
    """`<|channel|>CHANNEL to=functions.NAME <|constrain|>json<|message|>BODY<|call|>`."""

    THINK = ((f"analysis{_MESSAGE}", _END),)
    BEFORE_THINK = _CHANNEL
    ENDS_THOUGHT = (_CALL, _RETURN, _START)
    MARKS = (_START, _END, _MESSAGE, _CHANNEL, _CALL, _RETURN, _CONSTRAIN)

    def read(self) -> Steps[None]:
        """Read message after message. The prompt ends within the header of the first."""
        char = self.marks.char
        _, _, begun = self.settings.prompt_tail.rpartition(_START)
        for text in (_CHANNEL, _CONSTRAIN, _MESSAGE):
            begun = begun.replace(text, char(text))
        header, found, _ = begun.partition(char(_MESSAGE))
        if found:
            yield from self._body(header)
        while True:
            header = yield from self._header()
            yield from self._body(header)
            if self._ended and self._at >= len(self._text):
                return

    def _header(self) -> Steps[str]:
        """Take a header, up to where its message begins. What is none is not lost."""
        char = self.marks.char
        ends = re.compile(f"[{char(_END)}{char(_CALL)}{char(_RETURN)}{char(_START)}]")
        header = ""
        while True:
            if self._at >= len(self._text):
                if self._ended:
                    self._no_header(header)
                    return ""
                yield
                continue
            next_char = self._text[self._at]
            self.take()
            if next_char == char(_MESSAGE):
                return header
            if ends.match(next_char):
                self.reasoning(self._shown(header))
                header = ""
            else:
                header += next_char
            if len(header) > _MOST_HEADER:
                self.content(header)
                header = ""

    def _no_header(self, text: str) -> None:
        """Give out text in which no header began; a header that was cut off is dropped."""
        if not any(char in text for char in self.marks.known) and "to=" not in text:
            self.content(text)

    def _shown(self, header: str) -> str:
        """Return what stands in a header that has no message, but the role and the channel."""
        _, found, rest = header.rpartition(self.marks.char(_CHANNEL))
        return rest if found else ""

    def _body(self, header: str) -> Steps[None]:
        recipients = _RECIPIENT.findall(header)
        recipient = recipients[-1] if recipients else ""
        name = recipient.removeprefix("functions.")
        _, _, rest = header.rpartition(self.marks.char(_CHANNEL))
        found = _WORD.match(rest)
        channel = found[0] if found else ""
        if self.tools and (name != recipient or name in self.tools):
            if not (yield from self.attempt(self._call(name))):
                yield from self._prose(self.content)
        elif recipient not in _PEOPLE:
            yield from self._prose(lambda _: None)
        else:
            yield from self._prose(self.reasoning if channel == "analysis" else self.content)

    def _call(self, name: str) -> Steps[None]:
        yield from self.json_call(name)
        yield from self.skip_space()
        for end in (_CALL, _END, _RETURN):
            yield from self.optional(self.marks.char(end))

    def _prose(self, sink: Sink) -> Steps[None]:
        """Pass a body on up to its end."""
        char = self.marks.char
        ends = re.compile(f"[{char(_END)}{char(_CALL)}{char(_RETURN)}{char(_START)}]")
        while True:
            found = ends.search(self._text, self._at)
            end = found.start() if found else len(self._text)
            text, self._at = self._text[self._at : end], end
            sink(text)
            if found:
                self.take(found[0] != char(_START))
                self._out += self.content_text.end(keeps_space=True)
                self._out += self.reasoning_text.end(keeps_space=True)
                return
            if self._ended:
                return
            self.cut()
            yield
