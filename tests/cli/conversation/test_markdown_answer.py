"""Answers as markdown: what the screen shows at the end, however the text came."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterable

import pytest
from rich.console import Console

from shardnet_cli.conversation.markdown_answer import Blocks, MarkdownAnswer, open_answer
from shardnet_cli.output.exit_codes import StreamedText

ANSWER = """# Why the sky is *blue*

Light of **short** waves is scattered more:
line two, and `code` with <b>tags</b>
<think>
hidden?
</think>

1. one

   more of one, with a line that is longer than the screen is wide

2. two
[target]: http://example.com

| a | b |
|---|---|
| 1 | 2 |

```python
def f():

    return "# no heading"
```
[a link](http://hidden.example) \x1b[31mred
"""


def shown(written: str, width: int) -> list[str]:
    """The lines of a terminal that got this, without colours."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[AJ]|\x1b\[[\d;]*m|.|\n", written):
        if part == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append("")
        elif part == "\r":
            column = 0
        elif part.endswith("A") and len(part) > 1:
            row -= int(part[2:-1])
            assert row >= 0
        elif part == "\x1b[J":
            lines[row:] = [lines[row][:column]]
        elif len(part) == 1:
            assert column < width
            lines[row] = lines[row][:column].ljust(column) + part
            column += 1
    return [line.rstrip() for line in lines]


class Stopwatch:
    """A clock that goes on by `step_s` at every look."""

    def __init__(self, step_s: float) -> None:
        self._now_s, self._step_s = 0.0, step_s
        self.n_looks = 0

    def __call__(self) -> float:
        self._now_s += self._step_s
        self.n_looks += 1
        return self._now_s


def written(
    capsys: pytest.CaptureFixture[str],
    pieces: Iterable[str],
    *,
    height: int = 50,
    step_s: float = 1,
) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, height=height)
    answer = MarkdownAnswer(console, Stopwatch(step_s))
    for piece in pieces:
        answer.write(piece)
    answer.finish()
    return capsys.readouterr().out


def chunks(text: str, seed: int) -> Iterable[str]:
    draw = random.Random(seed)
    while text:
        n = draw.randint(1, 9)
        yield text[:n]
        text = text[n:]


@pytest.mark.parametrize("height", [50, 4])
def test_how_text_comes_changes_nothing_on_the_screen(
    capsys: pytest.CaptureFixture[str], height: int
) -> None:
    """A block that is higher than the screen is drawn by its end, and whole when it is done."""
    whole = shown(written(capsys, [ANSWER]), 40)
    for seed in range(3):
        pieces = chunks(ANSWER, seed)
        assert shown(written(capsys, pieces, height=height, step_s=0.02), 40) == whole


def test_nothing_of_an_answer_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """HTML is text, a line end stays one, an address is seen, and code is code."""
    lines = shown(written(capsys, [ANSWER]), 40)
    for line in (
        "Light of short waves is scattered more:",
        "line two, and code with <b>tags</b>",
        "<think>",
        "hidden?",
        "</think>",
    ):
        assert line in lines
    text = "\n".join(lines)
    for part in (
        *("1 one", "more of one", "2 two", "[target]: http://example.com", "(http://hidden.exa"),
        *('    return "# no heading"', "a link", r"\u001b[31mred"),
    ):
        assert part in text
    assert "**" not in text
    assert "```" not in text
    assert text.index("Why the sky") < text.index("more of one") < text.index("no heading")


def test_blocks_end_at_empty_lines_outside_of_code() -> None:
    blocks = Blocks()
    assert blocks.push("a\n\n  indented\n\n~~~~\n\n~~~\nb\n") == ["a\n\n  indented\n\n"]
    assert blocks.push("~~~~\n\n\n\nc") == ["~~~~\n\n~~~\nb\n~~~~\n\n\n\n"]
    assert blocks.take_rest() == "c"
    assert blocks.take_rest() == ""


def test_drawing_takes_a_tenth_of_the_time_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    """With a clock that goes on at each look: one for a piece, one more for a drawing."""
    n_pieces = 400
    n_drawn = written(capsys, ["word "] * n_pieces, step_s=1).count("\x1b[J")
    assert 30 < n_drawn <= (n_pieces + n_drawn) / 9.5


def test_text_goes_elsewhere_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for plain in (True, False):  # here standard output is no terminal
        answer = open_answer(plain=plain)
        assert type(answer) is StreamedText
        answer.write("# **a**\n\n<b>")
        answer.finish()
        assert capsys.readouterr().out == "# **a**\n\n<b>\n"


def test_other_output_comes_before_the_block_that_is_not_finished(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, height=50)
    answer = MarkdownAnswer(console, Stopwatch(1))
    for piece in ("# One\n\ntwo *thr", "ee* ```fo"):
        answer.write(piece)
    answer.make_way()
    before = capsys.readouterr().out + "waiting\n"
    answer.write("ur``` five")
    answer.finish()
    lines = [line for line in shown(before + capsys.readouterr().out, 40) if line.strip()]
    assert [line.strip() for line in lines[-2:]] == ["waiting", "two three four five"]
