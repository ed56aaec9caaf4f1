"""The list of nodes that is kept up to date, where standard output is no terminal."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardnet.errors import ShardnetError
from shardnet.wire.messages.membership import NodeInfo
from shardnet_cli.commands import nodes
from shardnet_cli.flags.options import Access, Search


def test_a_list_that_nobody_sees_live_is_printed_at_each_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So a reader that is gone is noticed, too."""
    n_looks = 0

    async def gathered(named: list[str], access: Access, search: Search) -> list[NodeInfo]:
        nonlocal n_looks
        n_looks += 1
        if n_looks > 2:
            raise ShardnetError("no more")
        return []

    monkeypatch.setattr(nodes, "gather", gathered)
    monkeypatch.setattr(nodes, "REFRESH_S", 0.0)
    looking: Any = nodes.nodes
    with pytest.raises(ShardnetError, match="no more"):
        asyncio.run(looking.__wrapped__(access=Access(), search=Search(no_mdns=True), watch=True))
    head, empty = nodes.node_lines([], None), ""
    assert capsys.readouterr().out.splitlines() == [*head, empty] * 2
