"""The tokenizer of a checkpoint in a node, by a helper process that a hostile one may end.

Decodes by a table of its own and encodes in another process, since a stranger's file may have the
`tokenizers` library end, block or bloat the process that uses it.

Blocks: for threads that may wait, except for `decode`, whose deadline is short.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol, Self
from weakref import WeakValueDictionary

from shardnet.checkpoint.tensors.checkpoint_files import find_file
from shardnet.checkpoint.tensors.manifest import ID_FILES
from shardnet.errors import CheckpointError, ContextExceededError, UsageError
from shardnet.guard.helper_process import HelperProcess, JobFailedError, JobLimits
from shardnet.tokenizers.chat.chat_template import (
    NO_OPTIONS,
    ChatTemplate,
    TemplateMessage,
    TemplateOptions,
    TemplateProcess,
    ends_turn,
)
from shardnet.tokenizers.formats.tokenizer_files import NAMES, tokenizer_files, tokenizer_place
from shardnet.tokenizers.token_table import HAS_TOKEN, Bos, Joins, TokenTable
from shardnet.tokenizers.token_table import read_eos_ids as read_eos_ids

LOAD = JobLimits(cpu_s=30, wall_s=300.0, memory_bytes=2 << 30, reply_bytes=224 << 20)
"""A tokenizer.json of 23 MB with 262 144 tokens takes 4 s and 0.3 GiB."""
ENCODE = JobLimits(cpu_s=10, wall_s=120.0, memory_bytes=1 << 30, reply_bytes=64 << 20)
"""A million characters in one word take 1.3 s."""
DECODE = JobLimits(cpu_s=1, wall_s=0.5, memory_bytes=1 << 30, reply_bytes=1 << 20)
"""The wall time is the longest that a token may stop the event loop."""

_PLAIN: Final = "a"
"""A text that every tokenizer encodes, unless it is at fault itself."""

_MODULE = "shardnet.tokenizers.text_program"
_AGAIN = "fetch the checkpoint again or take another; --token-ids needs no tokenizer for the prompt"


class TextProcess:
    """The tokenizer of the GGUF file or folder `place`. Thread-safe.

    `digest` is that of its description if it was loaded before.
    """

    def __init__(self, place: Path, digest: bytes = b"") -> None:
        self._place = place
        self._file = str(next(tokenizer_files(place), place))
        self._process = HelperProcess(_MODULE)
        self._loaded_in = 0
        """Which of its processes has the tokenizer: the first is number 1."""
        self._digest = digest

    @property
    def pid(self) -> int | None:
        """The id of the process, None if none runs."""
        return self._process.pid

    @property
    def _is_loaded(self) -> bool:
        return self._process.pid is not None and self._loaded_in == self._process.n_started

    def load(self) -> tuple[dict[str, Any] | None, bytes]:
        """Load the tokenizer; return what `text_program.described` gives, None if there is none.

        Raises CheckpointError, which names file and cause, if it cannot be loaded within limits.
        """
        described, block = self._call("load", {"place": str(self._place)}, LOAD)
        digest = digest_of(described, block)
        if self._digest not in (b"", digest):
            raise CheckpointError(
                f"{self._file}: the tokenizer's files have changed since they were read",
                remedy="unload the model, then ask again",
            )
        self._digest = digest
        self._loaded_in = self._process.n_started
        return described, block

    def ready(self) -> None:
        """Have a process with the tokenizer. Raises CheckpointError as `load`."""
        if not self._is_loaded:
            self.load()

    def encode(self, text: str, bos: Bos, parse_special: bool) -> list[int]:
        """Encode text. Raises UsageError if it fails or exceeds its limits, and CheckpointError if
        any other does.
        """
        arguments = {"text": text, "bos": bos, "parse_special": parse_special}
        block = self._encoded("encode", arguments)
        token_ids = array("I")
        token_ids.frombytes(block)
        return token_ids.tolist()

    def encode_input(
        self,
        text: str,
        pair: str | None = None,
        *,
        special_tokens: bool = True,
        most_tokens: int | None = None,
    ) -> tuple[list[int], list[int]]:
        """Encode a text, or two as one, for an encoder; return ids, and of which text each is.

        The longer one is cut so that there are at most `most_tokens`, special ones included, None
        for all. Raises as `encode`.
        """
        arguments = {
            "text": text,
            "pair": pair,
            "special_tokens": special_tokens,
            "most_tokens": most_tokens,
        }
        block = self._encoded("encode_input", arguments)
        numbers = array("I")
        numbers.frombytes(block)
        n_tokens = len(numbers) // 2
        return numbers[:n_tokens].tolist(), numbers[n_tokens:].tolist()

    def decode(self, token_ids: Sequence[int], keep_special_tokens: bool) -> str:
        """Decode ids. Raises CheckpointError if that fails, or needs a process to be started."""
        if not self._is_loaded:
            raise CheckpointError(
                f"{self._file}: the process that decodes its tokens has ended", remedy=_AGAIN
            )
        arguments = {"token_ids": list(token_ids), "keep_special_tokens": keep_special_tokens}
        _, block = self._call("decode", arguments, DECODE)
        return block.decode("utf-8", "replace")

    def classes(self, n_tokens: int) -> bytes:
        """Return of each of the first ids which class of texts that are alike it is of, int32.

        Nothing if there is no tokenizer. Raises CheckpointError as `load`.
        """
        return self._call("classes", {"place": str(self._place), "n_tokens": n_tokens}, LOAD)[1]

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _encoded(self, job: str, arguments: Mapping[str, Any]) -> bytes:
        """Encode in a process that has the tokenizer: another text may end it while this waits.

        Raises UsageError for a text that fails, CheckpointError if a plain one fails too.
        """
        while True:
            self.ready()
            number = self._process.n_started
            try:
                return self._call(job, arguments, ENCODE)[1]
            except CheckpointError as error:
                if self._process.n_started != number:
                    continue
                self.ready()
                self._call(job, {**arguments, "text": _PLAIN}, ENCODE)
                raise UsageError(error.message, remedy="send another text, or less of it") from None

    def _call(self, job: str, arguments: Mapping[str, Any], limits: JobLimits) -> tuple[Any, bytes]:
        try:
            return self._process.call(job, arguments, limits)
        except JobFailedError as error:
            raise CheckpointError(
                f"{self._file}: the tokenizer failed to {job}: {error}", remedy=_AGAIN
            ) from None


def digest_of(described: object, block: bytes) -> bytes:
    """Return the digest of a tokenizer's description."""
    return hashlib.sha256(repr(described).encode() + block).digest()


_log = logging.getLogger(__name__)

_LONGEST_STOP: Final = 64


class TextCoder(Protocol):
    """What encodes text, and decodes what no table can."""

    def ready(self) -> None:
        """Be ready to decode; may block."""

    def encode(self, text: str, bos: Bos, parse_special: bool) -> list[int]:
        """Encode as `Tokenizer.encode`."""

    def decode(self, token_ids: Sequence[int], keep_special_tokens: bool) -> str:
        """Decode as `Tokenizer.decode`."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Description:
    """What the process that reads a tokenizer tells of it. `digest` is that of all of it."""

    table: TokenTable
    bos_id: int | None
    eos_ids: tuple[int, ...]
    template: ChatTemplate | None
    digest: bytes = b""

    @classmethod
    def of(cls, said: Mapping[str, Any], block: bytes) -> Description:
        """Read what `text_program.described` gives."""
        template = said["template"]
        return cls(
            table=TokenTable.unpack(said["table"], block),
            bos_id=said["bos_id"],
            eos_ids=tuple(said["eos_ids"]),
            template=None if template is None else ChatTemplate(**template),
            digest=digest_of(said, block),
        )


class Tokenizer:
    """Text to token ids and back. Thread-safe. To be closed: it has a process of its own."""

    def __init__(
        self,
        description: Description,
        coder: TextCoder,
        *,
        decoder: TextCoder | None = None,
        path: Path = Path(),
    ) -> None:
        """Take what encodes, and what decodes where the table cannot: `coder` too by default.

        `path` is the checkpoint, whose files may have a chat template.
        """
        self._description = description
        self.table = description.table
        """The bytes of every token, and how they join to a text."""
        self._flags = description.table.flags
        self._coder = coder
        self._decoder = decoder or coder
        self._path = path
        self._templates = TemplateProcess()
        self._template: ChatTemplate | None = None
        self.template_stops: tuple[str, ...] = ()
        self.template_stop_ids: frozenset[int] = frozenset()
        """Texts and ids at which an answer to a conversation ends, once the template is found."""
        self.bos_id = description.bos_id
        """The id that begins a text, or None."""
        self.eos_ids = description.eos_ids
        """The ids that end a text, see `read_eos_ids`; may be empty."""
        self.template = description.template
        """The chat template in the tokenizer's own file, or None."""
        self.special_ids = self.table.special_ids()
        """Ids that `decode` omits by default."""
        self.n_tokens = self.table.n_tokens
        """One more than the largest id with a token; a model's vocabulary may be padded."""
        self.is_byte_level = self.table.is_byte_level
        """Whether the characters of a piece stand for bytes, as in GPT-2."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the tokenizer of a checkpoint, a folder or a GGUF file.

        Raises CheckpointError if there is none, a file is damaged, a file beside it has an invalid
        entry for bos or eos, or the library fails or exceeds its limits.
        """
        tokenizer = cls.load_optional(path)
        if tokenizer is None:
            raise no_tokenizer(path, "text")
        return tokenizer

    @classmethod
    def load_optional(
        cls, path: Path, *, begun: Callable[[TextProcess], object] = lambda _: None
    ) -> Self | None:
        """Load the tokenizer of a checkpoint; None if it has none.

        `begun` gets the processes before they load: another thread may close them. Raises
        CheckpointError as `load` does, except for a missing tokenizer.
        """
        place = tokenizer_place(path)  # a GGUF file has nothing beside it
        if not any(tokenizer_files(place)):
            return None
        key = (place, _stamp(place))
        description = _KNOWN.get(key)
        coder = TextProcess(place, b"" if description is None else description.digest)
        begun(coder)
        decoder: TextProcess | None = None
        try:
            if description is None:
                said, block = coder.load()
                if said is None:
                    coder.close()
                    return None
                description = _KNOWN[key] = Description.of(said, block)
            if description.table.joins is Joins.OTHERWISE:
                # Its own process: no prompt may delay the tokens of other requests.
                decoder = TextProcess(place, description.digest)
                begun(decoder)
                decoder.ready()
        except BaseException:
            for process in (coder, decoder):
                if process is not None:
                    process.close()
            raise
        return cls(description, coder, decoder=decoder, path=path)

    def close(self) -> None:
        """End the processes that encode and render. Blocks until they have ended."""
        self._coder.close()
        self._decoder.close()
        self._templates.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(
        self,
        text: str,
        *,
        bos: Bos = "auto",
        parse_special: bool = True,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Encode text to token ids. Blocks.

        `bos`: "auto" adds what the tokenizer's post-processor adds; "on" prepends exactly one bos;
        "off" adds nothing. A bos that the text itself contains is kept and never doubled.
        `parse_special`: True parses text like `<|end|>` as the special token, as transformers does;
        False encodes it as plain text, for user input in a template. `most_tokens` is what
        there is room for: a text longer than that many of the longest token is refused before it is
        encoded.

        Raises UsageError if the text is not valid Unicode, or the library fails at it, or for "on"
        without a bos token; ContextExceededError if the text is too long; CheckpointError if the
        library fails at any text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds half a surrogate pair at character {error.start}, which is not "
                "valid Unicode",
                remedy="send the whole character",
            ) from error
        longest = self.table.longest
        if most_tokens is not None and len(text) > most_tokens * longest:
            raise ContextExceededError.of(
                f"the prompt has {len(text)} characters and at most {most_tokens} tokens are "
                f"taken, of {longest} characters at most",
                -(-len(text) // longest),
                most_tokens,
                remedy="shorten the prompt",
            )
        return self._coder.encode(text, bos, parse_special)

    def chat_template(self) -> ChatTemplate:
        """Find the checkpoint's chat template, or make the default one, and what ends its answers.

        The first call reads files and blocks; it raises as `TemplateProcess.find`.
        """
        if self._template is None:
            ids = {text: token_id for token_id, text, _ in self.added_tokens(_LONGEST_STOP)}
            try:
                found = self._templates.find(self._path, self._description.template)
            except UsageError:  # it has none
                found = self._default_template(ids)
            else:
                found = replace(found, stops=self._ends_of(found, ids))
            self.template_stops = tuple(stop for stop in found.stops if stop not in ids)
            self.template_stop_ids = frozenset(ids[stop] for stop in found.stops if stop in ids)
            self._template = found
        return self._template

    def turn_ends(self) -> frozenset[int]:
        """Return the ids that end answers by the chat template, also where it cannot be had."""
        with contextlib.suppress(CheckpointError):
            self.chat_template()
        return self.template_stop_ids

    def _ends_of(self, template: ChatTemplate, added: Collection[str]) -> tuple[str, ...]:
        """Return the token that ends the messages of an assistant, if one does."""
        try:
            end = self._templates.find_end(template, added)
        except CheckpointError:  # who renders it says why
            return ()
        return (end,) if end is not None and ends_turn(end, added) else ()

    def _default_template(self, added: Collection[str]) -> ChatTemplate:
        """Make the template of a model without one. Blocks; says so in the log."""
        has_bos = self.bos_id is not None and self.encode("a")[:1] == [self.bos_id]
        bos = self.token_text(self.bos_id) if has_bos and self.bos_id is not None else ""
        made = ChatTemplate.default(added, bos)
        _log.warning(
            "%s has no chat template: conversations are written as %s", self._path, made.where
        )
        return made

    def chat_prompt(
        self, messages: Sequence[TemplateMessage], options: TemplateOptions = NO_OPTIONS
    ) -> str:
        """Render messages by the checkpoint's chat template. Blocks.

        Raises as `TemplateProcess.find` and `render`.
        """
        return self._templates.render(self.chat_template(), messages, options)

    def ready(self) -> None:
        """Have what decodes, after it failed too. Blocks; raises CheckpointError as `load`."""
        if self.table.joins is Joins.OTHERWISE:
            self._decoder.ready()

    def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """Decode token ids. Ids without a token are skipped; invalid bytes become U+FFFD.

        Raises CheckpointError where the table cannot decode and the library fails, within 0.5 s.
        """
        if self.table.joins is Joins.OTHERWISE:
            known = [token_id for token_id in token_ids if self.has_token(token_id)]
            return self._decoder.decode(known, keep_special_tokens) if known else ""
        return self.table.decode(token_ids, keep_special_tokens=keep_special_tokens)

    @property
    def decodes_behind(self) -> bool:
        """Whether `decode_behind` is possible: the table knows how tokens join."""
        return self.table.joins is not Joins.OTHERWISE

    def decode_behind(self, token_ids: Sequence[int]) -> str:
        """Decode ids that have a token, behind a text of whole characters that is not empty."""
        return self.table.decode_behind(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds when it is not the first of a text.

        They may be a part of a character, and are empty for an id without a token.
        """
        return self.table.later[token_id] if self.has_token(token_id) else b""

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def flags(self, token_id: int) -> int:
        """Return what is to know of a token at once: bits of token_table.py, 0 without a token."""
        return self._flags[token_id] if 0 <= token_id < self.n_tokens else 0

    def has_token(self, token_id: int) -> bool:
        """Say whether this id has a token."""
        return self.flags(token_id) & HAS_TOKEN != 0

    def added_tokens(self, longest: int) -> list[tuple[int, str, bool]]:
        """List each added token of at most `longest` bytes: id, text, and whether it is special."""
        return [
            (token_id, self.token_text(token_id), token_id in self.special_ids)
            for token_id in self.table.added_ids()
            if len(self.token_bytes(token_id)) <= longest
        ]

    def ids_without_token(self, n_rows: int) -> tuple[int, ...]:
        """List the ids below `n_rows` that have no token."""
        return self.table.ids_without_token(n_rows)


def no_tokenizer(model: object, what: str) -> CheckpointError:
    """Make the error for a model without a tokenizer; `what` needs one: text, --stop."""
    return CheckpointError(
        f"{model} has no tokenizer ({NAMES}), which {what} needs",
        remedy=f"add its files, or use --token-ids{' without --stop' if what == '--stop' else ''}",
    )


_Stamp = tuple[tuple[str, int, int], ...]

_KNOWN: WeakValueDictionary[tuple[Path, _Stamp], Description] = WeakValueDictionary()
"""The descriptions in use: a node that has the head and the tail of a ring reads files once."""


def _stamp(place: Path) -> _Stamp:
    """Return name, size and time of change of a tokenizer's files and those beside it."""
    files = sorted(place / name for name in ID_FILES) if place.is_dir() else [place]
    found = [(file.name, find_file(file)) for file in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found if stat)


_turn = threading.Lock()
"""Held while classes are found, so that stages that load side by side find them once."""


def token_classes(path: Path, n_tokens: int, n_classes: int) -> bytearray:
    """Return the classes of a checkpoint's first ids, int32 each: found once for each folder.

    Blocks. Raises CheckpointError if there is no tokenizer, it fails or exceeds its limits, or its
    classes are not `n_classes`.
    """
    place = tokenizer_place(path)
    with _turn:
        found = bytearray(_classes(place, _stamp(place), n_tokens))
    if len(found) != 4 * n_tokens:
        raise CheckpointError(
            f"{path} has no tokenizer ({NAMES}), by which its n-grams are hashed",
            remedy="add its files",
        )
    if (n_found := len({*memoryview(found).cast("i")})) != n_classes:
        raise CheckpointError(
            f"{path}: the texts of {n_tokens} tokens are {n_found} but for case, accents and "
            f"spaces; engram_compressed_vocab_size is {n_classes}",
            remedy="fetch the checkpoint's tokenizer again",
        )
    return found


@lru_cache(maxsize=4)
def _classes(place: Path, stamp: _Stamp, n_tokens: int) -> bytes:
    process = TextProcess(place)
    try:
        return process.classes(n_tokens)
    finally:
        process.close()


def check_token_ids(
    token_ids: Sequence[int], n_rows: int, tokenizer: Tokenizer | None = None
) -> None:
    """Raise UsageError if a prompt is empty or holds an id outside `[0, n_rows)`.

    `n_rows` is the model's vocabulary; a tokenizer may have more tokens. The error names the id,
    its token, its index and the limit.
    """
    if not token_ids:
        raise UsageError(
            "the prompt is empty and the tokenizer adds no bos",
            remedy="give it some text",
        )
    for place, token_id in enumerate(token_ids):
        if 0 <= token_id < n_rows:
            continue
        known = tokenizer is not None and tokenizer.has_token(token_id)
        named = f" ({tokenizer.token_text(token_id)!r})" if tokenizer and known else ""
        raise UsageError(
            f"token id {token_id}{named} at place {place} of the prompt is outside the model's "
            "vocabulary",
            remedy=f"ids go from 0 to {n_rows - 1}",
        )
