"""A model in noise that decodes on the device, for cuda_speed.py.

Weights are made on the device, every product its own copy, since what is read twice would come out
of the device's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from bench_steps import make_step
from cuda_device import Gpu
from torch import Tensor

from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.config.panel_form import Quantization
from shardnet.model.families.registry import family_of
from shardnet.model.families.stage_tensors import stage_tensors
from shardnet.model.fused.decoder import StageInputs
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.linear import KernelChoice, Linear, make_linear, probe
from shardnet.model.layers.norms import Norm
from shardnet.model.layers.weight_source import PlainTable, RowsOf, StoredTable
from shardnet.model.sampling.sampler import Sampler, SampleRow
from shardnet.model.shards.cut import Axis
from shardnet.sampling_params import SamplingParams
from shardnet.stage.estimate.memory_estimate import (
    WeightForm,
    activation_peak_bytes,
    stage_weight_bytes,
)
from shardnet.stage.packs.pack_writer import PackWriter
from shardnet.stage.stage_model import StageModel
from shardnet.stage.streaming.layer_stream import LayerStream
from shardnet.stage.synthetic_model import N_ROWS, SomeRows
from shardnet.types import BLOCK_POSITIONS, PREFILL_CHUNK_ROWS, DType, LayerRange, SlotId

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 4 * BLOCK_POSITIONS
POSITION = BLOCK_POSITIONS
"""Where rows of decode steps stand: each looks at so many keys."""
PREFILLED = 2 * PREFILL_CHUNK_ROWS
DTYPE = DType.BFLOAT16


class NoiseWeights:
    """A WeightSource of small random numbers, made on the device; norms are ones."""

    def __init__(self, config: ModelConfig, choice: KernelChoice, device: torch.device) -> None:
        tensors = stage_tensors(config, LayerRange(0, config.n_layers))
        self._shapes, self._head = tensors.all, tensors.head.keys()
        self._choice = choice
        self._device = device

    def linear(
        self,
        *names: str,
        transposed: bool = False,
        precise: bool = False,
        wide: bool = False,
        outputs: Sequence[Axis] = (),
        inputs: Axis | None = None,
    ) -> Linear:
        """Make a product of the shape that the parameters have together."""
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        shape = (sum(one[0] for one in shapes), shapes[0][1])
        kind = self._choice.weight_quantization(is_head=f"{names[0]}.weight" in self._head)
        return make_linear(self._choice, [self._noise(*shape)], [], self._device, kind)

    def norm(self, name: str, eps: float, offset: float = 0.0) -> Norm:
        """Make a norm of ones."""
        ones = torch.ones(*self._shapes[f"{name}.weight"], device=self._device)
        return Norm(weight=ones.to(torch_dtype(self._choice.dtype)), bias=None, eps=eps)

    def table(self, name: str) -> PlainTable:
        """Make a table."""
        return PlainTable(self.matrix(name))

    def stored_table(self, *names: str, rows_of: RowsOf) -> StoredTable:
        """Make a small table in the place of a large one."""
        _, width = self._shapes[f"{names[0]}.weight"]
        return SomeRows(PlainTable(self._noise(N_ROWS, width)), rows_of)

    def token_classes(self) -> Tensor:
        """Make one class of all tokens."""
        return torch.zeros(1 << 18, dtype=torch.int64)

    def matrix(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """Make a matrix."""
        return self._noise(*self._shapes[f"{name}.weight"])

    def parameter(self, name: str, *, rows: Axis | None = None) -> Tensor:
        """Make a parameter."""
        return self._noise(*self._shapes[name]).float()

    def _noise(self, *shape: int) -> Tensor:
        dtype = torch_dtype(self._choice.dtype)
        return torch.randn(*shape, dtype=dtype, device=self._device).mul_(0.02)


class Decoder:
    """A whole model in noise that decodes: layers, head and greedy sampling."""

    @torch.inference_mode()
    def __init__(self, gpu: Gpu, config: ModelConfig, kind: Quantization | None = None) -> None:
        self.config = config = replace(config, max_positions=CONTEXT)
        self.layers = LayerRange(0, config.n_layers)
        self.choice = choice = probe(gpu.device, DTYPE, DTYPE, kind)
        self.form = WeightForm(dtype=choice.dtype, quant=kind)
        dtype = torch_dtype(choice.dtype)
        weights = NoiseWeights(config, choice, gpu.device)
        inputs = StageInputs(config, self.layers, weights, CONTEXT, dtype, gpu.device)
        family = family_of(config).load_stage(inputs)
        room = ROWS[-1] * CONTEXT // BLOCK_POSITIONS
        heads = (config.n_layers, config.n_kv_heads, config.key_size)
        kv = KvCache(*heads, dtype, gpu.device, room)
        self.stage = StageModel(
            family,
            config,
            self.layers,
            choice,
            kv,
            context=CONTEXT,
            exact_rows=choice.exact_rows,
            weight_bytes=self.weight_bytes,
            stream=LayerStream(),
            writer=PackWriter(None),
        )
        self._sampler = Sampler(config.vocab_size)
        for slot in range(ROWS[-1]):
            kv.ensure(SlotId(slot), POSITION + 1)
            for layer in self.layers:
                for cached in kv.layer(SlotId(slot), layer):
                    cached.zero_()  # what nobody has written may be no number

    @property
    def weight_bytes(self) -> int:
        """What the planner thinks that the weights take."""
        return stage_weight_bytes(self.config, self.layers, self.form)

    @property
    def activation_bytes(self) -> int:
        """What the planner thinks that a prompt's chunk takes besides."""
        sizes = (PREFILL_CHUNK_ROWS, self.choice.dtype, CONTEXT)
        return activation_peak_bytes(self.config, self.layers, *sizes)

    def step(self, n_rows: int) -> None:
        """Decode one token of each of so many sequences."""
        batch = make_step((slot, POSITION, [slot]) for slot in range(n_rows))
        row = SampleRow(params=SamplingParams(), position=POSITION)
        self._sampler.sample(self.stage.forward(batch, None), [row] * n_rows)

    def prefill(self) -> None:
        """Run a prompt of 512 tokens in its chunks."""
        for place in range(0, PREFILLED, PREFILL_CHUNK_ROWS):
            ids = range(place, place + PREFILL_CHUNK_ROWS)
            step = make_step(
                [(0, place, [id_ % self.config.vocab_size for id_ in ids])], n_sampled=0
            )
            self.stage.run(step, None)
