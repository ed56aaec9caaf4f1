"""Every process ends with the code of what it did: threads that compute end before Python does.

The commands are real processes, since what is tested is Python's own end. The long form ends each
forty times, with a model of half a gigabyte.
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
from support.soak import cases, is_soak
from support.system.nodes import Command, open_machine

from shardnet.assets import DEFAULT_MODEL_PATH

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_checkpoint.py"
N_ENDS = 40 if is_soak() else 1
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
USUAL = ["generate"]
"""A node that is told to leave does so in test_gone_readers.py, a server that is interrupted in
test_http_server.py."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not is_soak():
        yield DEFAULT_MODEL_PATH
        return
    folder = tmp_path_factory.mktemp("half-a-gigabyte")
    subprocess.run([sys.executable, str(SCRIPT), str(folder), *HALF_A_GB], check=True)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", cases(USUAL, sorted(KINDS.keys() - set(USUAL))))
def test_a_process_ends_with_the_code_of_what_it_did(
    kind: str, model: Path, tmp_path: Path
) -> None:
    arguments, end, expected = KINDS[kind]
    context = "2048" if is_soak() else "1024"
    chosen = [] if arguments[0] == "node" else ["--model", str(model), "--context", context]
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
