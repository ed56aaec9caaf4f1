"""Real processes of the `shardnet` command, each with a deadline and an end.

A `Machine` pretends to be a machine of its own: its nodes and commands share a home, a
configuration and a register of nodes that nobody else sees. Knows processes, not models.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, ClassVar

import psutil
from support.system.netns import namespace_of
from support.system.parrot import LONG
from support.system.warm_start import WarmProcess, is_possible
from typer.testing import CliRunner

from shardnet.api.client import connect
from shardnet.cluster.machine.folders import RUNTIME_DIR_VARIABLE
from shardnet.cluster.measuring.figure_cache import FOLDER
from shardnet.errors import ShardnetError
from shardnet.wire.messages.plans import ModelChoice
from shardnet_cli.main import app

START_S = 120.0
"""How long a node may take to its ready line."""
COMMAND_S = 120.0
"""How long a command may take, and a line in a log may be waited for."""
STOP_S = 60.0
"""How long a process may take to leave when it was told to."""
FIGURES_VARIABLE = "SHARDNET_TESTS_FIGURES"
"""Names the folder of what machines measure; their processes do not see it."""
COPIED = frozenset(
    {
        *("bench", "cache", "doctor", "generate", "key", "node", "nodes"),
        *("plan", "pull", "status", "unload"),
    }
)
"""Commands that tests run again and again. Each is also started as a user starts it: by `begin`, by
a shell, or with --local."""


Layers = Sequence[tuple[int, int]]


class Output:
    """What a process writes to one of its pipes, as it comes.

    Whoever looks at it sees all that was written until then: nothing waits for a thread of ours.
    """

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._bytes = bytearray()
        self._grown = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """Everything so far."""
        with self._grown:
            self._take_in()
            return self._bytes.decode()

    def wait_for(
        self, part: str | re.Pattern[str], *, after: int = 0, deadline_s: float = COMMAND_S
    ) -> str:
        """Wait until `part` stands somewhere behind `after` characters; return everything so far.

        Fails when the output ends without it, or at the deadline.
        """
        end = time.monotonic() + deadline_s
        pattern = re.compile(re.escape(part)) if isinstance(part, str) else part
        with self._grown:
            while not pattern.search(self._bytes.decode(errors="replace")[after:]):
                left = end - time.monotonic()
                said = self._bytes.decode(errors="replace")
                assert not self._ended, f"the output ended without {part!r}: {said}"
                assert left > 0, f"no {part!r} within {deadline_s} s: {said}"
                self._grown.wait(left)
            return self._bytes.decode(errors="replace")

    def close(self) -> str:
        """Wait for the end and return everything."""
        self._reader.join(STOP_S)
        assert not self._reader.is_alive(), "a process that is gone left its pipe open elsewhere"
        return self.text

    def _read(self) -> None:
        while not self._ended:
            _wait_readable(self._pipe)
            with self._grown:
                self._take_in()
        self._pipe.close()

    def _take_in(self) -> None:
        """Read what is there, without waiting. The lock is held."""
        while not self._ended and _wait_readable(self._pipe, timeout_ms=0):
            chunk = os.read(self._pipe.fileno(), 1 << 16)
            self._bytes += chunk
            self._ended = not chunk
            self._grown.notify_all()


def _wait_readable(pipe: IO[bytes], timeout_ms: int | None = None) -> bool:
    """Wait until a pipe has bytes, or has ended. Tells whether it has."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(timeout_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The one JSON value on standard output of a command that succeeded."""
        assert self.code == 0, self.stderr
        assert self.stdout.count("\n") == 1, self.stdout
        return json.loads(self.stdout)

    @property
    def error(self) -> str:
        """The one line that says why a command failed, without its `error: `."""
        assert self.code == 1, (self.code, self.stderr)
        assert self.stdout == ""
        return self.error_line

    @property
    def error_line(self) -> str:
        """As `error`, where text had been streamed before the failure."""
        assert "Traceback" not in self.stderr, self.stderr
        lines = self.stderr.splitlines()
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:], self.stderr
        return lines[-1].removeprefix("error: ")


class Command:
    """A running command."""

    running: ClassVar[weakref.WeakSet[Command]] = weakref.WeakSet()
    """All that somebody still holds."""

    def __init__(self, process: subprocess.Popen[bytes] | WarmProcess) -> None:
        self.running.add(self)
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.stdout = Output(process.stdout)
        self.stderr = Output(process.stderr)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, deadline_s: float = COMMAND_S) -> Result:
        """Wait for its end. Kills it and fails at the deadline."""
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"no end within {deadline_s} s: {self.process.args!r}: {self.stderr.text}"
            ) from None
        return Result(code=code, stdout=self.stdout.close(), stderr=self.stderr.close())

    def kill(self) -> None:
        """End it at once, frozen or not."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.stdout.close()
        self.stderr.close()


class NodeProcess(Command):
    """A `shardnet node` that is ready. `ready` is its ready line."""

    def __init__(self, process: subprocess.Popen[bytes] | WarmProcess) -> None:
        super().__init__(process)
        self.ready: dict[str, Any] = {}
        self._told = False

    @property
    def log(self) -> str:
        """What it said on standard error."""
        return self.stderr.text

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"{self.ready['host']}:{self.ready['port']}"

    @property
    def private_bytes(self) -> int:
        """Memory that is freed when the process ends."""
        return int(psutil.Process(self.pid).memory_full_info().uss)

    def wait_until_ready(self) -> None:
        """Wait for the ready line."""
        self.ready = json.loads(self.stdout.wait_for("\n", deadline_s=START_S))

    def tell_to_leave(self) -> None:
        """Send it SIGTERM, once: a second one would end it on the spot."""
        if not self._told:
            self._told = True
            self.signal(signal.SIGTERM)

    def stop(self) -> None:
        """Have it leave, and check that it does so by itself and was never surprised."""
        self.tell_to_leave()
        result = self.wait(STOP_S)
        assert result.code == 0, (result.code, result.stderr)
        check_log(result.stderr)

    def freeze(self) -> None:
        """Stop it where it stands."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)


def check_log(log: str) -> None:
    """Fail when a log shows an error that nobody foresaw."""
    for surprise in ("Traceback", "never retrieved", "was never awaited", "Warning"):
        assert surprise not in log, log


class Machine:
    """A pretended machine under `folder`.

    `prefix` comes before each command line, to run it elsewhere. Unless `environment` says
    otherwise, its nodes and commands neither announce nor look for nodes by mDNS. Unless it
    `makes_copies`, which costs less, all are started as a user's are. Where it `is_measured` it
    knows how fast others have found themselves, none of whom measured for long: in truth all are
    this one. `python` runs what is started.
    """

    node_type = NodeProcess

    def __init__(
        self,
        folder: Path,
        *,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({"SHARDNET_NO_MDNS": "1"}),
        makes_copies: bool = is_possible(),
        is_measured: bool = True,
        python: str = sys.executable,
    ) -> None:
        self._prefix = tuple(prefix)
        self._python = python
        self._namespace = namespace_of(self._prefix)
        self.makes_copies = makes_copies and bool(self._namespace or not prefix)
        self._measures_well = not is_measured
        self.folder = folder
        self.runtime_dir = folder / "run"
        self.config_path = folder / "config" / "shardnet" / "config.toml"
        self.config_path.parent.mkdir(parents=True)
        figures = os.environ.get(FIGURES_VARIABLE) if is_measured else None
        if figures is not None:
            (folder / "cache").mkdir()
            (folder / "cache" / FOLDER).symlink_to(figures)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SHARDNET_") or name == "SHARDNET_ISA"
        }
        self.environment = inherited | {
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "SHARDNET_CACHE_DIR": str(folder / "cache"),
            RUNTIME_DIR_VARIABLE: str(self.runtime_dir),
            "SHARDNET_NO_SPIN": "1",  # other tests have a use for the cores
            **environment,
            "PYTHONWARNINGS": "error::ResourceWarning",
            "COLUMNS": "200",
        }
        self._commands: list[Command] = []

    def command_line(self, *arguments: str, module: str = "shardnet_cli") -> list[str]:
        """What runs a command of this machine."""
        return [*self._prefix, self._python, "-m", module, *arguments]

    def start_nodes(
        self,
        *names: str,
        arguments: Sequence[str] = (),
        cwd: Path | None = None,
        module: str = "shardnet_cli",
    ) -> list[NodeProcess]:
        """Start nodes on free ports, one compute thread each, and wait until all are ready.

        Another `module` is one that becomes `shardnet_cli`.
        """
        nodes = [
            self.node_type(
                self._start_node(
                    ["node", "--json", "--port", "0", "--name", name, "--threads", "1", *arguments],
                    cwd or self.folder,
                    module,
                )
            )
            for name in names
        ]
        self._commands += nodes
        for node in nodes:
            node.wait_until_ready()
        return nodes

    def begin(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
    ) -> Command:
        """Start a command as a user does and return while it runs."""
        command = Command(self._start(arguments, environment=environment, stdin=stdin))
        self._commands.append(command)
        return command

    def run(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stdin: str | None = None,
        deadline_s: float = COMMAND_S,
    ) -> Result:
        """Run a command to its end. Those in COPIED are copies, which saves 0.5 s of CPU each."""
        if arguments[0] in COPIED and "--local" not in arguments:
            copy = self.begin_copy(*arguments, environment=environment, stdin=stdin)
            return copy.wait(deadline_s)
        return self.begin(*arguments, environment=environment, stdin=stdin).wait(deadline_s)

    def begin_copy(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
    ) -> Command:
        """Start a command as a copy, where this machine makes them, and return while it runs."""
        if not self.makes_copies:
            return self.begin(*arguments, environment=environment, stdin=stdin)
        its_environment = {**self.environment, **(environment or {})}
        command = Command(
            WarmProcess(
                *(arguments, its_environment, self.folder, self._namespace),
                typed=stdin or "",
                measures_well=self._measures_well,
            )
        )
        self._commands.append(command)
        return command

    def call(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stdin: str | None = None,
    ) -> Result:
        """Run a command inside this process, which is 0.3 s faster than `run`."""
        its_environment = {**os.environ, **self.environment, **(environment or {})}
        outcome = CliRunner(env=its_environment).invoke(
            app, arguments, input=stdin, catch_exceptions=False
        )
        return Result(code=outcome.exit_code, stdout=outcome.stdout, stderr=outcome.stderr)

    def nodes_with(self, *names: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
        """What `shardnet nodes` lists, by name, once these are listed.

        It leaves out who does not answer at once, as happens on a busy machine.
        """
        while True:
            listed = self._ask("nodes", "--json", *arguments).json
            found = {node["name"]: node for node in listed}
            if set(names) <= found.keys():
                return found

    def status(self, *arguments: str, until: Callable[[str], bool] = lambda told: True) -> str:
        """What `shardnet status` tells of one node, once `until` holds for it.

        It gives up a node that takes seconds to answer, as happens on a busy machine.
        """
        while True:
            result = self._ask("status", *arguments)
            if result.code == 0 and until(result.stdout):
                return result.stdout
            late = "did not tell its state" in result.stderr or "no answer within" in result.stderr
            assert result.code == 0 or late, result.stderr

    def state(
        self, node: NodeProcess, until: Callable[[Any], bool] = lambda told: True
    ) -> dict[str, Any]:
        """What `shardnet status --json` tells of a node, once `until` holds for it."""
        told: dict[str, Any] = json.loads(
            self.status("--json", "--nodes", node.address, until=lambda s: until(json.loads(s)))
        )
        return told

    def _ask(self, *arguments: str) -> Result:
        """Run a command that is asked again and again: inside this process where that can be."""
        return self.run(*arguments) if self._prefix else self.call(*arguments)

    def processes(self) -> list[psutil.Process]:
        """All processes that were started for this machine and live, whoever started them.

        Copied nodes are not among them: the system tells their server's environment as theirs.
        """
        mark = (RUNTIME_DIR_VARIABLE, str(self.runtime_dir))
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if mark in process.environ().items():
                    found.append(process)
        return found

    def close(self) -> None:
        """End everything that still runs; fail if a node does not leave properly."""
        running = [command for command in self._commands if command.process.poll() is None]
        try:
            nodes = [command for command in running if isinstance(command, NodeProcess)]
            for node in nodes:
                node.tell_to_leave()
            for node in nodes:
                node.stop()
        finally:
            for command in running:
                command.kill()

    def _start_node(
        self, arguments: Sequence[str], cwd: Path, module: str = "shardnet_cli"
    ) -> subprocess.Popen[bytes] | WarmProcess:
        if self.makes_copies:
            return WarmProcess(
                *(arguments, self.environment, cwd, self._namespace, module),
                measures_well=self._measures_well,
            )
        return self._start(arguments, cwd=cwd, module=module)

    def _start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        cwd: Path | None = None,
        module: str = "shardnet_cli",
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self.command_line(*arguments, module=module),
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self.environment, **(environment or {})},
            cwd=cwd or self.folder,
        )
        if process.stdin is not None and stdin is not None:
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(stdin if isinstance(stdin, bytes) else stdin.encode())
        return process


@contextmanager
def open_machine(
    folder: Path, *, is_measured: bool = True, python: str = sys.executable
) -> Iterator[Machine]:
    """Give a machine in a new folder, and end all its processes afterwards.

    Those that another `python` runs are no copies.
    """
    folder.mkdir(parents=True)
    makes_copies = is_possible() and python == sys.executable
    machine = Machine(folder, is_measured=is_measured, python=python, makes_copies=makes_copies)
    try:
        yield machine
    finally:
        machine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Some nodes of one machine."""

    machine: Machine
    nodes: list[NodeProcess]

    def addresses(self, *numbers: int) -> str:
        """The nodes of these numbers as --nodes takes them; all without any."""
        return ",".join(self.nodes[number].address for number in numbers or range(len(self.nodes)))

    def generate(self, prompt: str, model: Path, *arguments: str) -> Result:
        """Run `shardnet generate` to its end, inside this process."""
        return self.machine.call("generate", prompt, "--model", str(model), *arguments)

    def says(self, prompt: str, model: Path, *numbers: int, layers: Layers = ()) -> str:
        """Three tokens that these nodes make, asked for without a process of its own.

        `layers` are those of each stage; none: as planned.
        """
        return asyncio.run(_text(prompt, model, self.addresses(*numbers).split(","), layers))

    def say_at_once(self, requests: Sequence[tuple[str, Path]], *numbers: int) -> list[str]:
        """What these nodes answer to prompts for models at one moment: texts, or refusals."""

        async def say(prompt: str, model: Path) -> str:
            try:
                return await _text(prompt, model, self.addresses(*numbers).split(","))
            except ShardnetError as error:
                return str(error)

        async def say_all() -> list[str]:
            return await asyncio.gather(*(say(*request) for request in requests))

        return asyncio.run(say_all())

    def begin(self, model: Path, addresses: str = "") -> Command:
        """Start a generation that goes on for minutes, and wait until it is under way."""
        running = self.machine.begin_copy(
            *("generate", "a", "--model", str(model), "--nodes", addresses or self.addresses()),
            *("--context", str(LONG), "--max-tokens", str(LONG - 1)),
        )
        running.stdout.wait_for("bcd")
        return running


async def _text(prompt: str, model: Path, addresses: list[str], layers: Layers = ()) -> str:
    choice = ModelChoice(model=str(model), nodes=addresses, layers=[*layers])
    async with connect(addresses[0]) as client:
        [result] = await client.complete(prompt, model=choice, max_tokens=3)
        return result.text
