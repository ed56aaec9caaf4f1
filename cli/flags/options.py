"""Options that several commands share, in a line each or in groups, and parsing of their values."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, Signature
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_origin, get_type_hints

import typer

from shardnet.api.connections import key_path, load_identity
from shardnet.api.requests import name_model
from shardnet.checkpoint.model_names import FOLDERS_VARIABLE
from shardnet.cluster.machine.folders import ClusterKey, load_key
from shardnet.errors import ConfigurationError, UsageError
from shardnet.files import expanded
from shardnet.transport.address import split_address

from ..output.exit_codes import FORMATS, keep_log_format, run_command
from ..output.exit_codes import VARIABLE as LOG_FORMAT_VARIABLE
from .config import Complete, node_addresses, one_of

if TYPE_CHECKING:
    from shardnet.transport.identity import Identity


T = TypeVar("T")


def option(
    spelled: str,
    help: str,
    *,
    env: bool | str = False,
    min: float | None = None,
    max: float | None = None,
    hides_default: bool = False,
    words: Complete | None = None,
) -> Any:
    """Describe a flag for typer: `spelled` as --help has it, such as `--name NAME`.

    It is also set by the variable `env`, or if True by SHARDNET_NAME. TAB completes `words`, else
    those of `--name this|that|N` that are in small letters.
    """
    flag, _, value = spelled.partition(" ")
    if words is None and "|" in value:
        words = one_of(*filter(str.islower, value.split("|")))
    return typer.Option(
        flag,
        metavar=value or None,
        help=help,
        envvar=f"SHARDNET_{flag[2:].replace('-', '_').upper()}" if env is True else env or None,
        min=min,
        max=max,
        show_default=not hides_default,
        autocompletion=words,
    )


env_option: Final = functools.partial(option, env=True)
"""Of a flag that SHARDNET_NAME sets too."""


def flag(default: T, spelled: str, help: str, **more: Any) -> T:
    """Make a parameter of a command, or a field of a group, that is a flag.

    The other arguments are those of `option`.
    """
    metadata = {"option": option(spelled, help, **more)}
    return dataclasses.field(default=default, metadata=metadata)


def env_flag(default: T, spelled: str, help: str, **more: Any) -> T:
    """Make such a flag that SHARDNET_NAME sets too."""
    return flag(default, spelled, help, env=True, **more)


@contextmanager
def naming(flag: str | None) -> Iterator[None]:
    """Raise typer.BadParameter, which names `flag`, where the body finds its value wrong."""
    try:
        yield
    except (UsageError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint=flag) from error


@contextmanager
def reading(name: str, flag: str) -> Iterator[None]:
    """Raise typer.BadParameter, which names `flag`, where file `name` is not there or no text."""
    try:
        yield
    except OSError as error:
        raise typer.BadParameter(f"{name}: {error.strerror}", param_hint=flag) from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{name} is not UTF-8 text: {error}", param_hint=flag) from error


def check_choices(group: Any) -> None:
    """Raise typer.BadParameter for a flag of a group that has none of the words of its --help.

    Those are all that it may be if each is in small letters, as in `--name this|that`.
    """
    for field in dataclasses.fields(group):
        words = (field.metadata["option"].metavar or "").split("|") if field.metadata else []
        value = getattr(group, field.name)
        if len(words) > 1 and all(map(str.islower, words)) and value != field.default:
            check_choice(f"--{field.name.replace('_', '-')}", value, words)


def takes_groups(
    command: Callable[..., None] | Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Replace each dataclass parameter of `command` by the flags among its fields, for typer.

    A field is a flag if `flag` made it or its type is Annotated; others keep their defaults, so a
    subclass removes a flag with a plain default. The command receives the dataclass, and may have
    parameters that `flag` made too. One that is a coroutine is run to its end.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            flags = list(_flags(hint))
            groups[name] = hint, [flag.name for flag in flags]
            parameters += flags
        else:
            default = parameter.default
            if isinstance(default, dataclasses.Field):
                hint, default = Annotated[hint, default.metadata["option"]], default.default
            parameters.append(
                Parameter(name, Parameter.KEYWORD_ONLY, annotation=hint, default=default)
            )

    @functools.wraps(command)
    def with_flags(**values: Any) -> None:
        for name, (group, flags) in groups.items():
            values[name] = group(**{flag: values.pop(flag) for flag in flags})
        main = command(**values)
        if main is not None:
            run_command(main)

    shown = Signature(parameters, return_annotation=None)
    with_flags.__signature__ = shown  # type: ignore[attr-defined]  # inspect looks for it
    with_flags.__annotations__ = {flag.name: flag.annotation for flag in parameters}
    return with_flags


def _flags(group: type[Any]) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        hint = hints[field.name]
        if "option" in field.metadata:
            hint = Annotated[hint, field.metadata["option"]]
        if get_origin(hint) is Annotated:
            assert field.default is not dataclasses.MISSING, f"--{field.name} needs a default"
            yield Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                annotation=hint,
                default=field.default,
            )


_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)?", re.IGNORECASE)
_UNITS: Final = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}

Nodes = Annotated[
    str,
    env_option(
        "--nodes H:P,H:P",
        "Exactly these nodes, in this order; the first is the head.",
        words=node_addresses,
    ),
]
Peer = Annotated[
    list[str] | None,
    env_option(
        "--peer H:P",
        "A node on the network to ask or to link to; may be given several times.",
        words=node_addresses,
    ),
]
NoMdns = Annotated[
    bool, env_option("--no-mdns", "Neither announce this machine nor look for nodes by mDNS.")
]
Tailnet = Annotated[
    bool,
    env_option(
        "--tailnet", "Ask the local Tailscale for your other machines, and look for nodes there."
    ),
]
Offline = Annotated[
    bool,
    env_option(
        "--offline",
        "Download nothing from the Internet. Nodes that already run decide for themselves.",
    ),
]
IgnoreUnknownConfig = Annotated[
    bool,
    env_option(
        "--ignore-unknown-config",
        "Load a model whose config has keys that are not known here, as if they were not there.",
    ),
]
ModelFolder = Annotated[
    list[Path] | None,
    option(
        "--model-folder DIR",
        "A folder to look for models in, for names of --model; may be given several times.",
        env=FOLDERS_VARIABLE,
    ),
]
KeyFile = Annotated[
    str,
    env_option(
        "--key-file F", "Where the cluster key is. Default: cluster.key beside the configuration."
    ),
]
Insecure = Annotated[
    bool,
    env_option("--insecure", "Use no cluster key: links are neither encrypted nor authenticated."),
]
LogFormat = Annotated[
    str,
    option(
        "--log-format text|json",
        "How lines on standard error are written; json is one object a line.",
        env=LOG_FORMAT_VARIABLE,
    ),
]
PrefixCache = Annotated[
    str,
    env_option(
        "--prefix-cache 20GiB",
        "Disk space for long prompts that are not computed again. Default: none.",
    ),
]
Json = Annotated[bool, option("--json", "Print JSON on standard output.")]


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


INTERFACES_VARIABLE: Final = "SHARDNET_MDNS_INTERFACES"
"""Comma-separated addresses of the interfaces to use, where the automatic choice is wrong."""


def mdns_interfaces(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the interface addresses in SHARDNET_MDNS_INTERFACES, () where it is not set."""
    named = environment.get(INTERFACES_VARIABLE, "")
    return tuple(part.strip() for part in named.split(",") if part.strip())


def keep_model_folders(folders: Sequence[Path] | None) -> None:
    """Have this process, and the nodes that it starts, look for models in these folders too."""
    if folders:
        named = [str(expanded(folder).absolute()) for folder in folders]
        os.environ[FOLDERS_VARIABLE] = os.pathsep.join(named)


def keep_offline(wanted: bool) -> None:
    """If `wanted`, keep this process and the nodes that it starts from downloading."""
    if wanted:
        os.environ["HF_HUB_OFFLINE"] = "1"


def take_log_format(wanted: str) -> None:
    """Write lines as --log-format says. Raises typer.BadParameter."""
    if wanted:
        check_choice("--log-format", wanted, FORMATS)
    keep_log_format(wanted)


def parse_size(text: str, flag: str) -> int:
    """Read `8GiB`, `500MB` or a number of bytes. Raises typer.BadParameter, which names `flag`."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"'{text}' is not a size such as 8GiB", param_hint=flag)
    return int(float(match[1]) * _UNITS[(match[2] or "B").lower()])


def parse_prefix_cache(text: str) -> int:
    """Return the bytes of --prefix-cache, 0 without one. Raises as `parse_size`."""
    return parse_size(text, "--prefix-cache") if text else 0


def check_choice(flag: str, value: str, allowed: Sequence[str]) -> None:
    """Raise typer.BadParameter, which names `flag`, for a value that is not in `allowed`."""
    if value not in allowed:
        *others, last = allowed
        raise typer.BadParameter(
            f"'{value}': choose {', '.join(others)} or {last}", param_hint=flag
        )


def check_model(model: str, flag: str = "--model") -> str:
    """Return the model's name as nodes take it.

    Raises typer.BadParameter, which names `flag`, for a URL.
    """
    with naming(flag):
        return name_model(model)


def split_nodes(text: str) -> list[str]:
    """Read `H:P,H:P`. Raises typer.BadParameter for a part that is not HOST:PORT."""
    return check_addresses([part.strip() for part in text.split(",") if part.strip()], "--nodes")


def check_addresses(addresses: Sequence[str] | None, flag: str = "--peer") -> list[str]:
    """Return the addresses, [] for None. Raises typer.BadParameter for one that is not HOST:PORT.

    The error names `flag`.
    """
    for address in addresses or ():
        with naming(flag):
            split_address(address)
    return list(addresses or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The flags of a command that looks for nodes: how it may."""

    no_mdns: NoMdns = False
    tailnet: Tailnet = False

    @property
    def is_allowed(self) -> bool:
        """Whether it may look at all."""
        return self.tailnet or not self.no_mdns


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
