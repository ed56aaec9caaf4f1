"""Residual streams by the library have the bits of the mixers in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from shardnet.model.config.model_config import StreamKind, Streams
from shardnet.model.fused.layers import NativeMixer
from shardnet.model.kernels.library import NativeKernels, find_kernels
from shardnet.model.kernels.panel_linear import float_linear
from shardnet.model.layers.norms import BareNorm, HeadNorm
from shardnet.model.layers.streams import GatedMixer, StreamMixer

ISAS = ("avx512", "avx2", "portable")


def kernels_of(name: str) -> NativeKernels:
    found = find_kernels({"SHARDNET_ISA": name})
    assert found is not None
    return found


def gated(count: int, width: int, kernels: NativeKernels) -> GatedMixer:
    def linear(n_out: int, n_in: int) -> Callable[..., Tensor]:
        weight = (torch.randn(n_out, n_in) * 0.1).bfloat16()
        return float_linear([weight], None, kernels)

    return GatedMixer(
        count=count,
        norm=HeadNorm(weight=torch.randn(count, width), eps=1e-6),
        down=linear(14, count * width),  # type: ignore[arg-type]
        up=linear(count * width, 14),  # type: ignore[arg-type]
        inject=linear(count, count * width),  # type: ignore[arg-type]
    )


def mixed(kind: StreamKind, count: int, width: int, kernels: NativeKernels) -> StreamMixer:
    config = Streams(count=count, kind=kind, eps=1e-6, magnitude=1.5, n_rounds=6)
    n_outputs = count * (config.n_kinds + (count - 1) * (config.n_kinds == 3))
    weight = torch.randn(n_outputs, count * width) * 0.1
    return StreamMixer(
        config=config,
        project=float_linear([weight], None, kernels),
        base=torch.randn(n_outputs),
        scale=torch.randn(config.n_kinds),
        norm=BareNorm(eps=1e-6),
    )


@pytest.mark.parametrize("name", ISAS)
@pytest.mark.parametrize("kind", StreamKind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "width"), [(3, 37), (4, 64)])
def test_one_call_gives_the_bits_of_many(
    kind: StreamKind, name: str, dtype: torch.dtype, count: int, width: int
) -> None:
    torch.manual_seed(0)
    kernels = kernels_of(name)
    is_gated = kind is StreamKind.GATED
    mixer = gated(count, width, kernels) if is_gated else mixed(kind, count, width, kernels)
    native = NativeMixer(mixer, width, kernels)
    for n_rows in (1, 7, 65):
        streams = torch.randn(n_rows, count * width).to(dtype)
        seen: list[Tensor] = []

        def sublayer(joined: Tensor) -> Tensor:
            seen.append(joined)  # noqa: B023
            return joined * 1.5

        assert torch.equal(native.around(streams, sublayer), mixer.around(streams, sublayer))
        assert torch.equal(*seen)


@pytest.mark.parametrize("kind", StreamKind)
def test_linears_of_other_shapes_are_refused(kind: StreamKind) -> None:
    """The library trusts their sizes: it would write behind its buffers."""
    kernels = kernels_of("portable")
    make = partial(gated, 3) if kind is StreamKind.GATED else partial(mixed, kind, 3)
    own, other = (make(width, kernels) for width in (32, 64))
    name = "inject" if kind is StreamKind.GATED else "project"
    with pytest.raises(ValueError, match="a mixer's linear has shape"):
        NativeMixer(replace(own, **{name: getattr(other, name)}), 32, kernels)
