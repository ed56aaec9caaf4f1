"""Finds what installed packages add to shardnet, by their entry points (docs/extending.md).

The one place that imports code by a name which is not written here: a package is code that the user
has installed. Must not know what is added.
"""

from __future__ import annotations

from importlib import metadata
from typing import Final

from shardnet.errors import ConfigurationError

COMPUTES: Final = "shardnet.computes"
"""Entry points of this group are ComputePlugins; `--device` takes their names."""
ENDPOINTS: Final = "shardnet.endpoints"
"""Entry points of this group are functions that return a list of endpoints for HTTP servers."""


def installed_names(group: str) -> list[str]:
    """List the names of a group's entry points, without importing what they name."""
    return sorted({entry.name for entry in metadata.entry_points(group=group)})


def installed(group: str, name: str) -> object:
    """Import what a package has added under `name`.

    Raises ConfigurationError, which names the package, where no package has, several have, or what
    was added cannot be imported.
    """
    found = {entry.value: entry for entry in metadata.entry_points(group=group, name=name)}
    if len(found) != 1:
        which = " and ".join(sorted(found)) or "no installed package"
        raise ConfigurationError(
            f"{which} {'add' if len(found) > 1 else 'adds'} {name!r} to {group}",
            remedy="uninstall all of them but one" if found else "install the package that adds it",
        )
    [entry] = found.values()
    package = entry.dist.name if entry.dist is not None else entry.value
    try:
        return entry.load()
    except Exception as error:  # of somebody else's code: any
        raise ConfigurationError(
            f"{package} adds {name!r} to {group}, and cannot be imported: {error!r}",
            remedy=f"repair or uninstall {package}",
        ) from error
