"""Endpoints that installed packages add to every HTTP server (docs/extending.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from shardnet.api.server.endpoint import Endpoint
from shardnet.errors import ConfigurationError
from shardnet.plugins import ENDPOINTS, installed, installed_names


def installed_endpoints() -> list[Endpoint[Any]]:
    """List them. Raises ConfigurationError for a package that cannot be used."""
    return [one for name in installed_names(ENDPOINTS) for one in _endpoints_of(name)]


def check_added(own: Sequence[Endpoint[Any]], added: Sequence[Endpoint[Any]]) -> None:
    """Raise ConfigurationError for an added endpoint whose method and path another one has."""
    taken = {(one.method, one.path) for one in own}
    for one in added:
        if (one.method, one.path) in taken:
            raise ConfigurationError(
                f"{one.method} {one.path} of the format {one.dialect.name!r} is taken",
                remedy="uninstall the package that adds it, or have it use another path",
            )
        taken.add((one.method, one.path))


def _endpoints_of(name: str) -> list[Endpoint[Any]]:
    make = installed(ENDPOINTS, name)
    try:
        made = cast(Callable[[], object], make)()
    except Exception as error:  # of somebody else's code: any
        raise _unusable(name) from error
    if isinstance(made, list) and all(isinstance(one, Endpoint) for one in made):
        return made
    raise _unusable(name)


def _unusable(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name!r} of {ENDPOINTS} should be a function that returns a list of endpoints",
        remedy="uninstall the package that adds it, or tell its makers",
    )
