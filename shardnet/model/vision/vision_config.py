"""The maths of one tower with its projector, whatever file it came from. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardnet.model.config.model_config import Activation


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
