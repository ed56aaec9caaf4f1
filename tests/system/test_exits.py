"""Every process ends with the code of what it did: threads that compute end before Python does.

The commands are real processes, since what is tested is Python's own end: each ends forty times,
with a model of half a gigabyte.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.soak import is_soak
from support.system.nodes import Command, open_machine

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_checkpoint.py"
N_ENDS = 40
HALF_A_GB = ["--layers", "6", "--hidden", "1536", "--intermediate", "4096"]
End = Callable[[Command], None]


def by_itself(command: Command) -> None:
    """The command ends when it is done."""


def by_signal(mark: str | re.Pattern[str], number: signal.Signals) -> End:
    """End it by a signal when it has printed `mark`."""

    def end(command: Command) -> None:
        command.stdout.wait_for(mark)
        command.signal(number)

    return end


KINDS: dict[str, tuple[list[str], End, int]] = {
    "generate": (["generate", "a", "--max-tokens", "3"], by_itself, 0),
    "node-term": (["node", "--port", "0"], by_signal("ready", signal.SIGTERM), 0),
    "serve": (["serve", "--port", "0"], by_signal("http", signal.SIGINT), 0),
    "generate-interrupted": (
        ["generate", "a", "--max-tokens", "2000", "--ignore-eos"],
        by_signal(re.compile("..", re.DOTALL), signal.SIGINT),
        130,
    ),
    "node-interrupted": (["node", "--port", "0"], by_signal("ready", signal.SIGINT), 0),
    "plan": (["plan"], by_itself, 0),
    "chat": (["chat", "--max-tokens", "3"], by_itself, 0),
    "bench": (["bench", "--rounds", "1", "--tokens", "4", "--prompt", "8"], by_itself, 0),
}
"""In the suite a text ends in test_unusable_folders.py, a node that is told to leave in
test_gone_readers.py, and a server that is interrupted in test_http_server.py."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("half-a-gigabyte")
    subprocess.run([sys.executable, str(SCRIPT), str(folder), *HALF_A_GB], check=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_ends_with_the_code_of_what_it_did(
    kind: str, model: Path, tmp_path: Path
) -> None:
    arguments, end, expected = KINDS[kind]
    chosen = [] if arguments[0] == "node" else ["--model", str(model), "--context", "2048"]
    ends = []
    with open_machine(tmp_path / "machine") as machine:
        for _ in range(N_ENDS):
            command = machine.begin(
                *arguments, *chosen, "--threads", "2", stdin="hello\n" if kind == "chat" else None
            )
            end(command)
            result = command.wait()
            ends.append((result.code, "terminate" in result.stderr or "Traceback" in result.stderr))
    assert ends == [(expected, False)] * N_ENDS
