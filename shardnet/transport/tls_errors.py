"""What OpenSSL's errors mean to a person: which side lacks the key, or speaks something else.

Knows OpenSSL's names of reasons. Must not know transports; whoever reports adds who the peer is.
"""

from __future__ import annotations

import ssl
from typing import Final

from shardnet.errors import (
    AuthenticationError,
    LinkClosedError,
    LinkError,
    RemoteProtocolError,
)
from shardnet.wire.framing.frames import PREAMBLE_MAGIC, TLS_RECORDS

_OTHER_KEY: Final = "it holds another cluster key"
_SHARE_KEY: Final = (
    "run `shardnet key show` on one of the two machines and `shardnet key join` with that key on "
    "the other"
)
_REFUSALS: Final = (
    "UNKNOWN_CA",
    "BAD_CERTIFICATE",
    "CERTIFICATE_REQUIRED",
    "CERTIFICATE_UNKNOWN",
    "DECRYPT_ERROR",
)
"""Alerts by which a peer says that it does not accept our certificate."""


def handshake_error(error: ssl.SSLError, *, initiator: bool, began_with: bytes) -> LinkError:
    """Return the error of a failed handshake; `began_with` are the peer's first bytes.

    On the acceptor's side only an error about a node of shardnet has a remedy: whoever else dials
    is a stranger, and `shardnet doctor` distinguishes them by it.
    """
    reason = error.reason or str(error)
    if began_with == PREAMBLE_MAGIC:
        return AuthenticationError("it has no cluster key", remedy="run `shardnet key join` there")
    if isinstance(error, ssl.SSLCertVerificationError) or _is_refusal(reason):
        return AuthenticationError(_OTHER_KEY, remedy=_SHARE_KEY)
    if "DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return AuthenticationError("it showed no certificate; only holders of the key may connect")
    if (
        "PROTOCOL" in reason or "NO_SHARED_CIPHER" in reason
    ):  # UNSUPPORTED_PROTOCOL, alerts about it
        what = "it does not speak TLS 1.3, as every node of shardnet does"
        return AuthenticationError(
            what, remedy="install the same shardnet there" if initiator else ""
        )
    if began_with[:1] not in TLS_RECORDS:
        if not initiator:
            return AuthenticationError("it does not speak TLS; it is no node of this cluster")
        return AuthenticationError("it does not speak TLS", remedy="check the address and port")
    remedy = "check that it is a node of shardnet" if initiator else ""
    return AuthenticationError(f"the TLS handshake failed ({reason})", remedy=remedy)


def cut_short() -> LinkError:
    """Return the error of a connection that ends while the handshake is under way."""
    return LinkClosedError("the peer closed the connection during the TLS handshake")


def stream_error(error: ssl.SSLError) -> LinkError:
    """Return the error of an encrypted stream that cannot continue.

    An initiator whose certificate the acceptor refuses learns it only now.
    """
    reason = error.reason or str(error)
    if _is_refusal(reason):
        return AuthenticationError(f"it refuses our certificate: {_OTHER_KEY}", remedy=_SHARE_KEY)
    return RemoteProtocolError(f"the encrypted stream is damaged ({reason})")


def _is_refusal(reason: str) -> bool:
    return "ALERT" in reason and reason.endswith(_REFUSALS)
