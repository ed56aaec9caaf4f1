"""`--save-logits`, `--save-hidden`, `--record-routing`: which rows are asked for, and their files.

Knows the flags and the layout of the files: numpy's .npz with the rows of all prompts one behind
the other, `offsets` (prompt number i has the rows offsets[i] to offsets[i + 1]) and the `positions`
of the rows. Must not know how rows come here.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from shardnet.api.events import GenerationResult, Routing, Rows
from shardnet.errors import SamplingError, UsageError
from shardnet.types import ALL_ROWS, OutputKind, OutputParams

from .exit_codes import say

if TYPE_CHECKING:  # the command line starts faster without
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFlags:
    """The flags as they were given: "" where one was not."""

    save_logits: Annotated[
        str,
        typer.Option("--save-logits", metavar="FILE.npz", help="Save the raw logits of rows."),
    ] = ""
    logits_rows: Annotated[
        str,
        typer.Option(
            "--logits-rows",
            metavar="all|last|K",
            help="Of all rows, those of the prompt and of new tokens but the last, or of the last "
            "K. Default: all.",
        ),
    ] = ""
    save_hidden: Annotated[
        str,
        typer.Option("--save-hidden", metavar="FILE.npz", help="Save the hidden states of rows."),
    ] = ""
    hidden_rows: Annotated[
        str,
        typer.Option(
            "--hidden-rows",
            metavar="all|last|K|mean",
            help="As --logits-rows, or the mean of all. Default: all.",
        ),
    ] = ""
    hidden_before_norm: Annotated[
        bool,
        typer.Option(
            "--hidden-before-norm", help="Hidden states in front of the final norm, not behind it."
        ),
    ] = False
    record_routing: Annotated[
        str,
        typer.Option(
            "--record-routing",
            metavar="FILE.npz",
            help="Save which experts each row visited, layer by layer.",
        ),
    ] = ""

    def files(self) -> dict[OutputKind, Path]:
        """Give the file of each kind. Raises typer.BadParameter for one that cannot be made."""
        named = {
            OutputKind.LOGITS: ("--save-logits", self.save_logits),
            OutputKind.HIDDEN: ("--save-hidden", self.save_hidden),
            OutputKind.ROUTING: ("--record-routing", self.record_routing),
        }
        files: dict[OutputKind, Path] = {}
        for kind, (flag, name) in named.items():
            path = _path(name, flag) if name else None
            for other, taken in files.items():
                if path == taken:
                    raise typer.BadParameter(
                        f"{name} is that of {named[other][0]} too", param_hint=flag
                    )
            if path is not None:
                files[kind] = path
        return files

    def outputs(self, n_prompt_logprobs: int | None) -> OutputParams:
        """Say what to ask for. Raises typer.BadParameter for what cannot be."""
        is_mean = self.hidden_rows == "mean"
        outputs = OutputParams(
            n_prompt_logprobs=n_prompt_logprobs,
            logit_rows=_rows(self.save_logits, "--save-logits", self.logits_rows, "--logits-rows"),
            hidden_rows=_rows(
                self.save_hidden,
                "--save-hidden",
                "all" if is_mean else self.hidden_rows,
                "--hidden-rows",
            ),
            hidden_mean=is_mean,
            before_norm=self.hidden_before_norm,
            routing=bool(self.record_routing),
        )
        if self.hidden_before_norm and not self.save_hidden:
            raise typer.BadParameter("give --save-hidden too", param_hint="--hidden-before-norm")
        try:
            outputs.check()
        except SamplingError as error:
            raise typer.BadParameter(str(error)) from error
        return outputs


@dataclass(slots=True)
class SavedRows:
    """The rows of all prompts, kept until they are written. A context: nothing is left half done.

    Entering it raises UsageError where a file cannot be made, before anybody is asked anything.
    """

    files: dict[OutputKind, Path]
    n_prompts: int
    _rows: dict[tuple[OutputKind, int], Rows | Routing] = field(default_factory=dict)

    def __enter__(self) -> Self:
        for path in self.files.values():
            with _naming(path):
                _half(path).touch()
        return self

    def __exit__(self, *_: object) -> None:
        for path in self.files.values():
            with suppress(OSError):
                _half(path).unlink()

    def take(self, result: GenerationResult) -> None:
        """Keep the rows of a prompt."""
        given = {
            OutputKind.LOGITS: result.logits,
            OutputKind.HIDDEN: result.hidden,
            OutputKind.ROUTING: result.routing,
        }
        for kind, rows in given.items():
            if rows is not None and kind in self.files:
                self._rows[kind, result.index] = rows

    def write(self) -> None:
        """Write the files. Raises UsageError when the system does not let us."""
        for kind, path in self.files.items():
            parts = [self._rows.get((kind, index)) for index in range(self.n_prompts)]
            with _naming(path):
                rows = _write(path, kind, parts)
            say(f"{path}: {rows} rows of {kind.value}")


def _path(name: str, flag: str) -> Path:
    path = Path(name).expanduser().absolute()
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}", param_hint=flag)
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder", param_hint=flag)
    return path


def _half(path: Path) -> Path:
    """Where a file is while it is written."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what the system says into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _rows(file: str, file_flag: str, rows: str, flag: str) -> int | None:
    """Read `all`, `last` or a number of rows; None where no file is asked for."""
    if not file:
        if rows:
            raise typer.BadParameter(f"give {file_flag} too", param_hint=flag)
        return None
    if rows in ("", "all"):
        return ALL_ROWS
    if rows == "last":
        return 1
    if not (rows.isascii() and rows.isdigit() and int(rows) > 0):
        raise typer.BadParameter(f"'{rows}' is not all, last or a number of rows", param_hint=flag)
    return int(rows)


def _write(path: Path, kind: OutputKind, parts: Sequence[Rows | Routing | None]) -> int:
    """Write one file and return its number of rows. Nobody ever sees half of it."""
    import numpy as np

    there = [part for part in parts if part is not None]
    lengths = [0 if part is None else part.n_rows for part in parts]
    n_rows = sum(lengths)
    row_shape = there[0].array().shape[1:] if there else (0,)
    offsets = np.array([0, *accumulate(lengths)], np.int64)
    spans = [np.arange(part.position, part.position + part.n_rows) for part in there]
    positions = np.concatenate([np.empty(0, np.int64), *spans])
    with zipfile.ZipFile(_half(path), "w") as archive:
        dtype = np.dtype("<i2" if kind is OutputKind.ROUTING else "<f4")
        _add(archive, kind.value, dtype, (n_rows, *row_shape), [part.data for part in there])
        for other, values in (("offsets", offsets), ("positions", positions)):
            _add(archive, other, values.dtype, values.shape, [values.tobytes()])
    _half(path).replace(path)
    return n_rows


def _add(
    archive: zipfile.ZipFile,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    parts: Iterable[bytes | bytearray],
) -> None:
    """Add an array whose rows lie in several pieces, without joining them."""
    import numpy as np

    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(part)
