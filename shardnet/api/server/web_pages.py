"""Which web pages may ask a server that has no key: its own, and those of sites that are named.

Every page that a person opens can send requests to this machine's loopback addresses, and a page
whose name is made to mean 127.0.0.1 can read the answers too. What browsers say of a request tells
both: the name it was sent to (Host) and the page it comes from (Origin, Sec-Fetch-Site). Programs
send neither of the latter. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Final

from shardnet.api.server.errors import Fault, HttpError

_PRIVATE: Final = ("localhost", "local", "internal", "home.arpa")
"""Names below these mean nothing in the public DNS: no stranger can make one mean this machine."""

_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


def check_web_page(
    method: str, headers: Mapping[bytes, bytes], hosts: Sequence[str], origins: Sequence[str]
) -> None:
    """Check a request to a server without a key; `headers` are by lower-case name.

    Beside loopback's names, `hosts` may be asked for, and beside the server's own pages, those of
    `origins` may ask; "*" is any. Raises HttpError 403.
    """

    def text(name: bytes) -> str:
        return headers.get(name, b"").decode("latin-1").strip().lower()

    host, origin, site = text(b"host"), text(b"origin"), text(b"sec-fetch-site")
    if not _is_own_name(_without_port(host), hosts):
        raise _refused(
            f"this server is not called {host[:200]}: give it --allowed-host "
            f"{_without_port(host)[:200]}, or an --api-key"
        )
    if site in ("same-origin", "none") or "*" in origins:
        return
    if origin:
        if not _may_ask(origin, host, origins):
            raise _refused(
                f"pages of {origin[:200]} may not ask this server: give it --cors-origin "
                f"{origin[:200]}, or an --api-key"
            )
    elif site and not (method == "GET" and text(b"sec-fetch-mode") == "navigate"):
        raise _refused("pages of other sites may not ask this server")


def _is_own_name(name: str, hosts: Sequence[str]) -> bool:
    """Say whether no public name server can have given this name to the client."""
    if not name or "." not in name or "*" in hosts or name in map(str.lower, hosts):
        return True
    if any(name.endswith(f".{private}") for private in _PRIVATE):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _may_ask(origin: str, host: str, origins: Sequence[str]) -> bool:
    """Say whether a page may ask, by its scheme, name and port."""
    if origin in (one.lower().rstrip("/") for one in origins):
        return True
    scheme, _, place = origin.partition("://")
    if scheme not in _DEFAULT_PORTS:  # an extension or a program with windows, or hidden: "null"
        return origin != "null"
    port = _DEFAULT_PORTS[scheme]
    return place.removesuffix(port) == host.removesuffix(port)


def _refused(message: str) -> HttpError:
    return HttpError(Fault(status=403, kind="permission_error", message=message))
