"""Bias, penalties and early stop ids against transformers, and by hand; many rows at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from shardnet.errors import NumericalError, SamplingError
from shardnet.model.sampling.penalties import RowContext, change_logits, repeats
from shardnet.model.sampling.sampler import Sampler, SampleRow, surviving_tokens
from shardnet.sampling_params import MAX_LOGIT_BIASES, SamplingParams

VOCAB = 60


def context(
    prompt: Sequence[int], output: Sequence[int] = (), stop_ids: Sequence[int] = ()
) -> RowContext:
    return RowContext(
        tokens=np.array([*prompt, *output], np.int32),
        n_prompt=len(prompt),
        stop_ids=tuple(stop_ids),
    )


def random_logits(n_rows: int, seed: int = 0, size: int = VOCAB) -> Tensor:
    return torch.randn(n_rows, size, generator=torch.Generator().manual_seed(seed)) * 3


def changed(logits: Tensor, *rows: tuple[SamplingParams, RowContext]) -> Tensor:
    copy = logits.clone()
    change_logits(copy, rows)
    return copy


def by_hand(logits: Tensor, params: SamplingParams, told: RowContext) -> list[float]:
    """Steps 3 to 7 of the document, token by token, in numpy's float32."""
    scores = [np.float32(value) for value in logits.tolist()]
    for token_id, bias in params.logit_bias:
        if token_id < len(scores):
            scores[token_id] += np.float32(bias)
    for token_id in set(told.tokens.tolist()):
        by = np.float32(params.repetition_penalty)
        scores[token_id] = scores[token_id] * by if scores[token_id] < 0 else scores[token_id] / by
    output = told.output.tolist()
    for token_id in set(output):
        count = np.float32(output.count(token_id))
        scores[token_id] -= np.float32(params.frequency_penalty) * count
        scores[token_id] -= np.float32(params.presence_penalty)
    if len(output) < params.min_tokens and not set(told.stop_ids) >= set(range(len(scores))):
        for token_id in told.stop_ids:
            scores[token_id] = np.float32(-math.inf)
    return [float(score) for score in scores]


PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.01, 0.7, 1.3, 100.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -1.5, 0.1, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 3), st.floats(-100, 100), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.integers(0, 4),
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
CONTEXTS = st.builds(context, TOKENS, TOKENS, st.lists(st.integers(0, VOCAB - 1), unique=True))


@settings(max_examples=100)
@given(rows=st.lists(st.tuples(PARAMS, CONTEXTS), min_size=1, max_size=6))
def test_every_row_is_changed_as_it_asks(rows: list[tuple[SamplingParams, RowContext]]) -> None:
    """Rows with different parameters in one call, each as if it were computed by hand."""
    logits = random_logits(len(rows))
    got = changed(logits, *rows)
    for index, (params, told) in enumerate(rows):
        assert got[index].tolist() == by_hand(logits[index], params, told)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 1.7])
def test_bias_repetition_and_early_stop_ids_are_those_of_transformers(penalty: float) -> None:
    """To the bit, in the order of transformers' `generate`."""
    bias = {3: 2.5, 17: -4.0, 40: 0.125}
    prompt, output, stop_ids = [3, 9, 9, 41], [17, 3, 22], [1, 22]
    processors = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token_id], x] for token_id, x in bias.items()]),
            RepetitionPenaltyLogitsProcessor(penalty),
            MinNewTokensLengthLogitsProcessor(len(prompt), 4, torch.tensor(stop_ids)),
        ]
    )
    params = SamplingParams(
        repetition_penalty=penalty, logit_bias=tuple(bias.items()), min_tokens=4
    )
    logits = random_logits(1)
    for n_output in range(4):
        made = output[:n_output]
        want = processors(torch.tensor([prompt + made]), logits.clone())
        assert torch.equal(changed(logits, (params, context(prompt, made, stop_ids))), want)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.7, 1.0])
@pytest.mark.parametrize("min_p", [1e-6, 0.02, 0.1, 0.5, 1.0])
def test_min_p_leaves_what_transformers_leaves(
    temperature: float, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p)
    for seed in range(6):
        row = random_logits(1, seed, 400)
        scores = TemperatureLogitsWarper(temperature)(None, row)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(None, scores)
        want = MinPLogitsWarper(min_p)(None, scores)[0] > -math.inf
        assert surviving_tokens(row[0], params)[0].tolist() == want.nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.5])
@pytest.mark.parametrize("mass", [0.2, 0.6, 0.95])
def test_typical_leaves_what_transformers_leaves(temperature: float, mass: float) -> None:
    params = SamplingParams(temperature=temperature, typical_p=mass)
    for seed in range(6):
        row = random_logits(1, seed, 400)
        scores = TemperatureLogitsWarper(temperature)(None, row.double())
        want = TypicalLogitsWarper(mass)(None, scores)[0] > -math.inf
        ids, gaps = surviving_tokens(row[0], params)
        assert ids.tolist() == want.nonzero().squeeze(1).tolist()
        assert gaps.max() == 0


@pytest.mark.parametrize("n_sigma", [0.1, 1.0, 2.5])
def test_top_n_sigma_leaves_what_is_so_near_to_the_best(n_sigma: float) -> None:
    """Whatever the temperature; excluded tokens do not count."""
    for seed, temperature in ((0, 1.0), (1, 20.0)):
        row = random_logits(1, seed, 400)[0]
        row[::7] = -math.inf
        exact = row.double().numpy()
        least = exact.max() - n_sigma * exact[np.isfinite(exact)].std()
        params = SamplingParams(temperature=temperature, top_n_sigma=n_sigma)
        assert surviving_tokens(row, params)[0].tolist() == np.flatnonzero(exact >= least).tolist()


def slow_repeats(tokens: Sequence[int], params: SamplingParams) -> dict[int, float]:
    """Step 7 of the document, word by word."""
    found: dict[int, int] = {}
    n = len(tokens)
    most = next((i for i in range(n) if tokens[n - 1 - i] in params.dry_breakers), n)
    for j in range(n - 1):
        length = 0
        while length < min(most, j + 1, 256) and tokens[j - length] == tokens[n - 1 - length]:
            length += 1
        if length >= max(1, params.dry_allowed_length or 0):
            found[tokens[j + 1]] = max(found.get(tokens[j + 1], 0), length)
    exponents = {t: length - (params.dry_allowed_length or 0) for t, length in found.items()}
    assert params.dry_base is not None
    assert params.dry_multiplier is not None
    if params.dry_base > 1.000001:
        limit = math.floor(88.7228391 / math.log(params.dry_base))
        exponents = {t: min(e, limit) for t, e in exponents.items()}
    return {t: params.dry_multiplier * params.dry_base**e for t, e in exponents.items()}


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    allowed=st.integers(0, 4),
    breakers=st.sampled_from([(), (2,), (0, 3)]),
    base=st.sampled_from([1.0, 1.75, 100.0]),
)
@settings(deadline=None)
def test_repeats_are_those_of_the_document(
    tokens: list[int], allowed: int, breakers: tuple[int, ...], base: float
) -> None:
    params = SamplingParams(
        dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed, dry_breakers=breakers
    )
    ids, penalties = repeats(np.array(tokens, np.int32), params)
    want = slow_repeats(tokens, params)
    assert sorted(ids.tolist()) == sorted(want)
    assert dict(zip(ids.tolist(), penalties.tolist(), strict=True)) == {
        token_id: pytest.approx(value, rel=1e-6) for token_id, value in want.items()
    }


def test_a_long_repeat_lowers_what_would_go_on_with_it_alone() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0)
    logits = torch.zeros(2, 8)
    got = changed(logits, (params, context([1, 2, 3, 4, 1, 2, 3])), (params, context([1])))
    assert got.tolist() == [[0, 0, 0, 0, -2, 0, 0, 0], [0] * 8]
    long = context([5] * 1000)
    assert repeats(long.tokens, params)[1].tolist() == [2.0 ** min(256 - 2, 127)]


def sample(logits: Tensor, *rows: SampleRow) -> list[int]:
    return Sampler(logits.shape[1]).sample(logits, rows).token_ids


def test_greedy_takes_the_best_of_the_changed_logits() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    told = context([0], [1, 1])
    for params, want in (
        (SamplingParams(), 0),
        (SamplingParams(repetition_penalty=2.0), 2),
        (SamplingParams(repetition_penalty=1.2, frequency_penalty=1.5), 0),
        (SamplingParams(logit_bias=((3, 3.5),)), 3),
        (SamplingParams(logit_bias=((0, -2.0),), frequency_penalty=0.4), 1),
        (SamplingParams(logit_bias=((0, -2.0),), frequency_penalty=0.6), 0),
        (SamplingParams(logit_bias=((0, -2.0),), presence_penalty=0.9), 1),
        (SamplingParams(logit_bias=((0, -2.0),), presence_penalty=1.1), 0),
    ):
        assert sample(logits, SampleRow(params=params, position=2, context=told)) == [want]


def test_stop_ids_are_out_until_enough_is_made() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    params = SamplingParams(min_tokens=2)
    drawn = [
        sample(
            logits,
            SampleRow(params=params, position=2 + n, context=context([0] * 3, [3] * n, [1, 2])),
        )
        for n in range(4)
    ]
    assert drawn == [[3], [3], [1], [1]]


def test_a_token_is_left_where_all_are_stop_ids() -> None:
    told = context([0], [], range(4))
    row = SampleRow(params=SamplingParams(min_tokens=1), position=0, context=told)
    assert sample(torch.tensor([[0.0, 9.0, 8.0, 1.0]]), row) == [1]


def test_draws_follow_the_changed_logits() -> None:
    """Rows beside it, greedy and plain, change nothing; tokens without a column are ignored."""
    logits = random_logits(3, 5)
    told = context([1, 2], [7, 7, 9])
    params = SamplingParams(
        temperature=0.9,
        repetition_penalty=1.4,
        frequency_penalty=0.5,
        logit_bias=((4, 3.0), (VOCAB + 40, 5.0)),
        seed=3,
    )
    rows = [
        SampleRow(params=SamplingParams(), position=4),
        SampleRow(params=params, position=4, context=told),
        SampleRow(params=SamplingParams(presence_penalty=1.0), position=4, context=told),
    ]
    plain = SampleRow(params=SamplingParams(temperature=0.9, seed=3), position=4)
    by_itself = changed(logits[1:2], (params, told))
    assert sample(logits, *rows)[:2] == [int(logits[0].argmax()), sample(by_itself, plain)[0]]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(1, 8)
    params = SamplingParams(logit_bias=((5, 100.0),), n_logprobs=2)
    result = Sampler(VOCAB).sample(logits, [SampleRow(params=params, position=0)])
    want = torch.log_softmax(logits[0].double(), 0)
    (logprobs,) = result.logprobs
    assert logprobs is not None
    assert result.token_ids == [logprobs.token_id] == [5]
    assert logprobs.logprob == pytest.approx(float(want[5]))
    assert [token_id for token_id, _ in logprobs.top] == torch.topk(want, 2).indices.tolist()


def test_logits_that_overflow_in_the_penalties_are_refused() -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = 3e38
    params = SamplingParams(repetition_penalty=0.01)
    rows = [
        SampleRow(params=params, position=0, context=context([2])),
        SampleRow(params=params, position=0, context=context([3])),
    ]
    with pytest.raises(NumericalError, match="row 1 ") as caught:
        sample(logits, *rows)
    assert caught.value.rows == (1,)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("min_p", -0.1, "min-p .* not -0.1"),
        ("min_p", 1.01, "min-p"),
        ("min_p", math.nan, "min-p"),
        ("top_n_sigma", -1.0, "top-n-sigma .* not -1"),
        ("typical_p", 0.0, "typical-p must be above 0"),
        ("dry_multiplier", 101.0, "dry-multiplier .* not 101"),
        ("dry_base", 0.5, "dry-base must be from 1 to 100, not 0.5"),
        ("dry_allowed_length", -1, "dry-allowed-length"),
        ("repetition_penalty", 0.0, "repetition-penalty .* not 0"),
        ("repetition_penalty", math.inf, "repetition-penalty"),
        ("presence_penalty", 2.1, "presence-penalty .* not 2.1"),
        ("presence_penalty", math.nan, "presence-penalty"),
        ("frequency_penalty", -2.1, "frequency-penalty .* not -2.1"),
        ("min_tokens", -1, "min-tokens .* not -1"),
        ("logit_bias", ((5, 100.5),), "logit-bias .* not 5=100.5"),
        ("logit_bias", ((5, math.nan),), "logit-bias"),
        ("logit_bias", ((-1, 0.0),), "logit-bias .* not -1"),
        ("logit_bias", ((5, 1.0), (5, 2.0)), "logit-bias names token 5 twice"),
        (
            "logit_bias",
            tuple((n, 0.0) for n in range(MAX_LOGIT_BIASES + 1)),
            "logit-bias may name 1024 tokens, not 1025",
        ),
    ],
)
def test_a_parameter_outside_its_range_is_named(field: str, value: object, named: str) -> None:
    with pytest.raises(SamplingError, match=named):
        SamplingParams(**{field: value}).check()  # type: ignore[arg-type]
