"""What months bring to a cluster, once or twice each: a few moments of `scripts/soak --months`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chaos.months import Months, months
from support.soak import is_soak

from shardnet.transport.loop import run

SHORT = ("clock", "address", "key", "disk", "clock", "suspend", "key", "tmp")
"""In this order the key is replaced on nodes that have other addresses by now, and the time of the
old one is ended while a node is back from an hour's sleep, whose clock has jumped."""


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_months_change_no_text_and_leave_nothing_behind(tmp_path: Path) -> None:
    async def main() -> Months:
        async with months(tmp_path, 3, 61, tmp_path / "samples.jsonl", minute_s=60.0) as lived:
            for what in [*SHORT, *lived.events()]:
                await lived.happen(what)
            await lived.answered()
        return lived

    lived = run(main())
    assert lived.wrong == []
    assert lived.happened["key"] >= 2
    assert lived.happened["key refused"] == 0
