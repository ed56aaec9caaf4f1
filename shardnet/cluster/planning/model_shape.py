"""What a model weighs, for the planner: from its config and dtypes to a ModelShape.

Knows the memory estimate of a stage. Pure. Must not know nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardnet.cluster.placement.figures import Gathers, ModelShape, QuantizedSizes, Streaming
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.panel_form import Quantization
from shardnet.model.families.registry import family_of
from shardnet.stage.estimate import memory_estimate
from shardnet.stage.estimate.gather_estimate import embedding_gathers, head_gathers, layer_gathers
from shardnet.stage.estimate.packed_sizes import PackedSizes
from shardnet.types import (
    BLOCK_POSITIONS,
    PREFILL_CHUNK_ROWS,
    DType,
    KvDType,
    LayerRange,
    WireDType,
)
from shardnet.wire.messages.plans import ModelChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationChoice:
    """What of a model is quantised: linear weights, keys and values."""

    weights: Quantization | None = None
    kv_dtype: KvDType = KvDType.AUTO
    is_unpacked: bool = False
    """Whether what is quantised is unpacked when it is loaded: it saves no memory then."""

    @classmethod
    def of(cls, choice: ModelChoice) -> QuantizationChoice:
        """Return what a client has chosen."""
        return cls(weights=Quantization.named(choice.quant), kv_dtype=KvDType(choice.kv_dtype))

    @property
    def unpacked(self) -> QuantizationChoice:
        """The same on a device that multiplies no packed weights."""
        return replace(self, weights=None, is_unpacked=True)

    def more(self) -> Iterator[tuple[tuple[str, ...], QuantizationChoice]]:
        """List every further quantisation with its flags: first one flag, then two at once."""
        kinds = [] if self.weights or self.is_unpacked else list(Quantization)
        weights = [((f"--quant {kind.value}",), replace(self, weights=kind)) for kind in kinds]
        yield from weights
        if self.kv_dtype is KvDType.AUTO:
            flag = f"--kv-dtype {KvDType.INT8.value}"
            yield (flag,), replace(self, kv_dtype=KvDType.INT8)
            for flags, one in weights:
                yield (*flags, flag), replace(one, kv_dtype=KvDType.INT8)


UNQUANTIZED = QuantizationChoice()


def model_shape(
    config: ModelConfig,
    dtype: DType,
    context: int,
    wire_dtype: WireDType | None = None,
    quantization: QuantizationChoice = UNQUANTIZED,
    stored: DType | None = None,
    packed: PackedSizes | None = None,
    gather_dtype: WireDType | None = None,
    tower_bytes: int = 0,
    held: DType | None = None,
) -> ModelShape:
    """Compute the sizes of a model in `dtype` with one sequence of `context` positions.

    `wire_dtype` is that of activations between stages, None for `dtype`. `stored` is that of linear
    weights in memory, None for `dtype`, except for those `packed`, which stay as they are stored.
    `gather_dtype` is that of parts between the nodes of one stage, None for `dtype`.
    The first stage has a tower of `tower_bytes` for pictures too. Keys and values that are not
    quantised are `held` in a dtype of their own, None for `dtype`.
    The shape also has the sizes with more of the model quantised than in `quantization`, and those
    of streaming, unless transformers' modules compute: these do neither.
    """
    form = memory_estimate.WeightForm(
        dtype=dtype,
        quant=quantization.weights,
        linear_dtype=stored,
        packed=packed,
        held_dtype=held,
    )
    weights = _quantized_sizes(config, form, context, quantization.kv_dtype)
    is_ours = config.outline is None
    return ModelShape(
        **weights.each,
        n_layers=config.n_layers,
        embedding_bytes=memory_estimate.embedding_weight_bytes(config, form) + tower_bytes,
        hop_bytes=(wire_dtype or WireDType.own(dtype)).row_bytes(config.row_width),
        context=context,
        layer_read_bytes=memory_estimate.layer_read_bytes(config, form),
        streaming=Streaming(
            read_bytes=memory_estimate.layer_stream_bytes(config, form),
            buffer_bytes=memory_estimate.layer_buffer_bytes(config, form),
            working_bytes=memory_estimate.layer_scratch_bytes(config, form)
            + memory_estimate.waiting_bytes(config, PREFILL_CHUNK_ROWS, dtype, context),
        )
        if is_ours
        else None,
        quantized_sizes=tuple(
            _quantized_sizes(
                config, replace(form, quant=more.weights), context, more.kv_dtype, flags
            )
            for flags, more in (quantization.more() if is_ours else ())
        ),
        n_tail_layers=int(config.has_mtp),
        gathers=_gathers(config, gather_dtype or WireDType.own(dtype)),
    )


def _gathers(config: ModelConfig, wire: WireDType) -> Gathers:
    """Compute what the nodes of a stage tell each other of one row."""

    def sizes(columns: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(wire.row_bytes, columns))

    return Gathers(
        layers=tuple(sizes(layer_gathers(config, layer)) for layer in range(config.n_layers)),
        embedding_bytes=sum(sizes(embedding_gathers(config))),
        head_bytes=sum(sizes(head_gathers(config))),
        heads=(1, 1) if family_of(config).has_whole_heads else (config.n_heads, config.n_kv_heads),
        head_weights=memory_estimate.attention_weights(config),
    )


def _quantized_sizes(
    config: ModelConfig,
    form: memory_estimate.WeightForm,
    context: int,
    kv_dtype: KvDType,
    flags: tuple[str, ...] = (),
) -> QuantizedSizes:
    """Compute the sizes that quantisation can change. `flags` ask for what `form` has."""
    one_layer, dtype = LayerRange(config.n_layers - 1, config.n_layers), form.dtype
    plain = replace(config, has_mtp=False)
    each_layer = [LayerRange(layer, layer + 1) for layer in range(config.n_layers)]
    blocks = [
        memory_estimate.kv_block_bytes(plain, n, form.kv, kv_dtype, dtype) for n in each_layer
    ]
    states = [memory_estimate.least_state_bytes(config, n, dtype) for n in each_layer]
    if config.has_mtp:  # whose layer is counted with the last one
        blocks.append(
            memory_estimate.kv_block_bytes(config, one_layer, form.kv, kv_dtype, dtype) - blocks[-1]
        )
        states.append(0)
    layer_kv = tuple(zip(blocks, states, strict=True))

    def activation_bytes(positions: int) -> int:
        rows = PREFILL_CHUNK_ROWS
        peak_bytes = memory_estimate.activation_peak_bytes(
            config, one_layer, rows, dtype, positions, kv_dtype
        )
        return peak_bytes + memory_estimate.every_stage_bytes(config, form)

    # The peak is convex in the context: linear interpolation from one block never underestimates.
    n_more = max(0, context - BLOCK_POSITIONS)
    layers = memory_estimate.layers_weight_bytes(config, form)
    more_bytes = activation_bytes(context) - activation_bytes(context - n_more)
    return QuantizedSizes(
        flags=flags,
        layer_bytes=max(layers),
        spared_bytes=_spared(layers),
        head_bytes=memory_estimate.tail_weight_bytes(config, form),
        tied_bytes=memory_estimate.shared_weight_bytes(config, form),
        kv_block_bytes=max(blocks),
        state_bytes=max(states),
        layer_kv=layer_kv if len({*layer_kv}) > 1 else (),
        activation_bytes=activation_bytes(context),
        activation_position_bytes=more_bytes // max(1, n_more),
    )


def _spared(layers: Sequence[int]) -> tuple[int, ...]:
    """Return how many bytes less than the largest layer each one takes; () if all are equal."""
    most = max(layers)
    return tuple(most - n_bytes for n_bytes in layers) if min(layers) < most else ()
