"""In which texts drafts are looked up."""

from __future__ import annotations

import asyncio

from support.rings.stage_forms import FORM

from shardnet.cluster.head.drafts import NGRAM, Drafts
from shardnet.runtime.scheduling.drafting import DraftSource
from shardnet.wire.messages.drafting import LoadDrafter

SAID = [1, 2, 3, 4, 330, 5]


async def source(drafts: Drafts, vocab_size: int) -> DraftSource:
    """What drafts for a request to a model of so many token ids."""
    speculation = await drafts.speculation(
        LoadDrafter(request=0, drafter=NGRAM, form=FORM, vocab_size=vocab_size),
        0,
        rewinds=True,
    )
    assert speculation is not None
    assert speculation.make_draft_source is not None
    return speculation.make_draft_source(lambda: None)


def test_no_draft_is_of_a_text_of_another_model() -> None:
    """A token that the model lacks would fail the step, and all requests in it."""

    async def main() -> None:
        drafts = Drafts()
        ended, running = await source(drafts, 400), await source(drafts, 400)
        ended.draft(SAID, 1)
        ended.close()
        assert (await source(drafts, 400)).draft([9, 1, 2, 3, 4], 2) == [330, 5]
        assert (await source(drafts, 320)).draft([9, 1, 2, 3, 4], 2) == []
        running.draft(SAID, 1)
        running.close()
        assert (await source(drafts, 320)).draft([9, 1, 2, 3, 4], 2) == []

    asyncio.run(main())
