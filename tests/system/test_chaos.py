"""Some short seeds of scripts/chaos on one ring of three nodes."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

from support.chaos.faults import Moment, draw_rounds, shortened
from support.chaos.lab import Lab
from support.chaos.ledger import Entry
from support.chaos.models import made_model
from support.chaos.rounds import Rounds
from support.chaos.streams import make_prompts
from support.soak import cases, is_soak

from shardnet.transport.loop import run

SEEDS = cases([3, 12], [5, 7, 39, 43, 53])
HEADS = dict(cases([(64, False), (186, True)], [(22, False), (86, True)]))
"""Seeds that drain the head (64, 86) or kill it, and whether it has a deputy then."""
N_NODES = 3
N_STREAMS = 5
N_TOKENS = 20
LONGEST = 8000 if is_soak() else 2000
MOMENTS = frozenset({Moment.RUNNING, Moment.LOADING, Moment.BESIDE, Moment.RECOVERING})


def test_no_fault_changes_a_text_or_leaves_anything_behind(tmp_path: Path) -> None:
    entries: list[Entry] = []

    async def main() -> list[str]:
        lab = Lab(tmp_path, N_NODES, random.Random(0))
        try:
            await lab.start()
            async with Rounds(
                lab,
                0,
                model=made_model("bundled", tmp_path / "models"),
                prompts=make_prompts(N_STREAMS, N_TOKENS, longest=LONGEST),
                return_s=0.0,
            ) as rounds:
                await rounds.record_undisturbed()
                for seed in (*SEEDS, *HEADS):
                    [drawn] = islice(draw_rounds(seed, N_NODES, moments=MOMENTS), 1)
                    short = shortened(drawn, longest_s=1.0, most_tokens=N_STREAMS * N_TOKENS // 2)
                    assert drawn.ends_head == (seed in HEADS)
                    entries.append(await rounds.run(short, has_deputy=HEADS.get(seed, False)))
                    print(entries[-1].row)
        finally:
            wrong = await lab.close()
        return wrong

    assert run(main()) == []
    assert [entry.row for entry in entries if not entry.is_good] == []
    assert sum(entry.n_recoveries for entry in entries) > 0
