"""Loads drafters that read hidden states of the model that they draft for.

Knows which parameters make which part, and what a drafter takes from the model itself. Must not
know who drafts, nor for whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.drafters import (
    EMBEDDING,
    FUSE,
    HEAD,
    KNOWN,
    DrafterFiles,
    DrafterFormat,
    open_drafter,
)
from shardnet.errors import CheckpointError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.drafters.dflash import DFlashDrafter
from shardnet.model.drafters.eagle3 import MOST_CHAINED, Eagle3Drafter, FusedAttention
from shardnet.model.drafters.state_drafter import StateDrafter
from shardnet.model.families.layout import Layout
from shardnet.model.families.stage_tensors import StageTensors
from shardnet.model.fused.layers import NativeSublayers
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.devices import capacity_error_for
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import KernelChoice, Linear, probe
from shardnet.model.layers.decoder_layer import AttentionSublayer, Layer, Residual
from shardnet.model.layers.modules import SelfAttention
from shardnet.model.layers.norms import HeadNorm, Norm
from shardnet.model.layers.rotary import rotary_tables
from shardnet.stage.estimate.stored_dtype import STORED_FLOATS
from shardnet.stage.weights import StageWeights
from shardnet.types import blocks_for

MAX_SLOTS: Final = 8
"""Slots that have room at the same time."""


@torch.inference_mode()
def load_state_drafter(
    folder: Path, target: Checkpoint, *, device: torch.device | str, context: int
) -> StateDrafter:
    """Load the drafter in `folder` for the model `target`, for slots of `context` positions.

    It computes in the dtype that it is stored in, as `probe` chooses. Where it has no embedding or
    LM head of its own, those of the model are read. Raises CheckpointError for a drafter that was
    made for another model, UnsupportedModelError for one that is not implemented, CapacityError if
    memory runs out.
    """
    files, device = open_drafter(folder, target), torch.device(device)
    choice = probe(device, "auto", STORED_FLOATS.get(files.checkpoint.tensors[FUSE].dtype))
    with capacity_error_for(f"{device} has no memory for the drafter {folder}"):
        return _Loader(files, target, choice, device).load(context)


class _Loader:
    """Makes a drafter of its parameters and those of the model."""

    def __init__(
        self, files: DrafterFiles, target: Checkpoint, choice: KernelChoice, device: torch.device
    ) -> None:
        self._files, self._config, self._model = files, files.config, target.config
        self._dtype, self._device = torch_dtype(choice.dtype), device
        own = StageTensors(embedding={}, layers={0: files.table}, head={})
        self._own = StageWeights(files.checkpoint, own, choice, device, _untold)
        self._head = EMBEDDING if self._model.tie_word_embeddings else HEAD
        size = self._model.vocab_size, self._model.hidden_size
        borrowed = StageTensors(
            embedding={} if EMBEDDING in files.table else {EMBEDDING: size},
            layers={},
            head={} if HEAD in files.table else {self._head: size},
        )
        self._borrowed = StageWeights(target, borrowed, choice, device, _untold)

    def load(self, context: int) -> StateDrafter:
        """Take all parameters, for slots of `context` positions."""
        config, is_eagle = self._config, self._files.format is DrafterFormat.EAGLE3
        most = MOST_CHAINED if is_eagle else self._files.block_size - 1
        end = context + most + 1
        assert config.rope is not None, "Llama and Qwen3 have rotary positions"
        with self._own.writer, self._borrowed.writer:
            own = self._eagle3() if is_eagle else self._dflash()
            return (Eagle3Drafter if is_eagle else DFlashDrafter)(
                layers=self._files.layers,
                context=context,
                most=most,
                kv=KvCache(
                    *(config.n_layers, config.n_kv_heads, config.head_size, self._dtype),
                    *(self._device, MAX_SLOTS * blocks_for(end), config.windows),
                ),
                rotary=rotary_tables(config.rope, config.head_size, end, self._dtype, self._device),
                fuse=self._own.linear(FUSE.removesuffix(".weight")),
                norm=self._norm("model.norm"),
                lm_head=self._lm_head(),
                known=self._known(),
                **own,
            )

    def _eagle3(self) -> dict[str, Any]:
        plain = Layout().load_layer(self._config, self._own, 0)
        around, self_attn = _attention(plain)
        fused = FusedAttention(
            embed=self._embedding(),
            norm_tokens=around.normalize,
            hidden_norm=self._norm("model.layers.0.hidden_norm"),
            norms_residual=self._files.norms_residual,
            self_attn=self_attn,
        )
        layer = _native(replace(plain, attention=fused))
        return {"layer": layer, "state_norms": [*map(self._norm, self._files.state_norms)]}

    def _dflash(self) -> dict[str, Any]:
        own, norms, names = [], [], []
        for number in range(self._config.n_layers):
            layer = Layout().load_layer(self._config, self._own, number)
            around, attn = _attention(layer)
            kind = replace(attn.kind, is_causal=attn.kind.window is not None)
            causal = AttentionSublayer(residual=around, self_attn=replace(attn, kind=kind))
            own.append(_native(replace(layer, attention=causal)))
            assert isinstance(attn.qk_norm, HeadNorm), "Qwen3 has norms over heads"
            norms.append(attn.qk_norm.weight[attn.n_heads :])
            names += [f"model.layers.{number}.self_attn.{name}_proj" for name in "kv"]
        return {
            "embed": self._embedding(),
            "own_layers": own,
            "fused_norm": self._norm("model.hidden_norm"),
            "project": self._own.linear(*names),
            "key_norm": HeadNorm(weight=torch.cat(norms), eps=self._config.norm_eps),
            "mask_id": self._files.mask_id,
        }

    def _norm(self, name: str) -> Norm:
        return self._own.norm(name, self._config.norm_eps)

    def _embedding(self) -> Callable[[Tensor], Tensor]:
        """Take the embedding; DFlash's is what the model's module gives, with its multiplier."""
        name, factor = EMBEDDING.removesuffix(".weight"), self._model.embedding_multiplier
        if EMBEDDING in self._files.table:
            return self._own.table(name).rows
        rows = self._borrowed.table(name).rows
        is_plain = factor == 1 or self._files.format is DrafterFormat.EAGLE3
        return rows if is_plain else lambda ids: rows(ids).mul_(factor)

    def _lm_head(self) -> Linear:
        is_own = HEAD in self._files.table
        source, name = (self._own, HEAD) if is_own else (self._borrowed, self._head)
        return source.linear(name.removesuffix(".weight"))

    def _known(self) -> Tensor | None:
        """Read the token ids of the drafter's own vocabulary. Raises CheckpointError."""
        checkpoint = self._files.checkpoint
        if KNOWN not in checkpoint.tensors:
            return None
        known = checkpoint.read(KNOWN).to(torch.int64)
        known += torch.arange(len(known))
        if not bool(((known >= 0) & (known < self._model.vocab_size)).all()):
            raise CheckpointError(
                f"{checkpoint.folder}: tensor d2t names tokens that the model does not have",
                remedy="fetch the drafter again",
            )
        return known.to(self._device)


def _attention(layer: Layer) -> tuple[Residual, SelfAttention]:
    """Return the norms and residual around attention, and attention itself."""
    own = layer.attention
    assert isinstance(own, AttentionSublayer), "Llama and Qwen3 have such"
    assert isinstance(own.self_attn, SelfAttention)
    return own.residual, own.self_attn


def _native(layer: Layer) -> Layer:
    return NativeSublayers.of(layer, native_kernels()).replace_in(layer)


def _untold(done: int, total: int) -> None:
    """Report no progress."""
