"""Commands at a terminal: Ctrl-C, Ctrl-D, windows that are closed, and what is left of them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers.proxy import slow_link
from support.system.nodes import Crew, Machine
from support.system.parrot import LONG, Parrots
from support.system.terminals import CTRL_C, at_terminal

CTRL_D = "\x04"
PASTED = "\x1b[200~two\rlines: m\x1b[201~"
SHOW_CURSOR = "\x1b[?25h"

START = "import runpy, signal, sys; sys.argv = ['shardnet', 'cache', 'ls']\n"
RUN = "\nrunpy.run_module('shardnet_cli', run_name='__main__', alter_sys=True)"
EARLY = """
class Interrupts:
    def find_spec(self, name, *_):
        if name == "shardnet_cli.commands.cache":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
"""
LATE = "import atexit; atexit.register(signal.raise_signal, signal.SIGINT)"


def prompt(behind: str = "") -> re.Pattern[str]:
    """The prompt on the screen, drawn and ready for keys: text may be pasted, the cursor shows."""
    return re.compile(rf"{re.escape(behind)}.*\x1b\[\?2004h.*\x1b\[\?25h", re.DOTALL)


@pytest.fixture(scope="module")
def talker(parrots: Parrots, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "talker"
    shutil.copytree(parrots.alphabet, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    return folder


@pytest.fixture
def slow_trio(trio: Crew) -> Iterator[str]:
    """The addresses of the three nodes, where answers that go on keep no core busy."""
    with slow_link(trio.nodes[2].ready["port"]) as to_cleo:
        yield f"{trio.addresses(0, 1)},{to_cleo}"


def chat(talker: Path, addresses: str) -> list[str]:
    """A conversation in which every answer goes on for minutes."""
    options = ["--temperature", "0", "--context", str(LONG), "--max-tokens", str(LONG // 2)]
    return ["chat", "--model", str(talker), "--nodes", addresses, *options]


def test_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation(
    trio: Crew, slow_trio: str, talker: Path
) -> None:
    with at_terminal(trio.machine, *chat(talker, slow_trio)) as terminal:
        terminal.screen.wait_for(prompt())
        terminal.type("abc\n", "defgh")
        terminal.type(CTRL_C, prompt("(stopped)"))
        terminal.type("half a li", "i")
        terminal.type(CTRL_C, prompt("an answer)"))
        terminal.type(PASTED, "m")
        terminal.type("\r", "nopqr")
        terminal.type(CTRL_C, prompt("(stopped)"))
        terminal.type("/save said.json\r", prompt("(4 messages saved to said.json)"))
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
        assert terminal.has_its_settings()
        assert "Traceback" not in terminal.screen.text
    said = json.loads((trio.machine.folder / "said.json").read_text())["messages"]
    assert [one["content"] for one in said if one["role"] == "user"] == ["abc", "two\nlines: m"]
    assert trio.says("z", talker) == "abc"


def test_closing_the_window_frees_the_ring(
    trio: Crew, slow_trio: str, talker: Path, parrots: Parrots
) -> None:
    with at_terminal(trio.machine, *chat(talker, slow_trio)) as terminal:
        terminal.screen.wait_for(prompt())
        terminal.type("abc\n", "defgh")
        terminal.close()
        assert terminal.wait() == -signal.SIGHUP
    assert trio.says("z", parrots.signs) == "."


def test_sigterm_leaves_a_terminal_that_shows_what_is_typed(trio: Crew, talker: Path) -> None:
    with at_terminal(trio.machine, *chat(talker, trio.addresses())) as terminal:
        terminal.screen.wait_for(prompt())
        terminal.type("ab", "b")
        assert not terminal.has_its_settings()  # the line is being edited
        assert terminal.terminate() == -signal.SIGTERM
        assert terminal.has_its_settings()
        terminal.screen.wait_for(SHOW_CURSOR)


def test_an_error_does_not_stand_behind_the_text(
    machine: Machine, talker: Path, parrots: Parrots
) -> None:
    node, other = machine.start_nodes("anna", "bert")
    with slow_link(other.ready["port"]) as to_bert:
        conversing = chat(talker, f"{node.address},{to_bert}")
        with (
            at_terminal(machine, *conversing) as chatting,
            at_terminal(machine, "generate", "a", *conversing[1:]) as generating,
        ):
            chatting.screen.wait_for(prompt())
            generating.screen.wait_for("bcdef")
            chatting.type("abc\n", "defgh")
            seen = len(chatting.screen.text)
            node.kill()
            said = chatting.screen.wait_for(prompt(), after=seen)
            assert "\nerror: anna" in said, said
            assert generating.wait() == 1
            generating.screen.wait_for("\nerror: anna")


@pytest.mark.parametrize(("moment", "code"), [(EARLY, 130), (LATE, -signal.SIGINT)])
def test_no_ctrl_c_shows_a_traceback(machine: Machine, moment: str, code: int) -> None:
    """While the command is still being imported, and when it is done."""
    done = subprocess.run(
        [sys.executable, "-c", START + moment + RUN],
        check=False,
        capture_output=True,
        text=True,
        env=machine.environment,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr
