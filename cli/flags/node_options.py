"""How a node of this machine is set up: the flags of `shardnet node`.

Knows each flag once, and what its text means. Must not know what a node does with it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import typer

from shardnet.api.switching.model_switch import parse_duration
from shardnet.cluster.machine.addresses import NODE_PORT
from shardnet.cluster.machine.device_list import parse_devices, parse_tensor_parallel
from shardnet.cluster.machine.wake_on_lan import check_wake_at
from shardnet.cluster.pressure.sleep import DEFAULT_SLEEP, SleepSettings
from shardnet.plugins import COMPUTES, installed_names
from shardnet.types import whole_number

from . import options
from .config import one_of

A = TypeVar("A")
T = TypeVar("T")

MAX_PORT: Final = 65535
_MAX_NAME: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The flags, in the order in which --help shows them. "" and 0 where one was not given."""

    host: str = options.env_flag(
        "", "--host H", "Address to listen on. Default: all with a cluster key, else loopback."
    )
    port: int = options.env_flag(
        NODE_PORT, "--port N", "Port to listen on; 0 takes a free one.", min=0, max=MAX_PORT
    )
    name: str = options.env_flag(
        "", "--name NAME", "Name that is shown to people. Default: the host's name."
    )
    device: str = options.env_flag(
        "auto",
        "--device auto|cpu|nvidia|cuda|mps|opencl|A,B",
        "Compute device, or a list of them: cuda:0,cuda:1 or cuda:0,cpu, or cpu:0,cpu:1 for "
        "equal groups of cores; nvidia has the CPU's bits, cuda is torch's; auto takes what is "
        "faster of GPUs and CPU, or both. Also the name of a plug-in.",
        words=one_of(
            *("auto", "cpu", "nvidia:0", "cuda", "mps", "opencl:0"),
            *("cuda:0,cuda:1", "cuda:0,cpu", "cpu:0,cpu:1"),
        ),
    )
    tensor_parallel: str = options.env_flag(
        "auto",
        "--tensor-parallel auto|N",
        "How many of the devices share each layer; 1 cuts layers over them. Default: the plan "
        "decides.",
        words=one_of("auto", "1", "2", "4"),
        hides_default=True,
    )
    memory: str = options.env_flag(
        "", "--memory 8GiB", "Memory for weights and KV cache. Default: most of what is available."
    )
    threads: int = options.env_flag(
        0,
        "--threads N",
        "Compute threads. Default: a share of the cores among the nodes of this machine.",
        min=0,
        max=4096,
        hides_default=True,
    )
    cache_limit: str = options.env_flag(
        "",
        "--cache-limit 50GiB",
        "Disk space for weights from other nodes. Default: half of what is free.",
    )
    share_rate: str = options.env_flag(
        "",
        "--share-rate 50MiB",
        "Most bytes of weights per second sent to other nodes. Default: no limit.",
    )
    prefix_cache: options.PrefixCache = ""
    yields: bool = options.env_flag(
        False, "--yield", "Give the layers to other nodes while the owner of this machine uses it."
    )
    sleep_after: str = options.env_flag(
        "", "--sleep-after 30m", "Have this machine sleep while nobody needs it. Default: never."
    )
    sleep_command: str = options.env_flag(
        DEFAULT_SLEEP, "--sleep-command COMMAND", "What has this machine sleep, or turns it off."
    )
    wake_at: str = options.env_flag(
        "", "--wake-at H:P", "Where to send what wakes this machine. Default: its networks."
    )
    wake_wait: str = options.env_flag(
        "90s", "--wake-wait 90s", "How long another machine may take to wake."
    )
    audit: float = options.env_flag(
        0.5,
        "--audit PERCENT",
        "Time that stages of a ring led here are audited for wrong bits; 0 for never.",
        min=0,
        max=50,
    )
    power_command: str = options.env_flag(
        "",
        "--power-command COMMAND",
        "A command that prints what this machine draws, in watts, as a socket's plug says it.",
    )
    allow_update: bool = options.env_flag(
        False,
        "--allow-update",
        "Let holders of the cluster key install other versions here (`shardnet update`).",
    )
    peer: options.Peer = None
    no_mdns: options.NoMdns = False
    tailnet: options.Tailnet = False
    no_spin: bool = options.env_flag(
        False, "--no-spin", "Let processors sleep while the next step is awaited, as on battery."
    )
    offline: options.Offline = False
    model_folder: options.ModelFolder = None
    http: str = options.env_flag(
        "", "--http H:P", "Serve HTTP at this address too, as `shardnet serve` does."
    )

    def check(self) -> None:
        """Raise typer.BadParameter for a wrong value, before anything else is imported."""
        self.n_shards()
        self.memory_bytes()
        self.cache_limit_bytes()
        self.share_bytes_per_s()
        self.prefix_cache_bytes()
        self.peers()
        self.power_words()
        self.sleeps()
        if len(self.name) > _MAX_NAME or not self.name.isprintable():
            raise typer.BadParameter(
                f"{self.name[:_MAX_NAME]!r}: give at most {_MAX_NAME} characters on one line",
                param_hint="--name",
            )

    def n_shards(self) -> int:
        """Return over how many devices each layer is cut, 0 where the plan decides.

        Raises typer.BadParameter, also for --device.
        """
        n_devices = len(_value("--device", parse_devices, self.device, installed_names(COMPUTES)))
        return _value("--tensor-parallel", parse_tensor_parallel, self.tensor_parallel, n_devices)

    def memory_bytes(self) -> int | None:
        """Return --memory, None without it. Raises typer.BadParameter."""
        return options.parse_size(self.memory, "--memory") if self.memory else None

    def cache_limit_bytes(self) -> int | None:
        """Return --cache-limit, None without it. Raises typer.BadParameter."""
        return options.parse_size(self.cache_limit, "--cache-limit") if self.cache_limit else None

    def share_bytes_per_s(self) -> int | None:
        """Return bytes per second, None for no limit. Raises typer.BadParameter."""
        return (
            (options.parse_size(self.share_rate, "--share-rate") or None)
            if self.share_rate
            else None
        )

    def prefix_cache_bytes(self) -> int:
        """Return --prefix-cache, 0 without it. Raises typer.BadParameter."""
        return options.parse_prefix_cache(self.prefix_cache)

    def sleeps(self) -> SleepSettings:
        """Return how the node sleeps, and wakes others. Raises typer.BadParameter."""
        after_s = None
        if self.sleep_after:
            after_s = _value("--sleep-after", _duration, self.sleep_after, 1.0)
        if self.wake_at:
            with options.naming("--wake-at"):
                check_wake_at(self.wake_at)
        wait_s = _value("--wake-wait", _duration, self.wake_wait, 1.0)
        return SleepSettings(
            after_s=after_s, command=self.sleep_command, wake_at=self.wake_at, wait_s=wait_s
        )

    def peers(self) -> tuple[str, ...]:
        """Return the addresses of --peer. Raises typer.BadParameter."""
        return tuple(options.check_addresses(self.peer))

    def power_words(self) -> tuple[str, ...]:
        """Return the words of --power-command, which no shell reads. Raises typer.BadParameter."""
        with options.naming("--power-command"):
            return tuple(shlex.split(self.power_command, posix=os.name == "posix"))

    def http_address(self) -> tuple[str, int]:
        """Return host and port of --http, port 0 included. Raises typer.BadParameter."""
        host, _, text = self.http.rpartition(":")
        port = whole_number(text)
        if not host or port is None or port > MAX_PORT:
            raise typer.BadParameter(f"'{self.http:.80}' is not HOST:PORT", param_hint="--http")
        return host.removeprefix("[").removesuffix("]"), port


def _duration(text: str, least_s: float) -> float:
    seconds = parse_duration(text)
    if seconds < least_s:
        raise ValueError(f"{text}: give {least_s:g}s or more")
    return seconds


def _value(flag: str, parse: Callable[[str, A], T], text: str, among: A) -> T:
    """Read the value of a flag. Raises typer.BadParameter, which names it."""
    with options.naming(flag):
        return parse(text, among)
