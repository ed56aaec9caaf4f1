"""The MLPs with experts that layouts are put together from: routers, names and biases.

Knows the parameters of each, by transformers' names. Must not know which family has them, nor
files; modules, which need torch, are imported when a stage loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.decoder_config import read_expert_counts
from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Experts, ModelConfig
from shardnet.model.families.family import Stacking
from shardnet.model.families.parts import Part
from shardnet.model.families.tensor_shapes import ExpertNames, Table, gated, sparse_mlp

if TYPE_CHECKING:
    from torch import Tensor

    from shardnet.model.layers.experts import ClampedMlp, Router, SparseMlp
    from shardnet.model.layers.modules import GatedMlp
    from shardnet.model.layers.weight_source import WeightSource

MakeRouter = Callable[["Experts", "WeightSource", str, "Tensor | None"], "Router"]
"""Makes a router of the name of its linear, and of the bias of the choice, if there is one."""

EXPERTS: Final = ExpertNames()
MIXTRAL: Final = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
LFM: Final = ExpertNames(block="feed_forward", gate="w1", up="w3", down="w2")
RENAMED_BIAS: Final = (("correction_bias", "correction.bias"),)
"""What GGUF's converter calls the bias of the choice of experts."""
STACKED: Final[dict[str, Any]] = {"experts": EXPERTS, "stacking": Stacking.CONCATENATED}
"""What the record of a family says whose experts have Llama's names, and may be stacked."""


def with_experts(config: ModelConfig, n_experts: int, top_k: int, **more: Any) -> ModelConfig:
    """Add experts, unless `layers` are none.

    The arguments are fields of Experts. Without more, experts are in every layer, as wide as the
    MLP would be, and weights add up to 1.
    """
    usual: dict[str, Any] = {
        "intermediate_size": config.intermediate_size,
        "normalize_top_k": True,
        "layers": tuple(range(config.n_layers)),
    }
    experts = Experts(n_experts=n_experts, top_k=top_k, **(usual | more))
    return replace(config, experts=experts if experts.layers else None)


def read_experts(
    fields: Fields,
    config: ModelConfig,
    layers: tuple[int, ...],
    *,
    counts: tuple[int, int],
    inner: int,
    shared: int = 0,
    sums: bool = False,
) -> ModelConfig:
    """Add the experts of `layers`, by Qwen's keys.

    How many there are and a token uses, how wide each and a shared one are (0 for none), and
    whether weights add up to 1 are defaults.
    """
    return with_experts(
        config,
        *read_expert_counts(fields, ("num_experts", "num_local_experts"), *counts),
        intermediate_size=fields.positive("moe_intermediate_size", inner),
        normalize_top_k=fields.take("norm_topk_prob", bool, sums),
        shared_intermediate_size=shared
        and fields.positive("shared_expert_intermediate_size", shared),
        layers=layers,
    )


def load_experts(
    config: ModelConfig,
    weights: WeightSource,
    prefix: str,
    n_experts: int,
    names: ExpertNames = EXPERTS,
) -> list[GatedMlp]:
    """Take the parameters of all experts of a layer, which stand below `prefix`."""
    from shardnet.model.layers.modules import GatedMlp

    return [
        GatedMlp.load(config, weights, f"{prefix}.{number}", names.linears)
        for number in range(n_experts)
    ]


def experts_part(
    make_router: MakeRouter,
    names: ExpertNames = EXPERTS,
    *,
    bias: str = "",
    bias_rows: tuple[int, ...] = (),
    shared: str = "shared_experts",
    has_shared_gate: bool = False,
) -> Part:
    """Make the part of a gated MLP, in layers that have them of a router and its experts.

    `shared` names the shared experts, which are one as wide as all of them, maybe with a gate.
    `bias` names what is added for the choice alone, below the block; it has `bias_rows` before its
    columns.
    """

    def tensors(config: ModelConfig, layer: int) -> Table:
        experts = config.layer_experts(layer)
        block = f"model.layers.{layer}.{names.block}"
        if experts is None:
            inner, linears = config.intermediate_size, names.linears
            return gated(config, block, inner, with_bias=config.mlp_bias, names=linears)
        inner = experts.shared_intermediate_size
        made = sparse_mlp(config, layer, names)
        if inner:
            made |= gated(config, f"{block}.{shared}", inner, with_bias=config.mlp_bias)
        if has_shared_gate:
            made[f"{block}.{shared}_gate.weight"] = (1, config.hidden_size)
        return made | ({f"{block}.{bias}": (*bias_rows, experts.n_experts)} if bias else {})

    def load(
        config: ModelConfig, weights: WeightSource, layer: int
    ) -> GatedMlp | ClampedMlp | SparseMlp:
        from shardnet.model.layers.experts import SharedExpert, SparseMlp
        from shardnet.model.layers.modules import GatedMlp

        experts, block = config.layer_experts(layer), f"model.layers.{layer}.{names.block}"
        if experts is None:
            return _clamped(GatedMlp.load(config, weights, block, names.linears), config.mlp_limit)
        added = weights.parameter(f"{block}.{bias}") if bias else None
        router = make_router(experts, weights, f"{block}.gate", added)
        plain = load_experts(config, weights, f"{block}.experts", experts.n_experts, names)
        each = [_clamped(one, experts.swiglu_limit) for one in plain]
        common: GatedMlp | ClampedMlp | SharedExpert | None = None
        if experts.shared_intermediate_size:
            plain_common = GatedMlp.load(config, weights, f"{block}.{shared}")
            common = _clamped(plain_common, config.mlp_limit)
            if has_shared_gate:
                gate = weights.linear(f"{block}.{shared}_gate", precise=True)
                common = SharedExpert(expert=plain_common, gate=gate)
        return SparseMlp(router=router, experts=each, shared=common)

    return Part(tensors=tensors, load=load)


def _clamped(plain: GatedMlp, limit: float | None) -> GatedMlp | ClampedMlp:
    from shardnet.model.layers.experts import ClampedMlp

    if limit is None:
        return plain
    return ClampedMlp(limit=limit, gate_up_proj=plain.gate_up_proj, down_proj=plain.down_proj)


def _by_softmax(experts: Experts, weights: WeightSource, gate: str, bias: Tensor | None) -> Router:
    from shardnet.model.layers.experts import SoftmaxRouter

    return SoftmaxRouter.of(experts, weights.linear(gate, precise=True))


def _by_groups(experts: Experts, weights: WeightSource, gate: str, bias: Tensor | None) -> Router:
    from shardnet.model.layers.experts import SoftmaxGroupRouter

    return SoftmaxGroupRouter(experts=experts, gate=weights.linear(gate, wide=True))


def _best_two(
    experts: Experts,
    weights: WeightSource,
    gate: str,
    bias: Tensor | None,
    *,
    has_softmax: bool = False,
) -> Router:
    """Make the router of DeepSeek-V3; see MakeRouter."""
    from shardnet.model.layers.experts import BestTwoRouter

    linear = weights.linear(gate, wide=True)
    by_softmax = has_softmax or experts.has_softmax
    return BestTwoRouter(experts=experts, gate=linear, bias=bias, has_softmax=by_softmax)


def _by_biased_logits(
    experts: Experts, weights: WeightSource, gate: str, bias: Tensor | None
) -> Router:
    from shardnet.model.layers.experts import BiasedLogitsRouter

    assert bias is not None, "its part names one"
    return BiasedLogitsRouter(experts=experts, gate=weights.linear(gate, wide=True), bias=bias)


def _by_mixer(experts: Experts, weights: WeightSource, gate: str, bias: Tensor | None) -> Router:
    from shardnet.model.layers.experts import SparseMixerRouter

    return SparseMixerRouter(gate=weights.linear(gate, precise=True))


_BIAS: Final = "gate.e_score_correction_bias"
SOFTMAX_EXPERTS: Final = experts_part(_by_softmax)
"""Qwen3's."""
GATED_EXPERTS: Final = experts_part(_by_softmax, shared="shared_expert", has_shared_gate=True)
"""Qwen2's, with one that every token uses."""
HUNYUAN_EXPERTS: Final = experts_part(_by_softmax, shared="shared_mlp")
MIXTRAL_EXPERTS: Final = experts_part(_by_softmax, MIXTRAL)
MINIMAX_EXPERTS: Final = experts_part(_best_two, MIXTRAL, bias="e_score_correction_bias")
LFM_EXPERTS: Final = experts_part(_best_two, LFM, bias="expert_bias")
PHI_EXPERTS: Final = experts_part(_by_mixer, MIXTRAL)
GROUPED_EXPERTS: Final = experts_part(_by_groups)
"""DeepSeek-V2's."""
DEEPSEEK_EXPERTS: Final = experts_part(_best_two, bias=_BIAS)
"""DeepSeek-V3's."""
UNBIASED_EXPERTS: Final = experts_part(_best_two)
"""Those of DeepSeek-V3 without a bias."""
MISTRAL_EXPERTS: Final = experts_part(partial(_best_two, has_softmax=True))
"""Those of DeepSeek-V3 without a bias, by softmax (Mistral 4)."""
ERNIE_EXPERTS: Final = experts_part(
    partial(_best_two, has_softmax=True), bias="moe_statics.e_score_correction_bias", bias_rows=(1,)
)
KOLIBRI_EXPERTS: Final = experts_part(_by_biased_logits, bias=_BIAS)
