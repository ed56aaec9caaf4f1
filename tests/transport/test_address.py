"""Addresses as people, and members, write them."""

from __future__ import annotations

import pytest

from shardnet.errors import UsageError
from shardnet.transport.address import split_address


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("192.168.1.12:7433", ("192.168.1.12", 7433)),
        ("[fe80::1%eth0]:7433", ("fe80::1%eth0", 7433)),
        ("küche.local:1", ("küche.local", 1)),
    ],
)
def test_an_address_is_split(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    "address",
    [
        *("", "nas", "nas:", ":1", "nas:0", "nas:65536", "nas:²", "nas:" + "9" * 5000),
        *("x" * 64 + ":1", "a..b:1", "x" * 290 + ":1"),
    ],
)
def test_what_the_resolver_would_raise_something_else_for_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match="is not HOST:PORT"):
        split_address(address)
