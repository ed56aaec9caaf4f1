"""All layers of a stage on a device: launches of the kernel text, one step after the other.

Knows the order of launches; coverage.py says of which layers. The bits are the compiled
library's, so that either may compute any step. Must not know where weights come from.

Axes in shape comments: T rows of the micro-batch, E hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from shardnet.errors import ConfigurationError
from shardnet.model.config.model_config import Temperature
from shardnet.model.config.panel_form import PanelForm
from shardnet.model.devices.coverage import projection_of
from shardnet.model.devices.device_attention import DeviceAttention, blocks_within
from shardnet.model.devices.device_choice import DeviceBlocks, StageChoices
from shardnet.model.devices.device_entries import DeviceEntries
from shardnet.model.devices.device_experts import DeviceExperts, bias_of, gating_of, linears_of
from shardnet.model.devices.device_kv import DeviceKvCache
from shardnet.model.devices.device_latents import DeviceLatents, visits_of_heads
from shardnet.model.devices.device_ngrams import DeviceNgrams, StageNgrams
from shardnet.model.devices.device_recurrence import (
    STATE_NAMES,
    STATE_PARTS,
    DeviceConvolution,
    DeviceRecurrence,
)
from shardnet.model.devices.device_states import StateLayer
from shardnet.model.devices.device_streams import Add, DeviceStreams
from shardnet.model.devices.mixer_device import BEFORE, MixerDevice, StepBuffers
from shardnet.model.devices.products import MANY, ROWS, DeviceProduct, Gating, Rows
from shardnet.model.drivers.driver import (
    ALIGNED,
    Array,
    Buffer,
    Driver,
    Kernel,
    Kernels,
    launch,
)
from shardnet.model.kernels.linear import Linear, ScaledLinear
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.decoder_layer import (
    AttentionSublayer,
    ExpertsSublayer,
    Layer,
    MlpSublayer,
    Residual,
    StreamResidual,
)
from shardnet.model.layers.experts import SparseMlp
from shardnet.model.layers.modules import Attention, BothMixers, SelfAttention
from shardnet.model.layers.norms import BareNorm, Norm
from shardnet.model.layers.rotary import Rotary
from shardnet.model.mixers.compressed_attention import CompressedAttention
from shardnet.model.mixers.gated_delta import GatedDeltaNet
from shardnet.model.mixers.latent_attention import LatentAttention
from shardnet.model.mixers.mixed_attention import GatedAttention, TemperedAttention, growth_at
from shardnet.model.mixers.position_indexer import BlockIndexer, PositionIndexer
from shardnet.model.mixers.short_conv import NgramSublayer, ShortConvolution

LAYER_PARTS: Final = ("vectors", "reals", "rows", "experts")
"""Of the text."""
_NAMES: Final = (
    "add_and_norm",
    "rotate_heads",
    "split_latents",
    "open_rows",
    "gate_ngrams",
    "route",
    "route_in_groups",
    "group_visits",
    "combine",
    "find_best",
)
_MOST_ROWS_RECORDED: Final = 16
"""Steps of more rows are launched one by one: prompts, whose numbers of rows are many."""
_MOST_RECORDED: Final = 64
"""Steps that are kept: those that came first make room."""
_ADDS, _AFTER, _ROUNDS = 1, 2, 4
"""What `add_and_norm` does."""


class Device:
    """A driver with its compiled kernels and the scratch that all launches share."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.kernels = Kernels(driver)
        self.scratch = Rows(driver)
        self._same_bits: set[PanelForm] = set()
        """The forms whose products were found to be right; some have a name in common."""
        self.judged: Judged | None = None
        """What the LM head has given of rows that were computed last."""

    def put(self, array: Array) -> Buffer:
        """Upload an array to memory of its own. Raises CapacityError."""
        own = np.ascontiguousarray(array)
        buffer = self.driver.empty(own.nbytes)
        self.driver.upload(buffer, own)
        return buffer

    def put_in(self, name: str, array: Array) -> Buffer:
        """Upload an array to scratch."""
        own = np.ascontiguousarray(array)
        buffer = self.scratch.of(name, max(4, own.nbytes))
        if own.nbytes:
            self.driver.upload(buffer, own)
        return buffer

    def put_together(self, arrays: Mapping[str, Array]) -> Together:
        """Upload arrays to scratch with one call. The place of each depends on all sizes before."""
        sizes = [-(-max(1, array.nbytes) // ALIGNED) * ALIGNED for array in arrays.values()]
        buffer = self.scratch.of("together", sum(sizes))
        of_all = zip(arrays.values(), sizes, strict=True)
        padded = b"".join([array.tobytes().ljust(size) for array, size in of_all])
        self.driver.upload(buffer, np.frombuffer(padded, np.uint8))
        places = zip(itertools.accumulate(sizes, initial=0), sizes, strict=False)
        return Together(self.driver, buffer, dict(zip(arrays, places, strict=True)))

    def product(
        self,
        *linears: PanelLinear,
        factors: Array | None = None,
        n_columns: int | None = None,
        begin: int = 0,
    ) -> DeviceProduct:
        """Upload the weights of a linear, or of one for each expert, all alike.

        Outputs of a single linear are multiplied by `factors` [N], float32, if given, and rows of
        outputs are `n_columns` apart, if given, with these from `begin` on. Raises
        ConfigurationError for a form with other bits here.
        """
        for part in linears[0].parts:
            if part.form not in self._same_bits:
                self._check(part)
                self._same_bits.add(part.form)
        parts = [linear.parts for linear in linears]
        bias = bias_of(linears)
        return DeviceProduct(
            self.kernels, self.driver, self.scratch, parts, bias, factors, n_columns, begin
        )

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


@dataclass(frozen=True, slots=True)
class Together:
    """Arrays that were uploaded with one call: `places` are where each begins, and its bytes."""

    driver: Driver
    buffer: Buffer
    places: Mapping[str, tuple[int, int]]

    def __getitem__(self, name: str) -> Buffer:
        return self.driver.view(self.buffer, *self.places[name])


@dataclass(frozen=True, slots=True)
class Judged:
    """Outputs of an LM head with `n_columns` for `rows`; `best` is the place of each row's largest,
    of equal ones the first, and its bits: uint32 [T, 2].
    """

    driver: Driver
    rows: Tensor
    outputs: Buffer
    n_columns: int
    best: Array

    def logits(self) -> Tensor:
        """Copy all outputs from the device: [T, N]."""
        out = torch.empty(len(self.rows), self.n_columns)
        self.driver.download(self.outputs, out.numpy())
        return out


class DeviceLinear:
    """A linear layer on a device whose rows come from the host and go back there: the LM head."""

    weights_stay = True
    is_native = False

    def __init__(self, device: Device, linear: PanelLinear) -> None:
        self._device = device
        self.product = device.product(linear)
        self.shape = linear.shape
        self.weights = linear.weights
        """Those of the host, of which the device has copies."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply every row."""
        device, out = self._device, torch.empty(len(rows), self.shape[0])
        given = device.put_in("rows", rows.numpy())
        taken = device.scratch.of("logits", out.nbytes)
        self.product(given, len(rows), taken)
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
    """An MLP, with a gate or without."""

    scratch: Rows
    first: DeviceProduct
    down: DeviceProduct
    gating: Gating

    def __call__(self, rows: Buffer, n_rows: int, inner: Buffer) -> None:
        """Run normalised rows [T, E] through it: `inner` [T, E]."""
        both = self.scratch.of("gates", 4 * n_rows * self.first.shape[0])
        self.first(rows, n_rows, both)
        self.down(both, n_rows, inner, self.gating)


Mixer = Callable[[Buffer, Buffer, int, StepBuffers], None]
"""Runs normalised rows [T, E] through a layer, numbered within the stage: `inner` [T, E]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sublayer:
    """A sub-layer of layer `index` within the stage, the last of it or not."""

    index: int
    is_last: bool
    around: _Around | DeviceStreams
    own: Mixer | _Dense | DeviceExperts

    def __call__(self, rows: Buffer, inner: Buffer, step: StepBuffers) -> None:
        """Run normalised rows [T, E] through it: `inner` [T, E]."""
        if isinstance(self.own, DeviceExperts):
            self.own(rows, step.n_rows, inner, step.tokens)
        elif isinstance(self.own, _Dense):
            self.own(rows, step.n_rows, inner)
        else:
            self.own(rows, inner, self.index, step)


@dataclass(slots=True, kw_only=True)
class _Recorded:
    """A step that was launched before, and how to launch it again."""

    places: tuple[int, tuple[int, ...]]
    """Which buffers there were."""
    again: Callable[[], None] | None = None


def _either(buffer: Buffer | None, other: Buffer) -> Buffer:
    """Return a buffer where there is one, else what a kernel is given in its place."""
    return other if buffer is None else buffer


class DeviceLayers:
    """All layers of a stage on a device. Not thread-safe."""

    def __init__(
        self,
        device: Device,
        layers: Sequence[Layer],
        kv: DeviceKvCache,
        ropes: Sequence[int],
        head: tuple[Norm, DeviceLinear] | None = None,
        *,
        hands_on: bool = False,
        tables: Sequence[Rotary] = (),
    ) -> None:
        """Upload layers of which `why_not` says nothing; then `kv` is on the device too.

        `ropes` says which of the step's rotary tables each has; `tables` are those of all
        positions, where any choose among blocks. A `head`, with the norm before it, judges the rows
        of short steps. With `hands_on` the layer behind them takes the positions that rows choose
        here. Raises CapacityError, and ConfigurationError where a form has other bits.
        """
        self.device, self._kv, self._ropes, self._every = device, kv, ropes, tables
        self._head = None if head is None else head[1].product
        self._final = None if head is None else _Around.of(device, Residual(before=head[0]))
        self._kernels = dict(device.rows_kernels())
        if kv.has_states:
            self._kernels |= device.kernels.of({}, STATE_PARTS, STATE_NAMES)
        self._recorded: dict[Hashable, _Recorded] = {}
        self._n_heads_by_id = 0
        self._by_token = False
        self._temperature: Temperature | None = None
        self._with_states: dict[int, StateLayer] = {}
        self._indexers: list[PositionIndexer | BlockIndexer] = []
        self._entries: dict[int, int] = {}
        """A layer for each number of positions that entries are made of."""
        self._chosen_entries: tuple[int, int] | None = None
        self._places: dict[int, Buffer] = {}
        """Cosines and sines of all positions, by the table that layers among blocks have."""
        self._on = MixerDevice(
            driver=device.driver,
            kernels=device.kernels,
            make=self._product,
            make_by_id=device.product,
            put=device.put,
            scratch=device.scratch,
            launch=self._launch,
            pages_of=kv.pages_of,
            entries_of=kv.entries_of,
            states_of=lambda index: kv.states_on.cells.buffers[index],
            inputs_of=lambda index: kv.states_on.inputs.buffers[index],
        )
        self._ngrams: dict[int, DeviceNgrams] = {}
        self._sublayers = list(self._uploaded(layers))
        self._tables_of_ngrams = StageNgrams(self._ngrams)
        of_entries = self._chosen_entries
        self._choices = StageChoices(self._indexers, self._on, of_entries, hands_on=hands_on)
        kv.compute_on(device.driver, self._with_states)

    def _uploaded(self, layers: Sequence[Layer]) -> Iterator[_Sublayer]:
        for index, layer in enumerate(layers):
            first, add = layer.attention, None
            if isinstance(first, NgramSublayer):
                add, first = self._with_ngrams(first, index), first.attention
            both = [each for each in (first, layer.mlp) if hasattr(each, "residual")]
            for sublayer in both:
                assert isinstance(sublayer, AttentionSublayer | ExpertsSublayer | MlpSublayer)
                residual, around = sublayer.residual, None
                if isinstance(residual, StreamResidual):
                    around = DeviceStreams(residual, self._on, add if sublayer is first else None)
                yield _Sublayer(
                    index=index,
                    is_last=sublayer is both[-1],
                    around=around or _Around.of(self.device, residual),
                    own=self._own_of(sublayer, index),
                )

    def _with_ngrams(self, sublayer: NgramSublayer, index: int) -> Add:
        """Upload what n-grams add to streams before a recurrence."""
        assert isinstance(sublayer.attention, AttentionSublayer)
        assert isinstance(sublayer.attention.self_attn, GatedDeltaNet)
        own = sublayer.attention.self_attn.config
        self._ngrams[index] = DeviceNgrams(sublayer.features, self._on, index, own)
        return self._ngrams[index].add

    def _own_of(
        self, sublayer: AttentionSublayer | ExpertsSublayer | MlpSublayer, index: int
    ) -> Mixer | _Dense | DeviceExperts:
        if isinstance(sublayer, AttentionSublayer):
            return self._mixer_of(sublayer.self_attn, index)
        device, own = self.device, sublayer.mlp
        if isinstance(own, SparseMlp):
            self._by_token = self._by_token or own.by_token
            return DeviceExperts(
                own,
                lambda linears: device.product(*linears),
                device.put,
                device.scratch,
                self._launch,
            )
        gating, (first, down) = gating_of(own), map(self._product, linears_of(own))
        assert gating is not None
        return _Dense(scratch=device.scratch, first=first, down=down, gating=gating)

    def _mixer_of(self, own: Attention, index: int) -> Mixer:
        on = self._on
        if isinstance(own, BothMixers):
            assert isinstance(own.self_attn, SelfAttention)
            mixers = self._mixer_of(own.recurrence, index), self._mixer_of(own.self_attn, index)
            return self._both(*mixers, own.self_attn.o_proj.shape[0])
        if isinstance(own, GatedDeltaNet):
            recurrence = DeviceRecurrence(own, on, self._ngrams.get(index))
            self._with_states[index] = recurrence
            return recurrence
        if isinstance(own, ShortConvolution):
            self._with_states[index] = convolution = DeviceConvolution(own, on)
            return convolution
        if isinstance(own, LatentAttention):
            latents = DeviceLatents(own, on)
            self._n_heads_by_id, self._temperature = latents.n_heads, own.temperature
            if own.indexer is not None:
                self._indexers.append(own.indexer)
                projections, n_pooled = own.indexer.projections, own.indexer.config.n_pooled
                if projections is not None and projections.pool is not None:
                    size = own.indexer.config.head_size
                    self._kv.pooled[index] = n_pooled, size, projections.pool
            return latents
        if isinstance(own, CompressedAttention):
            self._with_states[index] = entries = DeviceEntries(own, on)
            self._n_heads_by_id = entries.n_groups
            self._entries |= {entries.rate: index} if entries.rate else {}
            if own.indexer is not None:
                self._chosen_entries = entries.rate, own.config.indexer.n_chosen
            return entries
        if isinstance(own, TemperedAttention):
            self._temperature = own.temperature
            return DeviceAttention(own.inner, on, own.inner.qkv_proj, grows=True)
        assert isinstance(own, SelfAttention | GatedAttention)
        choose = None
        if isinstance(own, GatedAttention) and own.indexer is not None:
            indexer, rope = own.indexer, self._ropes[index]
            every = self._every[rope]
            if rope not in self._places:
                self._places[rope] = on.put(torch.cat((every.cos, every.sin), 1).numpy())
            choose = DeviceBlocks(indexer, on, every, self._places[rope], own.head_size)
            pool, config = partial(indexer.pool, every), indexer.config
            self._kv.pooled[index] = config.n_pooled, config.head_size, pool
            self._indexers.append(indexer)
        return DeviceAttention(own, on, projection_of(own), choose=choose)

    def _both(self, one: Mixer, other: Mixer, width: int) -> Mixer:
        def mix(rows: Buffer, inner: Buffer, index: int, step: StepBuffers) -> None:
            beside = self.device.scratch.of("beside", 4 * step.n_rows * width)
            one(rows, inner, index, step)
            other(rows, beside, index, step)
            numbers = width, _ADDS, 1, np.float32(1), np.float32(0), np.float32(0)
            buffers = [inner, *[beside] * 4]
            self._launch("add_and_norm", (step.n_rows, 1), buffers, *numbers)

        return mix

    def _product(
        self, linear: Linear, *, n_columns: int | None = None, begin: int = 0
    ) -> DeviceProduct:
        factors: Array | None = None
        if isinstance(linear, ScaledLinear):
            factors, linear = linear.factors.numpy(), linear.plain
        assert isinstance(linear, PanelLinear), "why_not says so"
        return self.device.product(linear, factors=factors, n_columns=n_columns, begin=begin)

    def __call__(
        self, hidden: Tensor, rotaries: Sequence[Rotary], step: ForwardStep
    ) -> Tensor | None:
        """Run all layers by rotary tables: [T, E] to [T, E], of the host.

        Returns None where the host is to compute: for slots that are not those of the stage, where
        hidden states are rounded otherwise than to bfloat16, where routing is asked for, and with
        rows of pictures that see each other, and where no layer before has chosen positions.
        """
        if step.kv is not self._kv or step.hidden_dtype not in (None, torch.bfloat16):
            return None
        if step.experts is not None or any(span.see_each_other for span in step.spans):
            return None
        if self._choices.are_missing(step):
            return None
        device, n_rows, shape = self.device, len(hidden), hidden.shape
        more, ends = self._tables_of_ngrams.look_up(step)
        at, pages, runs = self._kv.bring(step.spans)
        self._tables_of_ngrams.note(step, ends)
        if self._temperature is not None:
            at[:, 2] = growth_at(self._temperature, step.positions).numpy().view(np.uint32)
        n_blocks = blocks_within(max(s.position + s.end - s.start for s in step.spans) - 1)
        rounds = step.hidden_dtype is not None
        keeps = any(span.n_drafts for span in step.spans) and bool(self._with_states)
        is_alone = n_rows > _MOST_ROWS_RECORDED  # they are large, and would be copied once more
        head = None if is_alone else self._head
        arrays: dict[str, Array] = {} if is_alone else {"hidden": hidden.numpy()}
        arrays |= {"best": np.zeros((n_rows, 2), np.uint32), "places": at, "runs": runs[:, :4]}
        arrays |= {"kept": runs[:, 4]} if keeps else {}
        arrays |= self._tables(rotaries, step)
        more |= self._choices.digits(step)
        arrays |= more | {"pages": pages}  # these last, since their number grows
        brought = device.put_together(arrays)
        rows = device.put_in("hidden", hidden.numpy()) if is_alone else brought["hidden"]
        heads = None
        if self._n_heads_by_id:
            heads = visits_of_heads(n_rows, self._n_heads_by_id, device.put_in)
        chooses = self._choices.bring(step, at)

        def launch_all() -> None:
            widths = [rotary.cos.shape[-1] for rotary in rotaries]
            buffers = StepBuffers(
                n_rows=n_rows,
                n_blocks=n_blocks,
                at=(brought["places"], brought["pages"]),
                runs=brought["runs"],
                tables=[
                    (brought[f"cosines {rope}"], brought[f"sines {rope}"], widths[rope])
                    for rope in self._ropes
                ],
                heads=heads,
                kept=brought["kept"] if keeps else None,
                more={name: brought[name] for name in more},
                tokens=brought["tokens"] if self._by_token else None,
                of_entries={
                    rate: (brought[f"cosines of {rate}"], brought[f"sines of {rate}"])
                    for rate in self._entries
                },
                chooses=chooses,
            )
            best = None if head is None else brought["best"]
            self._launch_step(rows, shape, buffers, best, rounds=rounds)

        key = n_rows, n_blocks, rounds, keeps, chooses
        self._launch_or_replay(n_rows, key, launch_all)
        out = self._take(brought.buffer if not is_alone else rows, shape, brought, head)
        self._choices.hand_on(step, n_rows, chooses=chooses)
        return out

    def _tables(self, rotaries: Sequence[Rotary], step: ForwardStep) -> dict[str, Array]:
        """Return rotary tables, those of entries that rows are the last of, and tokens."""
        found = {str(n): rotary for n, rotary in enumerate(rotaries)}
        for rate, layer in self._entries.items():
            every = rotaries[self._ropes[layer]].every
            assert every is not None, "rows have one position each"
            found[f"of {rate}"] = every.at(step.positions // rate * rate)
        arrays: dict[str, Array] = {}
        for name, rotary in found.items():
            arrays |= {f"cosines {name}": rotary.cos.numpy(), f"sines {name}": rotary.sin.numpy()}
        if self._by_token:
            arrays["tokens"] = step.token_ids.numpy().astype(np.uint32)
        return arrays

    def _take(
        self, rows: Buffer, shape: Sequence[int], brought: Together, head: DeviceProduct | None
    ) -> Tensor:
        """Download the rows [T, E], and with a `head` what it has found of them, at once."""
        device, n_bytes = self.device, 4 * shape[0] * shape[1]
        end = n_bytes if head is None else brought.places["best"][0] + 8 * shape[0]
        taken = torch.empty(end, dtype=torch.uint8)
        device.driver.download(rows, taken.numpy())
        out = taken[:n_bytes].view(torch.float32).view(*shape)
        device.judged = None
        if head is not None:
            best = taken.numpy()[-8 * shape[0] :].view(np.uint32).reshape(-1, 2)
            outputs = device.scratch.of("judged", 0)
            device.judged = Judged(device.driver, out, outputs, head.shape[0], best)
        return out

    def _launch_step(
        self,
        rows: Buffer,
        shape: Sequence[int],
        step: StepBuffers,
        best: Buffer | None,
        *,
        rounds: bool,
    ) -> None:
        """Launch all layers over rows [T, E], and what finds the `best` outputs of the LM head."""
        inner, last = self._inner(shape), None if best is None else self._final
        self._between(None, self._sublayers[0].around, rows, shape, step)
        for sublayer, behind in itertools.pairwise([*self._sublayers, None]):
            assert sublayer is not None
            following = last if behind is None else behind.around
            rounded = rounds and sublayer.is_last
            sublayer(self._input(sublayer.around, rows), inner, step)
            self._between(sublayer.around, following, rows, shape, step, rounds=rounded)
        if best is not None and self._head is not None:
            outputs = self.device.scratch.of("judged", 4 * shape[0] * self._head.shape[0])
            self._head(self.device.scratch.of("normed", 0), shape[0], outputs)
            self._launch("find_best", (shape[0], 1), [outputs, best], self._head.shape[0])

    def _launch_or_replay(self, n_rows: int, key: Hashable, launch_all: Callable[[], None]) -> None:
        """Launch a step; like others before it with one call, where the driver records launches.

        `key` is all that launches depend on, but for the places of buffers in memory.
        """
        found, places = self._recorded.get(key), (self.device.scratch.n_made, self._kv.n_made)
        if found is None or found.places != places:
            launch_all()
            places = self.device.scratch.n_made, self._kv.n_made
            if n_rows <= _MOST_ROWS_RECORDED:
                while len(self._recorded) >= _MOST_RECORDED:
                    self._recorded.pop(next(iter(self._recorded)))
                self._recorded[key] = _Recorded(places=places)
            return
        if found.again is None:
            found.again = self.device.driver.record(launch_all)
        found.again()

    def _inner(self, shape: Sequence[int]) -> Buffer:
        """Return the buffer for what a sub-layer gives."""
        return self.device.scratch.of("inner", 4 * shape[0] * shape[1])

    def _input(self, around: _Around | DeviceStreams, rows: Buffer) -> Buffer:
        """Return the rows that go into a sub-layer: joined or normed, if that is before it."""
        is_bare = isinstance(around, _Around) and around.before is None
        return rows if is_bare else self.device.scratch.of("normed", 0)

    def _between(
        self,
        left: _Around | DeviceStreams | None,
        following: _Around | DeviceStreams | None,
        rows: Buffer,
        shape: Sequence[int],
        step: StepBuffers,
        *,
        rounds: bool = False,
    ) -> None:
        """Add what a sub-layer gives, and apply what is before the one that follows, if any."""
        if isinstance(left, DeviceStreams):
            left.share(rows, self._inner(shape), shape[0], rounds=rounds)
            left = None
        if isinstance(following, DeviceStreams):
            following.join(rows, step)
            following = None
        before = None if following is None else following.before
        if left is None and before is None:
            return
        inner = self._inner(shape)
        normed = self.device.scratch.of("normed", 4 * shape[0] * shape[1])
        after = None if left is None else left.after
        what = _ADDS * (left is not None) + _AFTER * (after is not None) + _ROUNDS * rounds
        what += BEFORE * (before is not None)
        self._launch(
            "add_and_norm",
            (shape[0], 1),
            [rows, inner, _either(after, rows), _either(before, rows), normed],
            shape[1],
            what,
            1,
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
        launch(self.device.driver, self._kernels[name], groups, buffers, *numbers)
