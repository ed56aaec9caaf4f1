"""Residual streams by the kernel text have the bits of layers/streams.py on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.devices import DEVICE, HAS_VECTORS, HOST, compared, device_of
from torch import Tensor

from shardnet.model.config.model_config import StreamKind, Streams
from shardnet.model.devices import bits
from shardnet.model.devices.coverage import why_not
from shardnet.model.devices.device_kv import DeviceKvCache
from shardnet.model.devices.device_layers import DeviceLayers
from shardnet.model.layers.attention import step_over
from shardnet.model.layers.decoder_layer import AttentionSublayer, Layer, StreamResidual
from shardnet.model.layers.norms import BareNorm, HeadNorm, Norm
from shardnet.model.layers.streams import GatedMixer, StreamMixer
from shardnet.types import RowGroup, SequenceId, SlotId

pytestmark = compared
WIDTH = 128


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixer_of(kind: StreamKind, count: int, seed: int) -> StreamMixer | GatedMixer:
    """Make a mixer whose factors are far from even."""
    wide, rank = count * WIDTH, 20
    if kind is StreamKind.GATED:
        return GatedMixer(
            count=count,
            norm=HeadNorm(weight=1 + 0.1 * numbers(count, WIDTH, seed=seed), eps=1e-6),
            down=bits._linear(bits.Quantization.INT4, rank * 8, wide),
            up=bits._float_linear(wide, rank * 8),
            inject=bits._float_linear(count, wide),
        )
    kinds = 3 if kind is StreamKind.BALANCED else 2
    n_out = [count * 2, count * (count + 2)][kinds - 2]
    return StreamMixer(
        config=Streams(count=count, kind=kind, eps=1e-3, magnitude=1.7, n_rounds=5),
        project=bits._float_linear(n_out, wide),
        base=numbers(n_out, seed=seed + 1),
        scale=numbers(kinds, seed=seed + 2),
        norm=BareNorm(eps=1e-5),
    )


def layer_of(kind: StreamKind, count: int) -> Layer:
    plain = bits._layer(bits._attention())
    mixers = [mixer_of(kind, count, seed) for seed in (1, 9)]
    norm = None
    if kind is not StreamKind.GATED:
        norm = Norm(weight=1 + 0.1 * numbers(WIDTH, seed=3), bias=None, eps=1e-5)
    first, second = (StreamResidual(mixer=mixer, before=norm) for mixer in mixers)
    assert isinstance(plain.attention, AttentionSublayer)
    return Layer.of(first, plain.attention.self_attn, second, plain.mlp.mlp)  # type: ignore[attr-defined]


@pytest.mark.skipif(not HAS_VECTORS, reason="without them factors are not packed")
@pytest.mark.parametrize("on", [HOST, DEVICE, "(THREADS - 1 - (i))"])
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (StreamKind.BALANCED, 4),
        (StreamKind.BALANCED, 3),
        (StreamKind.APART, 4),
        (StreamKind.APART, 14),
        (StreamKind.GATED, 4),
        (StreamKind.GATED, 2),
    ],
)
def test_streams_have_the_bits_of_a_cpu(kind: StreamKind, count: int, on: str) -> None:
    """With rounding of a ring in bfloat16, as layers' last sub-layers have it, and without."""
    layers = [layer_of(kind, count), layer_of(kind, count)]
    cpu = torch.device("cpu")
    kv = DeviceKvCache(2, bits._KV_HEADS, bits._SIZE, torch.float32, cpu, 2)
    assert not why_not(layers, kv)
    with torch.inference_mode():
        computed = DeviceLayers(device_of(on), layers, kv, [0, 0])
        for n_rows, dtype in ((3, None), (19, torch.bfloat16), (1, None)):
            group = RowGroup(
                sequence_id=SequenceId(1), slot=SlotId(0), position=0, n_rows=n_rows, n_sampled=0
            )
            kv.ensure(SlotId(0), n_rows, n_rows)
            step = step_over([group], [0] * n_rows, kv, torch.float32, hidden_dtype=dtype)
            rotary = bits._rotary(n_rows)
            rows = numbers(n_rows, count * WIDTH, seed=n_rows)
            found = computed(rows, [rotary], step)
            assert found is not None
            kv.give_back(step.spans)
            for index, layer in enumerate(layers):
                rows = step.after_layer(layer(rows, index, rotary, step))
            assert torch.equal(found, rows)


def test_streams_that_the_text_does_not_mix_are_named() -> None:
    kv = DeviceKvCache(1, bits._KV_HEADS, bits._SIZE, torch.float32, torch.device("cpu"), 2)
    layer = layer_of(StreamKind.APART, 15)
    assert "15 streams" in why_not([layer], kv)
    layer = layer_of(StreamKind.GATED, 3)
    assert "no power of two" in why_not([layer], kv)
    layer = layer_of(StreamKind.BALANCED, 2)
    residual = layer.attention.residual  # type: ignore[attr-defined]
    plain = replace(residual, mixer=replace(residual.mixer, project=lambda rows: rows))
    layer = replace(layer, attention=replace(layer.attention, residual=plain))  # type: ignore[type-var]
    assert "packed" in why_not([layer], kv)
