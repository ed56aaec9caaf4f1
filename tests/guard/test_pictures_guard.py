"""Strangers' pictures in a helper process: what is read, and what is refused within bounds."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from support.models.pictured_model import grey16, png, saved

from shardnet.errors import UsageError
from shardnet.guard import pictures
from shardnet.guard.pictures import LIMITS, PictureProcess


@pytest.fixture
def process() -> Iterator[PictureProcess]:
    made = PictureProcess()
    yield made
    made.close()


def striped(mode: str = "RGB") -> Image.Image:
    """Red above blue, 8 wide and 6 high."""
    image = Image.new("RGB", (8, 6), "red")
    image.paste("blue", (0, 3, 8, 6))
    return image.convert(mode)


RED, BLUE = [255, 0, 0], [0, 0, 255]


def test_the_formats_that_are_read(process: PictureProcess) -> None:
    for data in (
        saved(striped(), "PNG"),
        saved(striped("P"), "GIF", save_all=True, append_images=[Image.new("RGB", (8, 6))]),
        saved(striped(), "WEBP", lossless=True),
        saved(striped("RGBA"), "PNG"),
    ):
        pixels = process.decode(data)
        assert pixels.shape == (6, 8, 3)
        assert (pixels[0, 0].tolist(), pixels[5, 7].tolist()) == (RED, BLUE)


def test_a_picture_stands_upright_over_white_in_eight_bits(process: PictureProcess) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned to the right
    turned = process.decode(saved(striped(), "JPEG", exif=exif, quality=100, subsampling=0))
    assert turned.shape == (8, 6, 3)
    assert turned[0, 0, 2] > 200 > 60 > turned[0, 0, 0]
    clear = process.decode(saved(Image.new("RGBA", (2, 2), (0, 0, 0, 0)), "PNG"))
    assert np.all(clear == 255)
    grey = process.decode(grey16(4, 64))
    assert (grey[0, 0, 0], grey[3, 63, 0]) == (0, 255)
    inks = process.decode(saved(striped("CMYK"), "JPEG", quality=100))
    assert inks[0, 0, 0] > 200 > 80 > inks[0, 0, 2]
    assert process.decode(png(1, 1)).shape == (1, 1, 3)
    assert process.decode(png(20_000, 1)).shape == (20_000, 1, 3)


def bomb() -> bytes:
    """A PNG that says it has 60 000 x 60 000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 << 20))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("form", ["PNG", "WEBP", "JPEG"])
def test_damaged_notes_of_a_camera_damage_no_picture(process: PictureProcess, form: str) -> None:
    picture = saved(striped(), form, exif=b"Exif\0\0no TIFF at all")
    assert process.decode(picture).shape == (6, 8, 3)


def test_what_is_no_picture_is_named(process: PictureProcess) -> None:
    for data, why in (
        (b"", "is empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is SVG"),
        (saved(striped(), "BMP"), "is no picture that is known"),
        (png(40, 40)[:-200], "damaged or cut off"),
        (bomb(), "60000 x 60000 pixels"),
    ):
        with pytest.raises(UsageError, match=why):
            process.decode(data)


def test_mutated_files_are_read_or_named(process: PictureProcess) -> None:
    chance = random.Random(3)
    image = Image.fromarray(np.asarray(striped().resize((40, 30))))
    files = [saved(image, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    n_read = 0
    for _ in range(1000):
        data = bytearray(chance.choice(files))
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        try:
            n_read += process.decode(bytes(data)).ndim == 3
        except UsageError:
            continue
    assert 0 < n_read < 1000


def test_a_picture_that_takes_too_long_ends_its_process_alone(
    process: PictureProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "LIMITS", replace(LIMITS, memory_bytes=4 << 20))
    with pytest.raises(UsageError, match="cannot be decoded"):
        process.decode(saved(Image.new("RGB", (3000, 3000)), "PNG"))
    monkeypatch.undo()
    assert process.decode(png(5, 6)).shape == (5, 6, 3)
