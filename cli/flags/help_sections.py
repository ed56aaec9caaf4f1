"""`--help` of commands with many flags: in sections, with examples at the end.

Knows which flag stands in which section; docs/usage.md has the same ones. Must not know commands.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final, TypeVar

from typer.core import TyperCommand, TyperOption

from .completion import with_words

SECTIONS: Final = MappingProxyType(
    {
        "Which model, and how": (
            *(
                "--model",
                "--model-folder",
                "--layers",
                "--context",
                "--dtype",
                "--arith",
                "--wire-dtype",
            ),
            *(
                "--quant",
                "--kv-dtype",
                "--mmproj",
                "--mtp",
                "--lora",
                "--stream-layers",
                "--optimise",
            ),
            "--ignore-unknown-config",
        ),
        "Where a model runs": (
            *("--nodes", "--local", "--peer", "--no-mdns", "--key-file", "--insecure"),
            *("--offline", "--threads", "--standby", "--nodes-per-stage"),
        ),
        "Prompts": (
            *("--token-ids", "--n", "--prompts-file", "--static", "--chat", "--system", "--bos"),
            *("--image", "--priority", "--deadline"),
        ),
        "Sampling": (
            *("--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty"),
            *("--presence-penalty", "--frequency-penalty", "--logit-bias", "--seed"),
            "--use-lora",
        ),
        "The form of a text": ("--json-schema", "--regex", "--grammar"),
        "The end of a text": (
            *("--max-tokens", "--min-tokens", "--stop", "--stop-token-id", "--ignore-eos"),
        ),
        "Speculation and determinism": ("--speculate", "--draft-tokens", "--deterministic"),
        "Output": (
            *("--json", "--logprobs", "--prompt-logprobs", "--jsonl", "--keep-special-tokens"),
            *("--every", "--count", "--trace", "--log-format"),
        ),
        "HTTP": (
            *(
                "--http",
                "--api-key",
                "--api-key-file",
                "--cors-origin",
                "--allowed-host",
                "--alias",
            ),
            *("--root-path", "--tls", "--tls-cert", "--tls-key"),
            *("--switch", "--idle-unload", "--deputy", "--fetch-images"),
        ),
    }
)
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
