"""Routers and experts: who is chosen, what it counts, and that rows do not see each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.rings.stage_chain import CPU, probed
from torch import Tensor

from shardnet.model.config.model_config import Activation
from shardnet.model.kernels.linear import Linear, PlainLinear, make_linear
from shardnet.model.layers.experts import ExpertChoice, SoftmaxRouter, SparseMlp, best_experts
from shardnet.model.layers.modules import GatedMlp
from shardnet.types import DType

N_EXPERTS = 7
WIDTH = 24


class Scores:
    """A gate that gives each row the scores it consists of."""

    shape = (N_EXPERTS, N_EXPERTS)

    def __call__(self, rows: Tensor) -> Tensor:
        return rows


def choose(scores: list[float], top_k: int, *, normalize: bool) -> tuple[list[int], list[float]]:
    router = SoftmaxRouter(gate=Scores(), top_k=top_k, normalize=normalize)
    choice = router(torch.tensor([scores]))
    return choice.experts[0].tolist(), choice.weights[0].tolist()


def test_the_best_experts_by_their_shares() -> None:
    """Scores are logarithms: shares are 1, 2, 4 and 1 of 8."""
    scores = [math.log(share) for share in (1, 2, 4, 1)]
    assert choose(scores, 2, normalize=False) == ([2, 1], pytest.approx([0.5, 0.25]))
    assert choose(scores, 2, normalize=True) == ([2, 1], pytest.approx([2 / 3, 1 / 3]))
    assert choose(scores, 4, normalize=True)[0] == [2, 1, 0, 3]


@given(st.lists(st.sampled_from([-2.0, 0.0, 0.5, 3.0]), min_size=1, max_size=64), st.data())
def test_of_equal_experts_the_smaller_id(scores: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, len(scores)))
    ranked = sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))
    best, experts = best_experts(torch.tensor([scores]), top_k)
    assert experts[0].tolist() == ranked[:top_k]
    assert best[0].tolist() == [scores[expert] for expert in ranked[:top_k]]


def sparse(dtype: DType, top_k: int = 3) -> SparseMlp:
    generator = torch.Generator().manual_seed(1)
    choice = probed(CPU, dtype, None)

    def linear(n_out: int, n_in: int) -> Linear:
        return make_linear(choice, [torch.randn(n_out, n_in, generator=generator)], [], CPU)

    return SparseMlp(
        router=SoftmaxRouter(gate=linear(N_EXPERTS, WIDTH), top_k=top_k, normalize=True),
        experts=[
            GatedMlp(
                activation=Activation.SILU,
                gate_up_proj=linear(20, WIDTH),
                down_proj=linear(WIDTH, 10),
            )
            for _ in range(N_EXPERTS)
        ],
    )


def rows_of(n_rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n_rows, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("top_k", [1, 3, N_EXPERTS])
def test_each_row_gets_its_own_experts_answers(top_k: int) -> None:
    """Against each expert asked for each row."""
    mlp, rows = sparse(DType.FLOAT32, top_k), rows_of(40, torch.float32)
    found, experts = mlp(rows)
    choice = mlp.router(rows)
    assert torch.equal(experts, choice.experts)
    for row, chosen, weights, answer in zip(rows, experts, choice.weights, found, strict=True):
        parts = [
            weight * mlp.experts[int(expert)](row[None])[0]
            for expert, weight in zip(chosen, weights, strict=True)
        ]
        torch.testing.assert_close(answer, torch.stack(parts).sum(0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=lambda d: d.value)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype: DType) -> None:
    choice = probed(CPU, dtype, None)
    torch_dtype = torch.bfloat16 if choice.dtype is DType.BFLOAT16 else torch.float32
    mlp, rows = sparse(dtype), rows_of(choice.exact_rows, torch_dtype)
    whole, _ = mlp(rows)
    for row, answer in zip(rows, whole, strict=True):
        assert torch.equal(mlp(row[None])[0][0], answer)


def test_an_expert_computes_its_rows_once() -> None:
    asked: list[int] = []

    rows = rows_of(3, torch.float32)

    class Counting:
        down_proj = PlainLinear(torch.eye(rows.shape[1]), None)

        def inner(self, hidden: Tensor) -> Tensor:
            asked.append(hidden.shape[0])
            return hidden

        def __call__(self, hidden: Tensor) -> Tensor:
            return self.down_proj(self.inner(hidden))

    def router(hidden: Tensor) -> ExpertChoice:
        experts = torch.tensor([[0, 2], [2, 5], [2, 0]])
        return ExpertChoice(experts=experts, weights=torch.tensor([[0.5, 0.25]] * 3))

    mlp = SparseMlp(router=router, experts=[Counting() for _ in range(N_EXPERTS)])
    answers, _ = mlp(rows)
    assert asked == [2, 3, 1]
    torch.testing.assert_close(answers, 0.75 * rows)
