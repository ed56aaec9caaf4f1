"""What is started from a page and takes its time: loading, unloading and pulling a model.

Knows how progress is kept, and that a job ends with the server, not with the page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Final

from msgspec import convert
from msgspec.structs import replace

from shardnet.api.dashboard.state import JobKind, JobState, ShownJob, ShownProgress
from shardnet.api.server.errors import refused, too_many
from shardnet.api.server.service import Service
from shardnet.checkpoint.hub_cache import HubName
from shardnet.cluster.download.hub import pull_beside
from shardnet.errors import ShardnetError, internal_error, shown
from shardnet.transport.loop import cancel_all
from shardnet.wire.messages.plans import NodeProgress

KEPT_S: Final = 600.0
MAX_KEPT: Final = 32
"""How long ended jobs are listed, and how many are at most."""
MAX_PULLS: Final = 4
"""Pulls at once."""
RETRY_S: Final = 10
"""The wait, in seconds, that a refused client is asked for."""
EVERY_S: Final = 0.25
"""Pause between two reports of progress, at least."""

Pull = Callable[[HubName, Callable[[int, int], None], Callable[[str], None]], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class _Job:
    shown: ShownJob
    began_s: float
    loads: str = ""
    """The model that is loaded, as nodes know it."""
    ended_s: float | None = None
    task: asyncio.Task[None] | None = None
    nodes: dict[int, ShownProgress] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class Jobs:
    """The jobs of one server. `notify` is called when one has changed."""

    service: Service
    notify: Callable[[], None]
    _: KW_ONLY
    download: Pull = pull_beside
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._n_begun = 0
        self._notified_s = 0.0

    def listed(self) -> list[ShownJob]:
        """List those that run, and those that ended not long ago, in the order of their start."""
        now_s = self.clock()
        for name, job in list(self._jobs.items()):
            if job.ended_s is not None and now_s - job.ended_s > KEPT_S:
                del self._jobs[name]
        return [self._as_shown(job) for job in self._jobs.values()]

    async def load(self, name: str) -> ShownJob:
        """Load a model. Raises HttpError 404 for one that nobody has, 409 while one loads."""
        model = await self.service.models.find(name or None)
        self._check_free("load", "")
        job = self._begin("load", model.name)
        job.loads = model.choice.model
        switch = self.service.switch

        def note(text: str) -> None:
            if not job.nodes:  # later its nodes tell more
                job.shown.phase = self.service.models.shown(text)
                self._tell()

        async def work() -> None:
            place = await switch.admit(
                model.choice,
                note=note,
                on_progress=lambda progress: self._take(job, progress),
                promise_s=0.0,
            )
            switch.leave(place)

        return self._run(job, work)

    def unload(self, name: str) -> ShownJob:
        """Free the model of the ring, called `name`, "" if unknown. Raises HttpError 409 while one
        loads.
        """
        self._check_free("load", "")
        self._check_free("unload", "")
        job = self._begin("unload", name)
        switch = self.service.switch
        unload = (
            partial(switch.unload, switch.model) if switch.model else self.service.client.unload
        )
        return self._run(job, unload)

    def pull(self, text: str) -> ShownJob:
        """Pull a model from the Hub to this machine.

        Raises HttpError 400 for what is no name of the Hub, 409 while the same one is pulled, 429
        while MAX_PULLS others are.
        """
        name = HubName.parse(text)
        if name is None:
            raise refused(f"model is {shown(text)}: give ORG/NAME or ORG/NAME:GGUF", "model")
        self._check_free("pull", str(name))
        if sum(job.shown.kind == "pull" for job in self._running()) >= MAX_PULLS:
            raise too_many(f"{MAX_PULLS} models are being pulled already", RETRY_S)
        job = self._begin("pull", str(name))
        job.shown.phase = "downloading"

        def progress(done_bytes: int, total_bytes: int) -> None:
            job.shown.done_bytes, job.shown.total_bytes = done_bytes, total_bytes
            self._tell()

        async def work() -> None:
            await self.download(name, progress, self.service.settings.log)
            self.service.models.forget()

        return self._run(job, work)

    async def cancel(self, name: str) -> ShownJob:
        """Cancel a job, if it has not ended. Raises HttpError 404 for one that is not listed."""
        job = self._jobs.get(name)
        if job is None:
            raise refused(f"there is no job '{name[:50]}'", status=404)
        if job.task is not None and not job.task.done():
            await cancel_all(job.task)
            if job.loads:
                with suppress(ShardnetError):
                    await self.service.switch.unload(job.loads)
        return self._as_shown(job)

    def _running(self) -> list[_Job]:
        return [job for job in self._jobs.values() if job.ended_s is None]

    def _check_free(self, kind: JobKind, model: str) -> None:
        """Raise HttpError 409 while a job of this kind runs, with this model unless that is ""."""
        for job in self._running():
            if job.shown.kind == kind and (not model or job.shown.model == model):
                what = f"{kind}ing {job.shown.model}".strip()
                message = f"{what} goes on already: cancel it, or wait until it ends"
                raise refused(message, status=409)

    def _begin(self, kind: JobKind, model: str) -> _Job:
        self._n_begun += 1
        name = str(self._n_begun)
        ended = [key for key, job in self._jobs.items() if job.ended_s is not None]
        for key in ended[: max(0, len(self._jobs) + 1 - MAX_KEPT)]:
            del self._jobs[key]
        shown_job = ShownJob(id=name, kind=kind, model=model)
        self._jobs[name] = _Job(shown=shown_job, began_s=self.clock())
        return self._jobs[name]

    def _run(self, job: _Job, work: Callable[[], Coroutine[Any, Any, None]]) -> ShownJob:
        job.task = self.service.keep(self._watched(job, work))
        job.task.add_done_callback(lambda task: self._end(job, "cancelled"))
        self.notify()
        return self._as_shown(job)

    async def _watched(self, job: _Job, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do the work, and keep what became of it."""
        try:
            await work()
        except ShardnetError as error:
            self._end(job, "failed", error)
        except Exception as error:
            self._end(job, "failed", internal_error(job.shown.kind, error))
        else:
            self._end(job, "done")

    def _end(self, job: _Job, state: JobState, error: ShardnetError | None = None) -> None:
        """Keep how a job ended. What is said first counts."""
        if job.ended_s is not None:
            return
        job.shown.state, job.ended_s = state, self.clock()
        if error is not None:
            shown_text = self.service.models.shown
            job.shown.error = shown_text(error.message)
            job.shown.remedy = shown_text(error.remedy) or None
        self.notify()

    def _take(self, job: _Job, progress: NodeProgress) -> None:
        """Take the progress of a stage. Counts of what is measured are not added to bytes."""
        if job.shown.phase == "measuring" or progress.phase == "measuring":
            job.nodes.clear()
        job.shown.phase = progress.phase
        job.nodes[progress.rank] = convert(progress, ShownProgress, from_attributes=True)
        job.shown.done_bytes = sum(node.done_bytes for node in job.nodes.values())
        job.shown.total_bytes = sum(node.total_bytes for node in job.nodes.values())
        self._tell()

    def _tell(self) -> None:
        """Report progress, not too often: what was left out goes with the next report."""
        now_s = self.clock()
        if now_s - self._notified_s >= EVERY_S:
            self._notified_s = now_s
            self.notify()

    def _as_shown(self, job: _Job) -> ShownJob:
        end_s = self.clock() if job.ended_s is None else job.ended_s
        nodes = [job.nodes[rank] for rank in sorted(job.nodes)]
        return replace(job.shown, age_s=end_s - job.began_s, nodes=nodes)
