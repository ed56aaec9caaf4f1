"""Benchmark the product of rows with weights in every form they are stored in, in the caches.

Each form takes turns with a twin of the same codes whose groups are whole rows of inputs: what the
form takes longer is its share for scales, reading and applying them. With --beside it takes turns
with itself by another instruction set. Times are the fastest of the rounds.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

import torch
from torch import Tensor

from shardnet.checkpoint.formats.gguf_types import CODE_FORMS
from shardnet.model.config.panel_form import (
    GGUF_FORMS,
    Code,
    Minimum,
    PanelForm,
    Quantization,
    Scale,
)
from shardnet.model.kernels.library import ISA_VARIABLE, find_kernels
from shardnet.model.kernels.panel_linear import PanelLinear
from shardnet.model.kernels.panels import Panels

N_IN = 4096
_PUBLISHED = (
    PanelForm(name="MXFP8", bits=8, group=32, scale=Scale.EXPONENT, code=Code.E4M3),
    PanelForm(name="FP8, blocks", bits=8, group=128, scale=Scale.FLOAT32, code=Code.E4M3),
    PanelForm(name="GPTQ", bits=4, group=128, minimum=Minimum.ZERO_POINT),
    PanelForm(name="MLX", bits=4, group=64, scale=Scale.BFLOAT16, minimum=Minimum.STORED),
)
"""Some forms of safetensors files."""
FORMS = (
    *GGUF_FORMS.values(),
    *CODE_FORMS.values(),
    *_PUBLISHED,
    *(kind.form for kind in Quantization),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench forms")
    parser.add_argument("forms", nargs="*", help=f"of {', '.join(form.name for form in FORMS)}")
    parser.add_argument("--isa", default="", help="avx512, avx2, portable, ...")
    parser.add_argument("--beside", default="", help="another one, in place of the twin")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--outputs", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=100, help="products in a round")
    arguments = parser.parse_args()
    if arguments.isa:
        os.environ[ISA_VARIABLE] = arguments.isa
    torch.set_num_threads(1)
    other = find_kernels({ISA_VARIABLE: arguments.beside}) if arguments.beside else None
    last = f"times {arguments.beside}" if other else "for scales"
    print(f"| form | µs | GB/s | G weights times rows/s | {last} |\n|---|---|---|---|---|")
    for form in FORMS:
        if arguments.forms and form.name not in arguments.forms:
            continue
        own = product_of(form, arguments.outputs)
        if other is None:
            twin = product_of(_twin(form), arguments.outputs)
        else:
            twin = PanelLinear(own.parts, None, other)
        rows = torch.randn(arguments.rows, N_IN)
        times = [
            (_call_s(own, rows, arguments.calls), _call_s(twin, rows, arguments.calls))
            for _ in range(arguments.rounds)
        ]
        taken, of_twin = (min(side) for side in zip(*times, strict=True))
        speed = form.packed_bytes(arguments.outputs, N_IN) / taken / 1e9
        products = arguments.rows * arguments.outputs * N_IN / taken / 1e9
        share = f"{of_twin / taken:.2f}" if other else f"{max(0, 1 - of_twin / taken):.0%}"
        cells = (form.name, f"{taken * 1e6:.1f}", f"{speed:.1f}", f"{products:.0f}", share)
        print(f"| {' | '.join(cells)} |", flush=True)


def _twin(form: PanelForm) -> PanelForm:
    """Return the form with one scale for all inputs of an output."""
    one = replace(form, scale=Scale.FLOAT16, minimum=Minimum.NONE, block=0, factor=1.0)
    return replace(one, group=N_IN)


def product_of(form: PanelForm, n_out: int, n_in: int = N_IN) -> PanelLinear:
    """Make a linear of random codes with scales of an ordinary size."""
    generator = torch.Generator().manual_seed(1)
    shape = form.packed_shape(n_out, n_in)
    packed = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if form.code in (Code.E4M3, Code.E5M2):
        packed[..., form.header_bytes :] &= 0xBF  # half of the exponents: no infinities, no NaN
    header = packed[..., : form.header_bytes]
    header.copy_(_ordinary(form).repeat(-(-form.header_bytes // 4))[: form.header_bytes])
    return PanelLinear([Panels(packed=packed, form=form, shape=(n_out, n_in))], None)


def _ordinary(form: PanelForm) -> Tensor:
    """Return four bytes that, again and again, are scales of about 1/64, or integers of 30."""
    match form.scale:
        case Scale.FLOAT32:
            return torch.tensor([1 / 64]).view(torch.uint8)
        case Scale.BFLOAT16:
            return torch.tensor([1 / 64, 1 / 64]).bfloat16().view(torch.uint8)
        case Scale.FLOAT16:
            return torch.tensor([1 / 64, 1 / 64]).half().view(torch.uint8)
        case Scale.EXPONENT:
            return torch.full((4,), 121, dtype=torch.uint8)
        case _:
            return torch.full((4,), 30, dtype=torch.uint8)


def _call_s(product: PanelLinear, rows: Tensor, n_calls: int) -> float:
    began = time.perf_counter()
    for _ in range(n_calls):
        product(rows)
    return (time.perf_counter() - began) / n_calls


if __name__ == "__main__":
    main()
