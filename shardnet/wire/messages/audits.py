"""Control messages by which the head of a ring has its stages audited (docs/reliability.md).

Knows the fields, their types and their bounds. Knows nothing of how bits are compared.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from shardnet.wire.framing.schema import U32, Count, LayerNumber, Name, RequestId, Seconds, Tagged

MAX_AUDITED_BYTES: Final = 1 << 20
AuditedRows = Annotated[bytes, Meta(max_length=MAX_AUDITED_BYTES)]
"""Rows in the dtype of their ring, row-major, little-endian."""


class AuditStage(Tagged, frozen=True, kw_only=True):
    """Have a stage look at some of its weights, and compute rows that it computes each time.

    It looks at weights for as long as the rows have taken. Those before and after `layer` are asked
    for. Without `with_rows` it computes none. Failed with code 51 says what is wrong with it.
    """

    request: RequestId
    ring: Name
    epoch: U32
    layer: LayerNumber
    with_rows: bool


class StageAudited(Tagged, frozen=True, kw_only=True):
    """Answers AuditStage: nothing is wrong. The stage was kept from steps for `took_s`.

    It has looked at `looked_bytes` of `weight_bytes`. Rows `before` the model's first layer are
    not sent: token ids are embedded there, the same everywhere.
    """

    request: RequestId
    took_s: Seconds
    looked_bytes: Count
    weight_bytes: Count
    before: AuditedRows = b""
    after: AuditedRows = b""


class ComputeLayer(Tagged, frozen=True, kw_only=True):
    """Have a node of a ring compute rows with a layer that it reads from its checkpoint for this.

    It need not be a layer of its stage. LoadProgress precedes the answer where it takes long.
    """

    request: RequestId
    ring: Name
    epoch: U32
    layer: LayerNumber
    before: AuditedRows


class LayerComputed(Tagged, frozen=True, kw_only=True):
    """Answers ComputeLayer, in `took_s` of one thread."""

    request: RequestId
    took_s: Seconds
    after: AuditedRows
