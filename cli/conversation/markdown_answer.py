"""An answer at a terminal: markdown, rendered while it streams.

Knows where a block of markdown ends, and how the last one is drawn again while it grows. Blocks
that have ended are written once and never touched again. Must not know what is asked.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..output.exit_codes import StreamedText, printable, write_raw

if TYPE_CHECKING:  # only terminals need it
    from rich.console import Console
    from rich.markdown import Markdown

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")
_VANISHES: Final = re.compile(r"( {0,3})(?=<[a-zA-Z/!?]|\[[^\]]+\]:)")
"""The beginning of a line that markdown does not show: HTML, or the target of a link."""
_PADDING: Final = re.compile(r" +$", re.MULTILINE)
_PAUSE_S: Final = 0.05
_REST: Final = 9
"""Drawing takes at most a tenth of the time: the model may compute on the same cores."""


def open_answer(*, plain: bool) -> StreamedText:
    """Return what writes an answer: markdown at a terminal, else, or if `plain`, text as it is."""
    if plain or not sys.stdout.isatty():
        return StreamedText()
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False)
    if console.is_dumb_terminal or console.legacy_windows:
        return StreamedText()
    return MarkdownAnswer(console)


class MarkdownAnswer(StreamedText):
    """Markdown on standard output, a terminal. `clock` gives seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._console = console
        self._clock = clock
        self._blocks = Blocks()
        self._n_drawn = 0
        """Lines of the screen on which the unfinished block is drawn."""
        self._n_written = 0
        self._next_s = 0.0

    def write(self, text: str, *, end: str = "") -> None:
        """Add the next piece; raises what `write_out` does."""
        done = self._blocks.push(printable(text + end))
        if done:
            self._replace("".join(map(self._rendered, done)))
        began_s = self._clock()
        if began_s >= self._next_s and self._blocks.rest.strip():
            self._draw()
            took_s = self._clock() - began_s
            self._next_s = began_s + max(_PAUSE_S, took_s * (1 + _REST))

    def finish(self) -> None:
        """Write what has not been written, up to the end of its last line."""
        if rest := self._blocks.take_rest():
            self._replace(self._rendered(rest))

    def break_off(self) -> None:
        """End an answer that will not be complete."""
        self.finish()

    def make_way(self) -> None:
        """Let other output come; the unfinished block is drawn again below it."""
        self._replace("")

    def _draw(self) -> None:
        """Draw the unfinished block; of one that is higher than the screen its end."""
        lines = self._rendered(self._blocks.rest, n_before=self._n_written).splitlines()
        lines = lines[1 - max(2, self._console.size.height) :]
        self._erase_and_write("\n".join(lines))
        self._n_drawn = len(lines)

    def _replace(self, text: str) -> None:
        """Write finished lines in place of the unfinished block."""
        self._erase_and_write(text)
        self._n_drawn = 0

    def _erase_and_write(self, text: str) -> None:
        up = f"\x1b[{self._n_drawn - 1}A" if self._n_drawn > 1 else ""
        erase = f"\r{up}\x1b[J" if self._n_drawn else ""
        write_raw(erase + text)

    def _rendered(self, block: str, *, n_before: int | None = None) -> str:
        """Render a block, behind an empty line unless it is the first."""
        if n_before is None:
            n_before = self._n_written
            self._n_written += 1
        with self._console.capture() as captured:
            self._console.print(markdown(block))
        text = _PADDING.sub("", captured.get()).strip("\n")
        return ("\n" if n_before else "") + text + "\n"


class Blocks:
    """Divides markdown that streams into blocks that can be rendered alone."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._partial = ""
        self._fence = ""
        self._is_behind_blank = False

    @property
    def rest(self) -> str:
        """The block that has not ended."""
        return "".join([*self._lines, _shown(self._partial) if not self._fence else self._partial])

    def push(self, text: str) -> list[str]:
        """Add text; return the blocks that have ended.

        A block ends at an empty line, unless a code block is open or the next line is indented:
        that may belong to an item of a list.
        """
        done: list[str] = []
        *whole, self._partial = (self._partial + text).split("\n")
        for line in whole:
            self._end_before(line, done)
            self._add(line)
        self._end_before(self._partial, done)
        return done

    def take_rest(self) -> str:
        """Return the block that has not ended, "" for none, and forget it."""
        rest = self.rest
        self._lines, self._partial, self._fence = [], "", ""
        return rest if rest.strip() else ""

    def _end_before(self, line: str, done: list[str]) -> None:
        """End the block if this line, which may lack its end, begins another one."""
        if self._is_behind_blank and line and not line[0].isspace():
            if any(map(str.strip, self._lines)):
                done.append("".join(self._lines))
                self._lines = []
            self._is_behind_blank = False

    def _add(self, line: str) -> None:
        if self._fence:
            closing = line.strip()
            if closing.startswith(self._fence) and not closing.strip(self._fence[0]):
                self._fence = ""
        elif not line.strip():
            self._is_behind_blank = True
        elif found := _FENCE.match(line):
            self._fence = found[1]
        else:
            line = _shown(line)
        self._lines.append(f"{line}\n")


def markdown(text: str) -> Markdown:
    """Make markdown in which nothing of the text is lost: HTML is text, line ends stay."""
    from rich.markdown import Markdown

    made = Markdown(text, hyperlinks=False)
    for token in made.parsed:
        if token.type == "html_block":
            token.type = "fence"
        for inner in token.children or ():
            if inner.type == "html_inline":
                inner.type = "text"
            elif inner.type == "softbreak":
                inner.type = "hardbreak"
    return made


def _shown(line: str) -> str:
    """Escape the beginning of a line that would vanish."""
    return _VANISHES.sub(r"\1\\", line, count=1) if _VANISHES.match(line) else line
