"""Chat templates in a helper process, which an endless or greedy one ends, but not the node.

Knows the jobs of template_program.py and their limits. Blocks: for threads that may wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardnet.errors import CheckpointError
from shardnet.guard.helper_process import HelperProcess, JobFailedError, JobLimits
from shardnet.tokenizers.chat.chat_template import (
    AGAIN,
    NO_OPTIONS,
    ChatTemplate,
    TemplateMessage,
    TemplateOptions,
)

RENDER_S = 5
"""Limit of a template's processor time, in seconds; wall time would depend on other load."""
WAIT_FACTOR = 12
"""Limit of wall time, as a multiple of that: for systems that do not limit processor time."""
RENDER_MEMORY_BYTES = 2**30
MAX_REPLY_BYTES = 128 * 2**20

_MODULE = "shardnet.tokenizers.chat.template_program"


class TemplateProcess:
    """Finds and renders chat templates, one at a time. Starts its process at the first."""

    def __init__(self) -> None:
        self._process = HelperProcess(_MODULE)

    @property
    def pid(self) -> int | None:
        """The id of the process, None if none runs."""
        return self._process.pid

    def find(self, folder: Path, own: ChatTemplate | None = None) -> ChatTemplate:
        """Find the template of a checkpoint folder as `ChatTemplate.find`, which says the errors.

        Raises CheckpointError too for files that take too long or too much memory to read.
        """
        arguments = {"folder": str(folder), "own": None if own is None else asdict(own)}
        return ChatTemplate(**self._call("find", arguments, str(folder), RENDER_S))

    def render(
        self,
        template: ChatTemplate,
        messages: Sequence[TemplateMessage],
        options: TemplateOptions = NO_OPTIONS,
        *,
        seconds: int = RENDER_S,
    ) -> str:
        """Render the conversation to a prompt, up to the start of the model's reply.

        `seconds` limits processor time. Raises UsageError for messages that the template refuses,
        with its own text, and for tools and options that cannot be used, CheckpointError for a
        template that is damaged, does something forbidden, or exceeds its time or memory.
        """
        arguments = {
            "template": asdict(template),
            "messages": [dict(message) for message in messages],
            "options": asdict(options),
            "memory_bytes": RENDER_MEMORY_BYTES,
        }
        return str(self._call("render", arguments, template.where, seconds))

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _call(self, job: str, arguments: Mapping[str, Any], where: str, seconds: int) -> Any:
        limits = JobLimits(
            cpu_s=seconds,
            wall_s=float(WAIT_FACTOR * seconds),
            memory_bytes=RENDER_MEMORY_BYTES,
            reply_bytes=MAX_REPLY_BYTES,
        )
        try:
            return self._process.call(job, arguments, limits)[0]
        except JobFailedError as error:
            why = (
                f"{where} was not done after {seconds} s: it loops"
                if error.out_of_time
                else f"{where}: the chat template failed: {error}"
            )
            raise CheckpointError(why, remedy=AGAIN) from None
