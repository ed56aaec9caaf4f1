"""What there is to know about a model family: one record, which the family's file fills.

Knows which questions other rooms ask. Must not know any family, nor import torch: a family's
forward pass is imported when a stage loads.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardnet.model.config.fields import Fields
from shardnet.model.config.gguf_keys import GgufFields, read_gguf_decoder
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.families.tensor_shapes import (
    ExpertNames,
    Table,
    decoder_embedding,
    decoder_head,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from shardnet.model.cache.kv_cache import KvCache
    from shardnet.model.fused.decoder import LoadLayer, StageInputs
    from shardnet.model.layers.attention import ForwardStep
    from shardnet.model.layers.mtp import MtpLayer


class FamilyStage(Protocol):
    """The forward pass of one stage: embedding, layers and head, as far as they belong to it.

    T rows of the step, R rows whose logits are wanted, E hidden size, V vocabulary.
    """

    @property
    def mtp(self) -> MtpLayer | None:
        """What predicts a further token, on the last stage of a model that has it; else None."""

    def embed(self, step: ForwardStep) -> Tensor:
        """Look up token ids: hidden states [T, E] in the compute dtype; first stage only."""

    def walk(self, hidden: Tensor, step: ForwardStep) -> Iterator[Tensor]:
        """Run the layers one by one, each when its output is asked for: [T, E] in, out after each.

        The output of a layer is overwritten by the next layer's; that of the last one stays.
        """

    def is_exact(self, kv: KvCache) -> bool:
        """Whether a row's bits do not depend on the other rows, as far as its linears' do not.

        So it is where the compiled library attends. `kv` holds the stage's slots.
        """

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the final norm: [R, E] in and out; last stage only."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply final norm and LM head: [R, E] to [R, V]; last stage only."""


StageLoader = Callable[["StageInputs"], FamilyStage]
"""Builds the forward pass of one stage."""


def decoder_stage(load_layer: LoadLayer, final_norm: str = "model.norm") -> StageLoader:
    """Make the `load_stage` of a family with Llama's embedding, rotary positions and LM head.

    `load_layer(config, weights, layer)` takes the parameters of one layer; `final_norm` is what the
    norm before the head is called.
    """

    def load(inputs: StageInputs) -> FamilyStage:
        from shardnet.model.fused.decoder import DecoderStage

        return DecoderStage(load_layer, inputs, final_norm)

    return load


def no_tensors(config: ModelConfig) -> Table:
    """Name no tensors."""
    return {}


def nothing_looked_up(config: ModelConfig, layer: int) -> Table:
    """Name no tensors."""
    return {}


def _claims_all(fields: Fields) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFormat:
    """How llama.cpp's converter writes a family.

    `architecture` is `general.architecture`, `multimodal` are those of the same model inside
    multimodal ones, whose images have a file of their own; `named_as` is another one whose names of
    tensors hold, "" where the `gguf` package knows the own. Where several families share one,
    `claims` says of its keys, without the architecture in front, whether a file is of this family.
    `read` says what config.json would, given these keys. `interleaved_rotary`: the rows of queries
    and keys that rotate together stand side by side. `transposed` begins the names of matrices that
    are stored transposed, "" for none. Norms are stored with the model's `norm_offset` added in all
    families, except those whose names end in `plain_norm`. Names end in `decay` where minus the
    exponential is stored. `renamed` has endings of names that the converter replaces before it
    looks names up. `block_names` are what parameters of a layer are called that the `gguf` package
    does not name, each below `model.layers.N` and below `blk.N`, or the whole names of others;
    `joined_names` are those whose rows several tensors have.
    """

    architecture: str
    multimodal: tuple[str, ...] = ()
    named_as: str = ""
    claims: Callable[[Fields], bool] = _claims_all
    read: Callable[[GgufFields], dict[str, Any]] = read_gguf_decoder
    interleaved_rotary: bool = False
    transposed: str = ""
    plain_norm: str | None = None
    decay: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    block_names: tuple[tuple[str, str], ...] = ()
    joined_names: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidatedFormat:
    """How Meta and Mistral write a family: params.json beside `consolidated` files.

    `claims` says of the keys of params.json whether they are of this family. `read` says what
    config.json would, beyond what all families say in the same words (config/decoder_config.py).
    """

    claims: Callable[[Fields], bool]
    read: Callable[[Fields], dict[str, Any]]


class MtpNames(enum.Enum):
    """What checkpoints call the parameters of the layer that predicts a further token (MTP)."""

    LAYER = "layer"
    """Those of the decoder layer behind the last one, with more of its own (DeepSeek-V3)."""
    PREFIX = "prefix"
    """Below `mtp`, `mtp.layers.0` (Qwen3-Next), `mtp.0` (DeepSeek-V4) or `mtp_layers.0`."""


class Stacking(enum.Enum):
    """How transformers saves all experts of a layer as one tensor, the experts first."""

    CONCATENATED = "concatenated"
    """[experts, outputs, inputs]: the outputs of up follow those of gate.

    Multimodal checkpoints of such a family may have them as TRANSPOSED does.
    """
    TRANSPOSED = "transposed"
    """[experts, inputs, outputs]: the outputs of up follow those of gate."""
    ALTERNATING = "alternating"
    """[experts, inputs, outputs]: the outputs of gate and up take turns. Biases likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family: config, tensors, forward pass, and how file formats write it.

    `model_type` is its name in config.json and `architecture` the only class of transformers that
    is implemented; `same_architectures` are other names of it.

    `covers` says of a config whether it is computed here at all: where not, transformers' own
    modules may do it. `read_config` reads config.json; what it leaves unread is refused.
    `layer_tensors`, given config and absolute layer number, `embedding_tensors` and `head_tensors`
    name the parameters and their shapes, under transformers' names. `load_stage` builds the forward
    pass.

    `name_prefix` is left out of tensor names, where a checkpoint has it; then the first of each
    pair of `renamed_tensors` is replaced by the second, at the name's beginning alone where `^`
    stands before it. `ignored_tensors` is a pattern of whole names that checkpoints may have and
    nobody needs. `mtp` says what the layer is called that predicts a further token, None where it
    is not implemented. `experts` says what the parameters of experts are called and `stacking` how
    transformers may stack them; None where it never does. `gguf` and `consolidated` are None for a
    family that is not read from these formats. `shared_tensors` are needed by every stage. Rows of
    a layer's `looked_up_tensors` are read where they are stored: these are never loaded. With
    `has_whole_heads` a shard cannot compute the
    attention of some heads without the others.
    `pretokenizer` splits words where vocab.json and merges.txt stand alone, by its name in GGUF; ""
    where the files have to say it.
    """

    model_type: str
    architecture: str
    read_config: Callable[[Fields], ModelConfig]
    layer_tensors: Callable[[ModelConfig, int], Table]
    load_stage: StageLoader
    same_architectures: tuple[str, ...] = ()
    covers: Callable[[Fields], bool] = _claims_all
    embedding_tensors: Callable[[ModelConfig], Table] = decoder_embedding
    head_tensors: Callable[[ModelConfig], Table] = decoder_head
    name_prefix: str = ""
    renamed_tensors: tuple[tuple[str, str], ...] = ()
    ignored_tensors: str = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    mtp: MtpNames | None = None
    experts: ExpertNames | None = None
    stacking: Stacking | None = None
    shared_tensors: Callable[[ModelConfig], Table] = no_tensors
    looked_up_tensors: Callable[[ModelConfig, int], Table] = nothing_looked_up
    gguf: GgufFormat | None = None
    consolidated: ConsolidatedFormat | None = None
    pretokenizer: str = ""
    has_whole_heads: bool = False
