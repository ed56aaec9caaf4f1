from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from shardnet.model.config.model_config import Activation
from shardnet.model.layers.decoder_layer import Residual
from shardnet.model.layers.norms import HeadNorm, Norm, activate, row_sigmoid


@pytest.mark.parametrize("kind", list(Activation), ids=lambda k: k.value)
def test_activations_are_those_of_transformers(kind: Activation) -> None:
    values = torch.linspace(-6, 6, 1001)[None]
    torch.testing.assert_close(activate(kind, values), ACT2FN[kind.value](values))


def test_a_wide_norm_multiplies_before_it_rounds() -> None:
    """Gemma's norms, on bfloat16 rows: 1 + weight keeps bits that bfloat16 would not hold."""
    theirs = Gemma2RMSNorm(16, eps=1e-6)
    theirs.weight.data = torch.randn(16, generator=torch.Generator().manual_seed(0)) * 0.01
    rows = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = Norm(weight=theirs.weight.detach() + 1.0, bias=None, eps=1e-6)
    assert torch.equal(ours(rows), theirs(rows).detach())
    narrow = Norm(weight=(theirs.weight.detach() + 1.0).bfloat16(), bias=None, eps=1e-6)
    assert not torch.equal(narrow(rows), ours(rows))


def test_head_norms_of_queries_and_keys_stand_side_by_side() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = (
        Norm(weight=torch.randn(4, generator=generator), bias=None, eps=1e-6) for _ in range(2)
    )
    heads = torch.randn(3, 5, 4, generator=generator)  # 3 heads of queries, 2 of keys
    joined = HeadNorm.join(queries, keys, 3, 2)(heads)
    torch.testing.assert_close(joined[:, :3], queries(heads[:, :3]))
    torch.testing.assert_close(joined[:, 3:], keys(heads[:, 3:]))


@pytest.mark.parametrize("width", [1, 8, 33, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_sigmoid_has_the_same_bits_in_any_batch(width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(32, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = row_sigmoid(rows)
    torch.testing.assert_close(whole, torch.sigmoid(rows))
    for n_rows in (1, 2, 5, 31):
        assert torch.equal(row_sigmoid(rows[:n_rows]), whole[:n_rows])
        assert torch.equal(row_sigmoid(rows[-n_rows:]), whole[-n_rows:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_residual_with_a_factor_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """It multiplies and adds before it rounds, in columns that fill no vector too."""
    hidden, inner = torch.randn(2, 9, 129, generator=torch.Generator().manual_seed(0)).to(dtype)
    add = Residual(multiplier=0.22).add
    whole = add(hidden, inner)
    exact = (hidden.double() + inner.double() * 0.22).to(dtype)
    torch.testing.assert_close(whole, exact)
    alone = [add(hidden[row : row + 1], inner[row : row + 1]) for row in range(9)]
    assert torch.equal(torch.cat(alone), whole)
