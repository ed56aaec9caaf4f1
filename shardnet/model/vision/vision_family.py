"""What there is to know about a kind of tower: one record, which the tower's file fills.

Knows too the maths of one tower with its projector, whatever file it came from, and how the layers
are named that most have. Must not know any family; what needs torch is
imported when a tower loads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shardnet.model.config.fields import Fields
from shardnet.model.config.model_config import Activation, ModelConfig
from shardnet.model.vision.picture import PictureProcessor

if TYPE_CHECKING:
    import torch

    from shardnet.model.layers.weight_source import WeightSource
    from shardnet.model.vision.tower import Tower, TowerLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The maths of a tower.

    A patch is `patch` pixels high and wide, and `n_frames` copies of them deep. `merge` x `merge`
    patches become one row of the language model, of `out_size` columns. `grid` is the side, in
    patches, of the pictures that learned positions are for, 0 where there are none. `row_id` is the
    token that stands for a row. Queries, keys and values of GLM's have biases with
    `attention_bias` only. `projector_size` is the width inside a projector that has another one,
    `projector_eps` what its norm adds, and `deep_layers` are those behind which DeepStack takes
    what it adds in the language model. Layers but for the `full_layers` attend within squares of
    `window` x `window` rows, unless that is 0. With `standardizes` averages of patches are shifted
    and scaled by stored numbers, and where it `clips` inputs and outputs of linears are kept
    between some. Pixtral's projector `joins_patches`, but for Pixtral 12B's. Rows of a picture that
    `see_each_other` attend in both directions in the language model: `most_rows` at most, unless
    that is 0. With `colours_last` the three numbers of a pixel stand together in a patch, else
    those of a colour.
    """

    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    patch: int
    merge: int
    out_size: int
    norm_eps: float
    activation: Activation
    row_id: int
    n_frames: int = 1
    grid: int = 0
    rope_theta: float = 10000.0
    projector_activation: Activation = Activation.GELU
    projector_bias: bool = False
    projector_size: int = 0
    attention_bias: bool = True
    projector_eps: float = 1e-6
    deep_layers: tuple[int, ...] = ()
    window: int = 0
    full_layers: tuple[int, ...] = ()
    standardizes: bool = False
    clips: bool = False
    joins_patches: bool = True
    see_each_other: bool = False
    most_rows: int = 0
    colours_last: bool = False

    @property
    def head_size(self) -> int:
        """Columns of a head."""
        return self.hidden_size // self.n_heads

    @property
    def patch_width(self) -> int:
        """Numbers of a patch, in three colours."""
        return 3 * self.n_frames * self.patch * self.patch

    @property
    def merged_width(self) -> int:
        """Columns of the patches that become one row."""
        return self.hidden_size * self.merge * self.merge

    @property
    def row_pixels(self) -> int:
        """Pixels on a side of what becomes one row of the language model."""
        return self.patch * self.merge


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


def norm_tensors(width: int, *names: str, with_bias: bool = True) -> Table:
    """Name norms over `width` columns."""
    parts = ("weight", "bias") if with_bias else ("weight",)
    return {f"{name}.{part}": (width,) for name in names for part in parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """What the parameters of a tower's layers are called: layer N stands below `prefix`.N.

    `norms` are those before attention and before the MLP. `inputs` are one linear or those of
    queries, keys and values. An `mlp` of two linears has no gate, else its gate is the first.
    """

    prefix: str
    norms: tuple[str, str]
    inputs: tuple[str, ...]
    output: str
    mlp: tuple[str, ...]
    has_bias: bool = True
    has_norm_bias: bool = True

    def tensors(self, config: VisionConfig) -> Table:
        """Name the parameters of all layers."""
        width, inner = config.hidden_size, config.intermediate_size
        *first, down = self.mlp
        shapes = dict.fromkeys(self.inputs, (3 * width // len(self.inputs), width))
        shapes |= {self.output: (width, width)}
        shapes |= dict.fromkeys(first, (inner, width)) | {down: (width, inner)}
        made: Table = {}
        for number in range(config.n_layers):
            layer = f"{self.prefix}.{number}"
            norms = (f"{layer}.{norm}" for norm in self.norms)
            made |= linear_tensors(layer, shapes, with_bias=self.has_bias)
            made |= norm_tensors(width, *norms, with_bias=self.has_norm_bias)
        return made

    def load(self, config: VisionConfig, weights: WeightSource) -> tuple[TowerLayer, ...]:
        """Take the parameters of all layers."""
        return tuple(self._load_layer(config, weights, n) for n in range(config.n_layers))

    def _load_layer(self, config: VisionConfig, weights: WeightSource, number: int) -> TowerLayer:
        from shardnet.model.layers.modules import GatedMlp
        from shardnet.model.vision.tower import TowerLayer, TowerMlp

        layer, mlp = f"{self.prefix}.{number}", self.mlp
        attention_norm, mlp_norm = (
            weights.norm(f"{layer}.{norm}", config.norm_eps) for norm in self.norms
        )
        return TowerLayer(
            n_heads=config.n_heads,
            attention_norm=attention_norm,
            qkv_proj=weights.linear(*(f"{layer}.{name}" for name in self.inputs)),
            o_proj=weights.linear(f"{layer}.{self.output}"),
            mlp_norm=mlp_norm,
            mlp=GatedMlp.load(config, weights, layer, (mlp[0], mlp[1], mlp[2]))
            if len(mlp) == 3
            else TowerMlp(config.activation, weights, *(f"{layer}.{name}" for name in mlp)),
        )
