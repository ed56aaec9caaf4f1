"""The noise of sampling: Philox4x32-10, and Gumbel noise from its output words.

Knows integers only, and what docs/protocol.md, "Sampling", fixes about them: the key and counter of
each token, and how a word becomes noise. Must not know logits, filters or torch: results are equal
on every machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
TokenIdArray = npt.NDArray[np.int64]
Noise = npt.NDArray[np.float64]

WORD_LIMIT = 2**32
"""Positions, sample indices and token ids must be below it: each takes one word of the counter."""

WORDS_PER_BLOCK = 4

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_2 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


def philox4x32(counters: npt.ArrayLike, key: tuple[int, int]) -> Words:
    """Run Philox4x32-10 on many counters under one key.

    `counters` has shape [4, N], one block a column; `key` is (word 0, word 1). Returns the output
    blocks, uint32 [4, N]. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC 2011; the constants and the order of words are those of Random123's philox.h.
    """
    blocks = np.array(counters, dtype=np.uint64)  # [4, N], 32 bits used: products need 64
    word_0, word_1, word_2, word_3 = blocks
    product_0, product_2 = np.empty_like(word_0), np.empty_like(word_2)
    for turn in range(_ROUNDS):
        np.multiply(word_0, _MULTIPLIER_0, out=product_0)
        np.multiply(word_2, _MULTIPLIER_2, out=product_2)
        np.right_shift(product_2, _HALF, out=word_0)
        word_0 ^= word_1
        word_0 ^= np.uint64((key[0] + turn * _WEYL_0) % WORD_LIMIT)
        np.right_shift(product_0, _HALF, out=word_2)
        word_2 ^= word_3
        word_2 ^= np.uint64((key[1] + turn * _WEYL_1) % WORD_LIMIT)
        np.bitwise_and(product_2, _LOW, out=word_1)
        np.bitwise_and(product_0, _LOW, out=word_3)
    return blocks.astype(np.uint32)


def noise_words(seed: int, position: int, sample_index: int, token_ids: TokenIdArray) -> Words:
    """Return the 32 random bits of each token for one drawn row.

    Key: (seed mod 2^32, seed div 2^32). Counter: (position, sample_index, token id div 4, 0).
    Token t takes word t mod 4 of its block. `token_ids` is any int64 [N]; returns uint32 [N].
    """
    assert 0 <= seed < WORD_LIMIT**2
    assert 0 <= position < WORD_LIMIT
    assert 0 <= sample_index < WORD_LIMIT
    if not len(token_ids):
        return np.empty(0, dtype=np.uint32)
    first, last = int(token_ids.min()) // WORDS_PER_BLOCK, int(token_ids.max()) // WORDS_PER_BLOCK
    if last - first < len(token_ids):  # dense: each block of the span once, its tokens share it
        words = _blocks(seed, position, sample_index, np.arange(first, last + 1))
        return words.T.reshape(-1)[token_ids - WORDS_PER_BLOCK * first]
    words = _blocks(seed, position, sample_index, token_ids // WORDS_PER_BLOCK)
    return words[token_ids % WORDS_PER_BLOCK, np.arange(len(token_ids))]


def _blocks(seed: int, position: int, sample_index: int, block_numbers: TokenIdArray) -> Words:
    counters = np.zeros((WORDS_PER_BLOCK, len(block_numbers)), dtype=np.uint64)
    counters[0], counters[1], counters[2] = position, sample_index, block_numbers
    return philox4x32(counters, (seed % WORD_LIMIT, seed // WORD_LIMIT))


def gumbel_noise(seed: int, position: int, sample_index: int, token_ids: TokenIdArray) -> Noise:
    """Return the Gumbel noise of each token for one drawn row.

    u = (word + 1/2) / 2^32 is exact in float64 and never 0 or 1; noise = -log(-log(u)), which lies
    between -3.14 and 22.88. Arguments as `noise_words`; returns float64 [N].
    """
    noise = noise_words(seed, position, sample_index, token_ids).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-32
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise
