"""A checkpoint's tokenizer in a helper process, which a hostile one may end, but not the node.

Knows the jobs of text_program.py and their limits. Blocks: for threads that may wait, except for
`decode`, whose deadline is short.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardnet.errors import CheckpointError
from shardnet.guard.helper_process import HelperProcess, JobFailedError, JobLimits
from shardnet.tokenizers.formats.tokenizer_files import tokenizer_files
from shardnet.tokenizers.token_table import Bos

LOAD = JobLimits(cpu_s=30, wall_s=300.0, memory_bytes=2 << 30, reply_bytes=224 << 20)
"""A tokenizer.json of 23 MB with 262 144 tokens takes 4 s and 0.3 GiB."""
ENCODE = JobLimits(cpu_s=10, wall_s=120.0, memory_bytes=1 << 30, reply_bytes=64 << 20)
"""A million characters in one word take 1.3 s."""
DECODE = JobLimits(cpu_s=1, wall_s=0.5, memory_bytes=1 << 30, reply_bytes=1 << 20)
"""The wall time is the longest that a token may stop the event loop."""

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
        """Encode text. Raises CheckpointError if it fails or exceeds its limits."""
        self.ready()
        arguments = {"text": text, "bos": bos, "parse_special": parse_special}
        _, block = self._call("encode", arguments, ENCODE)
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
        for all. Raises CheckpointError if it fails or exceeds its limits.
        """
        self.ready()
        arguments = {
            "text": text,
            "pair": pair,
            "special_tokens": special_tokens,
            "most_tokens": most_tokens,
        }
        _, block = self._call("encode_input", arguments, ENCODE)
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

    def close(self) -> None:
        """End the process."""
        self._process.close()

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
