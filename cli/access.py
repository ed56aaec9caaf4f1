"""With which key a command speaks to nodes: the stored one, one that is named, or none.

Knows --key-file and --insecure. Must not know what is said to the nodes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardnet.cluster.cluster_key import default_key_path, load_key
from shardnet.errors import ConfigurationError

if TYPE_CHECKING:  # not every command needs the library behind it
    from shardnet.transport.identity import Identity


def key_path(key_file: str) -> Path:
    """Return where the key is: the place that is named, else the default one."""
    return Path(key_file).expanduser() if key_file else default_key_path(os.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The flags of a command: `key_file` is "" for the default place."""

    key_file: str
    insecure: bool

    def identity(self) -> Identity | None:
        """Load the key and make an identity of it, None without a key or with --insecure.

        Raises ConfigurationError for a key file that is named and not there, or is unusable.
        """
        if self.insecure:
            return None
        path = key_path(self.key_file)
        key = load_key(path)
        if key is not None:
            from shardnet.transport.identity import make_identity

            return make_identity(key.secret)
        if self.key_file:
            raise ConfigurationError(
                f"there is no key file {path}: run `shardnet key new` on the first machine and "
                "`shardnet key join` on the others"
            )
        return None

    def node_arguments(self) -> list[str]:
        """Return the flags that give a node process on this machine the same access."""
        if self.insecure:
            return ["--insecure"]
        return ["--key-file", str(key_path(self.key_file).absolute())] if self.key_file else []
