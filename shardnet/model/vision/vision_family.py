"""What there is to know about a kind of tower: one record, which the tower's file fills.

Must not know any family, nor import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import ModelConfig
from shardnet.model.vision.picture import PictureProcessor
from shardnet.model.vision.vision_config import VisionConfig

if TYPE_CHECKING:
    import torch

    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.vision.tower import Tower

Table = dict[str, tuple[int, ...]]
TokenId = Callable[[str], int | None]
"""Returns the id of a token, None for one that the tokenizer does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionGguf:
    """How llama.cpp's converter writes a tower.

    `projectors` are names of its projector type. `read` says what config.json would, given the keys
    without `clip.vision.` in front and the stored tensors, beyond what `GGUF_KEYS` has; `size`
    what the config of the processor says of sizes, given those of the tower. `row_token` is the
    token of a row, and `stand_in` marks its place where a model lacks that. Parameters have the
    names that the `gguf` package knows for those here, but for `names`, without what follows the
    last dot, or whole.
    `has_rotary_pairs`: the rows of queries and keys that rotate together stand side by side.
    `added` says what the converter adds to parameters.
    """

    projectors: tuple[str, ...]
    read: Callable[[Fields, Mapping[str, Any]], dict[str, Any]]
    size: Callable[[Mapping[str, Any]], dict[str, int]]
    row_token: str
    stand_in: str = ""
    names: Callable[[VisionConfig], Mapping[str, str]] = lambda config: {}
    has_rotary_pairs: bool = False
    added: Mapping[str, float] = field(default_factory=dict)


GGUF_KEYS: Final = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "patch_size": "patch_size",
    "image_size": "image_size",
}
"""Keys below `clip.vision.` that all projectors have, and what `vision_config` calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """One kind of tower with its projector.

    `read_config`, given the whole config.json, its `vision_config` and the language model's config,
    reads what is computed. `tensors` names the parameters and their shapes, as transformers does
    below `model.`; kernels of convolutions are matrices. `spell` returns that name of a stored
    parameter, given without `model.` in front. `make_processor` reads the config of the
    makers' processor. `load` builds the forward pass.
    """

    read_config: Callable[[Fields, Fields, ModelConfig], VisionConfig]
    tensors: Callable[[VisionConfig], Table]
    make_processor: Callable[[VisionConfig, Fields, TokenId], PictureProcessor]
    load: Callable[[VisionConfig, WeightSource, torch.dtype, torch.device], Tower]
    gguf: VisionGguf | None = None
    spell: Callable[[str], str] = lambda name: name


def linear_tensors(
    prefix: str, shapes: Mapping[str, tuple[int, int]], *, with_bias: bool = False
) -> Table:
    """Name linears below `prefix`, given as [outputs, inputs] by name."""
    made: Table = {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
    if with_bias:
        made |= {f"{prefix}.{name}.bias": shape[:1] for name, shape in shapes.items()}
    return made
