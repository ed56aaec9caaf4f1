"""Control messages by which a node comes to run another version, and its ring takes it back.

Knows the fields, their types and their bounds (docs/protocol.md section 8). The wheel comes over a
bulk link before (messages/bulk.py). Knows nothing of what is installed or planned.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from shardnet.types import Digest
from shardnet.wire.framing import schema


class DescribeUpdate(schema.Numbered, frozen=True, kw_only=True):
    """Ask a node how it comes to run another version. Answered by UpdateDescribed."""


class UpdateDescribed(schema.Reply, frozen=True, kw_only=True):
    """Answers DescribeUpdate.

    `keeper` names the process that would start the other version, "" where none is there.
    `refusal` says why this node takes none, "" where it does, and `remedy` what to do there then.
    `platform` is Python's name for the machine. `failure` says why the version does not run that
    was to be installed last, "" where it does. A head has a `deputy`, "" for none. `cut_off` says
    whom the end of the process would cut off, "" for nobody.
    """

    keeper: schema.Name = ""
    refusal: schema.Explanation = ""
    remedy: schema.Explanation = ""
    platform: schema.Name = ""
    failure: schema.Explanation = ""
    deputy: schema.Name = ""
    cut_off: schema.Explanation = ""


class Update(schema.Numbered, frozen=True, kw_only=True):
    """Order a node to run the version of a wheel that it was sent.

    It gives its layers away first, as for Drain. If it is not empty after `deadline_s` seconds it
    goes on as before, and the order fails. Where the others cannot do without it, their requests
    wait until it is back, if it `may_pause` them. Answered by Done when it is empty, LoadProgress
    before. The version before is installed again unless KeepUpdate comes within `within_s` seconds
    of the start of the other one.
    """

    sha256: Digest
    deadline_s: schema.Seconds
    within_s: schema.Seconds
    may_pause: bool = False


class KeepUpdate(schema.Numbered, frozen=True, kw_only=True):
    """Have a node stay with the version that it has begun to run. Answered by Done."""


class Rearrange(schema.Numbered, frozen=True, kw_only=True):
    """Have the head of a ring plan again with all nodes that are there, and change over if need be.

    With `without` it only plans, without the node of that id. Answered by Rearranged, a Redirect
    where another node is the head, Failed where the nodes that are there cannot do it.
    """

    without: schema.Name = ""


class Rearranged(schema.Reply, frozen=True, kw_only=True):
    """Answers Rearrange: the ids of the nodes of the ring, or of the one planned; [] for none.

    `known` are those of all nodes that the head could have used.
    """

    nodes: Annotated[list[schema.Name], Meta(max_length=schema.MAX_STAGES)]
    known: Annotated[list[schema.Name], Meta(max_length=1024)] = []


UpdateRequest: TypeAlias = DescribeUpdate | Update | KeepUpdate | Rearrange
"""Requests about versions."""
UpdateMessage: TypeAlias = UpdateRequest | UpdateDescribed | Rearranged
"""These, and their answers."""
