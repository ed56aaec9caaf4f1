"""A router and its experts on a device: experts are gathered by id, and nobody waits in between.

Knows which routers and experts the text computes, and the order of launches. Must not know the
layer around them.

Axes in shape comments: T rows of the micro-batch, E hidden size, X experts, K experts per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from shardnet.model.arithmetic.row_functions import ACTIVATIONS
from shardnet.model.config.model_config import Activation, Experts
from shardnet.model.devices.products import (
    GATHERED_FROM,
    NO_ACTIVATION,
    TILE,
    DeviceProduct,
    Gating,
    Rows,
    Tiles,
    Visits,
)
from shardnet.model.drivers.driver import THREADS, Array, Buffer
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panel_linear import PanelLinear
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
from shardnet.model.layers.modules import GatedMlp, Mlp, PlainMlp

MakeProduct = Callable[[Sequence[PanelLinear]], DeviceProduct]
"""Uploads linears that are alike, one or one for each expert."""
Launch = Callable[..., None]
"""Launches a kernel by name: groups, buffers, numbers."""
Put = Callable[[Array], Buffer]
"""Uploads an array."""
_ALONE: Final = ACTIVATIONS | {Activation.RELU_SQUARED: 3}
"""Activations of MLPs without gates."""
_CLAMPED: Final = 3
_BY_SOFTMAX: Final = 3
_BY_ROOTS: Final = 6
"""As the text numbers activations, and ways to route."""

_BIASED: Final = BestTwoRouter | SqrtSoftplusRouter
_GROUPED: Final = _BIASED | SoftmaxGroupRouter


def why_no_experts(mlp: SparseMlp, is_multiplied: Callable[[Linear], bool]) -> str:
    """Say what the text does not compute of experts, "" for nothing."""
    if _routing(mlp.router) is None or mlp.weighs_inputs:
        return "this router"
    shared = _shared(mlp)
    gatings = {gating_of(one) for one in mlp.experts}
    if len(gatings) > 1 or None in (*gatings, *map(gating_of, shared)):
        return "these experts"
    pairs = [linears_of(one) for one in (*mlp.experts, *shared)]
    if not all(map(is_multiplied, [*_gates(mlp), *itertools.chain(*pairs)])):
        return "linears whose weights do not stay packed in memory"
    alike = {(shape_of(first), shape_of(down)) for first, down in pairs[: len(mlp.experts)]}
    return "experts of unlike forms" if len(alike) > 1 else ""


def gating_of(mlp: Mlp) -> Gating | None:
    """Return the activation of an MLP, None if it has no number."""
    if isinstance(mlp, PlainMlp):
        number = _ALONE.get(mlp.activation) if isinstance(mlp.activation, Activation) else None
        return None if number is None else Gating(activation=NO_ACTIVATION + 1 + number)
    if isinstance(mlp, ClampedMlp) and mlp.added in (0, 1):
        return Gating(activation=_CLAMPED + (not mlp.added), limit=mlp.limit, alpha=mlp.alpha)
    if isinstance(mlp, GatedMlp) and mlp.activation in ACTIVATIONS:
        return Gating(activation=ACTIVATIONS[mlp.activation])
    return None


class DeviceExperts:
    """The experts of one layer, of which `why_no_experts` says nothing."""

    def __init__(
        self, mlp: SparseMlp, make: MakeProduct, put: Put, scratch: Rows, launch: Launch
    ) -> None:
        self._scratch, self._launch = scratch, launch
        routing = _routing(mlp.router)
        assert routing is not None
        self._routing, self._top_k = routing
        self._groups: Experts | None = None
        self._bias: Buffer | None = None
        self._of_tokens: Buffer | None = None
        if isinstance(mlp.router, _GROUPED):
            self._groups = mlp.router.experts
        if isinstance(mlp.router, _BIASED) and mlp.router.bias is not None:
            self._bias = put(mlp.router.bias.numpy())
        if isinstance(mlp.router, SqrtSoftplusRouter) and mlp.router.of_tokens is not None:
            self._of_tokens = put(mlp.router.of_tokens.numpy())
        experts, gating = [_panels(expert) for expert in mlp.experts], gating_of(mlp.experts[0])
        assert gating is not None
        self._gating = gating
        router, *gates = (make([gate]) for gate in _gates(mlp) if isinstance(gate, PanelLinear))
        self._router, self._gate = router, gates[0] if gates else None
        self._gate_up = make([gate_up for gate_up, _ in experts])
        self._down = make([down for _, down in experts])
        self._shared = [
            (gating_of(one) or gating, [make([linear]) for linear in _panels(one)])
            for one in _shared(mlp)
        ]

    def __call__(
        self, rows: Buffer, n_rows: int, inner: Buffer, tokens: Buffer | None = None
    ) -> None:
        """Run normalised rows [T, E] through their experts: `inner` [T, E].

        `tokens` are the rows' ids [T], where any experts go by them.
        """
        of, top_k, width = self._scratch.of, self._top_k, self._down.shape[0]
        n_experts, n_visits = self._router.shape[0], n_rows * top_k
        scores = of("scores", 4 * n_rows * n_experts)
        ids, weights = of("ids", 4 * n_visits), of("weights", 4 * n_visits)
        both, outputs = (
            of("gates", 4 * n_visits * self._gate_up.shape[0]),
            of("outputs", 4 * n_visits * width),
        )
        self._router(rows, n_rows, scores)
        self._route(scores, ids, weights, n_rows, tokens)
        tiles = self._tiles(ids, n_visits)
        self._gate_up(rows, n_rows, both, visits=Visits(ids=ids, each=top_k, tiles=tiles))
        self._down(both, n_visits, outputs, self._gating, Visits(ids=ids, each=1, tiles=tiles))
        of_shared, gates = outputs, weights
        if self._shared:
            [(gating, (gate_up, down))] = self._shared
            of_shared = of("shared", 4 * n_rows * width)
            both = of("shared gates", 4 * n_rows * gate_up.shape[0])
            gate_up(rows, n_rows, both)
            down(both, n_rows, of_shared, gating)
        if self._gate is not None:
            gates = of("gate of shared", 4 * n_rows)
            self._gate(rows, n_rows, gates)
        self._launch(
            "combine",
            (-(-n_rows * width // THREADS), 1),
            [outputs, weights, of_shared, gates, inner],
            *(n_rows, width, top_k, bool(self._shared) + (self._gate is not None)),
        )

    def _tiles(self, ids: Buffer, n_visits: int) -> Tiles | None:
        """Gather visits by expert, where that pays: an expert's weights are read once for many."""
        n_experts, of = self._router.shape[0], self._scratch.of
        if n_experts == 1 or n_visits < GATHERED_FROM * n_experts:
            return None
        n_tiles = n_visits // TILE + n_experts
        order, tiles = of("order", 4 * n_visits), of("tiles", 12 * n_tiles)
        sizes = n_visits, n_experts, n_tiles
        self._launch("group_visits", (n_experts, 1), [ids, order, tiles], *sizes)
        return Tiles(order=order, tiles=tiles, n=n_tiles)

    def _route(
        self, scores: Buffer, ids: Buffer, weights: Buffer, n_rows: int, tokens: Buffer | None
    ) -> None:
        """Choose the experts of rows, by the router's scores, or by their tokens."""
        n_experts, groups, own = self._router.shape[0], (n_rows, 1), self._groups
        sizes = n_experts, self._top_k
        if own is None:
            best = self._scratch.of("best", 4 * n_rows * self._top_k)
            self._launch("route", groups, [scores, ids, weights, best], *sizes, self._routing)
            return
        by = self._scratch.of("by", 4 * n_rows * (n_experts + 3 * own.n_groups))
        by_token = self._of_tokens is not None and tokens is not None
        table = [tokens, self._of_tokens] if by_token else [ids, ids]
        self._launch(
            "route_in_groups",
            groups,
            [scores, scores if self._bias is None else self._bias, by, ids, weights, *table],
            *(*sizes, own.n_groups, own.top_groups, self._routing),
            int(self._routing != _BY_SOFTMAX and own.normalize_top_k),
            *(int(self._bias is not None), int(by_token)),
            np.float32(own.output_scale),
        )


def _routing(router: Router) -> tuple[int, int] | None:
    """Return how a router weighs, as the text numbers it, and how many experts a row has."""
    if isinstance(router, SoftmaxRouter):
        return (0 if router.normalize else 1), router.top_k
    if isinstance(router, SigmoidRouter):
        return 2, router.top_k
    if not isinstance(router, _GROUPED):
        return None
    own = router.experts
    if own.n_experts % own.n_groups or (own.n_groups > 1 and own.n_experts == own.n_groups):
        return None
    if isinstance(router, SoftmaxGroupRouter):
        return _BY_SOFTMAX, own.top_k
    if isinstance(router, SqrtSoftplusRouter):
        return _BY_ROOTS, own.top_k
    return (5 if router.has_softmax else 4), own.top_k


def _gates(mlp: SparseMlp) -> list[Linear]:
    """Return the gate of the router, and that of the shared expert, if it has one."""
    each = (mlp.router, mlp.shared)
    return [
        one.gate
        for one in each
        if isinstance(one, SoftmaxRouter | SigmoidRouter | _GROUPED | SharedExpert)
    ]


def _shared(mlp: SparseMlp) -> list[Mlp]:
    """Return the expert that all rows visit, if there is one."""
    own = mlp.shared.expert if isinstance(mlp.shared, SharedExpert) else mlp.shared
    return [] if own is None else [own]


def linears_of(mlp: Mlp) -> tuple[Linear, Linear]:
    """Return the linears before and behind the activation."""
    if isinstance(mlp, PlainMlp):
        return mlp.up_proj, mlp.down_proj
    assert isinstance(mlp, GatedMlp | ClampedMlp)
    return mlp.gate_up_proj, mlp.down_proj


def _panels(mlp: Mlp) -> tuple[PanelLinear, PanelLinear]:
    first, down = linears_of(mlp)
    assert isinstance(first, PanelLinear)
    assert isinstance(down, PanelLinear)
    return first, down


def shape_of(linear: Linear) -> object:
    """Return what must be equal in all experts, so that one launch multiplies by any of them."""
    assert isinstance(linear, PanelLinear)
    parts = tuple((part.form, part.shape, part.input_order is None) for part in linear.parts)
    return parts, linear.bias is None


def bias_of(linears: Sequence[PanelLinear]) -> np.ndarray | None:
    """Return the biases of linears: [N], or [X, N] of several; None if they have none."""
    rows = [linear.bias.numpy() for linear in linears if linear.bias is not None]
    if not rows:
        return None
    return rows[0] if len(linears) == 1 else np.stack(rows)
