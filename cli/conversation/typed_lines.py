"""Messages as they are typed: an editor at a terminal, lines of a file or a pipe elsewhere.

Knows the keys, pasted text and the history of what was typed. Must not know what a line means.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shardnet.cluster.machine.folders import cache_dir
from shardnet.files import make_own_folder, open_own, read_own, write_whole

if TYPE_CHECKING:  # only terminals need it
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

HISTORY_VARIABLE: Final = "SHARDNET_CHAT_HISTORY"
"""The file of what was typed, "" for none."""
MOST_ENTRIES: Final = 500
"""So many are kept when a conversation begins."""
_MOST_BYTES: Final = 4 << 20
PROMPT: Final = "> "


def read_piped() -> str | None:
    """Read the next line of standard input, None at its end."""
    return sys.stdin.readline() or None


def open_editor() -> Callable[[], str]:
    """Return a function that has a message typed at the terminal.

    It raises EOFError for Ctrl-D, and KeyboardInterrupt for Ctrl-C.
    """
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")  # answers would come amid what is typed
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History, InMemoryHistory
    from prompt_toolkit.output import create_output

    class Kept(History):
        def __init__(self, lines: KeptLines) -> None:
            super().__init__()
            self._lines = lines

        def load_history_strings(self) -> Iterable[str]:
            return reversed(self._lines.read())

        def store_string(self, string: str) -> None:
            self._lines.add(string)

    path = history_path(os.environ)
    session: PromptSession[str] = PromptSession(
        multiline=True,
        prompt_continuation=lambda width, line, wraps: " " * width,
        key_bindings=_bindings(),
        history=InMemoryHistory() if path is None else Kept(KeptLines(path)),
        output=create_output(always_prefer_tty=True),
    )
    return lambda: session.prompt(PROMPT)


def history_path(environment: Mapping[str, str]) -> Path | None:
    """Return the file that keeps what was typed, None where nothing is to be kept."""
    named = environment.get(HISTORY_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    return cache_dir(environment) / "chat-history.jsonl"


class KeptLines:
    """What was typed, in a file for its owner alone: a JSON string a line.

    Nothing here raises: what cannot be read is not there, what cannot be written is not kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[str]:
        """Return the last entries, the oldest first; drop those before them from the file."""
        found = []
        with contextlib.suppress(OSError, ValueError):
            for line in read_own(self._path, _MOST_BYTES).decode().splitlines():
                if isinstance(entry := json.loads(line), str):
                    found.append(entry)
        if len(found) > MOST_ENTRIES:
            found = found[-MOST_ENTRIES:]
            with contextlib.suppress(OSError):
                write_whole(self._path, "".join(map(_line, found)).encode())
        return found

    def add(self, entry: str) -> None:
        """Append an entry."""
        with contextlib.suppress(OSError):
            make_own_folder(self._path.parent)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with os.fdopen(open_own(self._path, flags), "ab") as file:
                file.write(_line(entry).encode())


def _line(entry: str) -> str:
    return f"{json.dumps(entry)}\n"


def _bindings() -> KeyBindings:
    """Make Enter send, and Alt-Enter or a backslash before Enter begin a line."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
