"""Attention over latents that all heads share, on a device, by the kernel text.

Knows which of it the text computes, and the order of launches. A head's own matmuls are products by
id, as those of experts are. Must not know the layer around it.

Axes in shape comments: T rows, H heads, N columns of a head's own keys, R rotated ones, L columns
of a latent, V of a value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardnet.model.devices.device_attention import Attend, Seen
from shardnet.model.devices.device_choice import DeviceIndexer, why_no_choice
from shardnet.model.devices.device_kv import PAGE
from shardnet.model.devices.mixer_device import LINE, MixerDevice, StepBuffers
from shardnet.model.devices.products import GATHERED_FROM, TILE, Tiles, Visits
from shardnet.model.drivers.driver import THREADS, Array, Buffer
from shardnet.model.layers.native_attention import MAX_HEAD
from shardnet.model.mixers.latent_attention import LatentAttention


def why_no_latents(own: LatentAttention) -> str:
    """Say what the text does not compute of it but for its linears, "" for nothing."""
    if not (own.keys.is_native and own.values.is_native):
        return "this attention"
    if why := why_no_choice(own.indexer):
        return why
    if own.latent.width > MAX_HEAD or own.latent.rope_size % 2:
        return f"latents of {own.latent.width} columns"
    rank = 0 if own.queries.q_b_proj is None else own.queries.first.shape[0]
    widest = max(rank, own.latent.nope_size)
    return f"queries of {widest} columns" if widest > LINE else ""


def visits_of_heads(n_rows: int, n_heads: int, put_in: Callable[[str, Array], Buffer]) -> Visits:
    """Say which head each of T x H rows is, so that a product by id multiplies it by that's matmul.

    Of many rows those of a head are gathered in tiles, as `group_visits` of the text does.
    """
    heads = np.arange(n_rows * n_heads, dtype=np.uint32).reshape(n_rows, n_heads)
    ids, tiles = put_in("heads of rows", heads % n_heads), None
    if n_rows >= GATHERED_FROM:
        firsts = range(0, n_rows, TILE)
        of_head = [(head, first) for head in range(n_heads) for first in firsts]
        some = [(head, head * n_rows + n, min(TILE, n_rows - n)) for head, n in of_head]
        tiles = Tiles(
            order=put_in("order of heads", heads.T),
            tiles=put_in("tiles of heads", np.array(some, np.uint32)),
            n=len(some),
        )
    return Visits(ids=ids, each=1, tiles=tiles)


class DeviceLatents:
    """The attention of one layer, of which `why_no_latents` says nothing."""

    def __init__(self, own: LatentAttention, on: MixerDevice) -> None:
        """Upload it. Raises CapacityError."""
        self._latent, self._on, queries = own.latent, on, own.queries
        self._first, self._cached = on.make(queries.first), on.make(own.kv_a_proj)
        self._second = None if queries.q_b_proj is None else on.make(queries.q_b_proj)
        norms = [own.kv_a_layernorm, queries.q_a_layernorm or own.kv_a_layernorm]
        self._norms = [
            (on.put(norm.weight.float().numpy()), np.float32(norm.eps)) for norm in norms
        ]
        self.n_heads, rank, width = own.keys.weights.shape[0], own.latent.rank, own.latent.width
        self._keys = on.make_by_id(*own.keys.linears(), n_columns=width)
        self._values = on.make_by_id(*own.values.linears())
        self._output = on.make(own.o_proj)
        self._grows = int(own.temperature is not None)
        self._gates = None if own.gate_proj is None else on.make(own.gate_proj)
        self._indexer, n_chosen = None, 0
        if own.indexer is not None:
            n_chosen = own.indexer.config.n_attended
            if own.indexer.projections is not None:
                self._indexer = DeviceIndexer(own.indexer, on)
        heads, sizes, stride = (self.n_heads, 1), (width, rank, width), self.n_heads * width
        seen = Seen(n_chosen=n_chosen)
        self._attend = Attend(on, own.kind, heads, sizes, stride, seen=seen)

    def __call__(self, rows: Buffer, inner: Buffer, index: int, step: StepBuffers) -> None:
        """Run normalised rows [T, E] through it in layer `index` within the stage: `inner`."""
        on, of, n_rows, latent = self._on, self._on.scratch.of, step.n_rows, self._latent
        n_visits, (keys, _) = n_rows * self.n_heads, on.pages_of(index)
        cosines, sines, n_rotated = step.tables[index]
        cached = of("latents", 4 * n_rows * latent.width)
        self._cached(rows, n_rows, cached)
        queries = self._queries(rows, index, step)
        own = of("own columns", 4 * n_visits * latent.nope_size)
        heads = of("heads", 4 * n_visits * latent.width)
        (norm, eps), *_ = self._norms
        on.launch(
            "split_latents",
            (n_rows, self.n_heads + 1),
            [queries, cached, norm, cosines, sines, *step.at, keys, own, heads],
            *(self.n_heads, latent.nope_size, latent.rank, n_rotated, PAGE),
            *(int(latent.interleaved), self._grows, eps),
        )
        self._keys(own, n_visits, heads, visits=step.heads)
        if self._indexer is not None:
            self._indexer(rows, of("queries", 0), index, step)
        attended = self._attend(heads, (keys, keys), step)
        outputs = of("values of heads", 4 * n_visits * latent.value_size)
        self._values(attended, n_visits, outputs, visits=step.heads)
        if self._gates is not None:
            n, n_gates = n_visits * latent.value_size, n_rows * self._gates.shape[0]
            gates = of("gates of heads", 4 * n_gates)
            self._gates(rows, n_rows, gates)
            on.launch("open_rows", (-(-n // THREADS), 1), [outputs, gates], n, n // n_gates)
        self._output(outputs, n_rows, inner)

    def _queries(self, rows: Buffer, index: int, step: StepBuffers) -> Buffer:
        """Project normalised rows to queries [T, H x (N + R)]."""
        of, n_rows, width = self._on.scratch.of, step.n_rows, self._first.shape[0]
        first = of("queries", 4 * n_rows * width)
        self._first(rows, n_rows, first, behind=self._cached)
        if self._second is None:
            return first
        (norm, eps), pages = self._norms[1], self._on.pages_of(index)
        self._on.launch(  # normed as a single head, of which nothing is rotated
            "rotate_heads",
            (n_rows, 1),
            [first, norm, *step.tables[index][:2], *step.at, *pages],
            *(1, 0, width, 0, 0, 0, PAGE, 1, 0, 0, eps),
        )
        queries = of("all queries", 4 * n_rows * self._second.shape[0])
        self._second(first, n_rows, queries)
        return queries
