"""Print hashes of what the compiled library computes, as JSON: equal on every system and CPU.

Products of every packed form with one row and several, sizes with odd rests, on one thread and on
two; floats packed and rounded; rows of packed tables looked up. Inputs are integers of torch's
generator over powers of two: no system's mathematical functions have a part in them. CPUs differ
where bfloat16 meets bfloat16: compare where `arithmetic` is equal, or set SHARDNET_ISA=avx2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator

import torch
from bench_forms import FORMS, product_of
from torch import Tensor

from shardnet.model.config.panel_form import PanelForm, Quantization
from shardnet.model.kernels.library import NativeKernels, native_kernels
from shardnet.model.kernels.panel_linear import PanelLinear, float_linear
from shardnet.model.kernels.panels import look_up
from shardnet.model.kernels.quantized_linear import pack_all, quantized

SIZES = ((5, 32), (203, 813))
N_ROWS = (1, 2, 7, 33)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def main() -> None:
    """Compute and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    numbers_of_threads = parser.parse_args().threads
    native = native_kernels()
    if native is None:
        sys.exit("there is no compiled library here")
    found = {}
    for n_threads in numbers_of_threads:
        torch.set_num_threads(n_threads)
        found[f"{n_threads} threads"] = dict(hashes(native))
    print(json.dumps({"arithmetic": arithmetic(native), **found}, indent=1))


def arithmetic(native: NativeKernels) -> str:
    """Name what decides the bits of bfloat16 times bfloat16."""
    return "tiles" if native.has_tiles else "pairs" if native.has_pairs else "portable"


def hashes(native: NativeKernels) -> Iterator[tuple[str, str]]:
    """Yield a name and a hash for each form."""
    for form in FORMS:
        yield form.name, hash_of(products_of(form))
    for dtype in FLOATS:
        name = str(dtype).removeprefix("torch.")
        linears = (float_linear([numbers(*size).to(dtype)], None, native) for size in SIZES)
        yield name, hash_of(out for linear in linears for out in products(linear))
    for kind in Quantization:
        packed = (pack_all([numbers(*size)], kind) for size in SIZES)
        yield f"{kind.form.name}, rounded", hash_of(packed)
        table = quantized(numbers(*SIZES[1]), kind)
        yield f"{kind.form.name}, looked up", hash_of([look_up(table, ids(), torch.float32)])


def products_of(form: PanelForm) -> Iterator[Tensor]:
    """Yield the products of random weights of a form."""
    for size in SIZES:
        yield from products(product_of(form, *size))


def products(linear: PanelLinear) -> Iterator[Tensor]:
    """Yield the products of rows of both dtypes."""
    for n_rows in N_ROWS:
        for dtype in (torch.float32, torch.bfloat16):
            yield linear(numbers(n_rows, linear.shape[1]).to(dtype))


def numbers(*shape: int) -> Tensor:
    """Return numbers in [-2, 2), float32."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-(1 << 15), 1 << 15, shape, generator=generator) / (1 << 14)


def ids() -> Tensor:
    """Return rows of a table: its first, its last and one between."""
    return torch.tensor([0, SIZES[1][0] - 1, 17])


def hash_of(tensors: Iterable[Tensor]) -> str:
    """Hash the bytes of all."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
