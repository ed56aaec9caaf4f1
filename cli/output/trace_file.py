"""The file of `generate --trace`: where the time of requests went on every node.

Knows files and standard error. What is in one is made by the API.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from shardnet.api.events import GenerationEvent
from shardnet.api.traces import RequestTrace, chrome_trace
from shardnet.errors import ConfigurationError
from shardnet.files import write_whole

from .exit_codes import counted, say

MAX_REQUESTS: Final = 256
"""The first so many requests are written: viewers grow slow with more."""


class TraceFile:
    """Collects the traces of requests. Raises ConfigurationError if it cannot be written later."""

    def __init__(self, name: str) -> None:
        self._path = Path(name).expanduser()
        self._traces: dict[str, RequestTrace] = {}
        if not self._path.parent.is_dir():
            raise ConfigurationError(
                f"--trace: there is no folder {self._path.parent}", remedy="make it first"
            )

    def take(self, event: GenerationEvent) -> None:
        """Take the trace of a request that has ended."""
        if event.result is None or event.result.trace is None:
            return
        if len(self._traces) < MAX_REQUESTS:
            sample = f", sample {event.sample}" if event.sample else ""
            self._traces[f"prompt {event.index}{sample}"] = event.result.trace

    def write(self) -> None:
        """Write the file. Raises ConfigurationError."""
        try:
            content = json.dumps(chrome_trace(self._traces)).encode()
            write_whole(self._path, content, mode=0o644)
        except OSError as error:
            raise ConfigurationError(
                f"--trace: {self._path} cannot be written: {error.strerror}",
                remedy="name another file",
            ) from error
        steps = {step.step for trace in self._traces.values() for step in trace.steps}
        say(f"wrote {counted(len(steps), 'step')} to {self._path}: open it in ui.perfetto.dev")
