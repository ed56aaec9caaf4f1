"""The forward pass of every family, by its name.

Knows the families' files and what a stage asks of each. Must not know checkpoints, slots or steps
in flight.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.deepseek import load_deepseek_v2_layer, load_deepseek_v3_layer
from shardnet.model.families.gemma import load_gemma2_layer, load_gemma3_layer
from shardnet.model.families.gpt2 import Gpt2Stage
from shardnet.model.families.gpt_oss import load_gpt_oss_layer
from shardnet.model.families.llama import load_llama_layer
from shardnet.model.families.mixtral import load_mixtral_layer
from shardnet.model.families.olmo2 import load_olmo2_layer
from shardnet.model.families.phi3 import load_phi3_layer
from shardnet.model.families.qwen2_moe import load_qwen2_moe_layer
from shardnet.model.families.qwen3 import load_qwen3_layer
from shardnet.model.families.qwen3_moe import load_qwen3_moe_layer
from shardnet.model.fused.decode_graphs import Capture, find_capture
from shardnet.model.fused.decoder import DecoderStage
from shardnet.model.layers.attention import ForwardStep
from shardnet.model.layers.weight_source import WeightSource
from shardnet.types import LayerRange


class FamilyStage(Protocol):
    """What a family's file brings: embedding, layers and head of one stage."""

    def embed(self, step: ForwardStep) -> Tensor:
        """Token ids to hidden states [T, E]; first stage only."""

    def walk(self, hidden: Tensor, step: ForwardStep) -> Iterator[Tensor]:
        """Run the stage's layers, one whenever the next is asked for: [T, E] in, out after each.

        What comes out of a layer lasts until the next is asked for, of the last one for good.
        """

    def normed(self, hidden: Tensor) -> Tensor:
        """Final norm: [R, E] in and out; last stage only."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Norm and LM head: [R, E] to [R, V]; last stage only."""


class FamilyMaker(Protocol):
    """Builds one stage of a family. `context` is the positions of one sequence."""

    def __call__(
        self,
        config: ModelConfig,
        layers: LayerRange,
        weights: WeightSource,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> FamilyStage:
        """Take the parameters of `layers`, and of embedding and head where they belong."""


STAGES: Mapping[str, FamilyMaker] = MappingProxyType(
    {
        "llama": partial(DecoderStage, load_llama_layer),
        "mistral": partial(DecoderStage, load_llama_layer),
        "qwen2": partial(DecoderStage, load_llama_layer),
        "qwen3": partial(DecoderStage, load_qwen3_layer),
        "phi3": partial(DecoderStage, load_phi3_layer),
        "gemma2": partial(DecoderStage, load_gemma2_layer),
        "gemma3_text": partial(DecoderStage, load_gemma3_layer),
        "granite": partial(DecoderStage, load_llama_layer),
        "olmo2": partial(DecoderStage, load_olmo2_layer),
        "mixtral": partial(DecoderStage, load_mixtral_layer),
        "qwen2_moe": partial(DecoderStage, load_qwen2_moe_layer),
        "qwen3_moe": partial(DecoderStage, load_qwen3_moe_layer),
        "gpt_oss": partial(DecoderStage, load_gpt_oss_layer),
        "deepseek_v2": partial(DecoderStage, load_deepseek_v2_layer),
        "deepseek_v3": partial(DecoderStage, load_deepseek_v3_layer),
        "gpt2": Gpt2Stage,
    }
)
"""The forward pass of each family in families/registry.py."""


def make_family(
    config: ModelConfig,
    layers: LayerRange,
    weights: WeightSource,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    capture: Capture | None = None,
) -> FamilyStage:
    """Build the family's layers of one stage from `weights`.

    `capture` is what decode steps are captured by, None as the device can.
    """
    family = STAGES[config.family](config, layers, weights, context, dtype, device)
    capture = capture or find_capture(device, os.environ)
    if capture is not None and isinstance(family, DecoderStage):
        family.capture_by(capture)
    return family
