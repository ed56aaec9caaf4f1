"""A stage of the families with rotary positions: embedding, layers, head.

Knows what they have in common; each family's file provides its layer. Must not know files, wire or
scheduling.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardnet.model.arithmetic.row_functions import capped_rows
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import Activation, ModelConfig, Rope
from shardnet.model.devices.coverage import why_not
from shardnet.model.devices.device_kv import DeviceKvCache
from shardnet.model.devices.device_layers import Device, DeviceLayers, DeviceLinear, Judged
from shardnet.model.drivers.driver import Array
from shardnet.model.fused.decode_graphs import Capture, DecodeGraphs, find_capture
from shardnet.model.fused.layers import NativeLayers, NativeSublayers
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import Layer
from shardnet.model.layers.mtp import MtpLayer
from shardnet.model.layers.native_attention import can_attend
from shardnet.model.layers.norms import BareNorm, Norm
from shardnet.model.layers.rotary import Rotary, rotary_tables
from shardnet.model.layers.streams import StreamHead
from shardnet.model.layers.weight_source import Table, WeightSource, load_norm
from shardnet.types import LayerRange

LoadLayer = Callable[[ModelConfig, WeightSource, int], Layer]
"""Loads the layer with an absolute number."""


@dataclass(frozen=True, slots=True)
class StageInputs:
    """What a stage is built from: the parameters of `layers`, and of embedding and head where they
    belong.

    `context` is the positions of one sequence, `capture` how decode steps become graphs: None for
    what the device can.
    """

    config: ModelConfig
    layers: LayerRange
    weights: WeightSource
    context: int
    dtype: torch.dtype
    device: torch.device
    capture: Capture | None = None


class DecoderStage:
    """The layers `layers` of a model; the first stage has the embedding, the last one the head."""

    def __init__(
        self, load_layer: LoadLayer, inputs: StageInputs, final_norm: str = "model.norm"
    ) -> None:
        config, layers, weights, dtype = inputs.config, inputs.layers, inputs.weights, inputs.dtype
        self._numbers, self._streams = layers, config.streams
        self._n_carried = config.row_width - config.streams_width
        is_inside = layers.end < config.n_layers
        self._hands_choice_on = is_inside and config.taken_choice(layers.end) is not None
        self._embedding: _Embedding | None = None
        self._head: _Head | None = None
        if layers.start == 0:
            self._embedding = _Embedding.load(config, weights, dtype)
        if layers.end == config.n_layers:
            self._head = _Head.load(config, weights, final_norm)
        ropes = [_rope(config, layer) for layer in layers]
        ahead = [_rope(config, config.n_layers)] if config.has_mtp and self._head else []
        distinct = list(dict.fromkeys(ropes + ahead))
        self._tables = [
            rotary_tables(rope, size, inputs.context, dtype, inputs.device)
            for rope, size in distinct
        ]
        kernels, natives = native_kernels(), []
        self._layers: list[tuple[Layer, int]] = []
        self._by_linears: list[Layer] = []
        """The same layers, which call each linear by itself."""
        for number, rope in zip(layers, ropes, strict=True):
            layer = load_layer(config, weights, number)
            native = NativeSublayers.of(layer, kernels)
            natives.append(native)
            self._by_linears.append(layer)
            self._layers.append((native.replace_in(layer), distinct.index(rope)))
        self._joined = NativeLayers.of(natives, kernels)
        self.mtp: MtpLayer | None = None
        """See FamilyStage."""
        if config.has_mtp and self._head is not None:
            embedding = self._embedding or _Embedding.load(config, weights, dtype)
            layer = load_layer(config, weights, config.n_layers)
            self.mtp = MtpLayer(
                config,
                weights,
                layer=NativeSublayers.of(layer, kernels).replace_in(layer),
                index=len(layers),
                rotary=self._tables[distinct.index(ahead[0])],
                embed=embedding,
                project=self._head.project,
            )
        self._is_native = kernels is not None and _has_native_states(config, layers)
        self._heads = {config.heads(layer) for layer in layers}
        self._on_device: DeviceLayers | None = None
        self._graphs: DecodeGraphs | None = None
        capture = inputs.capture or find_capture(inputs.device, os.environ)
        if capture is not None:  # steps of few rows replay graphs of layers that allow it
            self._graphs = DecodeGraphs(self._layers, self._tables, capture)

    def compute_on(self, device: Device, kv: DeviceKvCache) -> str:
        """Have the kernel text compute layers and LM head on a device, to the library's bits.

        Returns "", or what the text does not compute. Raises CapacityError if the device has no
        memory for the weights, ConfigurationError where a form has other bits there. But for ""
        all stays as it is, `kv` too.
        """
        if self.mtp is not None:
            return "the layer that predicts further tokens"
        why = why_not(self._by_linears, kv)
        if not why:
            head, judge = self._head, None
            if head is not None and isinstance(head.lm_head, PanelLinear):
                head = replace(head, lm_head=(linear := DeviceLinear(device, head.lm_head)))
                if head.join is None and isinstance(head.norm, Norm) and head.norm.bias is None:
                    judge = head.norm, linear
            ropes, hands_on = [rope for _, rope in self._layers], self._hands_choice_on
            self._on_device = DeviceLayers(
                device,
                self._by_linears,
                kv,
                ropes,
                judge,
                hands_on=hands_on,
                tables=self._tables,
            )
            self._head = head
        return why

    def embed(self, step: ForwardStep) -> Tensor:
        """Embed the step's token ids: [T, E] in the compute dtype, once for each stream."""
        assert self._embedding is not None
        embedded = self._embedding(step.token_ids)
        if self._streams is None:
            return embedded
        rows = embedded.repeat(1, self._streams.count)
        if not self._n_carried:
            return rows
        carried = rows.new_zeros(len(rows), self._n_carried)
        carried[:, 0] = 1  # the first stream is the first sub-layer's whole input
        return torch.cat((rows, carried), 1)

    def walk(self, hidden: Tensor, step: ForwardStep) -> Iterator[Tensor]:
        """Run hidden states [T, E] through the stage's layers: yields [T, E] after each, lazily."""
        rotaries = [table.at(step.rotary_positions) for table in self._tables]
        is_deepened = self._is_deepened(step)
        is_alone = bool(step.kept_layers) or is_deepened
        if self._on_device is not None and not (is_alone or step.is_adapted):
            whole = self._on_device(hidden, rotaries, step)
            if whole is not None:
                yield from [whole] * len(self._layers)
                return
        if isinstance(step.kv, DeviceKvCache):
            step.kv.give_back(step.spans)
        if step.is_adapted:
            yield from self._walk_by_linears(hidden, rotaries, step)
            return
        if self._graphs is not None and not is_alone:
            replayed = self._graphs.begin(hidden, rotaries, step)
            if replayed is not None:
                yield from replayed
                return
        if self._joined is not None and not is_deepened:
            outputs = self._joined(hidden, [rotaries[rope] for _, rope in self._layers], step)
            if outputs is not None:
                yield from outputs
                return
        for index, (layer, rope) in enumerate(self._layers):
            hidden = self._after(layer(hidden, index, rotaries[rope], step), index, step)
            yield hidden

    def _is_deepened(self, step: ForwardStep) -> bool:
        """Whether DeepStack adds anything after these layers."""
        deep = step.pictures.deep if step.pictures is not None else {}
        return any(layer in self._numbers for layer in deep)

    def _after(self, hidden: Tensor, index: int, step: ForwardStep) -> Tensor:
        """Add what DeepStack adds after a layer, and round as a border between stages."""
        if step.pictures is not None:
            hidden = step.pictures.deepen(hidden, self._numbers.start + index)
        return step.after_layer(hidden)

    def _walk_by_linears(
        self, hidden: Tensor, rotaries: Sequence[Rotary], step: ForwardStep
    ) -> Iterator[Tensor]:
        for index, (layer, (_, rope)) in enumerate(
            zip(self._by_linears, self._layers, strict=True)
        ):
            hidden = self._after(layer(hidden, index, rotaries[rope], step), index, step)
            yield hidden

    def is_exact(self, kv: KvCache) -> bool:
        """Whether the compiled library attends in all layers, and computes their recurrences."""
        own = self._heads
        return self._is_native and all(can_attend(h.key_size, kv, h.value_size) for h in own)

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the final norm: [R, E] in and out, from all streams."""
        assert self._head is not None
        return self._head.normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply norm and LM head: [R, E] to [R, V], in the compute dtype or float32."""
        assert self._head is not None
        judged = self._judged(hidden)
        return self._head(hidden) if judged is None else self._head.finish(judged.logits())

    def best(self, hidden: Tensor) -> Array | None:
        """Return the `best` of Judged if a device has found it of rows, else None."""
        judged = self._judged(hidden)
        is_known = judged is not None and self._head is not None and not self._head.changes
        return judged.best if judged is not None and is_known else None

    def _judged(self, hidden: Tensor) -> Judged | None:
        judged = None if self._on_device is None else self._on_device.device.judged
        return judged if judged is not None and judged.rows is hidden else None


def _has_native_states(config: ModelConfig, layers: LayerRange) -> bool:
    """Whether the library computes the recurrences of layers that have one."""
    own = config.delta_net
    if own is None or not any(layer in own.layers for layer in layers):
        return True
    return own.is_mamba or config.activation is Activation.SILU


def _rope(config: ModelConfig, layer: int) -> tuple[Rope, int]:
    """Return a layer's rotary positions, and the columns of its heads that they are for."""
    rope = config.layer_rope(layer)
    assert rope is not None, "families of this kind have rotary positions"
    has_own = config.latent is not None or config.compressed is not None
    return rope, config.head_size if has_own else config.heads(layer).key_size


@dataclass(frozen=True, slots=True, kw_only=True)
class _Embedding:
    table: Table  # [V, E]
    multiplier: float
    norm: Norm | BareNorm | None

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, dtype: torch.dtype) -> _Embedding:
        """Load the table. The multiplier is rounded to the compute dtype, as in Gemma's code."""
        multiplier = torch.tensor(config.embedding_multiplier).to(dtype).item()
        norm = load_norm(config, weights, "") if config.has_embedding_norm else None
        return cls(table=weights.table("model.embed_tokens"), multiplier=multiplier, norm=norm)

    def __call__(self, token_ids: Tensor) -> Tensor:
        rows = self.table.rows(token_ids)
        rows = rows if self.multiplier == 1 else rows.mul_(self.multiplier)
        return rows if self.norm is None else self.norm(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    join: StreamHead | None
    norm: Norm | BareNorm | None
    lm_head: Linear
    divisor: float
    soft_cap: float | None

    @classmethod
    def load(cls, config: ModelConfig, weights: WeightSource, final_norm: str) -> _Head:
        table = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        return cls(
            join=None if config.streams is None else StreamHead(config, weights),
            norm=load_norm(config, weights, final_norm) if final_norm else None,
            lm_head=weights.linear(table),
            divisor=config.logit_divisor,
            soft_cap=config.logit_soft_cap,
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.project(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Join the streams, if there are several, and apply the norm: [R, E]."""
        joined = hidden if self.join is None else self.join(hidden)
        return joined if self.norm is None else self.norm(joined)

    def project(self, normed: Tensor) -> Tensor:
        """Apply the LM head to what a norm has given: [R, E] to [R, V]."""
        return self.finish(self.lm_head(normed))

    @property
    def changes(self) -> bool:
        """Whether logits are not the LM head's outputs themselves."""
        return self.divisor != 1 or self.soft_cap is not None

    def finish(self, logits: Tensor) -> Tensor:
        """Turn outputs of the LM head into logits: [R, V] in and out."""
        if self.divisor != 1:
            logits = logits / self.divisor
        if self.soft_cap is not None:
            logits = logits.float()
            native = capped_rows(logits, self.soft_cap)
            if native is not None:
                return native
            logits = logits.div(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits
