"""The devices of a node as people name them: `cuda:0,cuda:1`, `cuda:0,cpu`, `cpu:0,cpu:1`.

Knows how `--device` and `--tensor-parallel` are written and which of their values make sense. Must
not know which devices are here (profile.py). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardnet.errors import UsageError
from shardnet.wire.framing.schema import MAX_DEVICES

AUTO: Final = "auto"
CPU: Final = "cpu"
CUDA: Final = "cuda"
MPS: Final = "mps"
OPENCL: Final = "opencl"
HOST: Final = "host"
NVIDIA: Final = "nvidia"
AMD: Final = "amd"
METAL: Final = "metal"
BY_TEXT: Final = (OPENCL, NVIDIA, AMD, METAL, HOST)
"""What the kernel text computes on; host is this machine's CPU in that guise, to test it."""
KINDS: Final = (AUTO, CPU, NVIDIA, CUDA, MPS, OPENCL)
"""What there is without plug-ins: AMD's GPUs are cuda to torch, Apple's are mps."""
_MOST_INDEX: Final = 1023


@dataclass(frozen=True, slots=True)
class DeviceName:
    """One device: its kind (as in KINDS, host or a plug-in's name) and its number.

    cuda's number is torch's, nvidia's and amd's their drivers', opencl's counts all platforms.
    cpu's is that of a group of cores, of as many equal ones as the list names; None is the whole
    CPU, the first GPU, Apple's, or a plug-in.
    """

    kind: str
    index: int | None = None

    def __str__(self) -> str:
        """Write it as it is given."""
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def parse_devices(text: str, plugins: Sequence[str] = ()) -> tuple[DeviceName, ...]:
    """Read a list of devices; `plugins` are the names of the computes that packages have added.

    `auto` and a plug-in stand alone. Raises UsageError, which says what is wrong with which name.
    """
    words = [word.strip() for word in text.split(",")]
    names = tuple(_parse(word, text, plugins) for word in words)
    if len(names) > MAX_DEVICES:
        raise _wrong(text, f"{len(names)} devices", f"name at most {MAX_DEVICES}")
    alone = [str(name) for name in names if name.kind not in (CPU, CUDA, MPS, *BY_TEXT)]
    if alone and len(names) > 1:
        raise _wrong(text, f"{alone[0]} is no part of a list", "name it alone, or leave it out")
    cuda = [name.index or 0 for name in names if name.kind == CUDA]
    others = [(name.kind, name.index or 0) for name in names if name.kind in (MPS, *BY_TEXT)]
    if len(set(cuda)) < len(cuda) or len(set(others)) < len(others):
        raise _wrong(text, "a GPU is named twice", "name each once: cuda:0,cuda:1")
    if any(name.index is None for name in names if name.kind == CUDA) and len(cuda) > 1:
        raise _wrong(text, "which GPU is cuda", "give each its number: cuda:0,cuda:1")
    return _whole_cpu(text, names)


def _whole_cpu(text: str, names: tuple[DeviceName, ...]) -> tuple[DeviceName, ...]:
    """Check that the groups of cores are numbered from 0 without a gap; a single one is `cpu`."""
    groups = [name.index for name in names if name.kind == CPU]
    if len(groups) > 1 and (
        None in groups or sorted(i or 0 for i in groups) != [*range(len(groups))]
    ):
        wanted = ",".join(f"{CPU}:{index}" for index in range(len(groups)))
        raise _wrong(text, "groups of cores are numbered from 0, each once", f"write {wanted}")
    if len(groups) == 1 and groups[0]:
        raise _wrong(text, f"cpu:{groups[0]} is the only group named", "write cpu for all cores")
    if len(groups) == 1:
        return tuple(DeviceName(CPU) if name.kind == CPU else name for name in names)
    return names


def parse_tensor_parallel(text: str, n_devices: int) -> int:
    """Read how many devices share each layer; 0 stands for `auto`: the plan decides.

    Raises UsageError unless the number divides that of the devices, which 1 does.
    """
    if text == AUTO:
        return 0
    if not (text.isascii() and text.isdecimal() and 1 <= len(text) <= 4 and int(text)):
        raise UsageError(f"'{text}'", remedy="give auto, or a whole number of 1 or more")
    n_shards = int(text)
    if n_devices % n_shards:
        few = "1 device is" if n_devices == 1 else f"{n_devices} devices are"
        fitting = [str(n) for n in range(1, n_devices + 1) if n_devices % n == 0]
        raise UsageError(
            f"'{text}': {few} named, which {text} does not divide",
            remedy=f"give {' or '.join(fitting)}, or name more devices with --device",
        )
    return n_shards


def _parse(word: str, text: str, plugins: Sequence[str]) -> DeviceName:
    kind, colon, number = word.partition(":")
    if word in (AUTO, MPS, METAL, HOST, *plugins):
        return DeviceName(word)
    if kind not in (CPU, CUDA, OPENCL, NVIDIA, AMD):
        *others, last = (*KINDS, *plugins)
        raise _wrong(text, f"'{word}' is unknown", f"choose {', '.join(others)} or {last}")
    if not colon:
        return DeviceName(kind)
    if not (number.isascii() and number.isdecimal() and len(number) <= 4):
        raise _wrong(text, f"'{word}' has no number", f"write {kind}:0")
    if int(number) > _MOST_INDEX:
        raise _wrong(text, f"'{word}' is beyond {kind}:{_MOST_INDEX}", f"write {kind}:0")
    return DeviceName(kind, int(number))


def _wrong(text: str, what: str, remedy: str) -> UsageError:
    where = "" if f"'{text}'" in what else f"'{text[:80]}': "
    return UsageError(f"{where}{what}", remedy=remedy)
