"""Loads drafters that read hidden states of the model that they draft for.

Knows which parameters make which part, and what a drafter takes from the model itself. Must not
know who drafts, nor for whom.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.checkpoint.drafters import EMBEDDING, HEAD, DrafterFormat, open_drafter
from shardnet.errors import CheckpointError
from shardnet.model.cache.kv_cache import KvCache
from shardnet.model.drafters.state_drafter import (
    MOST_CHAINED,
    DFlashDrafter,
    Eagle3Drafter,
    FusedAttention,
    StateDrafter,
)
from shardnet.model.families.stage_tensors import StageTensors
from shardnet.model.fused.layers import NativeSublayers
from shardnet.model.kernels.codec import torch_dtype
from shardnet.model.kernels.devices import capacity_error_for
from shardnet.model.kernels.library import native_kernels
from shardnet.model.kernels.linear import Kernel, probe
from shardnet.model.layers.decoder_layer import (
    AttentionSublayer,
    Layer,
    MlpSublayer,
    Residual,
    Sublayer,
)
from shardnet.model.layers.modules import GatedMlp, SelfAttention
from shardnet.model.layers.norms import HeadNorm, Norm
from shardnet.model.layers.rotary import rotary_tables
from shardnet.stage.estimate.stored_dtype import STORED_FLOATS
from shardnet.stage.weights import StageWeights
from shardnet.types import blocks_for


class StateDrafterLoader:
    """Loads a drafter for the model `target`, for `n_slots` slots of `context` positions.

    It computes in the dtype that it is stored in, as `probe` chooses. Where it has no embedding or
    LM head of its own, those of the model are read.
    """

    def __init__(
        self, folder: Path, target: Checkpoint, *, device: str, context: int, n_slots: int
    ) -> None:
        """Check the drafter in `folder` by its headers.

        Raises CheckpointError for one that was made for another model, UnsupportedModelError for
        one that is not implemented.
        """
        self._files = files = open_drafter(folder, target)
        self._config, self._model, self._context = files.config, target.config, context
        self._device, checkpoint = torch.device(device), files.checkpoint
        stored = STORED_FLOATS.get(checkpoint.tensors["model.fc.weight"].dtype)
        self._choice = choice = probe(self._device, "auto", stored)
        self._dtype, config = torch_dtype(choice.dtype), files.config
        table, size = files.table, (self._model.vocab_size, self._model.hidden_size)
        is_tied = HEAD not in table and self._model.tie_word_embeddings
        self._head = EMBEDDING if is_tied else HEAD
        own = StageTensors(embedding={}, layers={0: table}, head={})
        borrowed = StageTensors(
            embedding={} if EMBEDDING in table else {EMBEDDING: size},
            layers={},
            head={} if HEAD in table else {self._head: size},
        )
        rest = choice, self._device, lambda done, total: None
        self._own = StageWeights(checkpoint, own, *rest)
        self._borrowed = StageWeights(target, borrowed, *rest)
        is_eagle = files.format is DrafterFormat.EAGLE3
        self._most = MOST_CHAINED if is_eagle else files.block_size - 1
        self._end = context + self._most + 1
        self._kv = KvCache(
            *(config.n_layers, config.n_kv_heads, config.head_size, self._dtype),
            *(self._device, n_slots * blocks_for(self._end), config.windows),
        )
        weights = [self._weight_bytes(checkpoint, name, name == EMBEDDING) for name in table]
        twice = () if is_eagle else ("k_proj.weight", "v_proj.weight")  # for tokens, and for states
        weights += [self._weight_bytes(checkpoint, n, False) for n in table if n.endswith(twice)]
        weights += [self._weight_bytes(target, name, True) for name in borrowed.embedding]
        weights += [self._weight_bytes(target, name, False) for name in borrowed.head]
        self.n_bytes = sum(weights) + self._kv.room_blocks * self._kv.block_bytes
        """What it takes in memory once all its slots are full."""

    def _weight_bytes(self, checkpoint: Checkpoint, name: str, is_looked_up: bool) -> int:
        """Return what a tensor takes in memory, to look rows up in or to compute with."""
        tensor, choice = checkpoint.tensors[name], self._choice
        is_linear = len(tensor.shape) == 2 and not is_looked_up
        stays = choice.kernel is Kernel.NATIVE if tensor.packed is None else not choice.unpacks
        if stays and (is_linear or tensor.packed is not None):
            return tensor.size_bytes
        return math.prod(tensor.shape) * choice.dtype.size_bytes

    @torch.inference_mode()
    def load(self) -> StateDrafter:
        """Take all parameters. Raises CheckpointError for damaged ones, CapacityError."""
        config, is_eagle = self._config, self._files.format is DrafterFormat.EAGLE3
        assert config.rope is not None, "Llama and Qwen3 have rotary positions"
        what = f"{self._device} has no memory for the drafter {self._files.checkpoint.folder}"
        with capacity_error_for(what), self._own.writer, self._borrowed.writer:
            own = self._eagle3() if is_eagle else self._dflash()
            return (Eagle3Drafter if is_eagle else DFlashDrafter)(
                layers=self._files.layers,
                context=self._context,
                most=self._most,
                kv=self._kv,
                rotary=rotary_tables(
                    *(config.rope, config.head_size, self._end, self._dtype, self._device)
                ),
                fuse=self._own.linear("model.fc"),
                norm=self._norm("model.norm"),
                lm_head=self._source(HEAD).linear(self._head.removesuffix(".weight")),
                known=self._known(),
                **own,
            )

    def _eagle3(self) -> dict[str, Any]:
        layer = "model.layers.0"
        fused = FusedAttention(
            embed=self._embedding(),
            token_norm=self._norm(f"{layer}.input_layernorm"),
            hidden_norm=self._norm(f"{layer}.hidden_norm"),
            norms_residual=self._files.norms_residual,
            self_attn=SelfAttention.load(self._config, self._own, 0),
        )
        norms = [*map(self._norm, self._files.state_norms)]
        return {"layer": self._layer(layer, fused), "state_norms": norms}

    def _dflash(self) -> dict[str, Any]:
        own, norms, names = [], [], []
        for number in range(self._config.n_layers):
            layer = f"model.layers.{number}"
            attn = SelfAttention.load(self._config, self._own, number, with_head_norm=True)
            kind = replace(attn.kind, is_causal=attn.kind.window is not None)
            around = Residual(before=self._norm(f"{layer}.input_layernorm"))
            causal = AttentionSublayer(residual=around, self_attn=replace(attn, kind=kind))
            own.append(self._layer(layer, causal))
            assert isinstance(attn.qk_norm, HeadNorm), "it was loaded so"
            norms.append(attn.qk_norm.weight[attn.n_heads :])
            names += [f"{layer}.self_attn.{name}_proj" for name in "kv"]
        return {
            "embed": self._embedding(),
            "own_layers": own,
            "fused_norm": self._norm("model.hidden_norm"),
            "project": self._own.linear(*names),
            "key_norm": HeadNorm(weight=torch.cat(norms), eps=self._config.norm_eps),
            "mask_id": self._files.mask_id,
        }

    def _layer(self, name: str, attention: Sublayer) -> Layer:
        """Put an MLP behind attention."""
        around = Residual(before=self._norm(f"{name}.post_attention_layernorm"))
        mlp = GatedMlp.load(self._config, self._own, f"{name}.mlp")
        layer = Layer(attention=attention, mlp=MlpSublayer(residual=around, mlp=mlp))
        return NativeSublayers.of(layer, native_kernels()).replace_in(layer)

    def _norm(self, name: str) -> Norm:
        return self._own.norm(name, self._config.norm_eps)

    def _source(self, name: str) -> StageWeights:
        return self._own if name in self._files.table else self._borrowed

    def _embedding(self) -> Callable[[Tensor], Tensor]:
        """Take the embedding; DFlash's is what the model's module gives, with its multiplier."""
        rows = self._source(EMBEDDING).table(EMBEDDING.removesuffix(".weight")).rows
        factor = self._model.embedding_multiplier
        is_scaled = factor != 1 and self._source(EMBEDDING) is self._borrowed
        if not is_scaled or self._files.format is DrafterFormat.EAGLE3:
            return rows
        return lambda ids: rows(ids).mul_(factor)

    def _known(self) -> Tensor | None:
        """Read the token ids of the drafter's own vocabulary. Raises CheckpointError."""
        checkpoint = self._files.checkpoint
        if "model.d2t" not in checkpoint.tensors:
            return None
        more = checkpoint.read("model.d2t").to(torch.int64)
        known = more + torch.arange(len(more))
        if known.min() < 0 or known.max() >= self._model.vocab_size:
            raise CheckpointError(
                f"{checkpoint.folder}: tensor d2t names tokens that the model lacks",
                remedy="fetch the drafter again",
            )
        return known.to(self._device)
