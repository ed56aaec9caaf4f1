"""What of a URL may be shown, and whether the proxies of the environment can be used.

Knows URLs and the variables that name proxies. Must not know what is downloaded.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

import httpx2

from shardnet.errors import HubError

PROXY_VARIABLES = "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY"


def split_url(url: str) -> SplitResult:
    """Split a URL of http or https.

    Raises HubError, which does not repeat one that is malformed: it may hold a password.
    """
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise HubError(
            "this URL is malformed: check its host and port, and write special characters of a "
            "password as %XX"
        ) from error
    if parts.scheme not in ("http", "https") or not has_host:
        raise HubError(f"{shown(url)} is not a URL that begins with https:// or http://")
    return parts


def shown(url: str) -> str:
    """Return a URL without what may be secret: user, password, query."""
    scheme, _, rest = url.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def check_proxies() -> None:
    """Raise HubError where the environment names a proxy that cannot be used."""
    try:
        httpx2.Client(verify=False).close()  # it connects to nothing
    except ImportError as error:
        raise HubError(
            "the environment names a SOCKS proxy, which needs the package socksio: install it "
            f"(pip install socksio), or name an HTTP proxy in {PROXY_VARIABLES}"
        ) from error
    except (ValueError, httpx2.InvalidURL) as error:
        raise HubError(
            f"the proxy in {PROXY_VARIABLES} is none that can be used: give http://HOST:PORT, "
            "with special characters of a password as %XX, or unset it"
        ) from error


def what_to_look_at() -> str:
    """Say where to look when nobody answers."""
    if getproxies():
        return f"the network and the proxy that the environment names ({PROXY_VARIABLES})"
    return "the network"
