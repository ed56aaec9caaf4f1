"""Parts of a device's report: what docs/exactness.md promises of a CPU, tried on this one.

The bundled model's logits of one prompt, computed in every way that must change no bit; and how
much of the memory's speed each form of weights reaches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from bench_ring import READ_BYTES, read_bandwidth
from bench_steps import make_step
from cuda_device import Gpu
from torch import Tensor

from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.library import ISA_VARIABLE, native_kernels
from shardnet.model.kernels.linear import (
    Kernel,
    KernelChoice,
    cpu_arithmetic,
    make_linear,
    probe,
)
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import PORTABLE_ARITHMETIC, Arith, DType, LayerRange, SlotId

Cells = Sequence[str]
CPU = torch.device("cpu")
N_PROMPT = 140
"""More than the 128 positions that attention adds up at a time."""
N_PLAIN = 9
"""Rows of the prompt that plain C computes: it is many times slower."""
CHUNKS = (0, 1, 8, 72, 73, 127, N_PROMPT)
"""Where the prompt is cut."""
FORMS: Sequence[tuple[DType, Arith, Quantization | None]] = (
    (DType.BFLOAT16, Arith.FAST, None),
    (DType.BFLOAT16, Arith.PORTABLE, None),
    (DType.FLOAT32, Arith.FAST, None),
    (DType.BFLOAT16, Arith.PORTABLE, Quantization.INT8),
    (DType.BFLOAT16, Arith.PORTABLE, Quantization.INT4),
)
SIDE = 8192
"""Inputs and outputs of a linear whose weights no cache holds."""


def promises() -> Iterator[Cells]:
    """Compute a prompt in chunks, in a batch, on several threads and stages, and in plain C."""
    yield "class of this CPU", cpu_arithmetic()
    if native_kernels() is None:
        yield "nothing is promised", "there is no compiled library here"
        return
    for dtype, arith, quantization in FORMS:
        choice = probe(CPU, dtype, DType.BFLOAT16, quantization, arith)
        of = f"{dtype.value}, {arith.value}{f', {quantization.value}' if quantization else ''}"
        if choice.kernel is not Kernel.NATIVE:
            yield of, choice.name, "not promised: torch computes"
            continue
        unequal = _unequal(choice)
        yield of, choice.name, "WRONG" if unequal else "same bits", "; ".join(unequal)


def _unequal(choice: KernelChoice) -> list[str]:
    """Name the ways of computing the prompt that change its bits, with the rows concerned."""
    config = Checkpoint.open(DEFAULT_MODEL_PATH).config
    ids = [(7 * place + place * place) % config.vocab_size for place in range(N_PROMPT)]
    n_threads = torch.get_num_threads()
    whole = [LayerRange(0, config.n_layers)]
    each = [LayerRange(layer, layer + 1) for layer in range(config.n_layers)]
    torch.set_num_threads(1)
    chain = _load(whole, choice)
    expected = _logits(chain, (0, 0, ids))

    def beside() -> Tensor:
        others = [(slot, 0, ids[slot : slot + 9]) for slot in (1, 2, 3)]
        return _logits(chain, *others, (4, 0, ids))[-N_PROMPT:]

    def threads() -> Tensor:
        torch.set_num_threads(max(2, os.cpu_count() or 1))
        return _logits(_load(whole, choice), (0, 0, ids))

    def chunks() -> Tensor:
        pieces = [(5, start, ids[start:end]) for start, end in pairwise(CHUNKS)]
        return torch.cat([_logits(chain, piece) for piece in pieces])

    ways: dict[str, Callable[[], Tensor]] = {
        "chunks": chunks,
        "a batch": beside,
        "a stage a layer": lambda: _logits(_load(each, choice), (0, 0, ids)),
        "threads": threads,
    }
    if choice.dtype is DType.FLOAT32:
        ways["plain C"] = partial(_in_plain_c, choice, ids[:N_PLAIN])
    try:
        found = {name: way() for name, way in ways.items()}
    finally:
        torch.set_num_threads(n_threads)
    counts = {
        name: int((logits != expected[: len(logits)]).any(1).sum())
        for name, logits in found.items()
    }
    return [f"{name}: {n} of {len(found[name])} rows" for name, n in counts.items() if n]


def _in_plain_c(choice: KernelChoice, ids: Sequence[int]) -> Tensor:
    """Compute a prompt as a CPU without vector instructions does."""
    before = os.environ.get(ISA_VARIABLE)
    os.environ[ISA_VARIABLE] = PORTABLE_ARITHMETIC
    native_kernels.cache_clear()
    try:
        layers = LayerRange(0, Checkpoint.open(DEFAULT_MODEL_PATH).config.n_layers)
        return _logits(_load([layers], choice), (0, 0, ids))
    finally:
        if before is None:
            del os.environ[ISA_VARIABLE]
        else:
            os.environ[ISA_VARIABLE] = before
        native_kernels.cache_clear()


def _load(ranges: Sequence[LayerRange], choice: KernelChoice) -> list[StageModel]:
    checkpoint = Checkpoint.open(DEFAULT_MODEL_PATH)
    return [
        load_stage(
            checkpoint,
            layers,
            choice=choice,
            device=CPU,
            room_blocks=16,
            progress=lambda done, total: None,
        )
        for layers in ranges
    ]


def _logits(chain: Sequence[StageModel], *rows: tuple[int, int, Sequence[int]]) -> Tensor:
    """Return the logits [T, V] of all rows, each (slot, position, token ids)."""
    batch = make_step(rows, n_sampled=None)
    for slot in [slot for slot, position, _ in rows if position == 0]:
        for stage in chain:
            stage.kv.free(SlotId(slot))
    hidden: Tensor | None = None
    for stage in chain:
        if hidden is not None:  # as the wire does
            hidden = hidden.to(torch_dtype(stage.choice.hidden_dtype or stage.choice.dtype))
        hidden = stage.forward(batch, hidden)
    assert hidden is not None
    return hidden


@torch.inference_mode()
def shares(gpu: Gpu) -> Iterator[Cells]:
    """Say at which share of the speed of plain reads each form of weights is multiplied with."""
    memory = torch.ones(READ_BYTES // 4)
    limit = read_bandwidth(memory)
    yield "plain reads", f"{limit / 1e9:.1f} GB/s"
    weight = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    for dtype, arith, quantization in FORMS:
        choice = probe(CPU, dtype, dtype, quantization, arith)
        stored = torch_dtype(choice.stored_dtype)
        n_bytes = weight.numel() * (stored.itemsize if quantization is None else 0)
        if quantization is not None:
            n_bytes = quantization.form.packed_bytes(SIDE, SIDE)
        linear = make_linear(choice, [weight.to(stored)], [], CPU, quantization)
        row = weight[:1].to(torch_dtype(choice.dtype))
        took_s = gpu.seconds(partial(linear, row))
        limit = max(limit, read_bandwidth(memory))
        share = n_bytes / took_s / limit
        kind = quantization.value if quantization else f"{dtype.value}, {arith.value}"
        yield kind, f"{n_bytes / took_s / 1e9:.1f} GB/s", f"{share:.2f} of plain reads"
