"""The sampler: greedy, filters against transformers, draws against softmax, purity, bad logits."""

from __future__ import annotations

import math
import struct
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracles.plain_noise import plain_noise
from support.protocol.sampling_section import rows_of, sampling_section
from support.soak import examples
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from shardnet.errors import CheckpointError, NumericalError, ShardnetError
from shardnet.model.sampling.penalties import RowContext
from shardnet.model.sampling.sampler import CUT, Sampler, SampleRow, rows_logprobs, surviving_tokens
from shardnet.sampling_params import SamplingParams

INFINITY = math.inf


def draw(logits: Tensor, params: SamplingParams, position: int = 0) -> int:
    """Sample one row alone."""
    row = SampleRow(params=params, position=position)
    return Sampler(logits.shape[-1]).sample(logits.reshape(1, -1), [row]).token_ids[0]


def random_row(seed: int, size: int = 500, scale: float = 3.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def survivors(logits: Tensor, params: SamplingParams) -> set[int]:
    return set(surviving_tokens(logits, params)[0].tolist())


def survivors_in_transformers(logits: Tensor, params: SamplingParams) -> set[int]:
    """The ids that transformers' warpers leave, applied in the order of its `generate`."""
    prompt = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(prompt, logits.reshape(1, -1))
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(prompt, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(prompt, scores)
    return set((scores[0] > -INFINITY).nonzero().squeeze(1).tolist())


# --- greedy


def test_greedy_takes_the_largest_logit() -> None:
    assert draw(torch.tensor([0.0, -1.0, 5.0, 4.9]), SamplingParams()) == 2


def test_greedy_ties_go_to_the_smaller_id() -> None:
    for size in (4, 33, 1000, 32000):
        logits = torch.zeros(size)
        logits[[size // 2, size - 1]] = 1.5
        assert draw(logits, SamplingParams()) == size // 2
        assert draw(torch.full((size,), -3.0), SamplingParams()) == 0


def test_no_rows_give_no_tokens() -> None:
    result = Sampler(7).sample(torch.empty(0, 7), [])
    assert result.token_ids == []
    assert result.logprobs == []


# --- filters


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 1.9])
@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0])
def test_survivors_are_those_of_transformers(temperature: float, top_p: float) -> None:
    for top_k, seed in product([0, 1, 2, 50, 499, 500, 10_000], range(examples(2))):
        logits = random_row(seed)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        want = survivors_in_transformers(logits, params)
        dropped = want - survivors(logits, params)
        assert survivors(logits, params) <= want
        # Only the cut may take more away than transformers does.
        assert all(logits[t] < logits.max() - CUT * temperature for t in dropped)


@pytest.mark.parametrize("size", [1, 2, 5000, 40_000])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_top_p_over_large_nuclei_is_that_of_transformers(size: int, scale: float) -> None:
    """Flat distributions, where the nucleus outgrows the first guess."""
    logits = random_row(9, size, scale).double().float()
    params = SamplingParams(temperature=1.0, top_p=0.9)
    got, want = survivors(logits, params), survivors_in_transformers(logits.double(), params)
    # Sums of 40 000 terms may round apart at the border: by one token, no more.
    assert len(got ^ want) <= 1


def test_top_k_keeps_every_token_that_equals_the_kth() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    params = SamplingParams(temperature=1.0, top_k=2)
    assert survivors(logits, params) == survivors_in_transformers(logits, params) == {1, 2, 3, 4}


@given(
    levels=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.05, 0.31, 0.52, 0.77, 0.93, 1.0]),
)
def test_ties_leave_as_many_tokens_as_in_transformers_and_prefer_smaller_ids(
    levels: list[int], top_k: int, top_p: float
) -> None:
    logits = torch.tensor(levels, dtype=torch.float32) * 1.37
    params = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p)
    got = survivors(logits, params)
    want = survivors_in_transformers(logits.double(), params)
    assert sorted(levels[t] for t in got) == sorted(levels[t] for t in want)
    border = min(levels[t] for t in got)
    tied = [t for t, level in enumerate(levels) if level == border]
    assert [t for t in tied if t in got] == tied[: sum(t in got for t in tied)]


def test_border_of_top_p_is_exclusive_as_in_transformers() -> None:
    """Masses 1/2, 1/4, 1/8, 1/8: at top-p 3/4 the first two hold the mass already."""
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log2() * math.log(2)
    for top_p, left in ((0.49, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.874, 3), (0.876, 4)):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        assert len(survivors(logits, params)) == left
        assert len(survivors_in_transformers(logits, params)) == left


def test_a_mass_that_equals_top_p_is_enough() -> None:
    logits = torch.zeros(8)
    params = SamplingParams(temperature=1.0, top_p=0.5)
    assert survivors(logits, params) == {0, 1, 2, 3}
    assert len(survivors_in_transformers(logits, params)) == 4


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-12])
def test_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = random_row(3)
    assert draw(logits, SamplingParams(temperature=temperature, seed=1)) == int(logits.argmax())


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    logits = random_row(4)
    params = SamplingParams(temperature=5.0, top_k=1, seed=3)
    assert {draw(logits, params, position) for position in range(50)} == {int(logits.argmax())}


def test_tokens_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((50,), -INFINITY)
    logits[[7, 30]] = 0.0
    params = SamplingParams(temperature=2.0, top_p=0.99, top_k=40)
    assert {draw(logits, params, position) for position in range(40)} == {7, 30}


# --- draws


def plain_draw(logits: list[float], params: SamplingParams, position: int) -> int:
    """The draw without filters, as the document writes it, on Python numbers."""
    best = max(logits)
    sums = [
        (logit - best) / params.temperature
        + plain_noise(params.seed, position, params.sample_index, token_id)
        for token_id, logit in enumerate(logits)
    ]
    return sums.index(max(sums))


@settings(max_examples=50)
@given(
    logits=st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.01, 10),
    seed=st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 1000),
    position=st.integers(0, 100_000),
)
def test_draws_equal_the_plain_reference(
    logits: list[float], temperature: float, seed: int, sample_index: int, position: int
) -> None:
    """The reference knows no cut: a token below it never wins."""
    params = SamplingParams(temperature=temperature, seed=seed, sample_index=sample_index)
    assert draw(torch.tensor(logits), params, position) == plain_draw(logits, params, position)


@pytest.mark.parametrize(
    "row",
    rows_of("| temperature | top-k | top-p | seed | sample index | tokens at positions 0 to 11 |"),
)
def test_draws_of_the_document(row: list[str]) -> None:
    line = next(line for line in sampling_section().splitlines() if "0000803f" in line)
    data = bytes.fromhex(line.strip("`:").replace("`", ""))
    logits = torch.tensor(struct.unpack("<8f", data))
    params = SamplingParams(
        temperature=float(row[0]),
        top_k=int(row[1]),
        top_p=float(row[2]),
        seed=int(row[3]),
        sample_index=int(row[4]),
    )
    assert [draw(logits, params, position) for position in range(12)] == [
        int(token_id) for token_id in row[5].split()
    ]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("axis", "temperature"),
    [("position", 0.6), ("sample_index", 1.0), ("seed", 1.0)],
)
def test_draws_follow_the_softmax(axis: str, temperature: float) -> None:
    """1200 draws over 8 tokens; 24.32 is the 0.999 quantile of chi-square with 7 degrees."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, 1.8, 0.9, 1.2])
    sampler, n_draws = Sampler(8), examples(1200)
    rows = [
        SampleRow(
            params=SamplingParams(
                temperature=temperature,
                seed=n if axis == "seed" else 42,
                sample_index=n if axis == "sample_index" else 0,
            ),
            position=n if axis == "position" else 17,
        )
        for n in range(n_draws)
    ]
    token_ids = sampler.sample(logits.expand(n_draws, 8), rows).token_ids
    expected = n_draws * torch.softmax(logits.double() / temperature, 0).numpy()
    assert chi_square(np.bincount(token_ids, minlength=8), expected) < 24.32


# --- purity


@settings(max_examples=30)
@given(data=st.data())
def test_a_row_does_not_depend_on_the_rows_beside_it(data: st.DataObject) -> None:
    n_rows = data.draw(st.integers(1, 9))
    params = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.5, 1.3]),
        top_k=st.sampled_from([0, 3, 40]),
        top_p=st.sampled_from([0.3, 0.9, 1.0]),
        seed=st.integers(0, 5),
        n_logprobs=st.sampled_from([None, 0, 3]),
    )
    rows = [
        SampleRow(params=data.draw(params), position=data.draw(st.integers(0, 9)))
        for _ in range(n_rows)
    ]
    logits = torch.stack([random_row(index, 300) for index in range(n_rows)])
    sampler = Sampler(300)
    together = sampler.sample(logits, rows)
    for index, row in enumerate(rows):
        alone = sampler.sample(logits[index : index + 1].clone(), [row])
        assert alone.token_ids == together.token_ids[index : index + 1]
        assert alone.logprobs == together.logprobs[index : index + 1]


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = random_row(1).reshape(1, -1)
    before = logits.clone()
    params = SamplingParams(temperature=0.7, top_k=50, top_p=0.9, n_logprobs=4)
    Sampler(500, range(400, 500)).sample(logits, [SampleRow(params=params, position=0)])
    assert torch.equal(logits, before)


# --- padding and bad logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_columns_without_a_token_are_masked(temperature: float) -> None:
    logits = torch.zeros(1, 64)
    logits[0, 60:] = 100.0
    logits[0, 63] = math.nan
    params = SamplingParams(temperature=temperature, n_logprobs=5)
    rows = [SampleRow(params=params, position=3)]
    result = Sampler(64, range(60, 64)).sample(logits, rows)
    assert result.token_ids[0] < 60
    logprobs = result.logprobs[0]
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(-math.log(60))
    assert [token_id for token_id, _ in logprobs.top] == [0, 1, 2, 3, 4]


HOLES = [0, 3, 7, 60, 61, 62, 63]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n_logprobs=64),
        SamplingParams(temperature=1.0, n_logprobs=64),
        SamplingParams(temperature=2.0, top_k=5, top_p=0.9, min_p=0.01, n_logprobs=64),
        SamplingParams(repetition_penalty=0.5, n_logprobs=64),
        SamplingParams(temperature=0.7, frequency_penalty=-2, presence_penalty=-2, n_logprobs=64),
        SamplingParams(logit_bias=((3, 100.0), (62, 100.0)), n_logprobs=64),
        SamplingParams(min_tokens=8, temperature=1.0, n_logprobs=64),
    ],
)
def test_ids_without_a_token_are_never_drawn(params: SamplingParams) -> None:
    """In the middle and at the end, whatever is done to the logits after."""
    logits = random_row(2, 64).reshape(1, -1)
    logits[0, HOLES] = 50.0
    logits[0, 7] = math.nan
    before = logits.clone()
    context = RowContext(tokens=np.array([3, 3, 7, 62, 5], np.int32), stop_ids=(3, 9))
    sampler = Sampler(64, HOLES)
    drawn = set()
    for position in range(60):
        row = SampleRow(params=params, position=position, context=context)
        result = sampler.sample(logits, [row])
        drawn.update(result.token_ids)
        (logprobs,) = result.logprobs
        assert logprobs is not None
    assert not drawn & set(HOLES)
    assert len(drawn) > 1 or params.temperature == 0
    assert sorted(token_id for token_id, _ in logprobs.top) == sorted({*range(64)} - {*HOLES})
    assert sum(math.exp(logprob) for _, logprob in logprobs.top) == pytest.approx(1.0)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_holes_change_nothing_for_the_tokens_that_are_left() -> None:
    """A column of minus infinity in the middle draws as a vocabulary in which it never won."""
    logits = random_row(4, 64).reshape(1, -1)
    rows = [
        SampleRow(params=SamplingParams(temperature=1.0, seed=s), position=s) for s in range(50)
    ]
    free = [Sampler(64).sample(logits, [row]).token_ids[0] for row in rows]
    masked = [Sampler(64, HOLES).sample(logits, [row]).token_ids[0] for row in rows]
    assert [a for a in free if a not in HOLES] == [
        b for a, b in zip(free, masked, strict=True) if a not in HOLES
    ]


def test_a_vocabulary_without_any_token_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no token for any of the model's 8 ids"):
        Sampler(8, range(8))


def test_prompt_logprobs_of_ids_without_a_token() -> None:
    own, hole = Sampler(8, [2, 7]).logprobs(torch.zeros(2, 8), [6, 2], 8)
    assert own.logprob == pytest.approx(-math.log(6))
    assert hole.logprob == -INFINITY
    assert [token_id for token_id, _ in hole.top] == [0, 1, 3, 4, 5, 6]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [math.nan, INFINITY, "all -inf"])
def test_logits_without_a_finite_maximum_are_refused_by_row(
    temperature: float, bad: float | str
) -> None:
    logits = torch.zeros(3, 16)
    if bad == "all -inf":
        logits[1] = -INFINITY
    else:
        logits[1, 5] = float(bad)
    rows = [SampleRow(params=SamplingParams(temperature=temperature), position=0)] * 3
    with pytest.raises(NumericalError, match=r"row 1 .* not a finite number") as caught:
        Sampler(16).sample(logits, rows)
    assert caught.value.rows == (1,)
    assert isinstance(caught.value, ShardnetError)
    assert "\n" not in str(caught.value)


# --- logprobs


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_row(5)
    params = SamplingParams(temperature=3.0, top_k=2, seed=4, n_logprobs=7)
    result = Sampler(500).sample(logits.reshape(1, -1), [SampleRow(params=params, position=8)])
    want = torch.log_softmax(logits, dim=-1)
    got = result.logprobs[0]
    assert got is not None
    assert got.token_id == result.token_ids[0]
    assert got.logprob == pytest.approx(float(want[got.token_id]), abs=1e-5)
    assert [token_id for token_id, _ in got.top] == torch.topk(want, 7).indices.tolist()
    for token_id, logprob in got.top:
        assert logprob == pytest.approx(float(want[token_id]), abs=1e-5)


def test_equal_logits_rank_by_id() -> None:
    """Beside a row without equal ones."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    for n_top, ranks in ((4, [1, 3, 2, 4]), (1, [1]), (0, []), (50, [1, 3, 2, 4, 5, 0])):
        first, second = rows_logprobs(logits, [0, 5], n_top)
        assert [token_id for token_id, _ in first.top] == ranks
        assert [token_id for token_id, _ in second.top] == [5, 4, 3, 2, 1, 0][:n_top]
        assert second.logprob == pytest.approx(float(torch.log_softmax(logits[1], 0)[5]))


def test_a_token_without_a_column_is_impossible() -> None:
    (logprobs,) = Sampler(8, [5, 6, 7]).logprobs(torch.zeros(1, 8), [6], 1)
    assert logprobs.logprob == -INFINITY
    assert logprobs.top == ((0, pytest.approx(-math.log(5))),)


def test_logprobs_are_made_only_where_asked() -> None:
    rows = [
        SampleRow(params=SamplingParams(n_logprobs=n_logprobs), position=0)
        for n_logprobs in (None, 0, 2)
    ]
    logprobs = Sampler(9).sample(torch.zeros(3, 9), rows).logprobs
    assert [entry if entry is None else len(entry.top) for entry in logprobs] == [None, 0, 2]


@pytest.mark.parametrize(
    ("parameters", "tokens", "drawn"),
    rows_of("| parameters | `s` | tokens at positions 0 to 11 |"),
)
def test_vectors_of_the_other_filters(parameters: str, tokens: str, drawn: str) -> None:
    given: dict[str, Any] = {
        name: float(value) if "." in value else int(value)
        for name, _, value in (one.partition("=") for one in parameters.split())
    }
    if "dry_breakers" in given:
        given["dry_breakers"] = (given["dry_breakers"],)
    params = SamplingParams(temperature=1.0, seed=8, **given)
    told = RowContext(tokens=np.array(tokens.split(), np.int32), n_prompt=len(tokens.split()))
    rows = [SampleRow(params=params, position=n, context=told) for n in range(12)]
    logits = torch.tensor([[1, 3, 2.5, 3, -1, 0, 2, -50]]).expand(12, 8)
    got = Sampler(8).sample(logits, rows).token_ids
    assert " ".join(map(str, got)) == drawn
