"""Words for a ring that was lost, as its nodes tell of it: who was lost comes first.

Knows how links name their ends in errors. Must not know rings.
"""

from __future__ import annotations

from collections.abc import Collection


def lost_first(told: str, others: Collection[str]) -> str:
    """Return what was told to a head so that it begins with the node at the end of the lost link.

    Each link on which that was passed on has put its sender before it: `cleo (ADDRESS): bert
    (ADDRESS): the connection is closed`. The first sender is named at the end, further ones are
    left out. `others` are the names of the ring's nodes beside the head: a link to the head says
    nothing of who was lost, so its other end stays first.
    """
    teller = ""
    while sender := _sender(told, others):
        _, _, rest = told.partition(": ")
        if not _sender(rest, others):
            break
        teller, told = teller or sender, rest
    return f"{told} (as {teller} says)" if teller else told


def _sender(told: str, names: Collection[str]) -> str:
    """Return whose name and address a text begins with, "" for none of these names."""
    who, colon, _ = told.partition(": ")
    named = [name for name in names if who.startswith(f"{name} (") and who.endswith(")")]
    return max(named, key=len, default="") if colon else ""
