"""Measure what the narrower wire dtype of a plan saves and costs, and cache it on disk.

Knows that the error depends on model, stage borders, dtype and wire dtype, and that a client may
cancel. Must not know how logits are compared (runtime/loading/wire_loss.py) nor how plans are made.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from shardnet.cluster.machine.profile import available_cores
from shardnet.cluster.member.refusals import check_threads
from shardnet.cluster.planning.plan import Plan
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import ShardnetError
from shardnet.files import read_own, write_whole
from shardnet.runtime.loading.loading import set_compute_threads
from shardnet.runtime.loading.wire_loss import measure_rounding_s, measure_wire_loss
from shardnet.runtime.stage.executor import ProgressReporter
from shardnet.types import Strict, WireDType, parse_wires
from shardnet.wire.messages.handshake import explanation
from shardnet.wire.messages.plans import NarrowWire, WireError

METHOD = 2
"""Version of the measurement: figures of another one are measured again."""

Progress = Callable[[int, int], None]


class _Key(Strict, frozen=True, kw_only=True):
    """What an error depends on."""

    method: int
    model_id: str
    borders: tuple[tuple[int, str], ...]
    dtype: str
    gathers: tuple[tuple[int, str, tuple[int, ...]], ...] = ()


class _Cached(Strict, frozen=True, kw_only=True):
    """The file of one error."""

    key: _Key
    error: WireError


class WireLoss:
    """Measures on a thread of its own and caches the errors in the folder `cache`.

    `threads` returns how many compute threads a stage of this node has.
    """

    def __init__(
        self, *, cache: Path, threads: Callable[[], int], log: Callable[[str], None]
    ) -> None:
        self._folder = cache / "wire-errors"
        self._threads = threads
        self._log = log
        self._thread = DiskJobs("shardnet-wire", niceness=10)

    async def narrow(self, plan: Plan, on_progress: Progress) -> NarrowWire:
        """Measure the time that the plan's wire dtypes save and the error that they cause.

        `on_progress` takes (bytes done, bytes in all) of the checkpoint. Cancelling ends the
        measurement. If the error cannot be measured, `why` of the result gives the reason.
        """
        config, own = plan.facts.config, WireDType.own(plan.dtype)
        wires = plan.wires or (parse_wires(plan.choice.wire_dtype).every or own,)
        saves_ms: float | None = 0.0
        why, error = "", None
        if not plan.wires and not plan.rounded_parts:
            why = "the plan has one stage, so nothing crosses a wire"
        elif not plan.narrowed and not plan.rounded_parts:
            slow = " and no link is slow" if parse_wires(plan.choice.wire_dtype).slow else ""
            why = f"the ring's hidden states are {own.value}{slow}, so nothing is rounded"
        else:
            saves_ms = await self._saves_ms(plan)
            try:
                error = await self._error(plan, on_progress)
            except ShardnetError as failure:
                why = explanation(failure)
        return NarrowWire(
            row_bytes=sum(wire.row_bytes(config.row_width) for wire in wires) // len(wires),
            exact_row_bytes=own.row_bytes(config.row_width),
            saves_ms=saves_ms,
            error=error,
            why=why,
        )

    def close(self) -> None:
        """End the thread once it has nothing to do."""
        self._thread.close()

    async def _saves_ms(self, plan: Plan) -> float | None:
        """Return the milliseconds per token that links save, less the conversion on every hop."""
        if plan.wire_saved_s is None:
            return None
        width, wires = plan.facts.config.row_width, list(plan.narrowed.values())
        rounding_s = await self._thread.run(
            plan.facts.path,
            lambda: {wire: measure_rounding_s(width, plan.dtype, wire) for wire in set(wires)},
        )
        return (plan.wire_saved_s - sum(rounding_s[wire] for wire in wires)) * 1e3

    async def _error(self, plan: Plan, on_progress: Progress) -> WireError:
        check_threads(plan.choice.threads, available_cores())
        threads = plan.choice.threads or self._threads()
        reporter = ProgressReporter(on_progress, asyncio.get_running_loop())
        return await reporter.to_its_end(
            self._thread.submit(
                plan.facts.path,
                lambda: self._find_or_measure(plan, threads, reporter),
                alive=lambda: reporter.n_reports,
            )
        )

    # --- on the thread

    def _find_or_measure(self, plan: Plan, threads: int, reporter: ProgressReporter) -> WireError:
        key = _Key(
            method=METHOD,
            model_id=plan.facts.model_id,
            borders=tuple((layer, wire.value) for layer, wire in plan.narrowed.items()),
            dtype=plan.dtype.value,
            gathers=tuple((n, wire.value, own) for n, (wire, own) in plan.rounded_parts.items()),
        )
        path = self._folder / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:32]}.json"
        kept = _read(path, key)
        if kept is not None:
            return kept
        set_compute_threads(threads)
        error = measure_wire_loss(
            plan.facts, plan.dtype, plan.narrowed, reporter.report, plan.rounded_parts
        )
        try:
            write_whole(path, msgspec.json.encode(_Cached(key=key, error=error)))
        except OSError as failure:
            self._log(f"the error of a narrower wire is not kept: {failure}")
        return error


def _read(path: Path, key: _Key) -> WireError | None:
    """Read the cached error of `key`, None if its file is missing or damaged."""
    try:
        kept = msgspec.json.decode(read_own(path), type=_Cached)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return kept.error if kept.key == key else None
