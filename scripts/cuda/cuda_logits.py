"""What check_cuda.py holds together: a small random model computed several ways, by its logits.

Plain formulas in float64 stand for the truth. Rounded weights are unpacked for them, so that what
rounding costs is not counted, only what computing with it does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from bench_steps import make_step
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import Quantization
from shardnet.model.fused.decode_graphs import GRAPHS_VARIABLE
from shardnet.model.kernels.linear import probe
from shardnet.model.kernels.panels import unpack
from shardnet.model.kernels.quantized_linear import quantized
from shardnet.stage.load import load_stage
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.stage_model import StageModel
from shardnet.types import DType, KvDType, LayerRange

T = TypeVar("T")
Verdict = tuple[str, ...]

N_DECODED = 10
TOLERANCES = {DType.FLOAT32: 1e-3, DType.FLOAT16: 0.01, DType.BFLOAT16: 0.05}
"""How far logits may lie apart, as a share of their largest, by what is computed in: sums are taken
in another order. The CPU's products with rounded weights, and rounded keys, are given the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to compute the model."""

    dtype: DType = DType.BFLOAT16
    quant: Quantization | None = None
    kv_dtype: KvDType = KvDType.AUTO
    n_streamed: int = 0

    @property
    def name(self) -> str:
        """For people."""
        weights = "" if self.quant is None else f", {self.quant.value} weights"
        keys = "" if self.kv_dtype is KvDType.AUTO else f", {self.kv_dtype.value} keys and values"
        return self.dtype.value + weights + keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is tried with: a model's shape, a prompt, and how many rows decode steps have."""

    shape: Mapping[str, int]
    n_prompt: int
    row_counts: Sequence[int]


def _shape(hidden: int, layers: int, heads: int, vocab: int) -> Mapping[str, int]:
    inner = {"intermediate": hidden * 11 // 4, "heads": heads, "kv-heads": heads // 4}
    return {"hidden": hidden, "layers": layers, "vocab": vocab} | inner


WHOLE_TRIAL = Trial(
    shape=_shape(512, 6, 8, 4000), n_prompt=300, row_counts=(*range(33, 0, -1), 1, 5, 32, 2)
)
SHORT_TRIAL = Trial(shape=_shape(64, 6, 4, 300), n_prompt=40, row_counts=(5, 1, 2))
PLAIN_WAYS = [Way(dtype=dtype) for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)]
ROUNDED_WAYS = [Way(quant=kind) for kind in Quantization]


@contextmanager
def small_model(device: torch.device, trial: Trial) -> Iterator[SmallModel]:
    """Write a random checkpoint that goes with the block."""
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name) / "model", trial.shape)
        yield SmallModel(Path(name), device, trial)


def make_checkpoint(folder: Path, shape: Mapping[str, int]) -> None:
    """Write random weights in bfloat16, in a process of its own."""
    script = Path(__file__).parents[1] / "make_checkpoint.py"
    options = [f"--{name}={value}" for name, value in shape.items()]
    command = [sys.executable, str(script), str(folder), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def without_graphs(make: Callable[[], T]) -> T:
    """Make something that launches every operator, as with the variable set."""
    before = os.environ.get(GRAPHS_VARIABLE)
    os.environ[GRAPHS_VARIABLE] = "off"
    try:
        return make()
    finally:
        del os.environ[GRAPHS_VARIABLE]
        if before is not None:
            os.environ[GRAPHS_VARIABLE] = before


class SmallModel:
    """A checkpoint, and the ways to load it."""

    def __init__(self, folder: Path, device: torch.device, trial: Trial) -> None:
        self._folder = folder / "model"
        self._packs = folder / "packs"
        self._device = device
        self._trial = trial
        places = range(trial.n_prompt + N_DECODED)
        self._ids = [(7 * place + place * place) % trial.shape["vocab"] for place in places]

    def against_plain(self) -> Iterator[Verdict]:
        """Hold prompts and decode steps against plain formulas, in all that computes."""
        ways = [*PLAIN_WAYS, *ROUNDED_WAYS, Way(kv_dtype=KvDType.INT8)]
        for way in ways:
            stage = self._load(way)
            cuts = [0, *range(self._trial.n_prompt, len(self._ids) + 1)]
            parts = [_answer(stage, a, self._ids[a:b]) for a, b in pairwise(cuts)]
            wide = way.quant is not None or way.kv_dtype is not KvDType.AUTO
            narrowest = stage.choice.hidden_dtype or stage.choice.dtype
            dtype = DType.BFLOAT16 if wide else narrowest
            plain = PlainLlama(Checkpoint.open(self._folder), way.quant)
            want = plain.logits(self._ids)
            yield _verdict(way.name, [torch.cat(parts).double().cpu()], [want], dtype)

    def graphs_against_eager(self) -> Iterator[Verdict]:
        """Hold decode steps of all row counts against those without graphs.

        Where a capture fails, steps run eagerly and are right: so captures are counted, too.
        """
        for way in (*PLAIN_WAYS, *ROUNDED_WAYS):
            stage, eager = self._load(way), without_graphs(partial(self._load, way))
            got, want = self._decode(stage), self._decode(eager)
            *cells, word = _verdict(way.name, got, want, stage.choice.dtype)
            n_captured = _n_buckets(stage)
            if self._device.type == "cuda" and not n_captured:
                word = "WRONG"
            yield *cells, f"{n_captured} row counts captured", word

    def streamed_against_resident(self) -> Iterator[Verdict]:
        """Hold decode steps of layers that are streamed against those in memory."""
        int4 = Quantization.INT4
        for way in (Way(n_streamed=2), Way(n_streamed=5), Way(n_streamed=5, quant=int4)):
            resident = Way(dtype=way.dtype, quant=way.quant)
            got, want = self._decode(self._load(way)), self._decode(self._load(resident))
            name = f"{way.name}, {way.n_streamed} of {self._trial.shape['layers']} layers"
            yield _verdict(name, got, want, way.dtype)

    def _load(self, way: Way) -> StageModel:
        checkpoint, kind = Checkpoint.open(self._folder), way.quant
        choice = probe(self._device, way.dtype, DType.BFLOAT16, kind)
        return load_stage(
            checkpoint,
            LayerRange(0, checkpoint.config.n_layers),
            choice=replace(choice, kv_form=way.kv_dtype),
            device=self._device,
            room_blocks=max(self._trial.row_counts),
            progress=lambda done, total: None,
            packs=PackCache(self._packs, str(self._folder), "check", kind) if kind else None,
            n_streamed=way.n_streamed,
        )

    def _decode(self, stage: StageModel) -> list[Tensor]:
        """Decode one row of each of so many sequences as the trial says."""
        ends, answers = [0] * max(self._trial.row_counts), []
        for n_rows in self._trial.row_counts:
            rows = [(slot, end, [self._ids[slot + end]]) for slot, end in enumerate(ends[:n_rows])]
            answers.append(stage.forward(make_step(rows), None))
            ends[:n_rows] = [end + 1 for end in ends[:n_rows]]
        return answers


def _answer(stage: StageModel, position: int, ids: list[int]) -> Tensor:
    return stage.forward(make_step([(0, position, ids)], n_sampled=len(ids)), None)


def _n_buckets(stage: StageModel) -> int:
    """Count the row counts whose steps were captured: none where a capture failed, or on a CPU."""
    graphs = stage.family._graphs  # type: ignore[attr-defined]
    return 0 if graphs is None else len(graphs._buckets)


def _verdict(what: str, got: list[Tensor], want: list[Tensor], dtype: DType) -> Verdict:
    """Say how far logits lie apart; NaN is as wrong as can be."""
    pairs = [*zip(got, want, strict=True)]
    worst = max(_apart(one, other) for one, other in pairs)
    n_equal = sum(torch.equal(one, other) for one, other in pairs)
    word = "ok" if worst <= TOLERANCES[dtype] else "WRONG"
    return what, f"{worst:.2g} (at most {TOLERANCES[dtype]})", f"{n_equal} of {len(pairs)}", word


def _apart(one: Tensor, other: Tensor) -> float:
    apart = float((one - other).abs().max() / other.abs().max())
    return float("inf") if apart != apart else apart


class PlainLlama:
    """A Llama by plain formulas in float64, the whole text at once."""

    def __init__(self, checkpoint: Checkpoint, kind: Quantization | None) -> None:
        """`kind` is what the weights of products are rounded to."""
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._kind = kind

    def logits(self, ids: list[int]) -> Tensor:
        """Return [T, V]."""
        hidden = self._weight("model.embed_tokens")[ids]
        for layer in range(self._config.n_layers):
            at = f"model.layers.{layer}"
            inner = self._norm(hidden, f"{at}.input_layernorm")
            hidden = hidden + self._attended(inner, f"{at}.self_attn")
            inner = self._norm(hidden, f"{at}.post_attention_layernorm")
            gate, up = (inner @ self._weight(f"{at}.mlp.{part}_proj").T for part in ("gate", "up"))
            hidden = hidden + (F.silu(gate) * up) @ self._weight(f"{at}.mlp.down_proj").T
        return self._norm(hidden, "model.norm") @ self._weight("lm_head").T

    def _attended(self, rows: Tensor, at: str) -> Tensor:
        size, n_group = self._config.head_size, self._config.n_heads // self._config.n_kv_heads
        heads = [rows @ self._weight(f"{at}.{part}_proj").T for part in "qkv"]
        queries, keys, values = (part.view(len(rows), -1, size) for part in heads)
        queries, keys = self._turned(queries), self._turned(keys).repeat_interleave(n_group, 1)
        scores = torch.einsum("thd,phd->htp", queries, keys) / size**0.5
        seen = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        attended = torch.einsum("htp,phd->thd", shares, values.repeat_interleave(n_group, 1))
        return attended.flatten(1) @ self._weight(f"{at}.o_proj").T

    def _turned(self, heads: Tensor) -> Tensor:
        rope, size = self._config.layer_rope(0), self._config.head_size
        assert rope is not None, "a Llama has rotary positions"
        powers = torch.arange(0, size, 2, dtype=torch.float64) / size
        positions = torch.arange(len(heads), dtype=torch.float64)
        angles = torch.outer(positions, rope.theta**-powers)[:, None]
        a, b = heads.chunk(2, -1)
        return torch.cat(
            (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1
        )

    def _norm(self, rows: Tensor, name: str) -> Tensor:
        scale = rows.square().mean(-1, keepdim=True).add(self._config.norm_eps).rsqrt()
        return rows * scale * self._weight(name)

    def _weight(self, name: str) -> Tensor:
        full = f"{name}.weight"
        stored = self._checkpoint.read(full)
        if self._kind is None or name == "model.embed_tokens" or stored.ndim != 2:
            return stored.double()
        kind = self._kind.of_head if name == "lm_head" else self._kind
        whole = unpack(quantized(stored, kind), torch.float32)
        return whole[: stored.shape[0], : stored.shape[1]].double()
