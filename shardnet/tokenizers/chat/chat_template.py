"""A checkpoint's chat template: renders the messages of a conversation to the text of a prompt.

Knows where checkpoints store their template, and runs it in a separate process with limits of time
and memory (template_renderer.py). Must not know tokens, requests or the event loop: `render`
blocks, so it is called on a thread that may wait.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardnet.checkpoint.tensors.checkpoint_files import has_file
from shardnet.checkpoint.tensors.json_files import read_file, read_json
from shardnet.errors import CheckpointError, UsageError

MAX_TEMPLATE_BYTES = 2**20
MAX_TEXT_BYTES = 8 * 2**20
"""Limit of a rendered prompt: more than any context holds."""

RENDER_S = 5
"""Limit of a template's CPU time, in seconds; wall time would depend on other load."""
WAIT_FACTOR = 12
"""Limit of wall time, as a multiple of that: for systems that do not limit CPU time."""
RENDER_MEMORY_BYTES = 2**30

_PROGRAM = Path(__file__).with_name("template_renderer.py")
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
_TOKEN_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)
_OUT_OF_TIME = -getattr(signal, "SIGXCPU", 0) or None
"""Exit code of a process that has used up its CPU time."""
_AGAIN = "fetch the checkpoint again, or give the prompt without a template"

TemplateMessage = Mapping[str, str]
"""`role` and `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A jinja2 template, its source file, and the special tokens it may use."""

    source: str
    where: str
    tokens: Mapping[str, str]

    @classmethod
    def find(cls, folder: Path, own: ChatTemplate | None = None) -> ChatTemplate:
        """Find the template of a checkpoint folder.

        It is the first of `chat_template.jinja`, `chat_template` in tokenizer_config.json (one, or
        of several the one named "default"), chat_template.json, and `own`, that of the tokenizer's
        file. Raises UsageError if there is none, CheckpointError for an unreadable or invalid file.
        """
        config = _read_json(folder / "tokenizer_config.json")
        tokens = _special_tokens(folder, config)
        file = folder / "chat_template.jinja"
        if has_file(file):
            return cls(source=_read_text(file), where=str(file), tokens=tokens)
        for name, content in (
            ("tokenizer_config.json", config),
            ("chat_template.json", _read_json(folder / "chat_template.json")),
        ):
            if content.get("chat_template") is not None:
                where = f"{folder / name}: chat_template"
                return cls(
                    source=_named(content["chat_template"], where), where=where, tokens=tokens
                )
        if own is not None:
            return own
        raise UsageError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): it is not a chat model",
            remedy="give the prompt without --chat",
        )

    def render(self, messages: Sequence[TemplateMessage], *, seconds: int = RENDER_S) -> str:
        """Render the conversation to a prompt, up to the start of the model's reply.

        `seconds` limits CPU time. Raises UsageError for messages that the template refuses, with
        its own text, CheckpointError for a template that is damaged, does something forbidden, or
        exceeds its time or memory.
        """
        request = {
            "template": self.source,
            "variables": {
                **self.tokens,
                "messages": [dict(message) for message in messages],
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
            },
            "memory_bytes": RENDER_MEMORY_BYTES,
            "most_bytes": MAX_TEXT_BYTES,
            "seconds": seconds,
        }
        reply = self._run(json.dumps(request), seconds)
        if "refused" in reply:
            raise UsageError(f"{self.where} refuses these messages: {reply['refused']}")
        if "text" not in reply:
            line = f" line {reply['line']}" if reply.get("line") else ""
            raise CheckpointError(
                f"{self.where}{line}: {reply['failed']}",
                remedy=_AGAIN,
            )
        return str(reply["text"])

    def _run(self, request: str, seconds: int) -> dict[str, Any]:
        """Run the renderer process, with its limits, and return its reply."""
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-X", "utf8", str(_PROGRAM)],
                input=request.encode(),
                capture_output=True,
                timeout=WAIT_FACTOR * seconds,
                check=False,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            )
        except subprocess.TimeoutExpired:
            raise self._loops(seconds) from None
        if done.returncode == _OUT_OF_TIME:
            raise self._loops(seconds)
        try:
            reply = json.loads(done.stdout)
        except ValueError:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise CheckpointError(
                f"{self.where}: rendering it ended with code {done.returncode} ({last})",
                remedy=_AGAIN,
            ) from None
        assert isinstance(reply, dict)
        return reply

    def _loops(self, seconds: int) -> CheckpointError:
        return CheckpointError(
            f"{self.where} was not done after {seconds} s: it loops",
            remedy=_AGAIN,
        )


def _named(value: object, where: str) -> str:
    """Return the template, of several the one named default."""
    if isinstance(value, list):
        named = {e.get("name"): e.get("template") for e in value if isinstance(e, dict)}
        value = named.get("default")
    if not isinstance(value, str):
        raise CheckpointError(
            f"{where} is neither a template nor a list with one named default",
            remedy=_AGAIN,
        )
    return value


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that the files define, by their names in templates."""
    found = {}
    for source in (_read_json(folder / "special_tokens_map.json"), config):
        for name in _TOKEN_NAMES:
            token = source.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[name] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file is missing."""
    return read_json(path) if has_file(path) else {}


def _read_text(path: Path) -> str:
    try:
        return read_file(path, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} cannot be read ({error})", remedy=_AGAIN) from error
