"""Which rows of DeepSeek-V4.1's n-gram tables (Engram) a text looks up, in plain formulas.

Tokens whose texts normalise alike are one; an n-gram of them is hashed once for each head of its
size. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

_SPACE = "\ue000"
"""Keeps a single space from being stripped."""


def compressed_ids(tokenizer: Tokenizer) -> list[int]:
    """Return for each token id that of its normalised text, in order of first appearance."""
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    known: dict[str, int] = {}
    found = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if "\ufffd" in text:  # a part of a character
            key = tokenizer.id_to_token(token_id)
        else:
            key = normalizer.normalize_str(text) or text
        found.append(known.setdefault(key, len(known)))
    return found


def table_primes(text: dict[str, Any]) -> list[list[int]]:
    """Return the rows of each table's blocks [sizes of n-grams x heads]: primes, each used once."""
    used: set[int] = set()
    tables = []
    for _ in text["engram_layer_ids"]:
        blocks = []
        for _ in range(2, text["engram_max_ngram_size"] + 1):
            last = text["engram_vocab_size"] - 1
            for _ in range(text["engram_n_heads"]):
                last = next(n for n in count(last + 1) if n not in used and _is_prime(n))
                used.add(last)
                blocks.append(last)
        tables.append(blocks)
    return tables


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % factor for factor in range(2, int(n**0.5) + 1))


def looked_up(
    text: dict[str, Any], compressed: Sequence[int], layer: int, ids: Sequence[int]
) -> NDArray[np.int64]:
    """Return the rows [T, columns] of a layer's table for each token of a whole text."""
    primes = table_primes(text)[text["engram_layer_ids"].index(layer)]
    n_heads, longest = text["engram_n_heads"], text["engram_max_ngram_size"]
    bound = max(1, (2**63 - 1) // text["engram_compressed_vocab_size"] // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, bound, size=longest, dtype=np.int64)
    factors = [2 * int(draw) + 1 for draw in draws]
    pad = compressed[text["engram_pad_token_id"]]
    tokens = [compressed[token_id] for token_id in ids]
    rows = np.empty((len(ids), len(primes)), np.int64)
    for place in range(len(ids)):
        before = [tokens[place - k] if place >= k else pad for k in range(longest)]
        mixed, begin = before[0] * factors[0], 0
        for k in range(1, longest):
            mixed ^= before[k] * factors[k]
            for head in range(n_heads):
                column = (k - 1) * n_heads + head
                rows[place, column] = begin + mixed % primes[column]
                begin += primes[column]
    return rows
