"""What people and programs read of shardnet stays as it is, or changes in tests/golden too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families
from support.golden import check_golden, filled, shape
from support.servers.asgi_client import ask
from support.servers.http_app import served
from typer.core import TyperGroup
from typer.main import get_command

from shardnet.api.dashboard.board import Dashboard
from shardnet.api.dashboard.endpoints import endpoints
from shardnet.api.openai.faults import OPENAI
from shardnet.wire.messages.generation import LastRun
from shardnet.wire.messages.plans import PlanReply
from shardnet_cli.main import app
from shardnet_cli.output.plan_text import plan_json, run_json

COLUMNS = 80


def helps(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    """The --help of a command and of all below it, each with what is typed for it above."""
    context = command.make_context(
        name, [], parent, resilient_parsing=True, terminal_width=COLUMNS, max_content_width=COLUMNS
    )
    yield f"$ {context.command_path} --help\n{command.get_help(context)}\n"
    if isinstance(command, TyperGroup):
        for below in command.commands:
            yield from helps(command.commands[below], below, context)


def as_json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def test_help_of_every_command() -> None:
    check_golden("help.txt", "\n".join(helps(get_command(app), "shardnet")))


def test_json_of_plans_and_runs() -> None:
    check_golden("plan.json", as_json(plan_json(filled(PlanReply))))
    check_golden("last_run.json", as_json(run_json(filled(LastRun))))


def test_json_of_the_dashboard() -> None:
    """What its page sends and gets, by endpoint."""
    shapes = {
        f"{one.method} {one.path}": {
            "body": None if one.body is None else shape(one.body),
            "answer": None if one.answer is None else shape(one.answer),
        }
        for one in endpoints(cast(Dashboard, None), OPENAI)
    }
    check_golden("dashboard.json", as_json(shapes))


def test_names_of_metrics() -> None:
    """Each with its kind, what it counts, and the labels of those that count something here."""

    async def counted() -> str:
        async with served() as server:
            await ask(server.app, "/v1/completions", {"prompt": "abc"})
            return (await ask(server.app, "/metrics")).content.decode()

    lines = []
    for family in text_string_to_metric_families(asyncio.run(counted())):
        labels = sorted({label for sample in family.samples for label in sample.labels})
        lines.append(f"{family.name} {family.type} [{', '.join(labels)}] {family.documentation}\n")
    check_golden("metrics.txt", "".join(sorted(lines)))
