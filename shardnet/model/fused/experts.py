"""A router and its experts in one call of the compiled library.

Knows which routers and experts the library computes, and the layout of a call's buffers. Must not
know the other sub-layers: fused/layers.py chooses among them.

Axes in shape comments: T rows of the micro-batch, E hidden size, X experts, K experts per row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from shardnet.model.arithmetic.row_functions import ACTIVATIONS
from shardnet.model.config.model_config import Experts
from shardnet.model.fused.structs import (
    CLAMPED,
    ExpertsStruct,
    ExpertStruct,
    MlpStruct,
    NativeSublayer,
    ResidualStruct,
    RouterStruct,
    Routing,
    aligned,
    check_shape,
)
from shardnet.model.kernels.library import SCRATCH, NativeKernels, check_memory
from shardnet.model.kernels.linear import Linear, NativeLinear, is_native
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import Residual
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
from shardnet.model.layers.rotary import Rotary
from shardnet.model.shards.gathered import JoinedLinear

_VISITS_AT_ONCE: Final = 256
"""Pairs of a row and an expert that are computed together, unless there are more rows than that:
enough to share their work over threads, few enough for their buffers to stay small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expert:
    """The linears of an expert, with weights at fixed addresses."""

    gate_up: NativeLinear
    down: JoinedLinear

    @classmethod
    def of(cls, mlp: Mlp | SharedExpert) -> _Expert | None:
        """Take the linears of an expert if the library computes them; else None."""
        if isinstance(mlp, SharedExpert):
            return cls.of(mlp.expert)
        if not isinstance(mlp, GatedMlp | ClampedMlp):
            return None
        gate_up, down = mlp.gate_up_proj, JoinedLinear.of(mlp.down_proj)
        if not is_native(gate_up) or down is None:
            return None
        is_fixed = gate_up.weights_stay and down.linear.weights_stay
        return cls(gate_up=gate_up, down=down) if is_fixed else None

    @property
    def struct(self) -> ExpertStruct:
        """Point to the linears."""
        gate_up, down = (linear.native_matmul().address for linear in self.linears)
        return ExpertStruct(gate_up=gate_up, down=down)

    @property
    def linears(self) -> tuple[NativeLinear, NativeLinear]:
        """Gate and up, down, as this shard has them."""
        return self.gate_up, self.down.linear


class NativeExperts(NativeSublayer[ExpertsStruct]):
    """An ExpertsSublayer by the library."""

    FIELD = "experts"
    """Of a LayerStruct."""

    def __init__(
        self,
        residual: Residual,
        mlp: SparseMlp,
        router: RouterStruct,
        experts: Sequence[_Expert],
        shared: _Expert | None,
        kernels: NativeKernels,
    ) -> None:
        down = experts[0].down
        width, n_inner = down.shape[0], down.n_own_in
        visited = [*experts] if shared is None else [*experts, shared]
        for expert in visited:
            like = expert.down if expert is shared else down
            check_shape("gate_up_proj", expert.gate_up, 2 * like.n_own_in, width)
            check_shape("down_proj", expert.down, width, like.shape[1])
        self._width = width
        self._down, self._shared = down, shared
        self._kept = (residual, mlp)
        self._shared_gate = mlp.shared.gate if isinstance(mlp.shared, SharedExpert) else None
        self.linears = tuple(linear for expert in visited for linear in expert.linears)
        """The linear layers of its experts: gate and up, down, each."""
        matmuls = [linear.native_matmul() for linear in (*self.linears, *self._small(mlp.router))]
        self._experts = (ExpertStruct * len(experts))(*(expert.struct for expert in experts))
        self._call = kernels.function("shardnet_experts", ctypes.POINTER(ExpertsStruct))
        self._arguments = ExpertsStruct(
            mlp=MlpStruct(
                residual=ResidualStruct.of(residual, width, kernels),
                n_inner=n_inner,
                joined=down.joined,
                **activation_fields(mlp.experts[0]),
            ),
            router=router,
            experts=ctypes.addressof(self._experts),
            row_bytes=aligned(max(matmul.row_bytes for matmul in matmuls)),
            n_columns=down.linear.shape[0],
            weighs_inputs=mlp.weighs_inputs,
        )
        if shared is not None:
            self._arguments.shared = shared.struct
            self._arguments.n_shared_inner = shared.down.n_own_in
            assert mlp.shared is not None
            self._arguments.shared_activation = int(
                activation_fields(_own(mlp.shared))["activation"]
            )
            if shared.down.ends != down.ends:
                self._arguments.shared_in_ends = shared.down.joined.in_ends
        if self._shared_gate is not None:
            assert is_native(self._shared_gate)
            self._arguments.shared_gate = self._shared_gate.native_matmul().address
        self._of_tokens = getattr(mlp.router, "of_tokens", None)
        self.chosen = torch.empty(0, router.top_k, dtype=torch.int64)
        """The experts of each row of the last call: [T, K]."""

    def _small(self, router: Router) -> list[NativeLinear]:
        """Return the gates of the router and of the shared expert."""
        gates = (_gate(router), self._shared_gate)
        return [gate for gate in gates if gate is not None and is_native(gate)]

    @classmethod
    def of(cls, residual: Residual, mlp: SparseMlp, kernels: NativeKernels) -> NativeExperts | None:
        """Join a router and its experts; None unless the library computes all of it, with weights
        at fixed addresses (not streamed).

        Raises ValueError for linears whose shapes do not fit together.
        """
        router = _router_struct(mlp.router, len(mlp.experts))
        experts = [_Expert.of(expert) for expert in mlp.experts]
        shared = None if mlp.shared is None else _Expert.of(mlp.shared)
        known = [expert for expert in experts if expert is not None]
        if router is None or len(known) < len(experts) or (shared is None) != (mlp.shared is None):
            return None
        gate = mlp.shared.gate if isinstance(mlp.shared, SharedExpert) else None
        if gate is not None and not (is_native(gate) and gate.weights_stay):
            return None
        first, *others = [activation_fields(expert) for expert in mlp.experts]
        if not first or any(kind != first for kind in others):
            return None
        of_shared = first if mlp.shared is None else activation_fields(_own(mlp.shared))
        if not of_shared or (of_shared["activation"] == CLAMPED and of_shared != first):
            return None
        return cls(residual, mlp, router, known, shared, kernels)

    @property
    def residual(self) -> ResidualStruct:
        """Input, output and norms among the arguments."""
        residual: ResidualStruct = self._arguments.mlp.residual
        return residual

    def __call__(self, hidden: Tensor, index: int, rotary: Rotary, step: ForwardStep) -> Tensor:
        """Run hidden states [T, E] through it in layer `index` within the stage: [T, E]."""
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        self.residual.bind_rows(hidden, out)
        self.bind_tokens(step)
        self.assign_buffers(SCRATCH.at_least(self.scratch_bytes(hidden)), hidden)
        self._call(self._arguments)
        step.record_experts(index, self.chosen)
        return out

    def bind_tokens(self, step: ForwardStep) -> None:
        """Point to the rows' token ids, where experts are chosen by them."""
        if self._of_tokens is None:
            return
        self._token_ids = step.token_ids.contiguous()
        ids = check_memory("token ids", self._token_ids, 8 * len(step.positions), torch.int64)
        if not 0 <= int(ids.min()) <= int(ids.max()) < len(self._of_tokens):
            raise ValueError(f"a token id is beyond the {len(self._of_tokens)} with experts")
        self._arguments.router.token_ids = ids.data_ptr()

    def scratch_bytes(self, hidden: Tensor) -> int:
        """Return the scratch memory of a call with rows like `hidden`, in bytes."""
        sizes = (size for sizes in self._buffers(hidden) for size in sizes.values())
        return self.residual.inner_bytes(len(hidden), hidden.element_size()) + sum(
            map(aligned, sizes)
        )

    def assign_buffers(self, scratch: Tensor, hidden: Tensor) -> None:
        """Point the arguments to buffers at the start of `scratch`."""
        arguments, at = self._arguments, scratch.data_ptr()
        of_rows = (len(hidden), hidden.element_size())
        self.residual.assign_inner(at, *of_rows)
        at += self.residual.inner_bytes(*of_rows)
        structs = (arguments.mlp.joined, arguments.mlp, arguments)
        buffers = self._buffers(hidden)
        for struct, sizes in zip(structs, buffers, strict=True):
            for name, size in sizes.items():
                setattr(struct, name, at)
                at += aligned(size)
        arguments.n_at_once = self._n_at_once(len(hidden))
        arguments.joined_bytes = buffers[0]["rows"] // 2
        arguments.activated_bytes = buffers[1]["activated"] // 2
        self.chosen = torch.empty(len(hidden), arguments.router.top_k, dtype=torch.int64)
        arguments.chosen = self.chosen.data_ptr()

    def _n_at_once(self, n_rows: int) -> int:
        n_visits: int = n_rows * self._arguments.router.top_k
        return min(n_visits, max(n_rows, _VISITS_AT_ONCE))

    def _buffers(self, hidden: Tensor) -> tuple[dict[str, int], ...]:
        """Return the sizes in bytes of the buffers of gathers, MLP and others, by their fields."""
        own, item, n_rows = self._arguments, hidden.element_size(), len(hidden)
        n_experts, n_visits = own.router.n_experts, n_rows * own.router.top_k
        at_once, n_shared = self._n_at_once(n_rows), 0 if self._shared is None else n_rows
        inner = item * (at_once * own.mlp.n_inner + n_shared * own.n_shared_inner)
        rows, _ = self._down.buffer_bytes(at_once, item)
        _, part = self._down.buffer_bytes(n_rows, item)
        if self._shared is not None:
            rows += self._shared.down.buffer_bytes(n_rows, item)[0]
        of_mlp = {
            "projected": 2 * inner,
            "activated": aligned(inner) * (2 if rows else 1),  # two batches, of which one travels
            "scratch": (at_once + n_shared) * own.row_bytes,
        }
        of_rest = {
            "products": 8 * (n_experts + 1),
            "wide": 4 * n_rows * self._width if own.router.is_wide else 0,
            "narrow": 4 * n_rows * n_experts,
            "scores": 12 * n_rows * n_experts,
            "weights": 4 * n_visits,
            "visits": 8 * n_visits,
            "places": 8 * n_visits,
            "starts": 8 * (n_experts + 1),
            "gathered": at_once * self._width * item,
            "outputs": (n_visits + n_shared) * own.n_columns * item,
            "shared_gates": n_rows * item,
        }
        of_gathers = {"rows": 2 * aligned(rows), "part": part}
        return of_gathers, of_mlp, of_rest


_KNOWN: Final = (
    SoftmaxRouter | SigmoidRouter | SoftmaxGroupRouter | BestTwoRouter | SqrtSoftplusRouter
)


def _gate(router: Router) -> Linear | None:
    return router.gate if isinstance(router, _KNOWN) else None


def _router_struct(router: Router, n_experts: int) -> RouterStruct | None:
    """Describe a router; None if the library does not compute it."""
    gate = _gate(router)
    if gate is None or not is_native(gate) or not gate.weights_stay:
        return None
    if gate.shape[0] != n_experts:
        raise ValueError(f"a router of {gate.shape[0]} experts stands before {n_experts}")
    struct = RouterStruct(gate=gate.native_matmul().address, n_experts=n_experts, scale=1.0)
    struct.n_groups = struct.top_groups = 1
    match router:
        case SoftmaxRouter():
            struct.top_k = router.top_k
            is_of_best = router.normalize
            struct.routing = Routing.BEST_BY_SOFTMAX if is_of_best else Routing.BEST_OF_SOFTMAX
        case SigmoidRouter():
            struct.top_k, struct.routing = router.top_k, Routing.BEST_BY_SIGMOID
        case SoftmaxGroupRouter():
            _group(struct, router.experts)
            struct.routing = Routing.GROUPS_BY_SOFTMAX
        case BestTwoRouter():
            _group(struct, router.experts)
            struct.normalizes = router.experts.normalize_top_k
            by_softmax = router.has_softmax
            struct.routing = (
                Routing.GROUPS_BY_TWO_SOFTMAX if by_softmax else Routing.GROUPS_BY_TWO_SIGMOIDS
            )
            _add_bias(struct, router.bias)
        case SqrtSoftplusRouter():
            _group(struct, replace(router.experts, n_groups=1, top_groups=1))
            struct.normalizes, struct.routing = 1, Routing.BEST_BY_ROOTS
            _add_bias(struct, router.bias)
            if (table := router.of_tokens) is not None:
                check_memory("experts of tokens", table, 4 * table.numel(), torch.int32)
                if not _are_distinct(table, n_experts, struct.top_k):
                    return None
                struct.of_tokens = table.data_ptr()
    return struct if _is_possible(struct) else None


def _add_bias(struct: RouterStruct, bias: Tensor | None) -> None:
    if bias is not None:
        own = check_memory("a router's bias", bias, 4 * struct.n_experts, torch.float32)
        struct.bias = own.data_ptr()


def _are_distinct(of_tokens: Tensor, n_experts: int, top_k: int) -> bool:
    """Whether each token has `top_k` of the experts: an expert has room for each row once."""
    ranked = of_tokens.sort(1).values
    is_known = 0 <= int(ranked.min()) <= int(ranked.max()) < n_experts
    return is_known and of_tokens.shape[1] == top_k and bool((ranked.diff(dim=1) > 0).all())


def _is_possible(struct: RouterStruct) -> bool:
    """Whether there are as many experts as are chosen, in groups of one size, of two or more."""
    size, left = divmod(struct.n_experts, struct.n_groups)
    is_grouped = struct.n_groups == 1 or (left == 0 and size > 1)
    has_groups = 0 < struct.top_groups <= struct.n_groups
    return is_grouped and has_groups and bool(0 < struct.top_k <= struct.n_experts)


def _group(struct: RouterStruct, experts: Experts) -> None:
    """Set what routers that choose among groups have in common."""
    struct.top_k, struct.scale = experts.top_k, experts.output_scale
    struct.n_groups, struct.top_groups = experts.n_groups, experts.top_groups
    struct.is_wide = 1


def _own(shared: Mlp | SharedExpert) -> Mlp:
    return shared.expert if isinstance(shared, SharedExpert) else shared


def activation_fields(mlp: Mlp) -> dict[str, float]:
    """Return the fields of a MlpStruct for an MLP's activation; none if it has no number."""
    if isinstance(mlp, ClampedMlp):
        return {
            "activation": CLAMPED,
            "limit": mlp.limit,
            "alpha": mlp.alpha,
            "added": mlp.added,
        }
    if isinstance(mlp, GatedMlp) and mlp.activation in ACTIVATIONS:
        return {"activation": ACTIVATIONS[mlp.activation]}
    return {}
