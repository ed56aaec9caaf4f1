"""A conversation: its messages so far, how they are typed, how the next answer is generated.

The whole conversation is sent every turn; the ring still holds what it has computed of it and
computes only what is new.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TextIO

import msgspec

from shardnet.api.events import GenerationResult
from shardnet.api.requests import ContentPart, GenerationOptions, Message, picture_of
from shardnet.api.validation import find_half_pair
from shardnet.cluster.machine.folders import cache_dir
from shardnet.errors import ShardnetError, UsageError
from shardnet.files import decode_text, expanded, make_own_folder, open_own, write_whole
from shardnet.sampling_params import SamplingParams
from shardnet.wire.framing.schema import MAX_TEXT
from shardnet.wire.messages.extras import RecommendedSampling
from shardnet.wire.messages.plans import PlanReply

from ..output.exit_codes import counted, no_text, say
from ..output.generation_output import RecoveryLines
from ..output.progress import LoadBars
from .markdown_answer import open_answer

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from shardnet.api.blocking import BlockingClient


MAX_SAVED_BYTES: Final = 64 << 20
"""Most bytes of a file that is loaded."""
_ENDS: Final = r"\.(?i:png|jpe?g|webp|gif)"
_DRIVE: Final = r"[A-Za-z]:[\\/]"
_BEGINS: Final = rf"(?:/|~|file://|{_DRIVE})"
_DROPPED: Final = re.compile(
    rf"""'({_BEGINS}[^'\n]*{_ENDS})'|"({_BEGINS}[^"\n]*{_ENDS})\""""
    rf"""|(?<!\S)({_BEGINS}(?:\\.|[^\s\\])*{_ENDS})(?!\S)"""
)
"""The path of a picture in a message: in quotation marks, or with escaped spaces."""


@dataclass(slots=True, kw_only=True)
class _Totals:
    """Tokens of all answers, and the last answer that came to its end."""

    n_answers: int = 0
    n_generated: int = 0
    last: GenerationResult | None = None
    context: int = 0


@dataclass(eq=False, repr=False)
class Conversation:
    """The messages so far, and the options with which the next answer is generated.

    At a terminal answers are rendered as markdown, unless `plain`.
    """

    client: BlockingClient
    sampling: SamplingParams
    options: GenerationOptions
    system: str
    _: KW_ONLY
    plain: bool = False

    def __post_init__(self) -> None:
        self._messages: list[Message] = []
        self._n_retries = 0
        self._ring_is_known = False
        self._pictures: list[bytes] = []
        self._totals = _Totals()

    @property
    def messages(self) -> list[Message]:
        """All messages, the system message first."""
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._messages]

    @messages.setter
    def messages(self, messages: Sequence[Message]) -> None:
        """Take these messages instead; a system message at their beginning becomes the own one."""
        has_system = bool(messages) and messages[0]["role"] == "system"
        said = messages[0]["content"] if has_system else ""
        self.system = said if isinstance(said, str) else ""
        self._messages = [*messages[has_system:]]
        self._n_retries = 0

    def reset(self) -> None:
        """Remove all messages but the system message, and the pictures of the next one."""
        self._messages = []
        self._pictures = []
        self._n_retries = 0

    def retry(self) -> None:
        """Answer the last message once more, with other draws; as `ask`.

        Raises UsageError where there is none.
        """
        asked = [place for place, said in enumerate(self._messages) if said["role"] == "user"]
        if not asked:
            raise UsageError("there is no message yet that could be answered once more")
        if not self.sampling.temperature:
            say("(temperature 0 always takes the most likely token: the answer is the same)")
        before, self._messages = self._messages, self._messages[: asked[-1]]
        self._n_retries += 1
        try:
            self._answer(before[asked[-1]]["content"] or "")
        except ShardnetError:
            self._messages = before
            raise

    def ask(self, text: str) -> None:
        """Send a message and print the answer as it streams.

        Ctrl-C stops the answer; the part that came stays in the conversation. Raises ShardnetError
        when generation fails, and then removes the message.
        """
        self._n_retries = 0
        shown: list[ContentPart] = [
            {"type": "image", "image": picture} for picture in self._pictures
        ]
        self._answer([*shown, {"type": "text", "text": text}] if shown else text)
        self._pictures = []

    def attach(self, path: Path) -> None:
        """Send the picture in a file with the next message. Raises UsageError for no such file."""
        self._pictures.append(picture_of(path).data)

    def stats(self) -> Iterable[str]:
        """Describe tokens and speed so far."""
        totals = self._totals
        yield (
            f"{counted(totals.n_answers, 'answer')} of {counted(totals.n_generated, 'token')}; "
            f"{counted(len(self.messages), 'message')} in the conversation"
        )
        if (last := totals.last) is not None:
            usage = last.usage
            yield (
                f"last answer: {_closing_words(last)}; of {counted(usage.n_prompt, 'token')} "
                f"before it {usage.n_reused} were still in the KV cache; it ended at "
                f"{usage.n_prompt + usage.n_generated} of a context of {totals.context}"
            )

    def _answer(self, content: str | Sequence[ContentPart]) -> None:
        asked: Message = {"role": "user", "content": content}
        answer, shown, closing = "", open_answer(plain=self.plain), ""
        recovery = RecoveryLines(shown)
        sampling = msgspec.structs.replace(
            self.sampling, sample_index=self.sampling.sample_index + self._n_retries
        )
        self._totals.n_answers += 1
        try:
            with LoadBars() as bars:

                def on_plan(plan: PlanReply) -> None:
                    self._totals.context = plan.context
                    if not self._ring_is_known:
                        bars.expect(plan)
                        self._say_recommended(plan.recommended)

                events = self.client.generate(
                    [*self.messages, asked],
                    sampling,
                    on_plan=on_plan,
                    on_loading=bars.update,
                    **self.options,
                )
                with contextlib.closing(events):
                    for event in events:
                        bars.stop()
                        self._ring_is_known = True
                        if event.error is not None:
                            raise event.error
                        recovery.take(event)
                        answer += event.text
                        self._totals.n_generated += len(event.token_ids)
                        shown.write(event.text)
                        if event.result is not None:
                            self._totals.last = event.result
                            closing = f"({_closing_words(event.result)})"
            shown.finish()
            say(closing)
        except ShardnetError:
            self._totals.n_answers -= 1
            shown.break_off()
            raise
        except KeyboardInterrupt:
            shown.finish()
            say("(stopped)")
        self._messages += [asked, {"role": "assistant", "content": answer}]

    def _say_recommended(self, recommended: RecommendedSampling | None) -> None:
        words = recommended_words(recommended, self.options.get("recommended", ()))
        if words:
            say(f"sampling as the model recommends: {words}")


def recommended_words(recommended: RecommendedSampling | None, left: Sequence[str]) -> str:
    """Write what of `recommended` counts: the parameters in `left`, which nobody has given."""
    if recommended is None:
        return ""
    values = {name: getattr(recommended, name) for name in left}
    return ", ".join(
        f"{name.replace('_', ' ' if name.endswith('penalty') else '-')} {value:g}"
        for name, value in values.items()
        if value is not None
    )


def _closing_words(result: GenerationResult) -> str:
    timing = result.timing
    return (
        f"{counted(result.usage.n_generated, 'token')}, first after {timing.ttft_s:.2f} s, "
        f"{timing.decode_tok_s:.1f} tokens/s"
    )


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    type: Literal["text", "image"]
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""
    image: bytes = b""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] | list[_Part]


class _Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[list[_Message], msgspec.Meta(max_length=1 << 14)]


def save(messages: Sequence[Message], path: Path) -> None:
    """Write messages to a file, for its owner alone.

    Raises UsageError for a file that is there and holds no conversation, or cannot be written.
    """
    if path.exists():
        try:
            load(path)
        except UsageError as error:
            raise UsageError(
                f"{path} is there and is not replaced: it holds no conversation",
                remedy="name another file",
            ) from error
    lines = ",\n".join(msgspec.json.encode(message).decode() for message in messages)
    try:
        write_whole(path, f'{{"messages": [\n{lines}\n]}}\n'.encode())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}", remedy="name another file"
        ) from error


def load(path: Path) -> list[Message]:
    """Read messages from a file. Raises UsageError for one that holds no conversation."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_SAVED_BYTES + 1)
        if len(content) > MAX_SAVED_BYTES:
            raise UsageError(f"{path} has more than {MAX_SAVED_BYTES} bytes")
        saved = msgspec.json.decode(decode_text(content), type=_Saved)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} holds no conversation: {find_half_pair(content) or error}",
            remedy="load a file that /save wrote",
        ) from error
    return [{"role": said.role, "content": _content(said)} for said in saved.messages]


def _content(said: _Message) -> str | list[ContentPart]:
    if isinstance(said.content, str):
        return said.content
    return [
        {"type": "text", "text": part.text}
        if part.type == "text"
        else {"type": "image", "image": part.image}
        for part in said.content
    ]


def dropped(text: str) -> tuple[str, list[Path]]:
    """Take the paths of pictures out of a message, as terminals write files that are dropped there.

    Returns the message without them, and those paths that are files.
    """
    paths: list[Path] = []

    def take(found: re.Match[str]) -> str:
        quoted, bare = found[1] or found[2], found[3] or ""
        is_of_windows = re.match(_DRIVE, bare)  # there a backslash escapes nothing
        written = quoted or (bare if is_of_windows else re.sub(r"\\(.)", r"\1", bare))
        if written.startswith("file://"):
            from urllib.request import url2pathname

            written = url2pathname(written[7:])
        path = Path(written)
        with contextlib.suppress(OSError, ValueError):
            path = expanded(path)
            if path.is_file():
                paths.append(path)
                return " "
        return found[0]

    rest = _DROPPED.sub(take, text)
    return (" ".join(rest.split()) if paths else text), paths


HISTORY_VARIABLE: Final = "SHARDNET_CHAT_HISTORY"
"""The file of what was typed, "" for none."""
MOST_ENTRIES: Final = 500
"""So many are kept when a conversation begins."""
_MOST_BYTES: Final = 4 << 20
PROMPT: Final = "> "


def read_piped(text: TextIO) -> str | None:
    """Read the next line of standard input, None at its end. Raises UsageError for no text."""
    try:
        return text.readline() or None
    except UnicodeDecodeError as error:
        raise UsageError(no_text(error)) from error


def open_editor() -> Callable[[], str]:
    """Return a function that has a message typed at the terminal.

    It raises EOFError for Ctrl-D, and KeyboardInterrupt for Ctrl-C.
    """
    if sys.platform == "win32" and not sys.stdout.isatty():
        return _type_plainly  # prompt_toolkit draws on standard output there
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


def _type_plainly() -> str:
    say(PROMPT, end="")
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line


def history_path(environment: Mapping[str, str]) -> Path | None:
    """Return the file that keeps what was typed, None where nothing is to be kept."""
    named = environment.get(HISTORY_VARIABLE)
    if named is not None:
        return expanded(named) if named else None
    return cache_dir(environment) / "chat-history.jsonl"


class KeptLines:
    """What was typed, in a file for its owner alone: a JSON string a line.

    Nothing here raises: what cannot be read is not there, what cannot be written is not kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[str]:
        """Return the last entries, the oldest first; drop those before them from the file."""
        found, raw, n_before = [], b"", 0
        with contextlib.suppress(OSError), os.fdopen(open_own(self._path), "rb") as file:
            n_before = file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            raw = file.read(_MOST_BYTES)
        for line in raw.splitlines():
            with contextlib.suppress(ValueError):  # cut off, by a full disk or here
                if isinstance(entry := json.loads(line), str):
                    found.append(entry)
        if len(found) > MOST_ENTRIES or n_before:
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
