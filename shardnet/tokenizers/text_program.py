"""The program that reads and uses a stranger's tokenizer, in a process of its own.

Its jobs are those that tokenizer.py asks for. Keeps the tokenizer that it has loaded.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shardnet.errors import CheckpointError
from shardnet.guard.job_loop import serve
from shardnet.tokenizers.formats.tokenizer_files import tokenizer_files

if TYPE_CHECKING:
    from shardnet.tokenizers.text_backend import TextBackend
    from shardnet.tokenizers.token_table import Bos


class _Jobs:
    """The jobs, by name."""

    def __init__(self) -> None:
        self._backend: TextBackend | None = None

    def load(self, place: str) -> tuple[object, bytes]:
        """Load the tokenizer; give its settings and its table, None if there is none."""
        from shardnet.tokenizers.text_backend import TextBackend

        self._backend = TextBackend.load_optional(Path(place))
        if self._backend is None:
            return None, b""
        try:
            return described(self._backend)
        except CheckpointError as error:
            raise error.at(str(next(tokenizer_files(Path(place))))) from error

    def encode(self, text: str, bos: Bos, parse_special: bool) -> tuple[object, bytes]:
        """Give the ids as 32-bit numbers."""
        assert self._backend is not None
        return None, array("I", self._backend.encode(text, bos, parse_special)).tobytes()

    def encode_input(
        self, text: str, pair: str | None, special_tokens: bool, most_tokens: int | None
    ) -> tuple[object, bytes]:
        """Give the ids of an encoder's input, then of which text each is, as 32-bit numbers."""
        assert self._backend is not None
        ids, types = self._backend.encode_input(text, pair, special_tokens, most_tokens)
        return None, array("I", [*ids, *types]).tobytes()

    def decode(self, token_ids: list[int], keep_special_tokens: bool) -> tuple[object, bytes]:
        """Give the text."""
        assert self._backend is not None
        return None, self._backend.decode(token_ids, keep_special_tokens).encode()

    def classes(self, place: str, n_tokens: int) -> tuple[object, bytes]:
        """Give of each id which class of texts that are alike it is of, as 32-bit numbers."""
        from shardnet.tokenizers.text_backend import TextBackend

        backend = TextBackend.load_optional(Path(place))
        return None, array("i", backend.classes(n_tokens) if backend else ()).tobytes()


def described(backend: TextBackend) -> tuple[dict[str, object], bytes]:
    """Describe a tokenizer as a JSON object and a block of bytes: all that decoding needs."""
    table, block = backend.table().pack()
    template = backend.loaded.template
    return {
        "table": table,
        "bos_id": backend.loaded.bos_id,
        "eos_ids": backend.loaded.eos_ids,
        "template": None if template is None else asdict(template),
    }, block


def main() -> None:
    """Do jobs until nobody asks."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    jobs = _Jobs()
    serve(
        {
            "load": jobs.load,
            "encode": jobs.encode,
            "encode_input": jobs.encode_input,
            "decode": jobs.decode,
            "classes": jobs.classes,
        }
    )
