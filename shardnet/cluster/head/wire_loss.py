"""What the narrower wire of a plan saves and costs: measured by the head, and kept on disk.

Knows that the error belongs to model, borders, dtype and wire dtype, and that a client may give up
waiting. Must not know how logits are compared (runtime/stage/wire_loss.py) nor how plans are made.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec

from shardnet.cluster.head.planning import Plan
from shardnet.errors import ShardnetError
from shardnet.files import write_whole
from shardnet.runtime.stage.executor import Executor
from shardnet.runtime.stage.loading import use_threads
from shardnet.runtime.stage.progress import Reporter
from shardnet.runtime.stage.wire_loss import measure_logit_error, measure_rounding_s
from shardnet.types import WireDType
from shardnet.wire.framing.schema import Strict
from shardnet.wire.messages.metas import explanation
from shardnet.wire.messages.narrow import NarrowWire, WireError

METHOD = 1
"""Counts up whenever a new measurement would give another figure than an old one."""

Progress = Callable[[int, int], None]


class _Key(Strict, frozen=True, kw_only=True):
    """What an error belongs to."""

    method: int
    model_id: str
    borders: tuple[int, ...]
    dtype: str
    wire_dtype: str


class _Kept(Strict, frozen=True, kw_only=True):
    """The file of one error."""

    key: _Key
    error: WireError


class WireErrors:
    """Measures on a thread of its own and keeps what it found in the folder `cache`.

    `threads` tells how many compute threads a stage of this node would have.
    """

    def __init__(
        self, *, cache: Path, threads: Callable[[], int], log: Callable[[str], None]
    ) -> None:
        self._folder = cache / "wire-errors"
        self._threads = threads
        self._log = log
        self._thread = Executor("shardnet-wire", niceness=10)

    async def narrow(self, plan: Plan, on_progress: Progress) -> NarrowWire:
        """Say what the plan's wire dtype saves and costs.

        `on_progress` gets (bytes done, bytes in all) of the checkpoint; cancelling ends the
        measurement. What cannot be measured is said in `why`.
        """
        config, own = plan.facts.config, WireDType.own(plan.dtype)
        saves_ms: float | None = 0.0
        why, error = "", None
        if plan.wire_dtype is own:
            why = f"the ring computes in {own.value}, so nothing is rounded"
        elif not plan.borders:
            why = "the plan has one stage, so nothing crosses a wire"
        else:
            saves_ms = await self._saves_ms(plan)
            try:
                error = await self._error(plan, on_progress)
            except ShardnetError as failure:
                why = explanation(failure)
        return NarrowWire(
            row_bytes=plan.wire_dtype.row_bytes(config.hidden_size),
            exact_row_bytes=own.row_bytes(config.hidden_size),
            saves_ms=saves_ms,
            error=error,
            why=why,
        )

    def close(self) -> None:
        """End the thread once it has nothing to do."""
        self._thread.close()

    async def _saves_ms(self, plan: Plan) -> float | None:
        """Milliseconds per token: what the links save, less the time to round on every hop."""
        if plan.wire_saved_s is None:
            return None
        width = plan.facts.config.hidden_size
        round_s = await self._thread.run(
            lambda: measure_rounding_s(width, plan.dtype, plan.wire_dtype)
        )
        return (plan.wire_saved_s - len(plan.borders) * round_s) * 1e3

    async def _error(self, plan: Plan, on_progress: Progress) -> WireError:
        threads = plan.choice.threads or self._threads()
        reporter = Reporter(on_progress, asyncio.get_running_loop())
        measuring = asyncio.ensure_future(
            self._thread.run(lambda: self._find_or_measure(plan, threads, reporter))
        )
        try:
            return await asyncio.shield(measuring)
        except asyncio.CancelledError:
            reporter.give_up()
            await asyncio.gather(measuring, return_exceptions=True)
            raise

    # --- on the thread

    def _find_or_measure(self, plan: Plan, threads: int, reporter: Reporter) -> WireError:
        key = _Key(
            method=METHOD,
            model_id=plan.facts.model_id,
            borders=plan.borders,
            dtype=plan.dtype.value,
            wire_dtype=plan.wire_dtype.value,
        )
        path = self._folder / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:32]}.json"
        kept = _read(path, key)
        if kept is not None:
            return kept
        use_threads(threads)
        measured = measure_logit_error(
            plan.facts, plan.dtype, plan.borders, plan.wire_dtype, reporter.report
        )
        error = WireError(**asdict(measured))
        try:
            write_whole(path, msgspec.json.encode(_Kept(key=key, error=error)))
        except OSError as failure:
            self._log(f"the error of a narrower wire is not kept: {failure}")
        return error


def _read(path: Path, key: _Key) -> WireError | None:
    """Read the file of one error; None where there is none that is whole and of this key."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return kept.error if kept.key == key else None
