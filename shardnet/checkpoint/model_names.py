"""Match what people type to the names of the models in a machine's stores.

Knows how names of each store are composed. Pure. Must not know where stores are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final

from shardnet.errors import UsageError

OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
"""Prefixes of names in the stores of these programs."""
FOLDERS_VARIABLE: Final = "SHARDNET_MODEL_FOLDERS"
"""Folders to look for models in, separated as in PATH."""
MAX_NAME: Final = 1000
"""Longest name, in characters, that is looked for."""
LISTED: Final = 8
"""How many names a message lists."""

_PLAIN = re.compile(r"(?!.*\.\.)(?![A-Za-z]:)[\w][^\x00-\x1f\x7f\\]*")
_FILE = re.compile(r"(?i)(?P<stem>.+?)(-\d{5}-of-\d{5})?\.gguf")
_FORM = re.compile(
    r"(?i)(?P<base>.+?)[-.](?P<form>i?q\d[\w]*|(?:bf|fp?)(?:16|32)|mxfp4\w*|nvfp4|tq\d_\d)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model in a store. `name` is what --model takes, `path` what is opened.

    `failure` says why it cannot be used; `path` is then where something is wrong. `modified_s` is
    when that last changed, in seconds since 1970, 0 where it is not known.
    """

    name: str
    store: str
    path: Path
    modified_s: int = 0
    failure: str = ""


def short_name(model: str) -> str:
    """Return the name that client programs are shown: of a path its last part."""
    if model.startswith("/"):
        return PurePosixPath(model).name
    return PureWindowsPath(model).name if is_path(model) else model


def is_path(model: str) -> bool:
    """Say whether `model` is an absolute path, of whatever system: a ring may span several."""
    return model.startswith("/") or PureWindowsPath(model).is_absolute()


def has_prefix(model: str) -> bool:
    """Return whether a name begins with a program's store, `ollama:` or `lmstudio:`."""
    return model.startswith((OLLAMA, LM_STUDIO))


def may_be_name(model: str) -> bool:
    """Say whether `model` may be a name, or part of one, and need not be a path."""
    return len(model) <= MAX_NAME and bool(_PLAIN.fullmatch(model))


def match(model: str, names: Collection[str]) -> str | None:
    """Return the one of `names` that `model` means; None if it means none.

    An exact name wins, else the only name with that spelling: its last part, its repository or file
    without the usual ending, with or without the form (NAME:Q4_K_M), in upper or lower case. Raises
    UsageError, which lists them, if several names have it.
    """
    if model in names:
        return model
    wanted = model.casefold()
    prefix = next((prefix for prefix in (OLLAMA, LM_STUDIO) if wanted.startswith(prefix)), "")
    found = [name for name in names if name.casefold() == wanted] or [
        name
        for name in names
        if name.startswith(prefix) and wanted.removeprefix(prefix) in spellings(name)
    ]
    several = sorted(set(found))
    if len(several) > 1:
        more = f" and {len(several) - LISTED} more" if len(several) > LISTED else ""
        raise UsageError(
            f"{model} may be any of {len(several)} models: {', '.join(several[:LISTED])}{more}",
            remedy="give more of the name",
        )
    return several[0] if several else None


def nearest_name(model: str, names: Collection[str]) -> str:
    """Return the name most similar to `model`, "" if none is similar."""
    spelled = {spelling: name for name in names for spelling in sorted(spellings(name))}
    near = difflib.get_close_matches(model.casefold(), spelled, n=1)
    return spelled[near[0]] if near else ""


def spellings(name: str) -> set[str]:
    """List what may be typed for a name, in lower case."""
    rest = name.removeprefix(OLLAMA).removeprefix(LM_STUDIO)
    is_file = is_path(rest)
    if is_file and not rest.startswith("/"):
        rest = PureWindowsPath(rest).as_posix()
    if "@" in rest and not is_file:
        return {name.casefold(), rest.casefold()}  # a revision is named in full
    folder, _, last = rest.rpartition("/")
    parents = [] if is_file else _tails(folder)
    found = {name, rest, *_tails(rest)}
    if file := _FILE.fullmatch(last):
        found |= _of_file(file["stem"], parents)
    elif ":" in last:
        base, _, choice = last.rpartition(":")
        repos = _tails(f"{folder}/{base}" if folder else base)
        file = _FILE.fullmatch(choice.rpartition("/")[2])
        found |= _of_file(file["stem"], repos) if file else _of_choice(choice, repos)
    return {spelling.casefold() for spelling in found if spelling}


def _tails(path: str) -> list[str]:
    """List the last part of a path, its last two and its last three."""
    parts = [part for part in path.split("/") if part]
    return ["/".join(parts[-n:]) for n in range(1, min(3, len(parts)) + 1)]


def _of_choice(choice: str, repos: Sequence[str]) -> set[str]:
    """List the spellings of a repository with a choice: a tag, or the form of a GGUF."""
    short = [repo for repo in _without_gguf(repos) if "/" not in repo]
    names = {*repos, *short}
    return {*names, *(f"{repo}:{choice}" for repo in names)}


def _of_file(stem: str, repos: Sequence[str]) -> set[str]:
    """List the spellings of a GGUF file in the folders `repos`."""
    named = _FORM.fullmatch(stem)
    if named is None:
        return {stem, *repos}
    base, form = named["base"], named["form"]
    return {stem, base, f"{base}:{form}", *_of_choice(form, repos)}


def _without_gguf(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield re.sub(r"(?i)[-_.]gguf$", "", name)
