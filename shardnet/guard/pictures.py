"""Decodes strangers' pictures in a helper process, which a hostile one may end, but not the node.

Both sides of it: `PictureProcess` is for threads that may wait, and `main` is the helper's. Only
decoders of Pillow that are named here run.
"""

from __future__ import annotations

import io
import struct
import warnings
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from shardnet.errors import UsageError
from shardnet.guard.helper_process import HelperProcess, JobFailedError, JobLimits
from shardnet.guard.job_loop import serve

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS: Final = 50_000_000
"""A photograph of a good telephone."""
LIMITS: Final = JobLimits(cpu_s=8, wall_s=60.0, memory_bytes=1 << 30, reply_bytes=160 << 20)
"""50 million pixels of a JPEG take 1 s and 0.5 GiB."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
NAMES: Final = "PNG, JPEG, WebP and GIF"


class PictureProcess:
    """Decodes pictures, one at a time. Thread-safe. To be closed."""

    def __init__(self) -> None:
        self._process = HelperProcess(__name__)

    def decode(self, data: bytes) -> NDArray[np.uint8]:
        """Return a picture's pixels [H, W, 3]: upright, of the first frame, over white.

        Raises UsageError for what is no picture, is damaged, or exceeds the limits.
        """
        try:
            shape, block = self._process.call("decode", {"most_pixels": MAX_PIXELS}, LIMITS, data)
        except JobFailedError as error:
            raise UsageError(f"it cannot be decoded: {error}") from None
        return np.frombuffer(block, np.uint8).reshape(*shape, 3)

    def close(self) -> None:
        """End the process."""
        self._process.close()


def decode(most_pixels: int, block: bytes = b"") -> tuple[object, bytes]:
    """Give height and width of a picture, its first frame, and its bytes by row, RGB.

    It stands as its EXIF data say, over white where it is transparent. Raises UsageError for what
    is no such picture, is damaged, or has more than `most_pixels`.
    """
    import PIL.Image as pillow
    from PIL import UnidentifiedImageError

    warnings.simplefilter("ignore")
    pillow.MAX_IMAGE_PIXELS = None  # the limit here is stricter, and named
    try:
        image: Image = pillow.open(io.BytesIO(block), formats=FORMATS)
    except UnidentifiedImageError:
        raise UsageError(f"it {_kind(block)}: only {NAMES} are read") from None
    except (OSError, SyntaxError, ValueError, struct.error) as error:
        raise _damaged(error) from None
    width, height = image.size
    if width * height > most_pixels:
        raise UsageError(
            f"it has {width} x {height} pixels, at most {most_pixels} are decoded",
            remedy="send it smaller",
        )
    try:
        image.load()
        image = _as_rgb(_upright(image))
    except MemoryError:
        raise
    except Exception as error:  # decoders of Pillow raise anything for damaged files
        raise _damaged(error) from None
    return [image.height, image.width], image.tobytes()


def _upright(image: Image) -> Image:
    """Turn a picture as its EXIF data say, if they can be read."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except MemoryError:
        raise
    except Exception:  # they are damaged, and the picture need not be
        return image


def _as_rgb(image: Image) -> Image:
    import PIL.Image as pillow

    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off above 255
        image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        over = image.convert("RGBA")
        image = pillow.new("RGBA", over.size, (255, 255, 255, 255))
        image.alpha_composite(over)
    return image.convert("RGB")


def _damaged(error: Exception) -> UsageError:
    return UsageError(f"it is damaged or cut off: {str(error)[:200] or type(error).__name__}")


def _kind(data: bytes) -> str:
    """Say what bytes are that are no picture."""
    start = data[:256].lstrip()
    if not data:
        return "is empty"
    if start.startswith(b"<"):
        return "is SVG" if b"<svg" in data[:4096] else "is XML or HTML"
    if start.startswith(b"%PDF"):
        return "is PDF"
    return f"is no picture that is known (it begins with {data[:8].hex(' ')})"


def main() -> None:
    """Do jobs until nobody asks."""
    serve({"decode": decode})
