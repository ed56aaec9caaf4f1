"""Byte ranges of files on the Hub, over connections that may break.

Blocks: to be called on a thread that may wait. Must not know where bytes are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import sleep
from typing import Final

from shardnet import __version__
from shardnet.checkpoint.hub_cache import HubName
from shardnet.checkpoint.tensors.stored_tensor import MAX_HEADER_BYTES, ByteRange
from shardnet.errors import HubError

SILENCE_S: Final = 15.0
"""Timeout while the Hub sends no byte."""
WAITS_S: Final = (0.0, 2.0, 5.0, 10.0)
"""Waits between attempts in a row without a byte: a network that is gone comes back in seconds.
After one attempt more a download fails."""
PASSING: Final = (429, 500, 502, 503, 504)
"""HTTP statuses of a server that may answer the same request later."""
RESUME: Final = "run the command again to go on"
_LENGTH_BYTES: Final = 8
_CONNECTIONS: Final = 8
"""Samples requested at one time: each takes a round trip, and few bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a model on the Hub, which states `sha256` (hex) for large files only, else ""."""

    name: str
    size_bytes: int
    sha256: str


class HubRanges:
    """Reads byte ranges of a commit's files."""

    def __init__(self, name: HubName, commit: str) -> None:
        from huggingface_hub import get_session
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        self._name, self._commit = name, commit
        self._session = get_session()
        self._headers = build_hf_headers(library_name="shardnet", library_version=__version__)

    def header(self, file: HubFile) -> bytes:
        """Fetch the header of a safetensors file, its length prefix included."""
        damaged = HubError(
            f"{self._name}: {file.name} is no safetensors file", remedy="report it to its authors"
        )
        if file.size_bytes < _LENGTH_BYTES:
            raise damaged
        length = b"".join(self.stream(file.name, 0, _LENGTH_BYTES))
        end = _LENGTH_BYTES + int.from_bytes(length, "little")
        if end > min(file.size_bytes, _LENGTH_BYTES + MAX_HEADER_BYTES):
            raise damaged
        return length + b"".join(self.stream(file.name, _LENGTH_BYTES, end))

    def samples(
        self, ranges: Mapping[str, Sequence[ByteRange]]
    ) -> Iterator[tuple[str, int, bytes]]:
        """Fetch byte ranges of several files, a few at a time; yield (file, offset, bytes)."""

        def fetch(asked: tuple[str, int, int]) -> tuple[str, int, bytes]:
            file, offset, n_bytes = asked
            return file, offset, b"".join(self.stream(file, offset, offset + n_bytes))

        wanted = [(file, *part) for file, parts in ranges.items() for part in parts]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            yield from pool.map(fetch, wanted)

    def stream(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [begin, end) of a file, reconnecting if a connection breaks.

        Raises HubError, httpx2.TransportError or HfHubHTTPError after several attempts in a row
        without a byte, see WAITS_S.
        """
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        waits = iter(WAITS_S)
        while begin < end:
            had = begin
            failure: Exception = HubError(
                f"{self._name}: {file} ends after {begin} bytes", remedy=RESUME
            )
            try:
                for piece in self._connect(file, begin, end):
                    begin += len(piece)
                    yield piece
            except httpx2.TransportError as error:
                failure = error
            except HfHubHTTPError as error:
                if error.response.status_code not in PASSING:
                    raise
                failure = error
            if begin > had:
                waits = iter(WAITS_S)
                continue
            wait_s = next(waits, None)
            if wait_s is None:
                raise failure
            sleep(wait_s)

    def _connect(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

        url = hf_hub_url(self._name.repo, file, revision=self._commit)
        headers = {**self._headers, "Range": f"bytes={begin}-{end - 1}"}
        with self._session.stream(
            "GET", url, headers=headers, timeout=SILENCE_S, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            said = response.headers.get("Content-Range", "")
            if not said.startswith(f"bytes {begin}-{end - 1}/"):
                raise HubError(
                    f"{self._name}: asked for bytes {begin} to {end} of {file}, the Hub sends "
                    f"{said or 'all'}",
                    remedy="pull the whole model",
                )
            for piece in response.iter_raw():
                if len(piece) > end - begin:
                    raise HubError(
                        f"{self._name}: more of {file} came than was asked for", remedy=RESUME
                    )
                begin += len(piece)
                yield piece
