"""Devices that compute by the kernel text, as far as this machine has them."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from shardnet.errors import ConfigurationError
from shardnet.model.devices.bits import open_device
from shardnet.model.devices.device_layers import Device
from shardnet.model.drivers import opencl
from shardnet.model.drivers.driver import Kernel
from shardnet.model.drivers.host import HostDriver
from shardnet.model.kernels.library import Isa, native_kernels

HOST: Final = "host"
DEVICE: Final = os.environ.get("SHARDNET_TEST_DEVICE", "opencl:0")
"""As `--device` has it: the one that tests compare with the host, where it is here."""
_NATIVE = native_kernels()
HAS_VECTORS: Final = _NATIVE is not None and _NATIVE.isa is not Isa.PORTABLE
"""Without them the library leaves plain floats to torch: routers are not packed, and bits depend on
the batch."""
compared = pytest.mark.skipif(_NATIVE is None, reason="it is compared with the library")


class HostOnce(HostDriver):
    """The kernel text by this machine's C compiler, each text compiled once a process."""

    def compile(self, text: str, names: Sequence[str]) -> Mapping[str, Kernel]:
        """See Driver."""
        key = self._command, text
        if key not in _COMPILED:
            _COMPILED[key] = super().compile(text, names)
        return _COMPILED[key]


_ONCE = """#!/bin/sh
options=
for word; do
    case "$before" in -o) made=$word ;; *) case "$word" in
        *.c) text=$word ;; *) options="$options $word" ;;
    esac ;; esac
    before=$word
done
kept={folder}/$({{ echo "$options"; cat "$text"; }} | cksum | tr ' ' -)
[ -f "$kept" ] || {{ {compiler} "$@" || exit; cp "$made" "$kept.$$" && mv "$kept.$$" "$kept"; }}
cp "$kept" "$made"
"""


def path_of_once(folder: Path) -> str:
    """A PATH whose C compiler compiles each text once: what nodes begin with takes it 3 s of CPU.

    For processes; what it made is kept in the new `folder`.
    """
    compiler = shutil.which("gcc") or shutil.which("clang")
    assert compiler is not None
    folder.mkdir()
    script = folder / "gcc"
    script.write_text(_ONCE.format(folder=shlex.quote(str(folder)), compiler=shlex.quote(compiler)))
    script.chmod(0o700)
    return os.pathsep.join((str(folder), os.environ["PATH"]))


_COMPILED: dict[tuple[tuple[str, ...], str], Mapping[str, Kernel]] = {}


@functools.cache
def device_of(kind: str) -> Device:
    """Return a device; skip the test where it is not here.

    A kind other than `DEVICE` and `host` is the order in which the host runs a group's threads.
    """
    if kind != DEVICE:
        return Device(HostOnce() if kind == HOST else HostOnce(kind))
    try:
        device = open_device(DEVICE)
        if isinstance(device.driver, opencl.OpenClDriver):  # pocl 3.0 has no target for a Zen 5
            device.driver.compile("kernel void nothing(void) {}", ["nothing"])
        return device
    except ConfigurationError as error:
        pytest.skip(error.message)


if "SHARDNET_TEST_DEVICE" in os.environ:  # what a driver opens for the process is no test's own
    device_of(DEVICE)
