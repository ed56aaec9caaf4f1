"""Reads tiktoken's files of ranks: Llama 3's `tokenizer.model` and Kimi's `tiktoken.model`.

Knows their lines, a token's bytes in base64 and its rank, and what the files omit: the pattern of
the pretokenizer and the 256 special tokens (github.com/meta-llama/llama-models,
models/llama3/tokenizer.py; Kimi's tokenization_kimi.py). Must not know other models' rank files.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path

from tokenizers import Tokenizer

from shardnet.errors import CheckpointError
from shardnet.tokenizers.backends.added_tokens import MAX_ID, NamedToken, read_added_tokens
from shardnet.tokenizers.backends.byte_level import ranked_backend
from shardnet.tokenizers.backends.pretokenizers import KIMI, LLAMA3, Pretokenizer
from shardnet.tokenizers.backends.token_files import LoadedTokenizer, damaged, read_lines

_LINE = re.compile(rb"[A-Za-z0-9+/]{2,}={0,2} [0-9]+\r?\n?")
_MAX_LINE_BYTES = 1 << 13
_N_SPECIAL = 256
_SPECIAL = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
_BEGIN, _ENDS = 0, (1, 8, 9)


def looks_like_ranks(beginning: bytes) -> bool:
    """Say whether the beginning of a file is that of a rank file, rather than sentencepiece's."""
    return _LINE.fullmatch(beginning.split(b"\n", 1)[0]) is not None


def read_tiktoken(path: Path) -> LoadedTokenizer:
    """Read a rank file, and add Llama 3's special tokens after the ranks.

    tokenizer_config.json beside it may rename them. Raises CheckpointError, which names the file
    and the line.
    """
    ranks = _ranks(read_lines(path), str(path))
    return LoadedTokenizer(
        backend=_backend(ranks, _special_tokens(len(ranks)), LLAMA3, path),
        bos_id=len(ranks) + _BEGIN,
        eos_ids=tuple(len(ranks) + place for place in _ENDS),
        adds_bos=True,
    )


def read_kimi(path: Path) -> LoadedTokenizer:
    """Read Kimi's rank file, and add as many special tokens after the ranks.

    tokenizer_config.json beside it names those that are used. Raises as `read_tiktoken`.
    """
    ranks = _ranks(read_lines(path), str(path))
    special = {
        token_id: NamedToken(text=f"<|reserved_token_{token_id}|>", token_id=token_id, special=True)
        for token_id in range(len(ranks), len(ranks) + _N_SPECIAL)
    }
    return LoadedTokenizer(backend=_backend(ranks, special, KIMI, path), adds_bos=False)


def _backend(
    ranks: list[bytes], special: dict[int, NamedToken], words: Pretokenizer, path: Path
) -> Tokenizer:
    """Make a backend of ranks and special tokens, some of which the files beside may rename."""
    for token_id, token in read_added_tokens(path.parent, {}).items():
        if token_id < len(ranks):
            raise CheckpointError(
                f"{path}: id {token_id} is a rank, and {token.text!r:.80} in the files beside it",
                remedy="take both from one checkpoint",
            )
        special[token_id] = token
    return ranked_backend(ranks, special.values(), words, first_id=0, where=str(path))


def _special_tokens(first_id: int) -> dict[int, NamedToken]:
    reserved = (place for place in range(_N_SPECIAL) if place not in _SPECIAL)
    texts = _SPECIAL | {
        place: f"<|reserved_special_token_{number}|>" for number, place in enumerate(reserved)
    }
    return {
        first_id + place: NamedToken(text=text, token_id=first_id + place, special=True)
        for place, text in texts.items()
    }


def _ranks(lines: list[bytes], where: str) -> list[bytes]:
    ranks: list[bytes] = []
    if not lines[-1]:
        lines.pop()
    for line in lines:
        text, _, rank = line.partition(b" ")
        place = f"{where}: line {len(ranks) + 1}"
        is_line = len(line) <= _MAX_LINE_BYTES and _LINE.fullmatch(line) is not None
        if not is_line or len(rank) > 10:
            raise damaged(f"{place} is not a token in base64 and its rank")
        if int(rank) != len(ranks) or len(ranks) == MAX_ID - _N_SPECIAL:
            raise damaged(f"{place} has rank {int(rank)}, expected {len(ranks)}")
        try:
            ranks.append(base64.b64decode(text, validate=True))
        except binascii.Error as error:
            raise damaged(f"{place}: base64: {error}") from error
    return ranks
