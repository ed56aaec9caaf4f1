"""Devices that compute by the kernel text, as far as this machine has them."""

from __future__ import annotations

import functools

import pytest

from shardnet.errors import ConfigurationError
from shardnet.model.devices.device_layers import Device
from shardnet.model.devices.host import HostDriver
from shardnet.model.devices.opencl import OpenClDriver, opencl_devices
from shardnet.model.kernels.library import native_kernels

HOST, OPENCL = "host", "opencl"
compared = pytest.mark.skipif(native_kernels() is None, reason="it is compared with the library")


@functools.cache
def device_of(kind: str) -> Device:
    """Return a device; skip the test where it is not here.

    A kind other than `opencl` and `host` is the order in which the host runs a group's threads.
    """
    if kind == OPENCL:
        if not _has_opencl():
            pytest.skip("no OpenCL here")
        return Device(OpenClDriver(0))
    return Device(HostDriver() if kind == HOST else HostDriver(kind))


def _has_opencl() -> bool:
    try:
        return bool(opencl_devices())
    except ConfigurationError:
        return False
