"""A group of commands that are imported when they are used, and their `--help` in sections."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from shardnet.cluster.machine.folders import config_path

from ..output.exit_codes import exit_codes
from .config import with_words

_FLAGS: Final = {
    "Which model, and how": (
        "--model --model-folder --layers --context --dtype --arith --wire-dtype --quant "
        "--kv-dtype --mmproj --mtp --lora --stream-layers --optimise "
        "--ignore-unknown-config"
    ),
    "Where a model runs": (
        "--nodes --local --peer --no-mdns --tailnet --key-file --insecure --offline "
        "--threads --standby --nodes-per-stage"
    ),
    "Prompts": (
        "--token-ids --n --prompts-file --chat --system --bos --image --priority --deadline"
    ),
    "Sampling": (
        "--temperature --top-k --top-p --min-p --repetition-penalty --presence-penalty "
        "--frequency-penalty --top-n-sigma --typical-p --dry-multiplier --dry-base "
        "--dry-allowed-length --dry-sequence-breaker --logit-bias --seed --use-lora"
    ),
    "The form of a text": "--json-schema --regex --grammar",
    "The end of a text": "--max-tokens --min-tokens --stop --stop-token-id --ignore-eos",
    "Speculation and determinism": "--speculate --draft-tokens --deterministic",
    "Output": (
        "--json --logprobs --prompt-logprobs --jsonl --keep-special-tokens --every "
        "--count --trace --log-format"
    ),
    "HTTP": (
        "--http --api-key --api-key-file --cors-origin --allowed-host --alias "
        "--root-path --tls --tls-cert --tls-key --switch --household --idle-unload --deputy "
        "--fetch-images --equal-calls --reasoning-budget"
    ),
}
SECTIONS: Final = MappingProxyType({name: flags.split() for name, flags in _FLAGS.items()})
"""The sections with their flags. A flag of one command alone stands in none."""
OWN: Final = "Options"
"""The section of a command's own flags, the first one unless only --help is in it."""
FEW: Final = 12
"""So many flags need no sections."""

Made = TypeVar("Made", bound=Callable[..., None])


def examples(*lines: str) -> Callable[[Made], Made]:
    """Show command lines at the end of a command's --help."""

    def keep(command: Made) -> Made:
        command.examples = lines  # type: ignore[attr-defined]
        return command

    return keep


class SectionedCommand(TyperCommand):
    """A command whose --help shows flags by section, and examples."""

    examples: tuple[str, ...] = ()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and flags."""
        of = {flag: section for section, flags in SECTIONS.items() for flag in flags}
        arguments: list[tuple[str, str]] = []
        shown: dict[str, list[tuple[str, str]]] = {OWN: [], **{name: [] for name in SECTIONS}}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if isinstance(parameter, TyperOption):
                shown[of.get(parameter.opts[0], OWN)].append(record)
            else:
                arguments.append(record)
        if sum(map(len, shown.values())) <= FEW:
            shown = {OWN: [record for records in shown.values() for record in records]}
        elif len(shown[OWN]) == 1:
            shown[OWN] = shown.pop(OWN)
        for title, records in {"Arguments": arguments, **shown}.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete flags."""
        return with_words(super().shell_complete(ctx, incomplete))

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, each on its own line."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))


class CommandGroup(TyperGroup):
    """Commands whose refused values are reported in our words, not those of a library."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors end it as `exit_codes` says, wrong values as BadParameter."""
        try:
            with exit_codes():
                return super().invoke(ctx)
        except typer.BadParameter as error:
            refused = _first_refused(error.__cause__)
            if refused is None:
                raise
            raise typer.BadParameter(
                f"{refused['input']!r}: give {_accepted(refused)}",
                ctx=error.ctx,
                param_hint=_source(error),
            ) from error


def _first_refused(cause: object) -> dict[str, Any] | None:
    """Return pydantic's first error, None where the cause is another."""
    errors = getattr(cause, "errors", None)
    refused: list[dict[str, Any]] = errors() if callable(errors) else []
    return refused[0] if refused else None


def _accepted(refused: dict[str, Any]) -> str:
    limits = refused.get("ctx", {})
    match refused["type"].split("_"):
        case ["greater", "than", "equal"]:
            return f"{limits['ge']} or more"
        case ["less", "than", "equal"]:
            return f"{limits['le']} or less"
        case ["int", *_]:
            return "a whole number"
        case ["float", *_]:
            return "a number"
        case ["bool", *_]:
            return "true or false"
        case ["string", *_]:
            return "text"
        case ["list", *_]:
            return "a list"
        case _:
            return f"another value ({refused['msg']})"


def _source(error: typer.BadParameter) -> str:
    """Name where the value comes from: the flag, the variable, or the key and its file."""
    if error.param is None or error.ctx is None:
        return ""
    source = error.ctx.get_parameter_source(error.param.name or "")
    flag = next((name for name in error.param.opts if name.startswith("--")), error.param.opts[0])
    match source.name if source is not None else "":
        case "ENVIRONMENT":
            return str(error.param.envvar)
        case "DEFAULT_MAP":
            key = flag.removeprefix("--").replace("-", "_")
            return f"{key} in {config_path(os.environ)}"
        case _:
            return flag


Load = Callable[[str], Callable[..., None] | typer.Typer]


class LazyGroup(CommandGroup):
    """Commands by name with their lines in the list of commands, in the order of `summaries`."""

    summaries: ClassVar[Mapping[str, str]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(self.summaries, self.load)

    def load(self, name: str) -> Callable[..., None] | typer.Typer:
        """Import the command of a name: a function, or a typer.Typer of several."""
        raise NotImplementedError

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete flags, and commands without importing them."""
        listed = copy(self)
        listed.commands = {
            name: TyperCommand(name, short_help=summary) for name, summary in self.summaries.items()
        }
        ctx.command = listed
        return with_words(super(LazyGroup, listed).shell_complete(ctx, incomplete))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([*self.summaries.items()])


def _make(name: str, summary: str, found: Callable[..., None] | typer.Typer) -> Any:
    """Make the command called `name` of a function, or of a typer.Typer."""
    parent = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    if isinstance(found, typer.Typer):
        parent.add_typer(found)
    else:
        parent.command(name, cls=SectionedCommand, short_help=summary)(found)
    command = typer.main.get_command(parent)
    if isinstance(command, SectionedCommand):
        command.examples = getattr(found, "examples", ())
    if isinstance(command, TyperGroup):
        command = command.commands[name]
    assert isinstance(command, TyperCommand | TyperGroup)
    return command


class _Commands(MutableMapping[str, Any]):
    """Commands by name, each made when it is first asked for."""

    def __init__(self, table: Mapping[str, str], load: Load) -> None:
        self._table = table
        self._load = load
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _make(name, self._table[name], self._load(name))
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._made or name in self._table

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._table, *self._made]))

    def __len__(self) -> int:
        return len(self._table.keys() | self._made.keys())
