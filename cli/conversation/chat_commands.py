"""The commands of `shardnet chat`: lines that begin with a slash. Pure.

Knows their names and what follows them. Must not know what they do.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

HINT: Final = "/help shows the commands, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
COMMANDS: Final = MappingProxyType(
    {
        "/help": ("", "show this list"),
        "/system": ("TEXT", "set the system message; `/system -` removes it, alone it is shown"),
        "/retry": ("", "answer the last message once more"),
        "/reset": ("", "start a new conversation; the system message stays"),
        "/stats": ("", "tokens and speed so far"),
        "/save": ("FILE", "write the conversation to a file, as JSON"),
        "/load": ("FILE", "continue a conversation from such a file"),
        "/exit": ("", "leave, as Ctrl-D does"),
    }
)
"""Each with what follows it, and what it does."""
KEYS: Final = (
    "Enter sends; Alt-Enter, or a backslash before Enter, begins a new line; pasted text is one "
    "message; Ctrl-C stops an answer"
)
_SYNONYMS: Final = {"/quit": "/exit", "/bye": "/exit", "/?": "/help"}


def read_command(text: str) -> tuple[str, str] | None:
    """Split a line into a command and what follows it; None for a message.

    A lone word with a slash is a command too, although there is none of that name; a path or a
    text that begins with a slash is a message.
    """
    word, _, rest = text.partition(" ") if " " in text.partition("\n")[0] else text.partition("\n")
    word = _SYNONYMS.get(word, word)
    if word in COMMANDS or (not rest and re.fullmatch(r"/[a-z?]+", word)):
        return word, rest.strip()
    return None


def help_lines() -> list[str]:
    """Describe the commands and the keys."""
    names = [f"{name} {rest}".strip() for name, (rest, _) in COMMANDS.items()]
    width = max(map(len, names))
    lines = [
        f"{name:{width}}  {does}" for name, (_, does) in zip(names, COMMANDS.values(), strict=True)
    ]
    return [*lines, KEYS]
