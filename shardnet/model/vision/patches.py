"""Pictures to patches: resized, normalised, cut, and the tokens that stand for them.

Knows arrays of bytes, what the makers' processors do to them, and the keys that their configs have
in common. Must not know files or torch.
"""

from __future__ import annotations

import enum
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from shardnet.errors import UsageError
from shardnet.model.config.fields import Fields
from shardnet.model.config.limits import SCALES, Range
from shardnet.model.vision.picture import PreparedPicture
from shardnet.model.vision.vision_family import TokenId, VisionConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_RATIO: Final = 200
"""How much longer one side of a picture may be than the other."""
LOW_PIXELS: Final = 512
"""A side of the pictures that are asked for with low detail."""
LOW_ROWS: Final = 70
"""Their rows, where a model counts these."""

HALF: Final = (0.5, 0.5, 0.5)
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)
_LEVELS: Final = Range(0.0, 1.0)


class Filter(enum.Enum):
    """A filter of Pillow, by its number there and in processors' configs."""

    LANCZOS = 1
    BILINEAR = 2
    BICUBIC = 3


def resize(picture: NDArray[np.uint8], height: int, width: int, kind: Filter) -> NDArray[np.uint8]:
    """Resize a picture [H, W, 3] to [height, width, 3], as makers' processors do: by Pillow."""
    import numpy as np
    from PIL.Image import Resampling, fromarray

    return np.asarray(fromarray(picture).resize((width, height), Resampling(kind.value)))


class SizeRule(Protocol):
    """How large a picture is before it is cut into patches."""

    def __call__(self, height: int, width: int, *, is_low: bool) -> tuple[int, int]:
        """Return height and width in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestEdge:
    """At most `longest` pixels on a side, rounded up to whole rows of `multiple` pixels."""

    longest: int
    multiple: int

    def __call__(self, height: int, width: int, *, is_low: bool) -> tuple[int, int]:
        """Return height and width in pixels."""
        longest = min(self.longest, LOW_PIXELS) if is_low else self.longest
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        n_high, n_wide = ((side - 1) // self.multiple + 1 for side in (height, width))
        return n_high * self.multiple, n_wide * self.multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSize:
    """Always the same."""

    height: int
    width: int

    def __call__(self, height: int, width: int, *, is_low: bool) -> tuple[int, int]:
        """Return height and width in pixels."""
        return self.height, self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelCount:
    """About as the picture is, from `fewest` to `most` pixels, in multiples of `multiple`.

    With `n_frames` those of all frames count, and what is smaller than `multiple` grows first.
    """

    fewest: int
    most: int
    multiple: int
    n_frames: int = 0

    def __call__(self, height: int, width: int, *, is_low: bool) -> tuple[int, int]:
        """Return height and width in pixels."""
        most = max(self.fewest, min(self.most, LOW_PIXELS**2)) if is_low else self.most
        if self.n_frames and min(height, width) < self.multiple:
            scale = self.multiple / min(height, width)
            height, width = int(height * scale), int(width * scale)
        sides, n_frames = (height, width), self.n_frames or 1
        rounded = [round(side / self.multiple) * self.multiple for side in sides]
        n_pixels = n_frames * rounded[0] * rounded[1]
        if n_pixels > most:
            beta = math.sqrt((n_frames * height * width) / most)
            rounded = [
                max(self.multiple, math.floor(side / beta / self.multiple) * self.multiple)
                for side in sides
            ]
        elif n_pixels < self.fewest:
            beta = math.sqrt(self.fewest / (n_frames * height * width))
            rounded = [math.ceil(side * beta / self.multiple) * self.multiple for side in sides]
        return rounded[0], rounded[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBudget:
    """As large as `most` rows of `multiple` x `multiple` pixels allow, in about the same shape."""

    most: int
    multiple: int

    def __call__(self, height: int, width: int, *, is_low: bool) -> tuple[int, int]:
        """Return height and width in pixels."""
        most = min(self.most, LOW_ROWS) if is_low else self.most
        factor = math.sqrt(most * self.multiple**2 / (height * width))
        n_high, n_wide = (math.floor(factor * side / self.multiple) for side in (height, width))
        if n_high == 0:
            n_high, n_wide = 1, min(width // height, most)
        elif n_wide == 0:
            n_high, n_wide = min(height // width, most), 1
        return n_high * self.multiple, n_wide * self.multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The tokens of a picture: `row` for each row, `line` between lines, and those around all."""

    row: int
    before: tuple[int, ...] = ()
    line: int | None = None
    after: tuple[int, ...] = ()

    def of(self, n_high: int, n_wide: int) -> tuple[int, ...]:
        """Return the tokens of a picture of `n_high` lines of `n_wide` rows."""
        line = (self.row,) * n_wide
        lines = (line if self.line is None else (*line, self.line)) * n_high
        return (*self.before, *(lines if self.line is None else lines[:-1]), *self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchProcessor:
    """Prepares pictures for towers that read patches.

    Patches are in the order of the language model's rows: the `merge` x `merge` of a row stand
    together. `mean` and `deviation` are those of numbers from 0 to 1. `around` is text that stands
    before and behind a placeholder in a prompt, `template_marks` what chat templates write there.
    With `colours_last` the three numbers of a pixel stand together, else those of a colour.
    """

    size: SizeRule
    filter: Filter
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    patch: int
    merge: int
    marks: Marks
    placeholder: str
    placeholder_id: int
    n_frames: int = 1
    around: tuple[str, str] = ("", "")
    template_marks: tuple[str, str] = ("", "")
    see_each_other: bool = False
    colours_last: bool = False

    @property
    def key(self) -> str:
        """What stands for all of its settings."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @property
    def templated(self) -> str:
        """What chat templates write for a picture."""
        return self.placeholder.join(self.template_marks)

    def surround(self, prompt: str) -> str:
        """Write what belongs around each placeholder into a prompt that is not tokenised yet."""
        return prompt.replace(self.placeholder, self.placeholder.join(self.around))

    def prepare(self, rgb: NDArray[np.uint8], detail: str = "auto") -> PreparedPicture:
        """Prepare a picture [H, W, 3]; see PictureProcessor."""
        import numpy as np

        height, width = check_ratio(rgb)
        height, width = self.size(height, width, is_low=detail == "low")
        resized = resize(rgb, height, width, self.filter)
        side = self.patch * self.merge
        grid = (1, height // side, width // side)
        tokens = self.marks.of(grid[1], grid[2])
        return PreparedPicture(
            pixels=self.cut(resized),
            grid=grid,
            token_ids=tokens,
            is_row=np.array(tokens) == self.marks.row,
            see_each_other=self.see_each_other,
        )

    def levels(self) -> NDArray[np.float32]:
        """Return what the tower gets of each byte, by colour: [256, 3]."""
        import numpy as np

        levels = np.arange(256, dtype=np.float32)[:, None] / np.float32(255)
        mean, deviation = (np.array(own, np.float32) for own in (self.mean, self.deviation))
        table: NDArray[np.float32] = (levels - mean) / deviation
        return table

    def cut(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Cut a picture [H, W, 3] into normalised patches [N, 3 x frames x patch x patch]."""
        import numpy as np

        n_high, n_wide = (side // (self.patch * self.merge) for side in picture.shape[:2])
        shape = (n_high, self.merge, self.patch, n_wide, self.merge, self.patch, 3)
        cut = picture.reshape(shape).transpose(0, 3, 1, 4, 6, 2, 5)  # rows, merged, C, P, P
        table = self.levels()
        patches = np.empty((*cut.shape[:5], self.n_frames, *cut.shape[5:]), np.float32)
        for colour in range(3):
            patches[..., colour, :, :, :] = table[:, colour][cut[..., colour, None, :, :]]
        if self.colours_last:
            patches = np.moveaxis(patches, 4, -1)
        return patches.reshape(-1, 3 * self.n_frames * self.patch * self.patch)


def check_ratio(rgb: NDArray[np.uint8], most: int = MAX_RATIO) -> tuple[int, int]:
    """Return height and width of a picture [H, W, 3].

    Raises UsageError where one is more than `most` times as long as the other.
    """
    height, width = rgb.shape[:2]
    if max(height, width) > most * min(height, width):
        raise UsageError(
            f"a picture of {width} x {height} pixels: one side may be at most {most} "
            "times as long as the other",
            remedy="crop the picture",
        )
    return height, width


def _read_levels(
    own: Fields, mean: tuple[float, ...], deviation: tuple[float, ...], *, normalizes: bool = True
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Read mean and deviation of each colour; those given where the config says nothing.

    Raises UnsupportedModelError where pixels are not scaled from 0 to 1 and normalised by them, or
    not normalised where it `normalizes` not.
    """
    for key in ("do_resize", "do_rescale", "do_convert_rgb"):
        own.require(key, True)
    own.require("do_normalize", normalizes)
    for key in ("do_center_crop", "do_pan_and_scan"):
        own.require(key, False)
    factor = own.number("rescale_factor", 1 / 255)
    if abs(factor * 255 - 1) > 1e-6:
        raise own.unsupported("rescale_factor", factor, "1 / 255")
    if not normalizes:
        own.ignore("image_mean", "image_std")
        return mean, deviation
    if not own.missing("image_mean"):
        mean = own.numbers("image_mean", 3, within=_LEVELS)
    if not own.missing("image_std"):
        deviation = own.numbers("image_std", 3, within=SCALES)
    return mean, deviation


def read_patches(
    own: Fields,
    config: VisionConfig,
    kind: Filter,
    mean: tuple[float, ...] = CLIP_MEAN,
    deviation: tuple[float, ...] = CLIP_DEVIATION,
    *,
    normalizes: bool = True,
) -> dict[str, Any]:
    """Read what all processors say of pixels and patches, as fields of PatchProcessor.

    The filter, mean and deviation are defaults. Without `normalizes` pixels are just scaled to 1.
    """
    mean, deviation = _read_levels(own, mean, deviation, normalizes=normalizes)
    return {
        "filter": _read_filter(own, kind),
        "mean": mean,
        "deviation": deviation,
        "patch": config.patch,
        "merge": config.merge,
    }


def read_fixed_size(own: Fields, config: VisionConfig) -> FixedSize:
    """Read the size of pictures, the one that learned positions are for."""
    side = config.grid * config.patch
    size = own.inner("size", own.take("size", dict, {"height": side, "width": side}))
    for key in ("height", "width"):
        size.require(key, side)
    return FixedSize(height=side, width=side)


def _read_filter(own: Fields, default: Filter) -> Filter:
    """Read the filter that pictures are resized by."""
    number = own.take("resample", int, default.value)
    try:
        return Filter(number)
    except ValueError:
        numbers = ", ".join(str(kind.value) for kind in Filter)
        raise own.unsupported("resample", number, numbers) from None


def required_id(own: Fields, token_id: TokenId, token: str) -> int:
    """Return the id of a token that stands in every picture.

    Raises UnsupportedModelError where the tokenizer lacks it.
    """
    found = token_id(token)
    if found is None:
        raise own.unsupported("tokenizer", f"one without {token}", "those of the model's makers")
    return found
