"""`shardnet pull`: a model of the Hub into this machine's cache."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from shardnet.errors import ShardnetError
from shardnet.model.hub_cache import HubName

from .options import Json
from .run import EXIT_INTERRUPTED, fail, say
from .texts import print_json

if TYPE_CHECKING:
    from rich.progress import TaskID

    from shardnet.cluster.hub import PulledModel


def pull(
    model: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="A model of the Hugging Face Hub, or NAME.")
    ],
    revision: Annotated[
        str, typer.Option("--revision", metavar="REV", help="A branch, tag or commit of it.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Download a model from the Hugging Face Hub to this machine.

    Config, tokenizer and safetensors come, never code. They lie in the cache that huggingface_hub
    keeps (HF_HOME), so other programs share them. Nodes then take --model ORG/NAME, and those that
    lack it fetch their layers from here. A download that broke goes on where it stopped.
    """
    text = f"{model}@{revision}" if revision else model
    name = HubName.parse(text)
    if name is None:
        raise typer.BadParameter(f"'{text}' is not ORG/NAME or NAME")
    from shardnet.cluster import hub

    with _Bars() as bars:
        try:
            pulled = hub.pull(name, bars.update)
        except ShardnetError as error:
            bars.stop()
            fail(str(error))
        except KeyboardInterrupt:
            bars.stop()
            say("interrupted: run the command again to go on where it stopped")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        print_json(_as_object(pulled))
        return
    for file in sorted(pulled.files, key=lambda file: -file.size_bytes):
        digest = f"  sha256 {file.sha256}" if file.sha256 else ""
        say(f"  {file.name}  {file.size_bytes / 2**20:.1f} MiB{digest}")
    news = f"{pulled.n_new_bytes / 2**20:.1f} MiB came" if pulled.n_new_bytes else "nothing is new"
    say(f"{pulled.name} (commit {pulled.commit[:12]}): {news}; use it with --model {pulled.name}")
    print(pulled.folder)


def _as_object(pulled: PulledModel) -> dict[str, Any]:
    return {
        "model": pulled.name,
        "commit": pulled.commit,
        "folder": str(pulled.folder),
        "files": [msgspec.to_builtins(file) for file in pulled.files],
        "new_bytes": pulled.n_new_bytes,
    }


class _Bars:
    """One bar of all bytes on a terminal, with the file that comes; elsewhere a line per file."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        self._is_terminal = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar: TaskID | None = None
        self._file = ""

    def __enter__(self) -> _Bars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def update(self, file: str, done: int, total: int) -> None:
        """Show how far it is (hub.Report)."""
        if self._bar is None:
            self._progress.start()
            self._bar = self._progress.add_task(file, total=total, completed=done)
        if file != self._file:
            self._file = file
            if not self._is_terminal:
                say(f"{file}: from {done / 2**20:.1f} of {total / 2**20:.1f} MiB on")
        self._progress.update(self._bar, description=file, completed=done, total=total)

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()
