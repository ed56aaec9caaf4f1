"""What the log says of a recovery."""

from __future__ import annotations

import pytest

from shardnet.cluster.recovery.recovery import RecoveryRecord


@pytest.mark.parametrize(
    ("n_requests", "waiting", "went_on"),
    [
        (0, "0 requests wait", "0 requests"),
        (1, "1 request waits", "1 request"),
        (2, "2 requests wait", "2 requests"),
    ],
)
def test_requests_are_counted_in_words(n_requests: int, waiting: str, went_on: str) -> None:
    record = RecoveryRecord(
        at_s=0.0, why="bert was lost", n_requests=n_requests, lost=("bert",), nodes=("anna",)
    )
    assert record.first_words == f"recovering: bert was lost; {waiting}"
    assert f"{went_on} went on over anna without bert" in record.words
