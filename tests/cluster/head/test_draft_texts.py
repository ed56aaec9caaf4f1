"""In which texts drafts are looked up."""

from __future__ import annotations

import asyncio

import pytest

from shardnet.cluster.head.drafts import Drafts
from shardnet.cluster.store.disk_jobs import DiskJobs
from shardnet.errors import UsageError
from shardnet.runtime.engine.requests import Speculation
from shardnet.runtime.scheduling.drafting import MTP, NGRAM, DraftSource

SAID = [1, 2, 3, 4, 330, 5]


async def source(drafts: Drafts, vocab_size: int) -> DraftSource:
    """What drafts for a request to a model of so many token ids."""
    speculation = await drafts.speculation(
        NGRAM, 0, vocab_size=vocab_size, context=512, rewinds=True
    )
    assert speculation is not None
    assert speculation.make_draft_source is not None
    return speculation.make_draft_source(lambda: None)


def test_no_draft_is_of_a_text_of_another_model() -> None:
    """A token that the model lacks would fail the step, and all requests in it."""

    async def main() -> None:
        disk = DiskJobs("drafts")
        drafts = Drafts(disk=disk, device="cpu", spare_bytes=lambda: 0, threads=lambda: 1)
        ended, running = await source(drafts, 400), await source(drafts, 400)
        ended.draft(SAID, 1)
        ended.close()
        assert (await source(drafts, 400)).draft([9, 1, 2, 3, 4], 2) == [330, 5]
        assert (await source(drafts, 320)).draft([9, 1, 2, 3, 4], 2) == []
        running.draft(SAID, 1)
        running.close()
        assert (await source(drafts, 320)).draft([9, 1, 2, 3, 4], 2) == []

    asyncio.run(main())


def test_auto_takes_what_the_ring_has_and_looks_text_up_beside_it() -> None:
    async def main() -> None:
        disk = DiskJobs("drafts")
        drafts = Drafts(disk=disk, device="cpu", spare_bytes=lambda: 0, threads=lambda: 1)

        async def made(how: str, *, has_mtp: bool, rewinds: bool = True) -> Speculation | None:
            return await drafts.speculation(
                how, 0, vocab_size=9, context=512, rewinds=rewinds, has_mtp=has_mtp
            )

        by_layer, looked_up = [await made("auto", has_mtp=has) for has in (True, False)]
        assert by_layer is not None
        assert looked_up is not None
        assert (by_layer.name, by_layer.make_draft_source) == (MTP, None)
        assert by_layer.most_by_ring > 0
        assert by_layer.look_up is not None
        assert (looked_up.name, looked_up.most_by_ring) == (NGRAM, 0)
        assert looked_up.make_draft_source is not None
        assert await made("auto", has_mtp=False, rewinds=False) is None, "none, and no error"
        with pytest.raises(UsageError, match="made without the layer"):
            await made("mtp", has_mtp=False)

    asyncio.run(main())
