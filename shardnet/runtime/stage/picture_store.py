"""Rows of encoded pictures, from the tower to the first stage's steps.

Knows how many bytes they take, and who needs them. Must not know towers or files. The loop puts
rows in and takes them out, the compute thread reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shardnet.model.vision.picture import EncodedPicture

KEPT_BYTES: Final = 256 << 20
"""Rows that no request needs are kept up to so many bytes, for conversations that go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPicture:
    """A picture's rows; row `n` belongs at `offsets[n]` positions behind the first one."""

    offsets: tuple[int, ...]
    encoded: EncodedPicture

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return sum(part.nbytes for part in (self.encoded.rows, *self.encoded.deep))


@dataclass(slots=True)
class PictureStore:
    """Rows by the digests of their pictures, those that were used last behind the others."""

    most_bytes: int = KEPT_BYTES
    _kept: dict[bytes, StoredPicture] = field(default_factory=dict)
    _n_users: dict[bytes, int] = field(default_factory=dict)

    def get(self, digest: bytes) -> StoredPicture | None:
        """Return a picture's rows. For any thread."""
        return self._kept.get(digest)

    def put(self, digest: bytes, stored: StoredPicture) -> None:
        """Keep a picture's rows."""
        self._kept[digest] = stored
        self._shrink()

    def use(self, digests: Iterable[bytes]) -> None:
        """Keep the rows of these pictures, those to come too, until `leave`."""
        for digest in digests:
            self._n_users[digest] = self._n_users.get(digest, 0) + 1

    def leave(self, digests: Iterable[bytes]) -> None:
        """Need the rows of these pictures no more; see `use`."""
        for digest in digests:
            self._n_users[digest] -= 1
            if not self._n_users[digest]:
                del self._n_users[digest]
                if digest in self._kept:
                    self._kept[digest] = self._kept.pop(digest)
        self._shrink()

    def _shrink(self) -> None:
        n_bytes = sum(stored.size_bytes for stored in self._kept.values())
        for digest in [*self._kept]:
            if n_bytes <= self.most_bytes:
                return
            if digest not in self._n_users:
                n_bytes -= self._kept.pop(digest).size_bytes
