"""The keys of config.json, each taken once, checked, and named in every error.

Knows types and bounds. Must not know what a family's keys mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardnet.errors import CheckpointError, UnsupportedModelError, shown
from shardnet.model.config.harmless_keys import is_harmless
from shardnet.model.config.limits import SCALES, Range

MAX_SIZE = 2**31 - 1
"""Cap on what a config may claim, so that a damaged one cannot make us fill the memory."""

MAX_KEY = 200
"""Characters of an unknown key that a message repeats."""

MAX_UNKNOWN = 64
"""Unknown keys that are noted; a config with more is of another model."""

_MAX_FLOAT_INT = 2**1000
"""Larger integers do not fit a float."""


class Fields:
    """The keys of one JSON object. What nobody has taken is noted by name.

    `where` names the object in messages, `prefix` the keys above it, with their dots. Unknown keys
    are noted in the list `unknown`, which the objects inside share; without one they are refused by
    `refuse_unknown`. What takes a value raises
    CheckpointError for one that is malformed, or missing and without a default.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        where: str,
        prefix: str = "",
        unknown: list[str] | None = None,
    ) -> None:
        self.where = where
        self._refuses = unknown is None
        self.unknown = [] if unknown is None else unknown
        """Keys that nobody knows, each with its value: `logit_scale = 0.1`."""
        self._raw = raw
        self._prefix = prefix
        self._taken: set[str] = set()

    def given(self, key: str) -> bool:
        """Whether the key is present, null or not."""
        return key in self._raw

    def take_the_rest(self) -> dict[str, Any]:
        """Return what nobody has taken, of any type."""
        rest = {key: value for key, value in self._raw.items() if key not in self._taken}
        self._taken.update(rest)
        return rest

    def inner(self, key: str, raw: Mapping[str, Any]) -> Fields:
        """Make a reader of the object `raw`, which stands under `key`."""
        return Fields(raw, self.where, f"{self._prefix}{key}.", self.unknown)

    def missing(self, key: str) -> bool:
        """Whether the key is absent or null. It counts as taken."""
        self._taken.add(key)
        return self._raw.get(key) is None

    def take(self, key: str, kind: Any, *default: Any) -> Any:
        """Return the value of `key`, checked to be of type `kind`; absent or null: the default."""
        self._taken.add(key)
        value = self._raw.get(key)
        if value is None:
            if default:
                return default[0]
            raise self.damaged(f"{self._prefix}{key} is missing")
        if kind is float and isinstance(value, int) and abs(value) <= _MAX_FLOAT_INT:
            value = value if isinstance(value, bool) else float(value)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = [k.__name__ for k in kinds]
            raise self.damaged(
                f"{self._prefix}{key} is {shown(value)}, expected {' or '.join(names)}"
            )
        return value

    def positive(self, key: str, *default: int, at_most: int = MAX_SIZE) -> int:
        """Return an integer from 1 to `at_most`."""
        value: int = self.take(key, int, *default)
        if not 1 <= value <= at_most:
            raise self.damaged(f"{self._prefix}{key} is {shown(value)}, expected 1 to {at_most}")
        return value

    def optional(self, key: str) -> int | None:
        """Return an integer above 0, None where the key is absent or null."""
        return None if self.missing(key) else self.positive(key)

    def number(self, key: str, *default: float, within: Range = SCALES) -> float:
        """Return a number in the range `within`, so that nothing computed with it overflows."""
        value: float = self.take(key, float, *default)
        if not within.least <= value <= within.most:
            raise self.damaged(f"{self._prefix}{key} is {value}, expected {within}")
        return value

    def optional_number(self, key: str, *, within: Range = SCALES) -> float | None:
        """Return a number in the range `within`, None where the key is absent or null."""
        return None if self.missing(key) else self.number(key, within=within)

    def numbers(self, key: str, count: int, *, within: Range) -> tuple[float, ...]:
        """Return a list of `count` numbers in the range `within`."""
        values: list[Any] = self.take(key, list)
        if len(values) != count:
            raise self.damaged(f"{self._prefix}{key} has {len(values)} numbers, expected {count}")
        for value in values:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not within.least <= value <= within.most:
                raise self.damaged(f"{self._prefix}{key} holds {shown(value)}, expected {within}")
        return tuple(float(value) for value in values)

    def require(self, key: str, only: bool | float) -> None:
        """Raise UnsupportedModelError for any value but `only`; an absent key counts as `only`."""
        value = self.take(key, type(only), only)
        if value != only:
            raise self.unsupported(key, value, repr(only))

    def ignore(self, *keys: str) -> None:
        """Take the keys, whatever their value."""
        self._taken.update(keys)

    def take_all(self) -> Mapping[str, Any]:
        """Take every key, for a reader that knows them all."""
        self._taken.update(self._raw)
        return self._raw

    def note_the_rest(self) -> None:
        """Note every key that nobody took in `unknown`, unless it cannot change what is computed.

        Raises UnsupportedModelError for more than MAX_UNKNOWN of them.
        """
        for key, value in self._raw.items():
            if key in self._taken or is_harmless(key) or _says_nothing(value):
                continue
            if len(self.unknown) == MAX_UNKNOWN:
                raise UnsupportedModelError(
                    f"{self.where}: more than {MAX_UNKNOWN} keys are not known to shardnet, "
                    f"{self.unknown[0]} among them",
                    remedy="use a checkpoint of a supported model",
                )
            named = key if key.isprintable() and len(key) <= MAX_KEY else shown(key)
            self.unknown.append(f"{self._prefix}{named} = {shown(value)}")

    def refuse_unknown(self) -> None:
        """Raise UnsupportedModelError, which names all unknown keys, unless a list was given."""
        if self._refuses and self.unknown:
            raise unknown_keys_error(self.where, self.unknown)

    def damaged(self, what: str) -> CheckpointError:
        """Make the error for a value that is malformed; `what` says which and how."""
        return CheckpointError(
            f"{self.where}: {what}", remedy="fetch or export the checkpoint again"
        )

    def unsupported(self, key: str, value: object, supported: str) -> UnsupportedModelError:
        """Make the error for a value that is not implemented; `supported` lists those that are."""
        return UnsupportedModelError(
            f"{self.where}: {self._prefix}{key} = {shown(value)} is not supported; "
            f"supported: {supported}"
        )


def unknown_keys_error(where: str, unknown: Sequence[str]) -> UnsupportedModelError:
    """Make the error for `unknown` keys, at least one, of the config `where`: it names them all."""
    one = f"{unknown[0]} is" if len(unknown) == 1 else f"{len(unknown)} keys are"
    names = "" if len(unknown) == 1 else f": {', '.join(unknown)}"
    return UnsupportedModelError(
        f"{where}: {one} not known to shardnet and may change what the model computes{names}",
        remedy="use another checkpoint, or --ignore-unknown-config to compute as if they were not "
        "there",
    )


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})
