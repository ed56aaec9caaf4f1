"""Philox and Gumbel noise against Random123's vectors, docs/protocol.md and a plain reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.oracles.plain_noise import plain_noise, plain_philox
from support.protocol.sampling_section import rows_of, sampling_section

from shardnet.model.sampling.sampler import gumbel_noise, noise_words, philox4x32

WORD = st.integers(0, 2**32 - 1)
SEED = st.integers(0, 2**64 - 1)
MASK = 2**32 - 1


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("row", rows_of("| key | counter | block |"))
def test_block_vectors_of_the_document(row: list[str]) -> None:
    key, counter, block = map(words_of, row)
    got = philox4x32(np.array(counter)[:, None], (key[0], key[1]))
    assert got[:, 0].tolist() == block


def test_random123_vector_is_in_the_document() -> None:
    """The known answer of Random123's kat_vectors for philox4x32 10, digits of pi."""
    row = "`a4093822 299f31d0` | `243f6a88 85a308d3 13198a2e 03707344` | "
    assert row + "`d16cfe09 94fdcceb 5001e420 24126ea1`" in sampling_section()


@pytest.mark.parametrize(
    "row", rows_of("| seed | position | sample index | token id | word | noise |")
)
def test_noise_vectors_of_the_document(row: list[str]) -> None:
    seed, word = int(row[0], 16), int(row[4], 16)
    position, sample_index, token_id = map(int, row[1:4])
    ids = np.array([token_id])
    assert noise_words(seed, position, sample_index, ids).tolist() == [word]
    noise = gumbel_noise(seed, position, sample_index, ids)
    assert noise.dtype == np.float64
    assert noise[0] == pytest.approx(float(row[5]), rel=1e-14)


@given(counters=st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1), key=st.tuples(WORD, WORD))
def test_blocks_equal_the_plain_reference(
    counters: list[tuple[int, ...]], key: tuple[int, int]
) -> None:
    got = philox4x32(np.array(counters).T, key)
    assert got.T.tolist() == [plain_philox(list(counter), list(key)) for counter in counters]


@given(
    seed=SEED,
    position=WORD,
    sample_index=WORD,
    ids=st.one_of(st.lists(st.integers(0, 300)), st.lists(WORD)),
)
def test_noise_of_any_ids_equals_the_plain_reference(
    seed: int, position: int, sample_index: int, ids: list[int]
) -> None:
    """Dense or scattered, in any order, repeated: a token's noise is its own."""
    got = gumbel_noise(seed, position, sample_index, np.array(ids, dtype=np.int64))
    want = [plain_noise(seed, position, sample_index, token_id) for token_id in ids]
    np.testing.assert_allclose(got, np.array(want), rtol=1e-13, atol=1e-13)


def test_noise_is_finite_at_the_ends_of_the_words() -> None:
    for word in (0, MASK):
        assert math.isfinite(-math.log(-math.log((word + 0.5) * 2.0**-32)))
    assert plain_noise(0, 0, 0, 0) < -math.log(-math.log((MASK + 0.5) * 2.0**-32)) < 22.88


def test_noise_has_the_mean_and_variance_of_gumbel() -> None:
    noise = gumbel_noise(11, 5, 0, np.arange(200_000))
    assert noise.mean() == pytest.approx(0.57722, abs=0.012)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("changed", [(12, 5, 0), (11, 6, 0), (11, 5, 1), (11 + 2**32, 5, 0)])
def test_seed_position_and_sample_index_each_make_other_noise(
    changed: tuple[int, int, int],
) -> None:
    ids = np.arange(1000)
    first, second = gumbel_noise(11, 5, 0, ids), gumbel_noise(*changed, ids)
    assert not np.any(first == second)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
