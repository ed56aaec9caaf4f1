"""`shardnet doctor`: what is wrong here, where, and what to do."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer

from shardnet.api.connections import key_path
from shardnet.cluster.machine.folders import runtime_dir
from shardnet.cluster.machine.local_nodes import LocalNodes
from shardnet.errors import ConfigurationError

from ..flags import options
from ..flags.config import model_names
from ..output.exit_codes import EXIT_FAILURE, one_line, write_json, write_out

if TYPE_CHECKING:
    from shardnet.cluster.diagnosis.facts import Finding, KeyFacts
    from shardnet.transport.identity import Identity

MOST_FINE = 40
"""Most lines about what is fine; with many nodes there would be many."""

_STYLES = {"ok": "green", "info": "cyan", "problem": "bold red"}


@options.takes_groups
async def doctor(
    *,
    model: str = options.flag(
        "",
        "--model PATH",
        "Also check whether the nodes have this checkpoint, and memory and disk for it.",
        words=model_names,
    ),
    ignore_unknown_config: options.IgnoreUnknownConfig = False,
    peer: options.Peer = None,
    search: options.Search,
    timeout: float = options.flag(
        10.0, "--timeout S", "Seconds to wait for the nodes' reports.", min=0.1
    ),
    access: options.Access,
    as_json: options.Json = False,
) -> None:
    """Diagnose this machine's node and those it knows: what is wrong, and what to do.

    Prints one line per finding. The exit code is 1 when something is wrong.
    """
    from shardnet.api.diagnostics import FactSources, gather_facts
    from shardnet.cluster.diagnosis.diagnosis import diagnose
    from shardnet.cluster.diagnosis.facts import Severity

    from ..finding.target import browse_all, look_in_tailnet

    model = options.check_model(model) if model else ""
    named = options.check_addresses(peer)
    key, identity = _key(access)
    if search.tailnet:
        answers = await look_in_tailnet(identity, insecure=access.insecure)
        named = list(dict.fromkeys([*named, *(answer.address for answer in answers)]))
    facts = await gather_facts(
        FactSources(
            key=key,
            identity=identity,
            here=LocalNodes(runtime_dir(os.environ)).list(),
            named=named,
            browse=None if search.no_mdns else browse_all,
            model=model,
            timeout_s=timeout,
            ignore_unknown_config=ignore_unknown_config,
        )
    )
    findings = diagnose(facts)
    if as_json:
        write_json(findings)
    else:
        _print(findings)
    if any(finding.severity is Severity.PROBLEM for finding in findings):
        raise typer.Exit(EXIT_FAILURE)


def _key(access: options.Access) -> tuple[KeyFacts, Identity | None]:
    """Load the key file; one that cannot be used becomes a finding, not an error."""
    from shardnet.cluster.diagnosis.facts import KeyFacts

    path = str(key_path(access.key_file))
    try:
        identity = access.identity()
    except ConfigurationError as error:
        return KeyFacts(path=path, failure=error.message, remedy=error.remedy), None
    fingerprint = identity.fingerprint if identity else ""
    return KeyFacts(path=path, fingerprint=fingerprint, is_set_aside=access.insecure), identity


def _print(findings: list[Finding]) -> None:
    """Print a line each: with colours on a terminal, plain elsewhere."""
    from shardnet.cluster.diagnosis.facts import Severity

    fine = [finding for finding in findings if finding.severity is Severity.OK]
    lines = [(finding.severity.value, finding.line) for finding in findings]
    if len(fine) > MOST_FINE:
        n_more = len(fine) - MOST_FINE
        lines[-n_more:] = [("ok", f"and {n_more} more findings are fine; --json has them all")]
    if not sys.stdout.isatty():
        for word, line in lines:
            write_out(f"{word:7}  {one_line(line)}")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for word, line in lines:
        console.print(Text(f"{word:7}", style=_STYLES[word]), Text(one_line(line)), soft_wrap=True)
