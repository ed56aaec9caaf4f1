"""Stages of four layers, of which some are streamed, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from support.rings.stage_chain import CPU, StageChain, probed, random_prompt

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.panel_form import Quantization
from shardnet.model.kernels.linear import KernelChoice
from shardnet.stage.load import load_stage
from shardnet.stage.packs.pack_cache import PackCache
from shardnet.stage.stage_model import StageModel
from shardnet.types import DType, LayerRange

WHOLE = LayerRange(0, 4)


def choice_of(dtype: DType, quant: str = "") -> KernelChoice:
    return probed(CPU, dtype, dtype, Quantization.named(quant))


def load(
    folder: Path, n_streamed: int, choice: KernelChoice | None = None, packs: Path | None = None
) -> StageModel:
    choice = choice or choice_of(DType.FLOAT32)
    kind = choice.quant
    return load_stage(
        Checkpoint.open(folder),
        WHOLE,
        choice=choice,
        device=CPU,
        room_blocks=64,
        progress=lambda done, total: None,
        packs=PackCache(packs, str(folder), "model", kind) if packs and kind else None,
        n_streamed=n_streamed,
    )


def said(model: StageModel) -> list[torch.Tensor]:
    """What two sequences say that are prefilled, one in a chunk, and decoded together."""
    prompt = random_prompt(40, 300)
    return StageChain([model]).generate([prompt, prompt[:5]], 4)


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
