"""Where shardnet stores its files on this machine, the cluster key among them.

$SHARDNET_* variables name a path themselves. Otherwise it is shardnet's folder below the $XDG_*
one, on every system, and without that the one of platformdirs. A relative $XDG_* is ignored, as the
XDG specification asks. The folders may not exist.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import platformdirs

from shardnet.errors import ConfigurationError, UsageError
from shardnet.files import NotOwnError, check_own, decode_text, delete, write_whole
from shardnet.permissions import others_at, privacy_command

if TYPE_CHECKING:  # not every command needs the library behind it
    from shardnet.transport.identity import Identity

CACHE_DIR_VARIABLE: Final = "SHARDNET_CACHE_DIR"
RUNTIME_DIR_VARIABLE: Final = "SHARDNET_RUNTIME_DIR"
CONFIG_VARIABLE: Final = "SHARDNET_CONFIG"
PACKS_FOLDER: Final = "packed"
"""Folder of packed weights in the cache (stage/packs/pack_cache.py)."""
KERNELS_FOLDER: Final = "kernels"
"""Folder of what was compiled for GPUs (model/drivers/gpu.py)."""
PREFIXES_FOLDER: Final = "prefixes"
"""Folder of finished prompts in the cache (stage/prefixes)."""
ADAPTERS_FOLDER: Final = "adapters"
"""LoRA adapters, in the folder of the models that came from other nodes."""
_NAME: Final = "shardnet"
_PROBE_BYTES: Final = 1 << 16


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder of files that can be made again: figures, runs, weights."""
    if environment.get(CACHE_DIR_VARIABLE):
        return Path(environment[CACHE_DIR_VARIABLE])
    return _in_xdg("XDG_CACHE_HOME", environment) or platformdirs.user_cache_path(
        _NAME, appauthor=False
    )


def config_path(environment: Mapping[str, str]) -> Path:
    """Return the path of the configuration file."""
    if CONFIG_VARIABLE in environment:
        return Path(environment[CONFIG_VARIABLE])
    return _config_dir(environment) / "config.toml"


def default_key_path(environment: Mapping[str, str]) -> Path:
    """Return the default path of the cluster key file."""
    return _config_dir(environment) / "cluster.key"


def runtime_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder in which this user's running nodes are registered.

    Without $XDG_RUNTIME_DIR it lies directly in the folder of temporary files: a folder between,
    as platformdirs has it, might be another user's. Where that cannot be written, as on a full
    disk, it is where the nodes are that have registered before. On Windows it is in the user's
    profile: %TEMP% may be another folder in every session.
    """
    if RUNTIME_DIR_VARIABLE in environment:
        return Path(environment[RUNTIME_DIR_VARIABLE])
    if (folder := _in_xdg("XDG_RUNTIME_DIR", environment)) is not None:
        return folder
    if sys.platform == "win32":
        return platformdirs.user_runtime_path(_NAME, appauthor=False)
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # none that it could write a file in
        temporary = environment.get("TMPDIR") or "/tmp"
    return Path(temporary) / f"{_NAME}-{os.getuid()}"


def why_not_written(folder: Path) -> str:
    """Return why `folder` cannot be written, "" if it can. Creates the folder if need be."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        write_whole(probe, bytes(_PROBE_BYTES))
        delete(probe)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _config_dir(environment: Mapping[str, str]) -> Path:
    return _in_xdg("XDG_CONFIG_HOME", environment) or platformdirs.user_config_path(
        _NAME, appauthor=False
    )


def _in_xdg(variable: str, environment: Mapping[str, str]) -> Path | None:
    base = environment.get(variable, "")
    return Path(base) / _NAME if os.path.isabs(base) else None


KEY_BYTES: Final = 16
_CHECK_BITS: Final = 12
_PRIME: Final = 4093
_REMAINDER: Final = 1
"""A key read as one number leaves this remainder by that prime. 32 generates all remainders of the
prime, so one wrong character, or two exchanged ones, always leave another."""
_GROUP: Final = 4
_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_N_CHARACTERS: Final = (KEY_BYTES * 8 + _CHECK_BITS) // 5
_READ_AS: Final = str.maketrans("OIL", "011")
"""Letters that the alphabet leaves out (Crockford's base 32), and the digits they are taken for."""
_MAX_FILE_BYTES: Final = 1024
_REPLACED: Final = re.compile(r"^replaces (.*) until (\d{1,15})\n", re.MULTILINE)
"""The line of a key file about the key before."""
_READ_ONLY: Final = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
"""Links are followed: a key may be kept elsewhere. What they lead to has to be this user's."""


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """128 secret bits. Neither `repr` nor `str` shows them.

    A key that has replaced another one has the `old` bits too, which count until `until_s` (seconds
    since 1970).
    """

    secret: bytes = field(repr=False)
    old: bytes = field(default=b"", repr=False)
    until_s: float = field(default=0.0, repr=False)

    @classmethod
    def make(cls) -> ClusterKey:
        """Make a new key from the system's randomness."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def parse(cls, text: str) -> ClusterKey:
        """Parse a typed key: in groups, any case, O for 0, I and L for 1.

        Raises UsageError, which describes the mistake without repeating the text.
        """
        characters = "".join(text.upper().replace("-", " ").split()).translate(_READ_AS)
        if len(characters) != _N_CHARACTERS:
            raise UsageError(
                f"a cluster key has {_N_CHARACTERS} characters in groups of {_GROUP}, "
                f"{len(characters)} were given",
                remedy="type it again",
            )
        number = 0
        for place, character in enumerate(characters):
            if character not in _ALPHABET:
                raise UsageError(
                    f"character {place + 1} of the cluster key, in group {place // _GROUP + 1}, "
                    "is none that a key may have",
                    remedy="type it again",
                )
            number = number * len(_ALPHABET) + _ALPHABET.index(character)
        if number % _PRIME != _REMAINDER:
            raise UsageError(
                "the cluster key is mistyped, its checksum does not match", remedy="type it again"
            )
        return cls((number >> _CHECK_BITS).to_bytes(KEY_BYTES, "big"))

    def text(self) -> str:
        """Format the key: seven groups of four characters, the last ones a checksum."""
        number = int.from_bytes(self.secret, "big") << _CHECK_BITS
        number += (_REMAINDER - number) % _PRIME
        digits = [_ALPHABET[number >> 5 * place & 31] for place in range(_N_CHARACTERS)]
        characters = "".join(reversed(digits))
        groups = range(0, _N_CHARACTERS, _GROUP)
        return "-".join(characters[start : start + _GROUP] for start in groups)


def load_key(path: Path) -> ClusterKey | None:
    """Load the key stored at `path`, None if there is no file; an old one whose time is over is
    left out.

    Raises ConfigurationError if users other than its owner may read it, or it is damaged.
    """
    try:
        is_open, content = _read(path)
    except FileNotFoundError:
        return None
    except NotOwnError as error:
        raise ConfigurationError(
            f"the key file {path} is not used: {error.strerror}",
            remedy="name one of your own with --key-file",
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"the key file {path} cannot be read: {error.strerror}",
            remedy="name another with --key-file",
        ) from error
    if is_open:
        raise ConfigurationError(
            f"the key file {path} is open to others than its owner",
            remedy=f"run `{privacy_command(path)}`, and make a new key if one of them may have "
            "read it",
        )
    text, *replaced = re.split(_REPLACED, decode_text(content, "replace"), maxsplit=1)
    try:
        key = ClusterKey.parse(text)
        if not replaced or float(replaced[1]) <= time.time():
            return key
        return ClusterKey(key.secret, ClusterKey.parse(replaced[0]).secret, float(replaced[1]))
    except UsageError as error:
        raise ConfigurationError(
            f"the key file {path} is damaged: {error.message}", remedy=error.remedy
        ) from error


def _read(path: Path) -> tuple[bool, bytes]:
    """Return whether others may read a key file, and its content. Never waits for a pipe.

    Raises NotOwnError if it is another user's, OSError.
    """
    descriptor = os.open(path, _READ_ONLY)
    try:
        content = os.read(descriptor, _MAX_FILE_BYTES)
        is_open = others_at(descriptor).may_read
        if not is_open:
            check_own(descriptor, path)
        return is_open, content
    finally:
        os.close(descriptor)


def store_key(key: ClusterKey, path: Path, *, replace: bool = False) -> None:
    """Store the key at `path`, readable for its owner alone (mode 600).

    Raises ConfigurationError if another key is there and `replace` is not set, or if the file
    cannot be written.
    """
    stored = None if replace else load_key(path)
    if stored is not None and stored.secret != key.secret:
        raise ConfigurationError(
            f"{path} holds the key of another cluster", remedy="add --replace to leave that one"
        )
    text = f"{key.text()}\n"
    if key.old:
        text += f"replaces {ClusterKey(key.old).text()} until {key.until_s:.0f}\n"
    try:
        write_whole(path, text.encode(), is_durable=True)
    except OSError as error:
        raise ConfigurationError(
            f"the key file {path} cannot be written: {error.strerror}",
            remedy="name another with --key-file",
        ) from error


@dataclass(slots=True, eq=False)
class HeldKey:
    """The key of a file and of the `identity` of this process: what is new is on disk first.

    It is as of when it was read or changed here. Reads and writes where it is called.
    """

    path: Path
    key: ClusterKey
    identity: Identity

    def take(self, secret: bytes, grace_s: float, after: bytes = b"") -> None:
        """See KeyKeeper. The key that is held only shortens the time in which the old one counts.

        Raises ConfigurationError if an old key still counts beside the one that is held, unless
        that is replaced: then the time of the old one has ended elsewhere. Also if the
        file holds another one or cannot be written; nothing has changed then.
        """
        old, until_s = self.key.old, time.time() + grace_s
        if secret == self.key.secret:
            until_s = min(until_s, self.key.until_s)
        elif old and after != self.identity.signer:
            raise ConfigurationError(
                f"it has taken another new key, of cluster {self.identity.fingerprints[0]}, and "
                "still accepts the one before",
                remedy="run `shardnet key rotate --finish` where that one was made, then this "
                "again",
            )
        else:
            old = self.key.secret
        stored = load_key(self.path)
        if stored is not None and stored.secret not in (self.key.secret, secret):
            raise ConfigurationError(
                f"{self.path} holds another key by now, which was not told", remedy="start it again"
            )
        key = ClusterKey(secret, old, until_s) if old and grace_s > 0 else ClusterKey(secret)
        store_key(key, self.path, replace=True)
        if (key.secret, key.old) != (self.key.secret, self.key.old):
            self.identity.use(key.secret, key.old)
        self.key, self.identity.until_s = key, key.until_s

    def forget_if_due(self) -> None:
        """See KeyKeeper. Raises ConfigurationError as `take`."""
        if self.key.old and self.key.until_s <= time.time():
            self.take(self.key.secret, 0)
