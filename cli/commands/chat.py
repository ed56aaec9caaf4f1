"""`shardnet chat`: a conversation with the model of the ring.

Knows its commands, lines that begin with a slash, and what they do. The rest of a conversation is
in cli/conversation/.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

import typer

from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.errors import ShardnetError, UsageError, shown
from shardnet.files import expanded
from shardnet.sampling_params import SamplingParams

from ..conversation.conversation import Conversation, dropped, load, open_editor, read_piped, save
from ..finding.target import open_target
from ..flags.lazy_group import examples
from ..flags.options import Access, flag, takes_groups
from ..flags.ring_options import RingOptions, Wanted
from ..flags.sampling_options import MaxTokens, SamplingOptions
from ..output.exit_codes import EXIT_FAILURE, say, standard_input

if TYPE_CHECKING:
    from shardnet.api.client import Client

HINT: Final = "/help shows the commands, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
COMMANDS: Final = MappingProxyType(
    {
        "/help": ("", "show this list"),
        "/system": ("TEXT", "set the system message; `/system -` removes it, alone it is shown"),
        "/image": ("FILE", "send a picture with the next message"),
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
_SYNONYMS: Final = {"/quit": "/exit", "/bye": "/exit", "/?": "/help", "\x1a": "/exit"}
"""The last is Ctrl-Z, which ends input on Windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring(RingOptions):
    optimise: str = ""  # no flag here: there is one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampling(SamplingOptions):
    """The flags of `generate`, without those that make no sense in a conversation."""

    DEFAULTS: ClassVar[SamplingParams] = SamplingParams(temperature=0.7)

    max_tokens: MaxTokens = 1024
    min_tokens: int = 0
    logit_bias: list[str] | None = None
    stop_token_id: list[int] | None = None
    ignore_eos: bool = False
    bos: str = "auto"
    keep_special_tokens: bool = False


@examples(
    "shardnet chat --model qwen3",
    'shardnet chat --model ~/models/Qwen3-4B --system "Be brief."',
    "shardnet chat --local 2 --temperature 0 < questions.txt",
)
@takes_groups
def chat(
    *,
    ring: _Ring,
    access: Access,
    sampling: _Sampling,
    plain: bool = flag(False, "--plain", "Show answers as they are, not as markdown."),
) -> None:
    """Chat with the model: each line is a message, the answer streams.

    Enter sends, Alt-Enter begins a new line, pasted text is one message, Ctrl-C stops an answer,
    Ctrl-D leaves; /help lists the commands, such as /system, /save and /retry. Standard input may
    be a file or a pipe: each of its lines is a message. A model without a chat template is shown
    the conversation in a form whose tokens it has, or as a dialogue.
    """
    params, options = sampling.params(), sampling.generation()
    if sampling.temperature != 0:  # else the most likely token was asked for, as it is
        options["recommended"] = sampling.left_to_the_model()
    wanted = ring.wanted(access)
    options["adapters"] = sampling.adapters(wanted.choice)
    warn_of_base_model(wanted.choice.model)
    from shardnet.api.blocking import opened

    with opened(_client(wanted)) as client:
        _talk(Conversation(client, params, options, sampling.system, plain=plain))


def warn_of_base_model(model: str) -> None:
    """Warn that the bundled model has a chat template and was not trained on conversations."""
    if model == DEFAULT_MODEL_NAME:
        say(
            "warning: the bundled model continues stories and was not trained on conversations; "
            "name a chat model with --model"
        )


@contextlib.asynccontextmanager
async def _client(wanted: Wanted) -> AsyncIterator[Client]:
    async with open_target(wanted) as target:
        target.client.choice = target.choice
        yield target.client


def _talk(conversation: Conversation) -> None:
    """Answer what is typed, or each line of standard input, until it ends or /exit."""
    is_terminal = sys.stdin.isatty()
    read = _at_terminal() if is_terminal else partial(read_piped, standard_input())
    while (line := read()) is not None:
        text = line.strip()
        command = read_command(text)
        if command == ("/exit", ""):
            return
        try:
            if command is not None:
                _do(*command, conversation)
            elif text:
                _ask(conversation, text)
        except ShardnetError as error:
            say(f"error: {' '.join(str(error).split())}")
            if not is_terminal:
                raise typer.Exit(EXIT_FAILURE) from None


def _ask(conversation: Conversation, text: str) -> None:
    """Send a message; the pictures that were dropped into it go with it, or with the next one."""
    text, pictures = dropped(text)
    for path in pictures:
        conversation.attach(path)
        say(f"(picture {path.name})")
    if text:
        conversation.ask(text)


def _do(command: str, rest: str, conversation: Conversation) -> None:
    """Do a command but /exit. Raises ShardnetError when it fails."""
    match command:
        case "/help":
            for line in help_lines():
                say(line)
        case "/reset":
            conversation.reset()
            say("(a new conversation)")
        case "/system":
            if rest:
                conversation.system = "" if rest == "-" else rest
            say(f"(system message: {conversation.system or 'none'})")
        case "/retry":
            conversation.retry()
        case "/image":
            if not rest:
                raise UsageError("/image needs the name of a file")
            path = _path(rest.strip("'\""))
            conversation.attach(path)
            say(f"(picture {path.name}: it goes with the next message)")
        case "/stats":
            for line in conversation.stats():
                say(line)
        case "/save" | "/load":
            if not rest:
                raise UsageError(f"{command} needs the name of a file")
            path = _path(rest)
            if command == "/save":
                save(conversation.messages, path)
            else:
                conversation.messages = load(path)
            done = "saved to" if command == "/save" else "loaded from"
            say(f"({len(conversation.messages)} messages {done} {path})")
        case _:
            say(f"{command} is not a command: {HINT}")


def _path(text: str) -> Path:
    """Read the name of a file. Raises UsageError for what can be none."""
    path = expanded(text)
    if "\0" in text or str(path).startswith("~"):  # of a user who is not there
        raise UsageError(f"{shown(text)} is no name of a file", remedy="name another file")
    return path


def _at_terminal() -> Callable[[], str | None]:
    """Return a function that has a message typed; None at Ctrl-D. Ctrl-C begins it anew."""
    say(HINT)
    editor = open_editor()

    def read() -> str | None:
        while True:
            try:
                return editor()
            except EOFError:
                return None
            except KeyboardInterrupt:
                say(f"({HINT})")

    return read


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
