"""Makes a stage's linear layers, norms and tables from a checkpoint's tensors.

Knows which parameters become which kind of linear, whether bits of its rows depend on the rows
beside them, and where packed ones are cached. Must not know forward passes, nor how tensors are
found and counted (tensor_reader.py): a family asks for its parameters by name and gets tensors that
share no memory with the file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Final, Unpack

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.families.stage_tensors import StageTensors
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.linear import (
    Kernel,
    KernelChoice,
    Linear,
    is_batch_invariant,
    join_biases,
    linear_of_panels,
    make_linear,
    probe,
)
from shardnet.model.kernels.packing import FLOAT_FORMS
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels, unpack_whole
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.weight_source import (
    LinearOptions,
    PanelTable,
    PlainTable,
    RowsOf,
    StoredTable,
    Table,
)
from shardnet.model.shards.cut import Axis
from shardnet.stage.file_table import FileTable, RowCache
from shardnet.stage.kept_linears import KeptLinears, LinearKey
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.packs.pack_writer import PackWriter
from shardnet.stage.stored_weights import (
    JoinedLinear,
    PlainWeights,
    QuantizedWeights,
    make_panels,
    stream_panels,
)
from shardnet.stage.streaming.buffers import HostBuffers, find_buffers
from shardnet.stage.streaming.layer_stream import LayerStream
from shardnet.stage.streaming.streamed_linear import ExpertPool, Place, StoredLinear, StreamedLinear
from shardnet.stage.tensor_reader import Progress, TensorReader
from shardnet.stage.weight_digests import WeightDigests
from shardnet.tokenizers.tokenizer import token_classes
from shardnet.types import ANY_ROWS, Arith, DType

_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")
"""In the name of an expert's parameter."""
log = logging.getLogger(__name__)


class StageWeights:
    """The WeightSource of one stage: each tensor can be taken once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: StageTensors,
        choice: KernelChoice,
        device: torch.device,
        progress: Progress,
        packs: PackCache | None = None,
        streamed: Sequence[int] = (),
        kept: KeptLinears | None = None,
    ) -> None:
        """Check every tensor of the stage by its header, before any is read.

        Linears of the `streamed` layers, absolute numbers, stay on disk: `stream` reads them. Those
        that are `kept` of the stage before are not made again; the others there are dropped.
        Raises CheckpointError as TensorReader does.
        """
        self._path, self._config = checkpoint.path, checkpoint.config
        self._choice = choice
        self._device = device
        self.writer = PackWriter(packs)
        """Writes packed weights to the cache on its own thread."""
        self._head = tensors.head.keys()
        buffers = find_buffers(device) if streamed else None
        self.stream = LayerStream(buffers)
        self.experts = ExpertPool() if isinstance(buffers, HostBuffers) else None
        """Of streamed layers: read alone. On other devices they are read with their layers."""
        first = min(tensors.layers, default=0)
        self._streamed = {n: layer - first for layer in streamed for n in tensors.layers[layer]}
        dtype = torch_dtype(choice.dtype)
        on_disk = self._streamed.keys() | tensors.looked_up.keys()
        self._reader = TensorReader(checkpoint, tensors, dtype, progress, on_disk)
        self._tables: dict[str, Panels] = {}
        """Packed tables that the LM head multiplies with too."""
        self._plain = PlainWeights(self._reader)
        self._tests = BatchInvarianceTests(choice.exact_rows, device)
        self._quantized = QuantizedWeights(
            choice=choice,
            reader=self._reader,
            plain=self._plain,
            packs=packs,
            writer=self.writer,
            device=device,
        )
        self._tied = tensors.embedding.keys() & self._head
        self._kept = kept or KeptLinears(exact_rows=choice.exact_rows)
        self._kept.drop_others(tensors.all.keys() - self._streamed.keys() - self._tied)
        self._made: dict[LinearKey, Linear] = {}
        self.tables: list[FileTable] = []
        """Those that stay in their files."""
        self._rows = RowCache(checkpoint.model_id)
        self.digests = WeightDigests()
        """Of what is in memory, for audits."""

    @property
    def made(self) -> KeptLinears:
        """The linears so far that stay in memory, and are of no table."""
        return KeptLinears(exact_rows=self._tests.exact_rows, linears=self._made)

    @property
    def exact_rows(self) -> int:
        """As probed, or 1 if a linear of this stage turned out not to be batch-invariant.

        ANY_ROWS if the compiled library computes all of them.
        """
        return ANY_ROWS if self._tests.all_native else self._tests.exact_rows

    def keep(self, name: str, ranges: Sequence[tuple[int, int]], axis: int) -> None:
        """Take no more of a parameter than `ranges` of an axis, in the place of all of it."""
        self._reader.keep(name, ranges, axis)

    def linear(self, *names: str, **how: Unpack[LinearOptions]) -> Linear:
        """Make one linear layer of the concatenated `NAME.weight` (and `NAME.bias`, if present).

        Where only some have a bias, those of the others are zeros.

        What outputs and inputs are counts for shards only. Raises CheckpointError for a file that
        cannot be read, CapacityError if memory, or the cache of streamed layers, is full.
        """
        key = LinearKey(
            names=names,
            transposed=how.get("transposed", False),
            precise=how.get("precise", False),
            wide=how.get("wide", False),
        )
        weights = [f"{name}.weight" for name in names]
        biases = [f"{name}.bias" for name in names if self._reader.has(f"{name}.bias")]
        is_kept = weights[0] not in self._streamed and weights[0] not in self._tied
        if is_kept and key in self._kept.linears:
            linear = self._kept.linears.pop(key)
            self._tests.take_over(linear, self._kept.exact_rows)
            self._reader.skip([*weights, *biases])
        else:
            linear = self._new_linear(key, weights, has_bias=bool(biases))
        if is_kept:
            self._made[key] = linear
        self.digests.add(names[0], *linear.weights)
        self._reader.report()
        return linear

    def _new_linear(self, key: LinearKey, weights: Sequence[str], *, has_bias: bool) -> Linear:
        choice, kind, place = self._choice, None, None
        names, transposed = key.names, key.transposed
        if key.wide:
            choice = self._wide
        elif not key.precise:
            kind = choice.weight_quantization(is_head=weights[0] in self._head)
            place = self._place(weights[0])
        bias = [self._bias(name, transposed=transposed) for name in names if has_bias]
        if kind is not None:
            made, linear = self._quantized.linear(names, bias, kind, place, transposed=transposed)
            self._tests.test(names[0], made, self._choice)
        elif self._stays_packed(weights, precise=key.precise or key.wide):
            linear = self._as_stored(weights, bias, place)
        elif place is not None:
            linear = self._streamed_linear(weights, bias, place, transposed=transposed)
        else:
            linear = self._plain_linear(choice, weights, bias, transposed=transposed)
            self._tests.test(names[0], linear, choice)
        return linear

    def _bias(self, name: str, *, transposed: bool) -> Tensor:
        """Read the bias of a linear, zeros where it has none."""
        if self._reader.has(f"{name}.bias"):
            return self._reader.read(f"{name}.bias")
        n_out = self._reader.shape(f"{name}.weight")[-1 if transposed else 0]
        return torch.zeros(n_out, dtype=torch_dtype(self._choice.dtype))

    def _place(self, weight: str) -> Place | None:
        """Return where a weight of a streamed layer is read, None for one that stays in memory."""
        layer = self._streamed.get(weight)
        if layer is None:
            return None
        expert = _EXPERT.search(weight)
        if self.experts is None or expert is None:
            return Place(self.stream, layer)
        return Place(self.experts.expert(layer, int(expert[1])), layer)

    def _plain_linear(
        self,
        choice: KernelChoice,
        weights: Sequence[str],
        biases: Sequence[Tensor],
        *,
        transposed: bool,
    ) -> Linear:
        """Make a linear of weights that stay floats, packed while they are read if possible."""
        forms = {FLOAT_FORMS.get(self._plain.stored_type(name)) for name in weights}
        form = forms.pop() if len(forms) == 1 and choice.kernel is Kernel.NATIVE else None
        packed = self._plain.packed_while_read(weights, form, transposed=transposed)
        if packed is None or form is None:
            whole = self._plain.read(weights, transposed=transposed)
            return make_linear(choice, whole, biases, self._device)
        bias = join_biases(biases, self._device, torch_dtype(choice.dtype))
        return PanelLinear(
            [Panels(packed=packed, form=form, shape=self._plain.shape(weights))], bias
        )

    def _stays_packed(self, weights: Sequence[str], *, precise: bool) -> bool:
        """Say whether a weight of a linear is computed with as it is stored."""
        return not precise and any(self._plain.is_packed(name) for name in weights)

    def _as_stored(
        self, weights: Sequence[str], biases: Sequence[Tensor], place: Place | None
    ) -> Linear:
        """Make a linear of weights some or all of which are stored packed.

        Those with a `place` to be streamed are read from disk for every pass.
        """
        parts: list[Linear] = []
        own_biases = [[bias] for bias in biases] or [[] for _ in weights]
        joined = zip(weights, own_biases, strict=True)
        for is_packed, group in groupby(joined, lambda one: self._plain.is_packed(one[0])):
            names, some = zip(*group, strict=True)
            bias = [tensor for own in some for tensor in own]
            if not is_packed and place is not None:
                parts.append(self._streamed_linear(names, bias, place, transposed=False))
            elif not is_packed:
                parts.append(self._plain_linear(self._choice, names, bias, transposed=False))
                self._tests.test(names[0], parts[-1], self._choice)
            else:
                parts.append(self._packed_linear(names, bias, place))
        return parts[0] if len(parts) == 1 else JoinedLinear(parts)

    def _packed_linear(
        self, names: Sequence[str], biases: Sequence[Tensor], place: Place | None
    ) -> Linear:
        """Make a linear of weights all of which are stored packed."""
        bias = join_biases(biases, self._device, torch.float32)
        if place is None:
            made = linear_of_panels(self._choice, self._panels(names), bias)
            self._tests.test(names[0], made, self._choice)
            return made
        linear = stream_panels(self._reader, names, bias, place, self._device)
        if not linear.is_native and self._tests.is_new(linear, self._choice):
            # Only then is anything read now: the compiled library needs no test.
            self._tests.test(names[0], PanelLinear(self._panels(names), bias), self._choice)
        self._reader.skip(names)
        return linear

    def _panels(self, names: Sequence[str]) -> list[Panels]:
        """Pack parameters, but for a tied table: that is held once, and was packed for lookups."""
        table = self._tables.pop(names[0], None)
        return [table] if table is not None else make_panels(self._reader, names, self._device)

    @cached_property
    def _wide(self) -> KernelChoice:
        """The kernel for float32 on this device."""
        arith = Arith.PORTABLE if self._choice.kernel is Kernel.NATIVE else Arith.FAST
        return probe(self._device, DType.FLOAT32, None, arith=arith)

    def _streamed_linear(
        self, names: Sequence[str], biases: Sequence[Tensor], place: Place, *, transposed: bool
    ) -> Linear:
        """Make a linear whose weights are read from disk for every pass."""
        shapes = [self._reader.shape(name) for name in names]
        stored = StoredLinear(self._choice, self._device, shapes, biases, transposed=transposed)
        parts = [part for name in names for part in self._reader.parts(name)]
        linear = StreamedLinear(
            place,
            place.stream.reserve(place.layer, parts, stored.packing),
            stored.read_bytes(sum(part.size_bytes for part in parts)),
            stored.shape,
            stored.make,
            is_ready=stored.is_ready,
            is_native=stored.is_native,
        )
        self._reader.skip(names)
        if not stored.is_native and self._tests.is_new(linear, self._choice):
            # Only then is anything read now: the compiled library needs no test.
            weights = torch.cat([self._reader.again(name) for name in names])
            made = stored.make(weights.view(-1).view(torch.uint8).to(self._device))
            self._tests.test(names[0], made, self._choice)
        return linear

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm of `NAME.weight` and `NAME.bias`, if present: [E] each.

        A nonzero `offset` is added to the weight; both stay in float32 then.
        """
        with_bias = self._reader.has(f"{name}.bias")
        if offset:
            weight = self._reader.read(f"{name}.weight").to(self._device, torch.float32) + offset
        else:
            weight = self._own(f"{name}.weight")
        bias = self._own(f"{name}.bias").to(weight.dtype) if with_bias else None
        norm = Norm(weight=weight, bias=bias, eps=eps)
        self.digests.add(name, weight, *(() if bias is None else (bias,)))
        self._reader.report()
        return norm

    def table(self, name: str) -> Table:
        """Take `NAME.weight` to look up rows in: packed if it is stored so, else a copy."""
        weight = f"{name}.weight"
        if not self._plain.is_packed(weight):
            return PlainTable(self.matrix(name))
        (panels,) = make_panels(self._reader, [weight], self._device)
        self.digests.add(name, panels.packed)
        if weight in self._head and self._choice.weight_quantization(is_head=True) is None:
            self._tables[weight] = panels
        if self._choice.unpacks:
            return PlainTable(unpack_whole([panels], torch_dtype(self._choice.dtype)))
        return PanelTable(panels, torch_dtype(self._choice.dtype))

    def stored_table(self, *names: str, rows_of: RowsOf) -> StoredTable:
        """Return the rows of all `NAME.weight`, which stay in their files, here or at other nodes.

        Raises CheckpointError as `FileTable.of`.
        """
        weights = [f"{name}.weight" for name in names]
        self._reader.skip(weights)
        self._reader.report()
        dtype = torch_dtype(self._choice.dtype)
        table = FileTable.of(self._reader, weights, dtype, self._device, rows_of, self._rows)
        self.tables += table.both
        return table

    def token_classes(self) -> Tensor:
        """Return the classes of tokens by the checkpoint's tokenizer, as many as the config says.

        Raises CheckpointError as `tokenizer.token_classes` does.
        """
        config = self._config
        assert config.ngrams is not None
        found = token_classes(self._path, config.vocab_size, config.ngrams.n_classes)
        return torch.frombuffer(found, dtype=torch.int32).long()

    def matrix(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """Copy `NAME.weight`: [N, K] in the compute dtype."""
        matrix = self._own(f"{name}.weight")
        self.digests.add(name, matrix)
        self._reader.report()
        return matrix

    def parameter(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """Copy the parameter with the full name `name`, in float32."""
        value = self._reader.read(name).to(self._device, torch.float32, copy=True)
        self.digests.add(name, value)
        self._reader.report()
        return value

    def _own(self, name: str) -> Tensor:
        return self._reader.own(name, self._device, torch_dtype(self._choice.dtype))


class BatchInvarianceTests:
    """Tests each kind of linear once for batch invariance."""

    def __init__(self, exact_rows: int, device: torch.device) -> None:
        """Start with the probed `exact_rows`."""
        self.exact_rows = exact_rows
        self.all_native = True
        """Whether all linears so far are the compiled library's."""
        self._device = device
        self._seen: set[tuple[int, int, DType, type[Linear]]] = set()

    def is_new(self, linear: Linear, choice: KernelChoice) -> bool:
        """Say, only once for each kind of linear, that it has yet to be tested."""
        key = (*linear.shape, choice.dtype, type(linear))
        if self.exact_rows == 1 or key in self._seen:
            return False
        self._seen.add(key)
        return True

    def take_over(self, linear: Linear, exact_rows: int) -> None:
        """Count a linear that was tested before, with others: up to `exact_rows` rows are alike."""
        self.all_native = self.all_native and linear.is_native
        self.exact_rows = min(self.exact_rows, exact_rows)

    def test(self, name: str, linear: Linear, choice: KernelChoice) -> None:
        """Test a linear, unless one of its kind was tested."""
        self.all_native = self.all_native and linear.is_native
        if self.is_new(linear, choice) and not is_batch_invariant(linear, choice, self._device):
            log.warning(
                "%s: on this machine the last bits of a token depend on how many are computed at "
                "once; with --deterministic they are computed one by one, which is slower",
                name,
            )
            self.exact_rows = 1
