"""Masks over the vocabulary, in each of their forms, and what the sampler draws under them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shardnet.constraints import MaskForm, TokenMask
from shardnet.errors import NumericalError
from shardnet.model.sampling.penalties import RowContext
from shardnet.model.sampling.sampler import Sampler, SampleRow
from shardnet.model.sampling.token_masks import forbidden_tokens, pack_mask
from shardnet.sampling_params import SamplingParams


def bits_of(allowed: np.ndarray) -> bytes:
    return np.packbits(allowed, bitorder="little").tobytes()


@pytest.mark.parametrize("n_tokens", [1, 8, 77, 1000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_a_mask_says_the_same_in_whatever_form(n_tokens: int, share: float) -> None:
    allowed = np.random.default_rng(n_tokens).random(n_tokens) < share
    beyond = np.ones(40, np.bool_)  # bits of ids that the model does not have
    mask = pack_mask(bits_of(np.concatenate([allowed, beyond])), n_tokens)
    assert len(mask.data) <= math.ceil(n_tokens / 8)
    assert (forbidden_tokens(mask, n_tokens) == ~allowed).all()
    assert mask.is_empty == (not allowed.any())
    padded = forbidden_tokens(mask, n_tokens + 9)
    assert (padded[:n_tokens] == ~allowed).all()
    assert mask.form is MaskForm.FORBIDDEN or padded[n_tokens:].all()


def test_forms_are_the_shortest() -> None:
    few = np.zeros(1000, np.bool_)
    few[[3, 999]] = True
    assert pack_mask(bits_of(few), 1000).form is MaskForm.ALLOWED
    assert pack_mask(bits_of(~few), 1000).form is MaskForm.FORBIDDEN
    assert pack_mask(bits_of(np.arange(1000) % 2 == 0), 1000).form is MaskForm.BITS


LOGITS = torch.tensor([[0.0, 5.0, 4.0, 3.0, -2.0]])
MASK = pack_mask(bits_of(np.array([True, False, False, True, True])), 5)


def drawn(params: SamplingParams, mask: TokenMask = MASK, context: RowContext | None = None) -> int:
    row = SampleRow(params=params, position=3, mask=mask)
    if context is not None:
        row = SampleRow(params=params, position=3, mask=mask, context=context)
    result = Sampler(5).sample(LOGITS, [row])
    for logprobs in result.logprobs:
        assert logprobs is not None
        assert logprobs.top[0][0] == 1  # those of the raw logits
    return result.token_ids[0]


def test_only_allowed_tokens_are_drawn_and_logprobs_are_those_of_the_raw_logits() -> None:
    assert drawn(SamplingParams(n_logprobs=1)) == 3
    hot = [SamplingParams(temperature=50.0, seed=seed, n_logprobs=1) for seed in range(40)]
    assert {drawn(params) for params in hot} == {0, 3, 4}
    assert drawn(SamplingParams(n_logprobs=1, logit_bias=((0, 4.0), (1, 50.0)))) == 0
    assert drawn(SamplingParams(temperature=1.0, top_k=1, n_logprobs=1)) == 3


def test_a_stop_id_that_comes_too_early_is_drawn_if_nothing_else_is_allowed() -> None:
    only_stop = TokenMask(MaskForm.ALLOWED, (4).to_bytes(4, "little"))
    context = RowContext(tokens=np.zeros(1, np.int32), n_prompt=1, stop_ids=(4,))
    params = SamplingParams(min_tokens=5, n_logprobs=1)
    assert drawn(params, only_stop, context) == 4


def test_a_row_without_a_token_is_an_error() -> None:
    with pytest.raises(NumericalError):
        drawn(SamplingParams(n_logprobs=1), TokenMask(MaskForm.ALLOWED, b""))
