"""`shardnet key`: make, enter, show or replace the cluster key.

The key itself goes to standard output and nowhere else, and is never taken from an argument.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from shardnet.api.client import Client
from shardnet.api.connections import key_path
from shardnet.cluster.machine.folders import ClusterKey, load_key, store_key
from shardnet.errors import ConfigurationError, ShardnetError, UsageError
from shardnet.wire.messages.membership import MAX_GRACE_S, NodeInfo

from ..finding.target import named_or_here
from ..flags import options
from ..flags.options import Access, KeyFile, flag, option
from ..output.exit_codes import no_text, picked, say, standard_input, write_json, write_out

DAY_S = 86_400
NOW_S = 600
"""How long with --now those count both keys that hear no more of it."""
TRIES = 3
"""Attempts to type the key at a terminal."""

key_app = typer.Typer(
    name="key", help="Make, enter, show or replace the cluster key.", no_args_is_help=True
)

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
    if key.old:
        _tell(f"until {_date(key.until_s)} it accepts too the key", ClusterKey(key.old), path)


@key_app.command(short_help="Replace the key on every machine while they run.")
@options.takes_groups
async def rotate(
    *,
    days: int = flag(7, "--days N", "How long the old key counts too.", min=1, max=365),
    finish: bool = flag(False, "--finish", "End that time now."),
    now: bool = flag(False, "--now", "Replace the key, and end that time at once."),
    peer: options.Peer = None,
    key_file: KeyFile = "",
    as_json: options.Json = False,
) -> None:
    """Replace the cluster key by a new one on every node, while requests go on.

    Machines that are off get it from any other when they are back, as long as the old key counts.
    """
    identity = Access(key_file=key_file).identity()
    if identity is None or identity.keeper is None:
        raise ConfigurationError("there is no key to replace", remedy="run `shardnet key new`")
    before, is_under_way = identity.fingerprint, finish or bool(identity.old)
    async with contextlib.AsyncExitStack() as stack:
        [client, *_] = await named_or_here(stack, options.check_addresses(peer), identity)
        status = await client.status(with_peers=True)
        tell = functools.partial(_tell_all, client, [status.node, *status.peers])
        can = "can be told a key" if is_under_way else ""
        if wrong := await tell(identity.secret, MAX_GRACE_S, can):
            raise ShardnetError(f"nothing was changed: {wrong}")
        secret = identity.secret if is_under_way else ClusterKey.make().secret
        grace_s = NOW_S if now else days * DAY_S
        identity.keeper.take(secret, grace_s)
        wrong = await tell(secret, grace_s, "has the new key")
        if finish or now:
            wrong = await tell(secret, 0, "has forgotten the old key")
            identity.keeper.take(secret, 0)
    if wrong:
        raise ShardnetError(wrong, remedy="run this again, or `shardnet key join --replace` there")
    until = _date(identity.until_s) if identity.old else None
    if as_json:
        told = [picked(info, "node", "name", "address") for info in (status.node, *status.peers)]
        cluster = {"cluster": identity.fingerprints[0], "before": before}
        write_json({**cluster, "until": until, "nodes": told})
    else:
        ends = f"counts until {until}, or `shardnet key rotate --finish`" if until else "is over"
        write_out(f"cluster {before} is {identity.fingerprints[0]} now; its old key {ends}")


async def _tell_all(
    client: Client, nodes: Sequence[NodeInfo], secret: bytes, grace_s: int, done: str
) -> str:
    """Have the node of `client`, the first, and its peers take a key; say what each has `done`.

    Returns who has not, and why; who still accepts another one has not where nothing was `done`.
    """
    wrong = []
    for number, info in enumerate(nodes, 1):
        try:
            taken = await client.take_key(secret, grace_s, info.node if number > 1 else "")
            if taken.old_s and not done:
                raise ConfigurationError(
                    "it still accepts the key before", remedy="run `shardnet key rotate --finish`"
                )
            if done:
                say(f"{info.name} {done} ({number} of {len(nodes)})")
        except ShardnetError as error:
            wrong.append(f"{info.name} cannot be told a key: {error}")
    return "; ".join(wrong)


@key_app.command(short_help="Print the certificate that programs trust for HTTPS.")
def authority(key_file: KeyFile = "") -> None:
    """Print the certificate of the cluster's authority for HTTPS, for those who ask `serve --tls`.

    It is public, and speaks for names and addresses at home alone.
    """
    from shardnet.api.serve.authority import HttpAuthority

    key = Access(key_file=key_file).key()
    write_out(HttpAuthority(key.secret).certificate().decode(), end="")
    say("trust it where you ask from: docs/server.md says how")


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().isoformat(" ", "minutes")


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
