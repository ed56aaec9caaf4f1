"""Mutated files of a checkpoint through all their readers.

Only documented errors may come of them, quickly and in little memory. `scripts/fuzz` calls
`fuzz_files`; a folder that fails is kept for the corpus.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from support.hostile.file_readers import read_everything
from support.hostile.small_files import GOOD, Files

SLOW_S: Final = 1.0
"""CPU time of all readers of one folder that is reported."""
HUGE_BYTES: Final = 500_000_000
"""Growth of resident memory by one folder that is reported."""

_NUMBERS: Final = (0, 1, 7, 8, 255, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**44, 2**60, 2**63 - 1, 2**64)
_JSON_VALUES: Final = (
    *(None, True, False, -1, 0, 2**31, 2**63, 2**64, 10**399, 1.5, 1e308, -0.0, "", "a", "\u00e9"),
    *(
        [],
        {},
        [[]],
        {"a": {}},
        ["a"] * 40,
        [0] * 3000,
        {str(n): n for n in range(3000)},
        "x" * 9999,
    ),
)
_TOKENS: Final = (
    *(b"[", b"]", b"{", b"}", b'"', b",", b":", b"\\", b"\0", b"\n", b"\xff", b"\xed\xa0\x80"),
    *(b"1e999", b"-", b"NaN", b"9" * 500, b"[" * 100, b'{"":' * 50, b"\\ud800", b"../", b"\\u0000"),
    *(b"h\0", b"q\0", b"(", b")", b".", b"t", b"u", b"R", b"Q", b"\x85", b"\x86", b"\x87", b"\x94"),
)


@dataclass(slots=True, kw_only=True)
class Figures:
    """What came of the files: counts by kind of error, the worst time and memory, the finds."""

    n_files: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    worst_s: float = 0.0
    worst_bytes: int = 0
    found: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.errors.most_common())
        return (
            f"{self.n_files} files: {kinds}; worst {self.worst_s:.2f} s of CPU and "
            f"{self.worst_bytes / 1e6:.0f} MB; {len(self.found)} finds"
        )


def fuzz_files(
    n: int, seed: int, on_slow: Callable[[Path, str], None] = lambda folder, why: None
) -> Figures:
    """Read `n` folders with a mutated file each, made from `seed` and their number.

    `on_slow` is called with each folder that raised what is not documented, took more than SLOW_S
    of CPU time or HUGE_BYTES, and why; the folder is deleted afterwards.
    """
    figures = Figures()
    goods = {kind: make() for kind, make in GOOD.items()}
    place = Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        read_everything(_write(place / "warm-up", goods["safetensors"]))  # imports
        for number in range(n):
            chance = random.Random(f"{seed}-{number}")
            files = dict(goods[chance.choice([*goods])])
            name = chance.choice([*files])
            files[name] = mutated(chance, name, files[name])
            folder = _write(place / "folder", files)
            why = _read(folder, figures)
            if why is not None:
                figures.found.append(f"seed {seed}-{number}, {name}: {why}")
                on_slow(folder, figures.found[-1])
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(place)
    return figures


def _write(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def _read(folder: Path, figures: Figures) -> str | None:
    """Read a folder; return what is wrong with how that went, None if nothing is."""
    before_bytes, began = _peak_bytes(), time.process_time()
    why = None
    try:
        refused = read_everything(folder)
    except Exception as error:
        refused, why = [], f"{type(error).__name__}: {str(error)[:300]}"
    took_s, grown_bytes = time.process_time() - began, _peak_bytes() - before_bytes
    for name in {type(error).__name__ for error in refused} or {"read"}:
        figures.errors[name if why is None else why.partition(":")[0]] += 1
    figures.n_files += 1
    figures.worst_s = max(figures.worst_s, took_s)
    figures.worst_bytes = max(figures.worst_bytes, grown_bytes)
    for error in refused:
        if str(folder) not in str(error):
            why = why or f"the file is not named in: {str(error)[:300]}"
        if len(str(error)) > 4000 or not str(error).isprintable():
            why = why or f"unfit for a terminal: {str(error)!r:.300}"
    if took_s > SLOW_S:
        why = why or f"{took_s:.1f} s of CPU time"
    if grown_bytes > HUGE_BYTES:
        why = why or f"{grown_bytes / 1e6:.0f} MB"
    return why


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def mutated(chance: random.Random, name: str, content: bytes) -> bytes:
    """Return the content of the file `name` with its bytes or its structure changed."""
    if name.endswith((".json", ".safetensors")) and chance.random() < 0.5:
        return _mutated_structure(chance, name, content)
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        _mutate_bytes(chance, data)
    return bytes(data)


def _mutate_bytes(chance: random.Random, data: bytearray) -> None:
    """Change the bytes at one place, more often near the beginning, where headers are."""
    top = min(len(data), chance.choice((32, 512, 4096, len(data))))
    at = chance.randrange(top + 1)
    match chance.randrange(8):
        case 0:
            data[at : at + 1] = bytes([chance.randrange(256)])
        case 1:
            data[at:at] = chance.choice(_TOKENS) * chance.choice((1, 1, 2, 300))
        case 2:
            number = chance.choice(_NUMBERS) + chance.choice((-1, 0, 1))
            layout = chance.choice(("<I", "<Q", ">I"))
            size = struct.calcsize(layout)
            data[at : at + size] = struct.pack(layout, number % (1 << 8 * size))
        case 3:
            del data[at : at + chance.choice((1, 4, 8, 100))]
        case 4:
            piece = data[at : at + chance.choice((1, 8, 60, 600))]
            data[at:at] = piece * chance.choice((1, 2, 50, 2000))
        case 5:
            del data[at:]
        case 6:
            other = chance.randrange(len(data) + 1)
            data[at : at + 16], data[other : other + 16] = (
                data[other : other + 16],
                data[at : at + 16],
            )
        case _:
            if at < len(data):
                data[at] ^= 1 << chance.randrange(8)


def _mutated_structure(chance: random.Random, name: str, content: bytes) -> bytes:
    """Change keys and values of JSON, the header of a safetensors file included."""
    is_header = name.endswith(".safetensors")
    length = int.from_bytes(content[:8], "little") if is_header else len(content)
    value = json.loads(content[8 : 8 + length] if is_header else content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        _mutate_value(chance, value)
    text = json.dumps(value).encode()
    if chance.random() < 0.2:
        text = text.replace(b"[", b"[" * chance.choice((2, 20, 2000)), 1)
    return len(text).to_bytes(8, "little") + text + content[8 + length :] if is_header else text


def _mutate_value(chance: random.Random, value: Any) -> None:
    while isinstance(value, dict | list) and value:
        places = [*value] if isinstance(value, dict) else [*range(len(value))]
        at = chance.choice(places)
        if not isinstance(value[at], dict | list) or chance.random() < 0.4:
            break
        value = value[at]
    else:
        return
    new = json.loads(json.dumps(chance.choice(_JSON_VALUES)))
    if isinstance(value, dict) and chance.random() < 0.3:
        value[chance.choice(("", "x" * 600, "a\nb", "\u202e", str(at) + "x"))] = value.pop(at)
    elif isinstance(value, dict) and chance.random() < 0.2:
        del value[at]
    else:
        value[at] = new
