"""The cluster key that a command uses: the stored one, that of --key-file, or none.

Knows --key-file and --insecure. Must not know what is sent to the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardnet.api.connections import key_path, load_identity
from shardnet.cluster.machine.cluster_key import ClusterKey, load_key
from shardnet.errors import ConfigurationError

from .options import Insecure, KeyFile

if TYPE_CHECKING:  # not every command needs the library behind it
    from shardnet.transport.identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The flags of a command: `key_file` is "" for the default place."""

    key_file: KeyFile = ""
    insecure: Insecure = False

    def identity(self) -> Identity | None:
        """Load the key and make an identity; None without a key or with --insecure.

        Raises ConfigurationError if --key-file does not exist, or the key is unusable.
        """
        return load_identity(self.key_file, insecure=self.insecure)

    def key(self) -> ClusterKey:
        """Load the cluster key. Raises ConfigurationError where there is none."""
        path = key_path(self.key_file)
        key = load_key(path)
        if key is None:
            raise ConfigurationError(
                f"there is no key in {path}",
                remedy="run `shardnet key new`, or `shardnet key join` with the key of another "
                "machine",
            )
        return key

    def node_arguments(self) -> list[str]:
        """Return the flags that give a node process on this machine the same access."""
        if self.insecure:
            return ["--insecure"]
        return ["--key-file", str(key_path(self.key_file).absolute())] if self.key_file else []
