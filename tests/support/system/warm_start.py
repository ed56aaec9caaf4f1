"""Nodes and commands that begin as copies of one process which has imported torch.

That saves 2 s of CPU for each node, 0.5 s for each command.

Python's fork server makes the copies: one server for each process that runs tests. A copy has the
arguments, the environment and the folder that it is given, and runs the same `__main__` as
`python -m shardnet_cli`. Knows nothing of what the processes say or do.

What is not tested this way is Python's own start and end; the nodes of `--local`, one of
the walkthrough and those that a shell starts are started as users start them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from shardnet.runtime.loading import measuring

PRELOADED = [
    "torch",
    "shardnet.cluster.node.node",
    "shardnet.cluster.member.stage_host",
    "shardnet_cli.main",
    "zeroconf.asyncio",
    *(f"shardnet_cli.commands.{name}" for name in ("node", "generate", "plan", "status", "chat")),
    *(f"shardnet_cli.commands.{name}" for name in ("bench", "cache", "doctor", "key", "nodes")),
    *(f"shardnet_cli.commands.{name}" for name in ("pull",)),
    "shardnet.cluster.diagnosis.facts",
    "shardnet.model.fused.layers",
    "shardnet.model.drivers.opencl",
    "shardnet.runtime.stage.torch_compute",
    *(f"shardnet.stage.{name}" for name in ("load", "packs.pack_writer", "moves.slot_moves")),
    "shardnet.stage.stage_audit",
    "shardnet.stage.prefixes.stage_prefixes",
    "shardnet.stage.streaming.layer_stream",
    "shardnet.stage.synthetic_model",
    "shardnet.tokenizers.grammar.matcher",
    *("filelock", "httpcore2", "httpx2", "yaml"),  # of what huggingface_hub imports
    "encodings.idna",
    "rich.progress",
    "typer._adapters",  # with pydantic, where that is installed
    "uvloop",
]
"""What a node has imported when it serves a model, or leads to it, and what commands import as they
run. None of it reads the environment or starts a thread of ours when it is imported."""

CLONE_NEWNET = 0x40000000
"""Linux's number for network namespaces; Python knows it from 3.12 on."""


def is_possible() -> bool:
    """Whether a process with torch in it may be copied here; not so on macOS."""
    return sys.platform == "linux"


@contextlib.contextmanager
def server() -> Iterator[None]:
    """Have the process that is copied, and wait for its end, which nobody else does."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


class WarmProcess:
    """`python -m shardnet_cli` as a copy; has what tests use of subprocess.Popen.

    It has the network of this process, or that of the `namespace` of this name, and reads what is
    `typed`; or it leads a session at the `terminal` of this descriptor. Another `module` than
    `shardnet_cli` is one that becomes it. Unless it `measures_well` it spends a tenth of a second
    on a figure for which others take one or two.
    """

    stdin = None

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        namespace: str = "",
        module: str = "shardnet_cli",
        typed: str | bytes = "",
        *,
        measures_well: bool = False,
        terminal: int | None = None,
    ) -> None:
        self.args = [module, *arguments]
        context = multiprocessing.get_context("forkserver")
        stdout, its_stdout = context.Pipe(duplex=False)
        stderr, its_stderr = context.Pipe(duplex=False)
        its_terminal = None if terminal is None else Connection(os.dup(terminal))
        with stdout, stderr, its_stdout, its_stderr, its_terminal or contextlib.nullcontext():
            self._process = context.Process(
                target=_run,
                args=(
                    *(self.args, environment, cwd, namespace, typed, measures_well),
                    *(its_stdout, its_stderr, its_terminal),
                ),
                daemon=True,
            )
            self._process.start()
            self.stdout: IO[bytes] = os.fdopen(os.dup(stdout.fileno()), "rb")
            self.stderr: IO[bytes] = os.fdopen(os.dup(stderr.fileno()), "rb")
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, once there is one; minus the signal's number if one ended it."""
        if self._code is None and (code := self._process.exitcode) is not None:
            self._code = code
            self._process.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired, as Popen does."""
        if self._code is None:
            self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal unless it is gone."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    namespace: str,
    typed: str | bytes,
    measures_well: bool,
    stdout: Connection,
    stderr: Connection,
    terminal: Connection | None,
) -> None:
    """Be the command, in the copy."""
    if namespace:
        _enter(namespace)
    gc.freeze()  # what the server has imported is not looked through again
    for ending in weakref.finalize._registry:  # type: ignore[attr-defined]
        ending.atexit = False  # torch would take back each operator that it has imported: 0.05 s
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for pipe, descriptor in ((stdout, 1), (stderr, 2)):
        os.dup2(pipe.fileno(), descriptor)
        pipe.close()
    before = sys.stdout  # that of the server, which may be a file and take a place in it
    raw = io.BufferedWriter(io.FileIO(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(raw, encoding=before.encoding, errors=before.errors)
    if terminal is not None:
        _sit_at(terminal)
    elif typed:
        _type(typed)
    if not measures_well:
        measuring.WINDOW_S, measuring.FIGURE_S, measuring.CHUNK_S = 0.02, 0.1, 0.1
    warnings.simplefilter("error", ResourceWarning)
    sys.argv = [*command]
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    finally:
        gc.collect()  # what is dropped while it still has something to say would say so now
        atexit._run_exitfuncs()


def _type(text: str | bytes) -> None:
    """Have this on standard input, whole and at its end."""
    file = os.memfd_create("typed")
    os.write(file, text if isinstance(text, bytes) else text.encode())
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)


def _sit_at(terminal: Connection) -> None:
    """Lead a session whose terminal this is, and write lines to it as they are done."""
    os.setsid()
    for descriptor in range(3):
        os.dup2(terminal.fileno(), descriptor)
    terminal.close()
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # from now on it has the session's signals
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _enter(namespace: str) -> None:
    """Leave this network for another one, as `ip netns exec` does; threads to come go along."""
    with Path("/run/netns", namespace).open(encoding="utf-8") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
