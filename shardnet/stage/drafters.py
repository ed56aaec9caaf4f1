"""Loads drafters that read hidden states of the model that they draft for.

Knows which parameters make which part, and what a drafter takes from the model itself. Must not
know who drafts, nor for whom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.drafters import (
    EMBEDDING,
    HEAD,
    KNOWN,
    OWN,
    DrafterFiles,
    DrafterFormat,
    open_drafter,
)
from shardnet.errors import CheckpointError, UnsupportedModelError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.drafters.dflash import BlockLayer, DFlashDrafter
from shardnet.model.drafters.eagle3 import MOST_CHAINED, Eagle3Drafter, FusedAttention
from shardnet.model.drafters.state_drafter import DrafterSlots, StateDrafter
from shardnet.model.families.stage_tensors import (
    StageTensors,
    embedding_tensors,
    head_tensors,
)
from shardnet.model.families.stage_tensors import Table as Shapes
from shardnet.model.fused.layers import native_mlp
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.devices import capacity_error_for
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import KernelChoice, Linear, probe
from shardnet.model.layers.decoder_layer import Layer, MlpSublayer, Residual, Sublayer
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.native_attention import AttentionKind
from shardnet.model.layers.norms import HeadNorm, Norm
from shardnet.model.layers.rotary import rotary_tables
from shardnet.stage.estimate.stored_dtype import STORED_FLOATS
from shardnet.stage.weights import StageWeights
from shardnet.types import blocks_for

_TABLE, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_SLOTS = 8
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
    stored = STORED_FLOATS.get(files.checkpoint.tensors[f"{OWN}.fc.weight"].dtype)
    choice = probe(device, "auto", stored)
    with capacity_error_for(f"{device} has no memory for the drafter {folder}"):
        return _Loader(files, target, choice, device).load(context)


class _Loader:
    """Makes a drafter of its parameters and those of the model."""

    def __init__(
        self, files: DrafterFiles, target: Checkpoint, choice: KernelChoice, device: torch.device
    ) -> None:
        self._files, self._config, self._device = files, files.config, device
        self._model, self._dtype = target.config, torch_dtype(choice.dtype)
        own = StageTensors(embedding={}, layers={0: files.table}, head={})
        self._own = StageWeights(files.checkpoint, own, choice, device, _untold)
        shapes = embedding_tensors(self._model) | head_tensors(self._model)
        tied = self._model.tie_word_embeddings
        self._head_name = _TABLE if tied or HEAD in files.table else _LM_HEAD
        borrowed = StageTensors(
            embedding=_only(_TABLE, shapes) if EMBEDDING not in files.table else {},
            layers={},
            head=_only(self._head_name, shapes) if HEAD not in files.table else {},
        )
        self._borrowed = StageWeights(target, borrowed, choice, device, _untold)

    def load(self, context: int) -> StateDrafter:
        """Take all parameters."""
        with self._own.writer, self._borrowed.writer:
            if self._files.format is DrafterFormat.EAGLE3:
                return self._eagle3(context)
            return self._dflash(context)

    def _eagle3(self, context: int) -> Eagle3Drafter:
        config, layer = self._config, f"{OWN}.layers.0"
        attn = f"{layer}.self_attn"
        qkv = self._own.linear(*(f"{attn}.{name}_proj" for name in "qkv"))
        fused = FusedAttention(
            embed=self._embedding(),
            token_norm=self._norm(f"{layer}.input_layernorm"),
            hidden_norm=self._norm(f"{layer}.hidden_norm"),
            norms_residual=self._files.norms_residual,
            self_attn=SelfAttention.of(config, 0, qkv, self._own.linear(f"{attn}.o_proj")),
        )
        return Eagle3Drafter(
            layers=self._files.layers,
            slots=self._slots(context, MOST_CHAINED),
            state_norms=tuple(map(self._norm, self._files.state_norms)),
            fuse=self._own.linear(f"{OWN}.fc"),
            layer=Layer(attention=fused, mlp=self._mlp(layer)),
            norm=self._norm(f"{OWN}.norm"),
            lm_head=self._lm_head(),
            known=self._known(),
        )

    def _dflash(self, context: int) -> DFlashDrafter:
        most = self._files.block_size - 1
        return DFlashDrafter(
            layers=self._files.layers,
            slots=self._slots(context, most + 1),
            embed=self._embedding(),
            fuse=self._own.linear(f"{OWN}.fc"),
            fused_norm=self._norm(f"{OWN}.hidden_norm"),
            blocks=[self._block(number) for number in range(self._config.n_layers)],
            norm=self._norm(f"{OWN}.norm"),
            lm_head=self._lm_head(),
            known=self._known(),
            mask_id=self._files.mask_id,
            most=most,
        )

    def _block(self, number: int) -> BlockLayer:
        config, layer = self._config, f"{OWN}.layers.{number}"
        attn, kind = f"{layer}.self_attn", AttentionKind.of(config, number)
        return BlockLayer(
            head_size=config.head_size,
            kind=replace(kind, is_causal=kind.window is not None),
            input_norm=self._norm(f"{layer}.input_layernorm"),
            q_proj=self._own.linear(f"{attn}.q_proj"),
            kv_proj=self._own.linear(f"{attn}.k_proj", f"{attn}.v_proj"),
            o_proj=self._own.linear(f"{attn}.o_proj"),
            query_norm=self._head_norm(f"{attn}.q_norm", config.n_heads),
            key_norm=self._head_norm(f"{attn}.k_norm", config.n_kv_heads),
            mlp=self._mlp(layer),
        )

    def _mlp(self, layer: str) -> Sublayer:
        residual = Residual(before=self._norm(f"{layer}.post_attention_layernorm"))
        own = MlpSublayer(
            residual=residual, mlp=GatedMlp.load(self._config, self._own, f"{layer}.mlp")
        )
        return native_mlp(own, native_kernels()) or own

    def _norm(self, name: str) -> Norm:
        return self._own.norm(name, self._config.norm_eps)

    def _head_norm(self, name: str, n_heads: int) -> HeadNorm:
        norm = self._norm(name)
        return HeadNorm(weight=norm.weight.repeat(n_heads, 1), eps=norm.eps)

    def _embedding(self) -> Callable[[Tensor], Tensor]:
        """Take the embedding; DFlash's is what the model's module gives, with its multiplier."""
        if EMBEDDING in self._files.table:
            return self._own.table(EMBEDDING.removesuffix(".weight")).rows
        rows = self._borrowed.table(_TABLE.removesuffix(".weight")).rows
        multiplier = self._model.embedding_multiplier
        if multiplier == 1 or self._files.format is DrafterFormat.EAGLE3:
            return rows
        return lambda ids: rows(ids).mul_(multiplier)

    def _lm_head(self) -> Linear:
        if HEAD in self._files.table:
            return self._own.linear(HEAD.removesuffix(".weight"))
        return self._borrowed.linear(self._head_name.removesuffix(".weight"))

    def _known(self) -> Tensor | None:
        """Read the token ids of the drafter's own vocabulary. Raises CheckpointError."""
        checkpoint = self._files.checkpoint
        if KNOWN not in checkpoint.tensors:
            return None
        more = checkpoint.read(KNOWN).to(torch.int64)
        known = more + torch.arange(len(more))
        if len(known) and not 0 <= int(known.min()) <= int(known.max()) < self._model.vocab_size:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor d2t names tokens that the model does not have",
                remedy="fetch the drafter again",
            )
        return known.to(self._device)

    def _slots(self, context: int, n_drafted: int) -> DrafterSlots:
        config, dtype, size = self._config, self._dtype, context + n_drafted
        assert config.rope is not None, "Llama and Qwen3 have rotary positions"
        kv = KvCache(
            config.n_layers,
            config.n_kv_heads,
            config.head_size,
            dtype,
            self._device,
            MAX_SLOTS * blocks_for(size),
            config.windows,
        )
        rotary = rotary_tables(config.rope, config.head_size, size, dtype, self._device)
        return DrafterSlots(kv=kv, rotary=rotary, context=context)


def _only(name: str, shapes: Shapes) -> Shapes:
    """Take one parameter of the model. Raises UnsupportedModelError where it has none."""
    if name not in shapes:
        raise UnsupportedModelError(
            f"this model has no {name}, which the drafter takes from it", remedy="leave it out"
        )
    return {name: shapes[name]}


def _untold(done: int, total: int) -> None:
    """Report no progress."""
