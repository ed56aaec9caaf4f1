"""A router and its experts in one call of the library: the bits of the same layer step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from support.needs import needs_library
from torch import Tensor

from shardnet.model.config.model_config import Activation, Experts
from shardnet.model.config.panel_form import Quantization
from shardnet.model.fused.experts import NativeExperts
from shardnet.model.kernels.library import NativeKernels, find_kernels
from shardnet.model.kernels.linear import Linear, PlainLinear
from shardnet.model.kernels.panel_linear import PanelLinear, float_linear
from shardnet.model.kernels.quantized_linear import quantized
from shardnet.model.layers.decoder_layer import ExpertsSublayer, Residual
from shardnet.model.layers.experts import (
    BestTwoRouter,
    ClampedMlp,
    Router,
    SharedExpert,
    SigmoidRouter,
    SoftmaxGroupRouter,
    SoftmaxRouter,
    SparseMlp,
    SqrtSoftplusRouter,
)
from shardnet.model.layers.modules import GatedMlp, Mlp
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.rotary import Rotary

pytestmark = needs_library
ISAS = ("portable", "avx2", "avx512", "")
WIDTH, INNER, N_EXPERTS, TOP_K = 40, 24, 12, 3
GROUPS = Experts(
    n_experts=N_EXPERTS,
    top_k=TOP_K,
    intermediate_size=INNER,
    normalize_top_k=True,
    n_groups=4,
    top_groups=2,
    output_scale=2.5,
    layers=(0,),
)
NO_ROTARY = Rotary(cos=torch.empty(0), sin=torch.empty(0))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """Makes linears for an instruction set."""

    kernels: NativeKernels

    def linear(self, n_out: int, n_in: int, seed: int) -> Linear:
        """In turns int4, int8, and bfloat16 with a bias."""
        weight = numbers(n_out, n_in, seed=seed) / n_in**0.5
        if seed % 3 == 2:
            bias = numbers(n_out, seed=seed + 1)
            return float_linear([weight.bfloat16()], bias, self.kernels)
        kind = Quantization.INT4 if seed % 3 == 0 else Quantization.INT8
        return PanelLinear([quantized(weight, kind)], None, self.kernels)

    def gate(self, *, is_wide: bool) -> Linear:
        """A router's linear that gives two experts the same score."""
        weight = numbers(N_EXPERTS, WIDTH, seed=1)
        weight[7] = weight[2]
        return float_linear([weight if is_wide else weight.bfloat16()], None, self.kernels)

    def gated(self, inner: int, seed: int) -> GatedMlp:
        """A usual expert."""
        return GatedMlp(
            activation=Activation.SILU,
            gate_up_proj=self.linear(2 * inner, WIDTH, seed),
            down_proj=self.linear(WIDTH, inner, seed + 1),
        )

    def clamped(self, seed: int) -> ClampedMlp:
        """One of gpt-oss, whose limits are often reached."""
        own = self.gated(INNER, seed)
        return ClampedMlp(
            limit=0.71, alpha=1.702, gate_up_proj=own.gate_up_proj, down_proj=own.down_proj
        )

    def sparse(self, router: Router, *, is_clamped: bool = False) -> SparseMlp:
        """Experts behind a router."""
        experts: list[Mlp] = [
            self.clamped(10 * number) if is_clamped else self.gated(INNER, 10 * number)
            for number in range(N_EXPERTS)
        ]
        return SparseMlp(router=router, experts=experts)


def softmax(make: Maker, *, normalize: bool) -> SoftmaxRouter:
    return SoftmaxRouter(gate=make.gate(is_wide=False), top_k=TOP_K, normalize=normalize)


def best_two(make: Maker, config: Experts = GROUPS, *, has_softmax: bool = False) -> BestTwoRouter:
    bias = numbers(N_EXPERTS, seed=3).abs()
    gate = make.gate(is_wide=True)
    return BestTwoRouter(experts=config, gate=gate, bias=bias, has_softmax=has_softmax)


def with_gated_expert(make: Maker) -> SparseMlp:
    gate = float_linear([numbers(1, WIDTH, seed=4).bfloat16()], None, make.kernels)
    shared = SharedExpert(expert=make.gated(2 * INNER, 7), gate=gate)
    return replace(make.sparse(softmax(make, normalize=False)), shared=shared)


def with_weighted_inputs(make: Maker) -> SparseMlp:
    router = SigmoidRouter(gate=make.gate(is_wide=False), top_k=2)
    shared = make.gated(INNER, 8)
    return replace(make.sparse(router), shared=shared, weighs_inputs=True)


def with_roots(make: Maker) -> SparseMlp:
    """DeepSeek-V4's router, and Hunyuan 4's experts, of which the shared one is not clamped."""
    bias = numbers(N_EXPERTS, seed=3).abs()
    router = SqrtSoftplusRouter(experts=GROUPS, gate=make.gate(is_wide=True), bias=bias)
    return replace(make.sparse(router, is_clamped=True), shared=make.gated(2 * INNER, 7))


KINDS: dict[str, Callable[[Maker], SparseMlp]] = {
    "mixtral": lambda make: make.sparse(softmax(make, normalize=True)),
    "gpt_oss": lambda make: make.sparse(softmax(make, normalize=True), is_clamped=True),
    "qwen2_moe": with_gated_expert,
    "llama4": with_weighted_inputs,
    "deepseek_v2": lambda make: make.sparse(
        SoftmaxGroupRouter(experts=GROUPS, gate=make.gate(is_wide=True))
    ),
    "deepseek_v3": lambda make: make.sparse(best_two(make)),
    "deepseek_v4": with_roots,
    "ernie": lambda make: make.sparse(
        best_two(make, replace(GROUPS, n_groups=1, top_groups=1), has_softmax=True)
    ),
}


def layer_of(kind: str, name: str, dtype: torch.dtype) -> tuple[ExpertsSublayer, NativeExperts]:
    """The layer, and the layer by the library."""
    kernels = find_kernels({"SHARDNET_ISA": name})
    assert kernels is not None
    norm = Norm(weight=numbers(WIDTH, seed=5).to(dtype), bias=None, eps=1e-5)
    plain = ExpertsSublayer(
        residual=Residual(before=norm, after=norm), mlp=KINDS[kind](Maker(kernels=kernels))
    )
    native = NativeExperts.of(plain.residual, plain.mlp, kernels)
    assert native is not None
    return plain, native


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step that keeps the experts its rows visited."""

    found: dict[int, Tensor]

    def record_experts(self, layer: int, experts: Tensor) -> None:
        self.found[layer] = experts


def run(layer: ExpertsSublayer | NativeExperts, hidden: Tensor) -> tuple[Tensor, Tensor]:
    step = Recorded({})
    out = layer(hidden, 4, NO_ROTARY, step)  # type: ignore[arg-type]
    return out, step.found[4]


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_call_gives_the_bits_of_many(kind: str, name: str, dtype: torch.dtype) -> None:
    plain, native = layer_of(kind, name, dtype)
    try:
        for n_rows in (1, 2, 130):  # the last with more visits than are computed at once
            hidden = numbers(n_rows, WIDTH, seed=n_rows).to(dtype)
            torch.set_num_threads(1 + n_rows % 2)
            (want, chosen), (found, visited) = run(plain, hidden), run(native, hidden)
            assert torch.equal(visited, chosen)
            assert torch.equal(found, want)
    finally:
        torch.set_num_threads(1)


def test_a_row_that_is_no_number_stays_so_alone() -> None:
    _, native = layer_of("deepseek_v3", "", torch.float32)
    hidden = numbers(5, WIDTH, seed=1)
    hidden[3, 7] = torch.nan
    out, _ = run(native, hidden)
    assert out[3].isnan().all()
    assert out[[0, 1, 2, 4]].isfinite().all()


def test_what_the_library_does_not_compute_is_left_to_torch() -> None:
    plain, _ = layer_of("mixtral", "", torch.float32)
    kernels = find_kernels({})
    assert kernels is not None
    odd = PlainLinear(numbers(WIDTH, INNER, seed=1), None)
    experts = [*plain.mlp.experts[1:], replace(plain.mlp.experts[0], down_proj=odd)]  # type: ignore[type-var]
    for mlp in (
        replace(plain.mlp, experts=experts),
        replace(plain.mlp, router=lambda hidden: plain.mlp.router(hidden)),
        replace(plain.mlp, router=replace(plain.mlp.router, top_k=N_EXPERTS + 1)),  # type: ignore[type-var]
        replace(plain.mlp, shared=replace(experts[0], activation=Activation.GELU)),  # type: ignore[type-var]
    ):
        assert NativeExperts.of(plain.residual, mlp, kernels) is None
    with pytest.raises(ValueError, match="stands before 11"):
        NativeExperts.of(plain.residual, replace(plain.mlp, experts=experts[:-1]), kernels)


def test_a_table_that_names_an_expert_twice_is_left_to_python() -> None:
    kernels = find_kernels({})
    assert kernels is not None
    plain = with_roots(Maker(kernels=kernels))
    for row, is_native in (
        (range(TOP_K), True),
        ([0] * TOP_K, False),
        ([N_EXPERTS] * TOP_K, False),
    ):
        table = torch.tensor([[*row]] * 3, dtype=torch.int32)
        router = replace(plain.router, of_tokens=table)  # type: ignore[type-var]
        made = NativeExperts.of(Residual(), replace(plain, router=router), kernels)
        assert (made is not None) is is_native
