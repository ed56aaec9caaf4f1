"""The plain values every room shares: ids, bounds of numbers, layer ranges, dtypes, micro-batches.

Knows nothing of bytes, tensors or sockets, and imports neither torch nor numpy.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Final, Literal, NewType, TypeVar

import msgspec
from msgspec import Meta

from shardnet.constraints import RowMask
from shardnet.errors import UsageError

NodeId = NewType("NodeId", str)
SequenceId = NewType("SequenceId", int)
SlotId = NewType("SlotId", int)
StateId = NewType("StateId", int)
Epoch = NewType("Epoch", int)
StepId = NewType("StepId", int)

BLOCK_POSITIONS = 256
"""Positions in one block of KV room (design: slot, block)."""


def blocks_for(n_positions: int) -> int:
    """Return how many blocks hold `n_positions` positions."""
    return -(-n_positions // BLOCK_POSITIONS)


PROMPT_TAIL_ROWS = 20
"""The last rows of a prompt, which go by themselves where layers keep a state: it is kept before
them. What a template leaves out of the next turn of a chat begins there.
"""


def settled_blocks(n_positions: int) -> int:
    """Return how many blocks of a slot with so many positions do not change any more.

    They end before the last position: the layer that predicts further tokens computes it again when
    the token behind is known.
    """
    return max(0, n_positions - 1) // BLOCK_POSITIONS


def block_spans(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut positions `[begin, end)` at the ends of blocks."""
    while begin < end:
        cut = min(end, (begin // BLOCK_POSITIONS + 1) * BLOCK_POSITIONS)
        yield begin, cut
        begin = cut


WEIGHT_PART_BYTES = 16 << 20
"""Tensors travel, and are checked and kept, in parts of so many bytes; the last is smaller."""

PREFILL_CHUNK_ROWS = 256
"""Rows of one prefill chunk: fixed, counted from position 0, so any split gives the same bits."""


REWIND_ROWS = PREFILL_CHUNK_ROWS
"""Rows by which a slot may be rewound in a model with sliding windows: those of the largest frame.

Its layers keep their window and so many rows (design decision 6).
"""


STORED_PREFIX_POSITIONS = 512
"""Prompts of at least so many positions are kept on disk, where nodes keep any."""

MAX_STORED_BLOCKS = 3500
"""Blocks of one prompt that are kept on disk: their keys fit a SEQUENCE frame."""

BLOCK_KEY_BYTES = 16

MAX_ROWS_IN_FLIGHT = 128
"""Drafts of one sequence in flight: half the rows by which any slot may be rewound."""
LIVE_STATES = 2
"""States that a running sequence takes: its own, and while drafts are verified that before them."""
LEAST_STATES = 24
"""States of each layer that keeps one for which a stage must have room, whatever its context."""
MAX_STATES = 1 << 14
"""Most states of a ring that are kept at once."""
STATE_POSITIONS = 1024
"""Positions for which a stage has room, beyond one context, for each further state."""

U32_MAX: Final = 2**32 - 1
MAX_LAYERS: Final = 10_000
MAX_POSITIONS: Final = 1 << 24

U32 = Annotated[int, Meta(ge=0, le=U32_MAX)]
U64 = Annotated[int, Meta(ge=0)]
"""Its upper bound is that of msgpack."""
Positions = Annotated[int, Meta(ge=0, le=MAX_POSITIONS)]
LayerNumber = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
Digest = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9a-f]{64}\Z")]
"""SHA-256 in hex. The id of a model is one."""


NO_NUL: Final = r"\A[^\x00]*\Z"
PathText = Annotated[str, Meta(max_length=4096, pattern=NO_NUL)]
"""A path or the name of a model. An operating system's path has no NUL."""
Quant = Literal["", "int8", "int4"]
"""What linear weights are quantised to, "" for nothing."""
KvDTypeName = Literal["auto", "int8"]

BlockKey = Annotated[bytes, Meta(max_length=BLOCK_KEY_BYTES)]
"""Stands for all tokens of a prompt up to the end of one block, on one ring."""
BlockKeys = Annotated[tuple[BlockKey, ...], Meta(max_length=MAX_STORED_BLOCKS)]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A map that informs: keys that only another release knows are ignored."""


class Strict(Report, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A map that orders something, and has no other keys: what is not understood is not done.

    Keys that have their default are left out, so that another release reads what makes no use of
    those added since. That compares identities, not values: a key that is added needs a default of
    which there is one (None, "", 0, False, [], ()).
    """


class Tagged(Strict, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """A member of a union: the key `type` holds the class name."""


class TaggedReport(
    Tagged, frozen=True, kw_only=True, forbid_unknown_fields=False, omit_defaults=False
):
    """A member of a union that informs."""


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array with exactly these elements, in this order."""


_Names = TypeVar("_Names", bound=enum.Enum)
K = TypeVar("K")
V = TypeVar("V")


def _named(names: type[_Names], name: str, what: str) -> _Names:
    """Read the name of a `what`. Raises UsageError for one that is none."""
    try:
        return names(name)
    except ValueError:
        choices = ", ".join(member.value for member in names)
        raise UsageError(f"'{name}' is no {what}: choose one of {choices}") from None


class DType(enum.Enum):
    """A dtype that computes or travels. The value is the name used in flags and JSON."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @classmethod
    def named(cls, name: str) -> DType:
        """Read a name. Raises UsageError for one that is none."""
        return _named(cls, name, "dtype")

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2


class Arith(enum.Enum):
    """How the CPUs of a ring compute. The value is the name used in flags and JSON.

    PORTABLE is in float32 by the compiled library, whose bits are the same on every CPU. FAST may
    use bfloat16 instructions where a CPU has them.
    """

    PORTABLE = "portable"
    FAST = "fast"

    @classmethod
    def named(cls, name: str) -> Arith:
        """Read a name. Raises UsageError for one that is none."""
        return _named(cls, name, "arithmetic")


PORTABLE_ARITHMETIC: Final = "portable"
"""What a node says of its arithmetic whose CPU computes with the compiled library in float32."""
PAIRS_ARITHMETIC: Final = "AVX-512 bfloat16"
"""The same with AVX-512's bfloat16 instructions."""
TILES_ARITHMETIC: Final = "AMX bfloat16"
"""The same with AMX's, which add in another order."""

ANY_ROWS = 2**31 - 1
"""As a number of rows up to which bits do not depend on a batch: any number."""

INT8_GROUP_COLUMNS = 64
"""Columns of a row that share one scale on an int8 wire; a row's last group may have fewer."""


class WireDType(enum.Enum):
    """How activations travel from stage to stage. The value is the name used in flags and JSON.

    A ring's own is the dtype it computes in, which rounds nothing. INT8 is 8 bits a column and a
    float32 scale per group of columns (docs/protocol.md section 9).
    """

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    def __init__(self, name: str) -> None:
        self.plain = None if name == "int8" else DType(name)
        """The dtype whose elements travel as they are, None for a layout of its own."""
        self._plain_bytes = self.plain.size_bytes if self.plain else 0

    @classmethod
    def own(cls, dtype: DType) -> WireDType:
        """The wire dtype that keeps every bit of a ring that computes in `dtype`."""
        return cls(dtype.value)

    @classmethod
    def named(cls, name: str) -> WireDType:
        """Read a name. Raises UsageError for one that is none."""
        return _named(cls, name, "wire dtype")

    def row_bytes(self, width: int) -> int:
        """Bytes of one row of `width` columns."""
        if self._plain_bytes:
            return width * self._plain_bytes
        return width + 4 * int8_groups(width)


SLOW_LINKS = "slow"
"""Stands for every slow link where --wire-dtype names links."""

GATHERS = "gather"
"""Stands for all links between the nodes of one stage there."""

_NARROW_WIRES = (WireDType.BFLOAT16, WireDType.FLOAT16, WireDType.INT8)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireChoice:
    """What --wire-dtype asks for: on `every` link, on `slow` ones, on those that are `named`.

    A name counts before slowness, and that before the rest. None is the ring's own dtype. `gather`
    is for the parts between the nodes of one stage, which nothing else narrows; None for their own.
    """

    every: WireDType | None = None
    slow: WireDType | None = None
    gather: WireDType | None = None
    named: tuple[tuple[str, WireDType], ...] = ()

    @property
    def varies(self) -> bool:
        """Whether links may differ."""
        return self.slow is not None or bool(self.named)


def parse_wires(text: str) -> WireChoice:
    """Read `int8`, `slow=int8` or `0-1=int8,desk-pi=bfloat16`, "" for the ring's own dtype.

    A link is named by its two ranks, its two nodes, or is any that is slow; `gather` names the
    links between the nodes of a stage. Raises UsageError.
    """
    every: WireDType | None = None
    named: dict[str, WireDType] = {}
    for part in text.split(",") if text else ():
        link, is_link, name = part.strip().rpartition("=")
        wire = next((wire for wire in _NARROW_WIRES if wire.value == name), None)
        if wire is None:
            raise UsageError(
                f"the wire dtype '{name}': choose bfloat16, float16 or int8",
                remedy="name links as in 0-1=int8, desk-pi=int8 or slow=int8",
            )
        if is_link and not link:
            raise UsageError(
                f"the wire dtype '{part.strip()}' names no link",
                remedy="name its ranks as 0-1, its nodes as desk-pi, or slow for slow links",
            )
        if link:
            named[link] = wire
        else:
            every = wire
    slow, gather = named.pop(SLOW_LINKS, None), named.pop(GATHERS, None)
    return WireChoice(every=every, slow=slow, gather=gather, named=tuple(named.items()))


def int8_groups(width: int) -> int:
    """Count the groups of columns, and so the scales, of a row on an int8 wire."""
    return -(-width // INT8_GROUP_COLUMNS)


_KV_GROUPS = (32, 16)
"""How many columns of a key or value may share one scale in an int8 KV cache."""
_KV_SCALE_BYTES = 2


class KvDType(enum.Enum):
    """How the KV cache holds keys and values. The value is the name used in flags and JSON.

    AUTO holds them as the model computes. INT8 is 8 bits a column and a bfloat16 scale per group of
    columns (docs/adr/0024).
    """

    AUTO = "auto"
    INT8 = "int8"

    def row_bytes(self, width: int, dtype: DType) -> int:
        """Bytes of one key or value of `width` columns, of a model that computes in `dtype`."""
        if self is KvDType.AUTO:
            return width * dtype.size_bytes
        n_groups, group = kv_groups(width)
        return n_groups * (group + _KV_SCALE_BYTES)


def kv_groups(width: int) -> tuple[int, int]:
    """Cut a key or value for int8: the groups of columns, and how many columns each of them has.

    All have 16 or all 32, whole vectors of the compiled library, whichever takes fewer bytes with
    the scales; the last one may end beyond `width`.
    """
    if width == 0:
        return 0, 0
    groups = [(-(-width // columns), columns) for columns in _KV_GROUPS]
    return min(groups, key=lambda own: own[0] * (own[1] + _KV_SCALE_BYTES))


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """A half-open range of absolute layer numbers, `[start, end)`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise UsageError(f"layer range {self.start}-{self.end} is empty or negative")

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"

    @property
    def words(self) -> str:
        """Name the layers for people: the last one included, `layers 0-7` for 0-8."""
        if len(self) == 1:
            return f"layer {self.start}"
        return f"layers {self.start}-{self.end - 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRows:
    """What a slot has of one layer: rows from position `first` on, or a state, in bytes."""

    first: int
    n_bytes: int
    is_state: bool = False


_MOST_DIGITS: Final = 18


def whole_number(text: str) -> int | None:
    """Return the number that a text is, None for what is no number of at most 18 digits."""
    is_one = text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS
    return int(text) if is_one else None


def parse_layer_range(text: str) -> LayerRange:
    """Read `0-8`, half-open. Raises UsageError when it is not two numbers, or empty."""
    start, end = (whole_number(part) for part in text.strip().partition("-")[::2])
    if start is None or end is None:
        raise UsageError(f"'{text:.60}' is not START-END; write for example 0-8")
    return LayerRange(start, end)


def parse_layers(text: str) -> tuple[LayerRange, ...]:
    """Read `0-8,8-12` (half-open, in ring order).

    Raises UsageError when a part is not two numbers, is empty, or the parts do not join at 0.
    """
    ranges = [parse_layer_range(part) for part in text.split(",")]
    expected = 0
    for layers in ranges:
        if layers.start != expected:
            raise UsageError(
                f"range {layers} should start at {expected}; ranges must join, from 0",
                remedy="the end is not part of a range: 0-8,8-12 are layers 0 to 7 and 8 to 11",
            )
        expected = layers.end
    return tuple(ranges)


class RowGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive rows of one sequence in a micro-batch.

    `position` is the position of the first row, `n_sampled` how many of the last rows the tail
    samples. The last `n_drafts` positions up to the last row may be rejected yet: those of drafts
    among the rows, and of drafts in flight before them.
    """

    sequence_id: SequenceId
    slot: SlotId
    position: int
    n_rows: int
    n_sampled: int
    n_drafts: int = 0


_N_ROWS = attrgetter("n_rows")
_N_SAMPLED = attrgetter("n_sampled")


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that travel round the ring in one step, without their activations.

    `token_ids` holds the input token id of every row, group after group. `masks` are those of the
    sampled rows whose output is constrained, in row order.
    """

    epoch: Epoch
    step: StepId
    groups: tuple[RowGroup, ...]
    token_ids: Sequence[int]
    masks: tuple[RowMask, ...] = ()

    @property
    def n_rows(self) -> int:
        """Rows of all groups."""
        return sum(map(_N_ROWS, self.groups))

    @property
    def n_sampled(self) -> int:
        """Rows that the tail samples: the number of ids in the answering token frame."""
        return sum(map(_N_SAMPLED, self.groups))

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise UsageError for an id outside the vocabulary."""
        wrong = next((t for t in self.token_ids if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise UsageError(
                f"token id {wrong} is outside the model's vocabulary of {vocab_size}",
                remedy=f"use ids from 0 to {vocab_size - 1}",
            )


class LiveState(enum.Enum):
    """How a request stands that has not ended. The value is the name used on the wire."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    RESUMED = "resumed"
    RECOVERING = "recovering"


def remember(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Put what is known of `key` last, and forget the first where there are more than `most`."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
