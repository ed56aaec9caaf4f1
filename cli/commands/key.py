"""`shardnet key`: make, enter or show the cluster key.

The key itself goes to standard output and nowhere else, and is never taken from an argument.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from shardnet.api.connections import key_path
from shardnet.cluster.machine.folders import ClusterKey, load_key, store_key
from shardnet.errors import ConfigurationError, UsageError

from ..flags.options import Access, KeyFile, option
from ..output.exit_codes import no_text, say, standard_input, write_out

TRIES = 3
"""Attempts to type the key at a terminal."""

key_app = typer.Typer(name="key", help="Make, enter or show the cluster key.", no_args_is_help=True)

Replace = Annotated[
    bool, option("--replace", "Replace the key of another cluster that is stored here.")
]


@key_app.command(short_help="Make a key for a new cluster, store it here and print it.")
def new(key_file: KeyFile = "", replace: Replace = False) -> None:
    """Make a key for a new cluster, store it here and print it for the other machines."""
    path = key_path(key_file)
    if not replace and load_key(path) is not None:
        raise ConfigurationError(
            f"{path} holds a key already",
            remedy="print it with `shardnet key show`, or make another with --replace, which "
            "every machine of the cluster then has to join",
        )
    key = ClusterKey.make()
    store_key(key, path, replace=replace)
    write_out(key.text())
    _tell("stored the new key", key, path)
    say("run `shardnet key join` on every other machine and type it there")


@key_app.command(short_help="Type the key that another machine shows, and store it.")
def join(
    source: Annotated[
        str, typer.Argument(metavar="-", help="- reads the key from standard input.")
    ] = "",
    key_file: KeyFile = "",
    replace: Replace = False,
) -> None:
    """Type the key that another machine of the cluster shows, and store it here."""
    if source not in ("", "-"):
        raise typer.BadParameter(
            "give no key here: every user of this machine can read arguments, and the shell "
            "keeps them; run `shardnet key join` and type it"
        )
    path = key_path(key_file)
    key = _type_key() if not source and sys.stdin.isatty() else _read_key()
    store_key(key, path, replace=replace)
    _tell("stored the key", key, path)


@key_app.command(short_help="Print the stored key and its fingerprint.")
def show(key_file: KeyFile = "") -> None:
    """Print the stored key, and the fingerprint that names its cluster."""
    path = key_path(key_file)
    key = Access(key_file=key_file).key()
    write_out(key.text())
    _tell("this is the key", key, path)


@key_app.command(short_help="Print the certificate that programs trust for HTTPS.")
def authority(key_file: KeyFile = "") -> None:
    """Print the certificate of the cluster's authority for HTTPS, for those who ask `serve --tls`.

    It is public, and speaks for names and addresses at home alone.
    """
    from shardnet.api.serve.authority import HttpAuthority

    key = Access(key_file=key_file).key()
    write_out(HttpAuthority(key.secret).certificate().decode(), end="")
    say("trust it where you ask from: docs/server.md says how")


def _type_key() -> ClusterKey:
    """Ask at the terminal; what is typed is shown, as it has 28 characters."""
    for tries_left in reversed(range(TRIES)):
        say("cluster key: ", end="")
        try:
            return _read_key()
        except UsageError as error:
            if not tries_left:
                raise
            say(str(error))
    raise AssertionError("the last try returns or raises")


def _read_key() -> ClusterKey:
    try:
        line = standard_input().readline()
    except UnicodeDecodeError as error:
        raise UsageError(no_text(error)) from error
    if not line.strip():
        raise ConfigurationError(
            "no key was given", remedy="type the one that `shardnet key show` prints"
        )
    return ClusterKey.parse(line)


def _tell(what: str, key: ClusterKey, path: Path) -> None:
    from shardnet.transport.identity import derive_authority_key, fingerprint

    cluster = fingerprint(derive_authority_key(key.secret))
    say(f"{what} of cluster {cluster} ({path})")
