"""Whether a device gives the compiled library's bits: found out when it starts, and for each form.

Knows what has to be compared. Must not know who acts on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from shardnet.errors import ConfigurationError
from shardnet.model.config.model_config import Activation, DeltaNet
from shardnet.model.config.panel_form import Quantization
from shardnet.model.devices.device_kv import DeviceKvCache
from shardnet.model.devices.device_layers import Device, DeviceLayers
from shardnet.model.drivers.gpu import CUDA, HIP, GpuDriver, Keep
from shardnet.model.drivers.host import HostDriver
from shardnet.model.drivers.metal import MetalDriver
from shardnet.model.drivers.opencl import OpenClDriver
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.panel_linear import PanelLinear, float_linear
from shardnet.model.kernels.panels import Panels
from shardnet.model.kernels.quantized_linear import pack_all
from shardnet.model.kernels.recurrence import RecurrenceParameters
from shardnet.model.layers.attention import step_over
from shardnet.model.layers.decoder_layer import AttentionSublayer, Layer, MlpSublayer, Residual
from shardnet.model.layers.modules import Attention, GatedMlp, SelfAttention
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.model.layers.norms import HeadNorm, Norm
from shardnet.model.layers.rotary import Rotary
from shardnet.model.mixers.gated_delta import GatedDeltaNet, Projections
from shardnet.types import RowGroup, SequenceId, SlotId

HOST: Final = "host"
OPENCL: Final = "opencl"
METAL: Final = "metal"
_WIDTH, _HEADS, _KV_HEADS, _SIZE = 128, 4, 2, 32
_SLOT: Final = SlotId(0)
_DELTA_NET: Final = DeltaNet(
    n_key_heads=2, n_value_heads=4, key_size=32, value_size=32, n_taps=4, layers=(1,)
)


_OPEN: Final[dict[str, Device]] = {}


def open_device(name: str, keep: Keep | None = None) -> Device:
    """Return a device by the name that `--device` has for it; one for the whole process.

    What is compiled for a GPU goes through the `keep` that it is first opened with. Raises
    ConfigurationError if it is not here.
    """
    if name not in _OPEN:
        _OPEN[name] = _opened(name, keep)
    return _OPEN[name]


def _opened(name: str, keep: Keep | None) -> Device:
    kind, _, index = name.partition(":")
    if kind == HOST:
        return Device(HostDriver())
    if kind == OPENCL:
        return Device(OpenClDriver(int(index or 0)))
    if kind == METAL:
        return Device(MetalDriver())
    for maker in (CUDA, HIP):
        if kind == maker.kind:
            return Device(GpuDriver(maker, int(index or 0), keep))
    raise ConfigurationError(f"--device {name}: nothing here computes by the kernel text on that")


@torch.inference_mode()
def error_of(device: Device) -> float:
    """Compute two layers on a device; return how far they are off, 0.0 for the library's bits.

    In parts of the largest value. They have attention and a recurrence, a decode step behind a
    prompt of more than one block, all activations in float32, and weights of 4 and 8 bits. Raises
    ConfigurationError.
    """
    both = [_layer(_attention()), _layer(_recurrence())]
    found, expected = (_steps(both, on) for on in (device, None))
    error = 0.0
    for one, other in zip(found, expected, strict=True):
        if not torch.equal(one, other):
            difference = float((one - other).abs().max() / other.abs().max())
            error = max(error, difference if math.isfinite(difference) else math.inf)
    return error


def _steps(both: Sequence[Layer], on: Device | None) -> list[Tensor]:
    """Run a prompt of 130 rows and a row behind it: [T, E] each."""
    form = 2, _KV_HEADS, _SIZE, torch.float32, torch.device("cpu"), 1
    kv = DeviceKvCache(*form, states=[None, _DELTA_NET.state])
    layers = None if on is None else DeviceLayers(on, both, kv, [0, 0])
    found, position = [], 0
    for n_rows in (130, 1):
        group = RowGroup(
            sequence_id=SequenceId(1), slot=_SLOT, position=position, n_rows=n_rows, n_sampled=0
        )
        kv.ensure(_SLOT, position + n_rows, n_rows)
        step = step_over([group], [0] * n_rows, kv, torch.float32)
        hidden, rotary = _numbers(n_rows, _WIDTH), _rotary(n_rows)
        whole = None if layers is None else layers(hidden, [rotary], step)
        if whole is None:
            whole = both[1](both[0](hidden, 0, rotary, step), 1, rotary, step)
        found.append(whole)
        position += n_rows
    return found


def _attention() -> SelfAttention:
    n_looking = (_HEADS + 2 * _KV_HEADS) * _SIZE
    weight = 1 + 0.1 * _numbers(_HEADS + _KV_HEADS, _SIZE)
    return SelfAttention(
        n_heads=_HEADS,
        n_kv_heads=_KV_HEADS,
        head_size=_SIZE,
        kind=AttentionKind(soft_cap=20.0),
        qkv_proj=_linear(Quantization.INT4, n_looking, _WIDTH),
        o_proj=_float_linear(_WIDTH, _HEADS * _SIZE),
        qk_norm=HeadNorm(weight=weight, eps=1e-6),
    )


def _recurrence() -> GatedDeltaNet:
    own, parameters = _DELTA_NET, [_numbers(1, n)[0] for n in (_HEADS, _HEADS + 1, _SIZE)]
    return GatedDeltaNet.of(
        own,
        Activation.SILU,
        Projections(
            config=own,
            qkvz_proj=_float_linear(own.mixed_width + own.value_width, _WIDTH),
            ba_proj=_float_linear(2 * _HEADS, _WIDTH),
            groups_qkvz=True,
        ),
        RecurrenceParameters(
            taps=_numbers(own.n_taps, own.mixed_width),
            decay_rate=-parameters[0].exp(),
            decay_bias=parameters[1][:_HEADS].contiguous(),
            norm_weight=parameters[2],
            norm_eps=1e-6,
        ),
        _float_linear(_WIDTH, own.value_width),
    )


def _layer(mixer: Attention) -> Layer:
    """Make a layer of random numbers."""
    mlp = GatedMlp(
        gate_up_proj=_linear(Quantization.INT8, 4 * _WIDTH, _WIDTH),
        down_proj=_linear(Quantization.INT4, _WIDTH, 2 * _WIDTH),
        activation=Activation.SILU,
    )
    norm = Norm(weight=1 + 0.1 * _numbers(1, _WIDTH)[0], bias=None, eps=1e-5)
    residual = Residual(before=norm, after=norm)
    return Layer(
        attention=AttentionSublayer(residual=residual, self_attn=mixer),
        mlp=MlpSublayer(residual=Residual(before=norm), mlp=mlp),
    )


def _linear(kind: Quantization, n_out: int, n_in: int) -> PanelLinear:
    packed = pack_all([_numbers(n_out, n_in) / n_in**0.5], kind)
    return PanelLinear([Panels(packed=packed, form=kind.form, shape=(n_out, n_in))], None)


def _float_linear(n_out: int, n_in: int) -> PanelLinear:
    """Make a linear that does not round rows: it hides no bit of theirs."""
    native = native_kernels()
    assert native is not None, "whoever compares bits has the library"
    return float_linear([_numbers(n_out, n_in) / n_in**0.5], None, native)


def _rotary(n_rows: int) -> Rotary:
    """Make tables of some angles."""
    angles = _numbers(n_rows, _SIZE).view(n_rows, 1, _SIZE)
    return Rotary(cos=angles, sin=-angles)


def _numbers(n_rows: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(n_rows * 100_003 + width)
    return torch.randn(n_rows, width, generator=generator)
