"""All layers of a stage on a device: launches of the kernel text, one step after the other.

Knows which layers the text computes, and the order of launches. The bits are the compiled
library's, so that either may compute any step. Must not know where weights come from.

Axes in shape comments: T rows of the micro-batch, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from shardnet.errors import ConfigurationError
from shardnet.model.devices.device_attention import DeviceAttention, blocks_within
from shardnet.model.devices.device_experts import (
    DeviceExperts,
    bias_of,
    gating_of,
    why_no_experts,
)
from shardnet.model.devices.device_kv import PAGE, DeviceKvCache
from shardnet.model.devices.driver import (
    Array,
    Buffer,
    Driver,
    Kernel,
    Kernels,
    launch,
)
from shardnet.model.devices.products import (
    MANY,
    ROWS,
    DeviceProduct,
    Gating,
    Rows,
    can_multiply,
)
from shardnet.model.kernels.linear import Linear
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import (
    AttentionSublayer,
    ExpertsSublayer,
    Layer,
    Residual,
    Sublayer,
)
from shardnet.model.layers.modules import SelfAttention
from shardnet.model.layers.native_attention import MAX_HEAD
from shardnet.model.layers.norms import BareNorm, Norm
from shardnet.model.layers.rotary import Rotary

LAYER_PARTS: Final = ("vectors", "rows", "experts")
"""Of the text."""
_NAMES: Final = (
    "add_and_norm",
    "rotate_heads",
    "route",
    "route_in_groups",
    "group_visits",
    "combine",
)
_MOST_ROWS_RECORDED: Final = 16
"""Steps of more rows are launched one by one: prompts, whose numbers of rows are many."""
_MOST_RECORDED: Final = 64
"""Steps that are kept: those that came first make room."""
_ADDS, _AFTER, _ROUNDS, _BEFORE = 1, 2, 4, 8
"""What `add_and_norm` does."""


class Device:
    """A driver with its compiled kernels and the scratch that all launches share."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.kernels = Kernels(driver)
        self.scratch = Rows(driver)
        self._same_bits: set[str] = set()
        """Names of the forms whose products were found to be right."""

    def put(self, array: Array) -> Buffer:
        """Upload an array to memory of its own. Raises CapacityError."""
        own = np.ascontiguousarray(array)
        buffer = self.driver.empty(own.nbytes)
        self.driver.upload(buffer, own)
        return buffer

    def put_in(self, name: str, array: Array) -> Buffer:
        """Upload an array to scratch."""
        own = np.ascontiguousarray(array)
        buffer = self.scratch.of(name, own.nbytes)
        self.driver.upload(buffer, own)
        return buffer

    def product(self, *linears: PanelLinear) -> DeviceProduct:
        """Upload the weights of a linear, or of one for each expert, all alike.

        Raises ConfigurationError for a form with other bits here.
        """
        for part in linears[0].parts:
            if part.form.name not in self._same_bits:
                self._check(part)
                self._same_bits.add(part.form.name)
        parts = [linear.parts for linear in linears]
        return DeviceProduct(self.kernels, self.driver, self.scratch, parts, bias_of(linears))

    def _check(self, part: Panels) -> None:
        """Hold products of the first panel of some weights against the library's."""
        first, scratch = next(iter(part.split(1))), Rows(self.driver)
        product = DeviceProduct(self.kernels, self.driver, scratch, [[first]], None)
        library, numbers = PanelLinear([first], None), torch.Generator().manual_seed(1)
        for n_rows in (*ROWS, MANY):
            rows = torch.randn(n_rows, first.shape[1], generator=numbers)
            out = torch.empty(n_rows, first.shape[0])
            taken = self.driver.empty(out.nbytes)
            product(self.put(rows.numpy()), n_rows, taken)
            self.driver.download(taken, out.numpy())
            if torch.equal(out, library(rows)):
                continue
            raise ConfigurationError(
                f"{self.driver.description} has other bits for {part.form.name}"
            )

    def rows_kernels(self) -> Mapping[str, Kernel]:
        """Return the kernels of rows and experts."""
        return self.kernels.of({}, LAYER_PARTS, _NAMES)


class DeviceLinear:
    """A linear layer on a device whose rows come from the host and go back there: the LM head."""

    weights_stay = True
    is_native = False

    def __init__(self, device: Device, linear: PanelLinear) -> None:
        self._device, self._host = device, linear
        self._product = device.product(linear)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self._host.shape

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Those of the host, of which the device has copies."""
        return self._host.weights

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        device, out = self._device, torch.empty(len(rows), self.shape[0])
        given = device.put_in("rows", rows.numpy())
        taken = device.scratch.of("logits", out.nbytes)
        self._product(given, len(rows), taken)
        device.driver.download(taken, out.numpy())
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """Norms and residual of a sub-layer."""

    before: Buffer | None
    after: Buffer | None
    eps: tuple[float, float]
    multiplier: float

    @classmethod
    def of(cls, device: Device, residual: Residual) -> _Around:
        def weight(norm: Norm | BareNorm | None) -> Buffer | None:
            assert not isinstance(norm, BareNorm), "is_rms says so"
            return None if norm is None else device.put(norm.weight.float().numpy())

        norms = residual.before, residual.after
        return cls(
            before=weight(residual.before),
            after=weight(residual.after),
            eps=(norms[0].eps if norms[0] else 0.0, norms[1].eps if norms[1] else 0.0),
            multiplier=residual.multiplier,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dense:
    """A gated MLP."""

    scratch: Rows
    gate_up: DeviceProduct
    down: DeviceProduct
    gating: Gating

    def __call__(self, rows: Buffer, n_rows: int, inner: Buffer) -> None:
        """Run normalised rows [T, E] through it: `inner` [T, E]."""
        both = self.scratch.of("gates", 8 * n_rows * self.down.shape[1])
        self.gate_up(rows, n_rows, both)
        self.down(both, n_rows, inner, self.gating)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    own: SelfAttention
    around_attention: _Around
    around_mlp: _Around
    qkv: DeviceProduct
    output: DeviceProduct
    mlp: _Dense | DeviceExperts
    attend: DeviceAttention
    head_norm: Buffer | None
    head_eps: float


@dataclass(slots=True, kw_only=True)
class _Recorded:
    """A step that was launched before, and how to launch it again."""

    places: tuple[int, int]
    """Which buffers there were."""
    again: Callable[[], None] | None = None


def why_not(layers: Sequence[object], kv: DeviceKvCache) -> str:
    """Say what the text does not compute of a stage, "" for nothing."""
    if kv.is_quantized:
        return "keys and values in int8"
    if kv.has_states:
        return "layers with a recurrence"
    for layer in layers:
        if not isinstance(layer, Layer) or layer.scale != 1:
            return "layers that are no attention and MLP"
        own = _attention_of(layer.attention)
        if own is None:
            return "this attention"
        if own.qkv_proj.shape[1] % 4:
            return f"rows of {own.qkv_proj.shape[1]} columns"
        if own.head_size > MAX_HEAD or own.head_size % 2:
            return f"heads of {own.head_size} columns"
        if own.qk_norm is not None and own.qk_norm.per_head is None:
            return "a norm over all heads"
        if not all(map(_is_multiplied, (own.qkv_proj, own.o_proj))):
            return "linears whose weights do not stay packed in memory"
        if why := _why_no_mlp(layer.mlp):
            return why
    return ""


def _attention_of(sublayer: Sublayer) -> SelfAttention | None:
    """Return the attention of a sub-layer if the text computes what is around its products."""
    if not isinstance(sublayer, AttentionSublayer) or not sublayer.residual.is_rms:
        return None
    own = sublayer.self_attn
    if not isinstance(own, SelfAttention) or own.is_joined:
        return None
    if own.norms_rotated or own.norms_values:
        return None
    is_both = own.has_pairs and own.qk_norm is not None  # a norm adds columns in their own order
    return None if own.is_value_key or is_both else own


def _why_no_mlp(sublayer: Sublayer) -> str:
    if isinstance(sublayer, ExpertsSublayer):
        own = why_no_experts(sublayer.mlp, _is_multiplied)
        return own if sublayer.residual.is_rms else "this norm"
    mlp = sublayer.fusible_mlp
    if mlp is None or not mlp.residual.is_rms:
        return "MLPs without a gate"
    if gating_of(mlp.mlp) is None:
        return f"the activation {mlp.mlp.activation.value}"
    if not all(map(_is_multiplied, (mlp.mlp.gate_up_proj, mlp.mlp.down_proj))):
        return "linears whose weights do not stay packed in memory"
    return ""


def _is_multiplied(linear: Linear) -> bool:
    if not isinstance(linear, PanelLinear) or not linear.is_native:
        return False
    return all(can_multiply(part.form) for part in linear.parts)


def _either(buffer: Buffer | None, other: Buffer) -> Buffer:
    """Return a buffer where there is one, else what a kernel is given in its place."""
    return other if buffer is None else buffer


class DeviceLayers:
    """All layers of a stage on a device. Not thread-safe."""

    def __init__(self, device: Device, layers: Sequence[Layer], kv: DeviceKvCache) -> None:
        """Upload layers of which `why_not` says nothing.

        Raises CapacityError, and ConfigurationError where a form has other bits.
        """
        self._device, self._kv = device, kv
        kv.compute_on(device.driver)
        self._kernels = device.rows_kernels()
        self._recorded: dict[Hashable, _Recorded] = {}
        self._layers = [self._uploaded(layer) for layer in layers]

    def _uploaded(self, layer: Layer) -> _Layer:
        assert isinstance(layer.attention, AttentionSublayer)
        residual, mlp = self._mlp_of(layer.mlp)
        own, put = _attention_of(layer.attention), self._device.put
        assert own is not None
        norm = None if own.qk_norm is None else own.qk_norm.per_head
        sinks, device = own.kind.sinks, self._device
        attend = DeviceAttention(
            device.kernels,
            device.driver,
            device.scratch,
            own,
            None if sinks is None else put(sinks.float().numpy()),
        )
        return _Layer(
            own=own,
            attend=attend,
            around_attention=_Around.of(self._device, layer.attention.residual),
            around_mlp=_Around.of(self._device, residual),
            qkv=self._product(own.qkv_proj),
            output=self._product(own.o_proj),
            mlp=mlp,
            head_norm=None if norm is None else put(norm.weight.float().numpy()),
            head_eps=0.0 if norm is None else norm.eps,
        )

    def _mlp_of(self, sublayer: Sublayer) -> tuple[Residual, _Dense | DeviceExperts]:
        device = self._device
        if isinstance(sublayer, ExpertsSublayer):
            experts = DeviceExperts(
                sublayer.mlp,
                lambda linears: device.product(*linears),
                device.put,
                device.scratch,
                self._launch,
            )
            return sublayer.residual, experts
        own = sublayer.fusible_mlp
        assert own is not None
        gating = gating_of(own.mlp)
        assert gating is not None
        return own.residual, _Dense(
            scratch=device.scratch,
            gate_up=self._product(own.mlp.gate_up_proj),
            down=self._product(own.mlp.down_proj),
            gating=gating,
        )

    def _product(self, linear: Linear) -> DeviceProduct:
        assert isinstance(linear, PanelLinear), "why_not says so"
        return self._device.product(linear)

    def __call__(
        self, hidden: Tensor, rotaries: Sequence[Rotary], step: ForwardStep
    ) -> Tensor | None:
        """Run all layers, each with its rotary tables: [T, E] to [T, E], of the host.

        Returns None where the host is to compute: for slots that are not those of the stage, where
        hidden states are rounded otherwise than to bfloat16, where routing is asked for, and with
        rows of pictures that see each other.
        """
        if step.kv is not self._kv or step.hidden_dtype not in (None, torch.bfloat16):
            return None
        if step.experts is not None or any(span.see_each_other for span in step.spans):
            return None
        device, n_rows = self._device, len(hidden)
        places, pages = self._kv.bring(step.spans)
        at = device.put_in("places", places), device.put_in("pages", pages)
        own = {id(rotary): rotary for rotary in rotaries}
        number = {key: n for n, key in enumerate(own)}
        of_layers = tuple(number[id(rotary)] for rotary in rotaries)
        tables = [
            (
                device.put_in(f"cosines {n}", rotary.cos.numpy()),
                device.put_in(f"sines {n}", rotary.sin.numpy()),
                rotary.cos.shape[-1],
            )
            for n, rotary in enumerate(own.values())
        ]
        rows = device.put_in("hidden", hidden.numpy())
        rounds = step.hidden_dtype is not None
        n_blocks = blocks_within(int(places[:, 0].max()))

        def launch_all() -> None:
            self._between(None, self._layers[0].around_attention, rows, hidden.shape)
            for index, (layer, n) in enumerate(zip(self._layers, of_layers, strict=True)):
                self._attention(layer, index, rows, n_rows, tables[n], at, n_blocks)
                self._between(layer.around_attention, layer.around_mlp, rows, hidden.shape)
                layer.mlp(self._input(layer.around_mlp, rows), n_rows, self._inner(hidden.shape))
                behind = self._layers[index + 1 : index + 2]
                following = behind[0].around_attention if behind else None
                self._between(layer.around_mlp, following, rows, hidden.shape, rounds=rounds)

        self._launch_or_replay(n_rows, (n_rows, n_blocks, rounds, of_layers), launch_all)
        out = torch.empty_like(hidden)
        device.driver.download(rows, out.numpy())
        return out

    def _launch_or_replay(self, n_rows: int, key: Hashable, launch_all: Callable[[], None]) -> None:
        """Launch a step; like others before it with one call, where the driver records launches.

        `key` is all that launches depend on, but for the places of buffers in memory.
        """
        found, places = self._recorded.get(key), (self._device.scratch.n_made, self._kv.n_pages)
        if found is None or found.places != places:
            launch_all()
            places = self._device.scratch.n_made, self._kv.n_pages
            if n_rows <= _MOST_ROWS_RECORDED:
                while len(self._recorded) >= _MOST_RECORDED:
                    self._recorded.pop(next(iter(self._recorded)))
                self._recorded[key] = _Recorded(places=places)
            return
        if found.again is None:
            found.again = self._device.driver.record(launch_all)
        found.again()

    def _attention(
        self,
        layer: _Layer,
        index: int,
        rows: Buffer,
        n_rows: int,
        table: tuple[Buffer, Buffer, int],
        at: tuple[Buffer, Buffer],
        n_blocks: int,
    ) -> None:
        own, device = layer.own, self._device
        size, n_heads, n_kv_heads = own.head_size, own.n_heads, own.n_kv_heads
        in_all = n_heads + 2 * n_kv_heads
        heads = device.scratch.of("heads", 4 * n_rows * in_all * size)
        keys, values = self._kv.pages_of(index)
        layer.qkv(self._input(layer.around_attention, rows), n_rows, heads)
        self._launch(
            "rotate_heads",
            (n_rows, in_all),
            [heads, _either(layer.head_norm, heads), *table[:2], *at, keys, values],
            n_heads,
            n_kv_heads,
            size,
            table[2],
            PAGE,
            int(layer.head_norm is not None),
            int(own.has_pairs),
            np.float32(layer.head_eps),
        )
        attended = layer.attend(heads, at, (keys, values), n_rows, n_blocks)
        layer.output(attended, n_rows, self._inner((n_rows, layer.output.shape[0])))

    def _inner(self, shape: Sequence[int]) -> Buffer:
        """Return the buffer for what a sub-layer gives."""
        return self._device.scratch.of("inner", 4 * shape[0] * shape[1])

    def _input(self, around: _Around, rows: Buffer) -> Buffer:
        """Return the rows that go into a sub-layer: normed, if there is a norm before it."""
        return rows if around.before is None else self._device.scratch.of("normed", 0)

    def _between(
        self,
        left: _Around | None,
        following: _Around | None,
        rows: Buffer,
        shape: Sequence[int],
        *,
        rounds: bool = False,
    ) -> None:
        """Add what a sub-layer gives, and apply the norm before the one that follows, if any."""
        before = None if following is None else following.before
        if left is None and before is None:
            return
        inner = self._inner(shape)
        normed = self._device.scratch.of("normed", 4 * shape[0] * shape[1])
        after = None if left is None else left.after
        what = _ADDS * (left is not None) + _AFTER * (after is not None) + _ROUNDS * rounds
        what += _BEFORE * (before is not None)
        self._launch(
            "add_and_norm",
            (shape[0], 1),
            [rows, inner, _either(after, rows), _either(before, rows), normed],
            shape[1],
            what,
            np.float32(1.0 if left is None else left.multiplier),
            np.float32(0.0 if left is None else left.eps[1]),
            np.float32(0.0 if following is None else following.eps[0]),
        )

    def _launch(
        self,
        name: str,
        groups: tuple[int, int],
        buffers: Sequence[Buffer],
        *numbers: int | np.float32,
    ) -> None:
        launch(self._device.driver, self._kernels[name], groups, buffers, *numbers)
