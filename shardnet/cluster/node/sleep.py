"""Has this node's machine sleep while nobody needs it, and takes part again when it has woken.

What is loaded stays in memory meanwhile. Knows what counts as use, and the order: leave the ring,
say goodbye, sleep. Keyboards, and what else keeps a machine awake, are its system's affair.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from shardnet.cluster.machine.programs import ask
from shardnet.cluster.machine.wake_on_lan import how_to_wake
from shardnet.cluster.peers.control_link import ControlLink, MessageHandlers
from shardnet.cluster.pressure.sleep import Doze, SleepPolicy
from shardnet.errors import BusyError, ConfigurationError, UsageError
from shardnet.transport.loop import cancel_all
from shardnet.wire.messages.control import Done
from shardnet.wire.messages.membership import Wake

if TYPE_CHECKING:
    from shardnet.cluster.node.services import Services

LOOK_S: Final = 2.0
"""Interval of the looks, or a quarter of the time after which a node sleeps."""
DOZE_LOOK_S: Final = 0.25
COMMAND_S: Final = 300.0
"""How long a command may take that has a machine sleep."""
SETTLE_S: Final = 60.0
"""How long a machine may take to sleep once that has ended."""
SLEEPS: Final = "it sleeps"
_SHELL: Final = ("cmd", "/c") if sys.platform == "win32" else ("/bin/sh", "-c")


class NodeSleep:
    """Has the machine of one `node` sleep."""

    def __init__(self, node: Services) -> None:
        self._node = node
        self._settings = node.settings.sleeps
        self.has_readers: Callable[[], bool] = lambda: False
        """Whether an HTTP server of this process has connections."""

    def register(self, handlers: MessageHandlers) -> None:
        """Register what has this node wake another one."""
        handlers.register(Wake, self._wake)

    async def _wake(self, control: ControlLink, message: Wake) -> None:
        """Wake a node. Raises UsageError if it does not wake, or none of that id sleeps."""
        sleepers = self._node.links.peers.sleepers
        if not any(info.node == message.node for info in sleepers.listed()):
            raise UsageError("no such node has told this one that it sleeps")

        async def woken() -> Done:
            await sleepers.wake([message.node])
            for out in sleepers.left_out():
                if out.node == message.node:
                    raise UsageError(f"{out.name} sleeps on: {out.why}")
            return Done(request=message.request)

        await control.answer_with(message.request, woken())

    def _is_needed(self) -> bool:
        """Say whether requests, orders or clients need this node now."""
        node = self._node
        return bool(
            node.drain.is_needed
            or node.runners.is_needed
            or node.pressure.rests
            or node.stage.host.refusals.is_draining
            or node.stage.host.is_preparing
            or node.head.led.opening
            or node.handlers.is_at_work
            or node.dispatcher.has_clients
            or self.has_readers()
        )

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        after_s, progress = self._settings.after_s, (0, 0)
        assert after_s is not None
        policy = SleepPolicy(after_s=after_s, used_s=time.monotonic())
        while True:
            await asyncio.sleep(min(LOOK_S, after_s / 4))
            now_s, before, progress = time.monotonic(), progress, self._node.stage.host.progress
            is_used = before != progress or self._is_needed()
            if policy.look(now_s, now_s if is_used else self._node.handlers.used_s):
                await self._sleep(f"nobody has needed this node for {after_s:g} s")
                policy.stay(time.monotonic())

    async def _sleep(self, why: str) -> None:
        """Leave everything, sleep, and take part again, also where the machine does not sleep."""
        node, peers, refusals = self._node, self._node.links.peers, self._node.stage.host.refusals
        refusals.rests = SLEEPS
        try:
            await self._leave_ring()
            node.settings.log(f"sleeping: {why}")
            asleep = how_to_wake(node.links.advertisement.local, self._settings.wake_at)
            asleep = replace(asleep, wake_s=peers.woke_s, since_s=time.time())
            await peers.fall_asleep(replace(node.stage.own.info(), asleep=asleep, rests=""))
            slept_s = await self._doze()
            node.settings.log(f"awake again, after {slept_s:.0f} s: back to the other nodes")
        except BusyError:  # a request has come meanwhile
            pass
        except ConfigurationError as error:
            node.settings.log(f"warning: this machine does not sleep: {error}")
        finally:
            refusals.rests = ""
            peers.wake()
            if node.settings.discovery is not None:
                node.settings.discovery.announce()

    async def _leave_ring(self) -> None:
        """Have no ring; what is loaded stays for the next one. Raises BusyError for one in use."""
        led, host = self._node.head.led, self._node.stage.host
        async with led.lock:
            led.check_idle()
            if led.lead is not None:
                await led.unload({node.address for node in led.lead.plan.ring_nodes})
        if host.membership is not None:
            await host.leave_ring(host.membership)

    async def _doze(self) -> float:
        """Have the machine sleep; return for how many seconds it did, once it is awake.

        Raises ConfigurationError if it does not sleep.
        """
        command, ended_s = self._settings.command, None
        sleeping = asyncio.ensure_future(ask((*_SHELL, command), os.environ, answer_s=COMMAND_S))
        doze = Doze(looked_s=time.monotonic(), ahead_s=_ahead_s())
        try:
            while ended_s is None or time.monotonic() - ended_s < SETTLE_S:
                await asyncio.sleep(DOZE_LOOK_S)
                if slept_s := doze.look(time.monotonic(), _ahead_s()):
                    return slept_s
                if sleeping.done() and ended_s is None:
                    sleeping.result()
                    ended_s = time.monotonic()
        finally:
            await cancel_all(sleeping)
        raise ConfigurationError(f"`{command}` has ended, and it is awake still")


def _ahead_s() -> float:
    """Return how far a clock that counts sleep is ahead of one that does not, 0 without both."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_MONOTONIC) - time.monotonic()
    return 0.0
