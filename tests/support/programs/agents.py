"""A model that calls the tools of coding agents as they expect, and how each agent is run once.

Its chat template is the script: by the tools that a program offers it ends with a mark, for which
the model has an answer (support/system/parrot.py). Every agent is to have a file written.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from support.system.parrot import make_scripted

from shardnet.api.programs import PROGRAMS, Served

FILE: Final = "from_the_ring.txt"
SAID: Final = "written by the ring"
PROMPT: Final = f"Write '{SAID}' to {FILE}."


def call(name: str, **arguments: object) -> str:
    """Write a call as Hermes does."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


TEMPLATE: Final = """
{%- set names = (tools or []) | map(attribute='function.name') | list %}
{%- if messages[-1].role == 'tool' %}<|done|>
{%- elif 'exec_command' in names %}<|exec_command|>
{%- elif 'shell' in names %}<|shell|>
{%- elif 'Bash' in names %}<|Bash|>
{%- elif 'bash' in names %}<|bash|>
{%- elif 'run_commands' in names %}<|run_commands|>
{%- elif 'edit' in (messages | map(attribute='content') | join | lower) %}<|edit|>
{%- else %}<|say|>{% endif %}{# <tool_call> #}"""

_SHELL: Final = f"echo '{SAID}' > {FILE}"
ANSWERS: Final = {
    "<|done|>": "The file is written.",
    "<|exec_command|>": call("exec_command", cmd=_SHELL),
    "<|shell|>": call("shell", command=["bash", "-lc", _SHELL]),
    "<|Bash|>": call("Bash", command=_SHELL, description="Write the file"),
    "<|bash|>": call("bash", command=_SHELL, description="Write the file again"),
    "<|run_commands|>": call("run_commands", commands=[_SHELL]),
    "<|edit|>": f"{FILE}\n```\n{SAID}\n``` ",
    "<|say|>": "A file",
}


def make_agent_model(folder: Path) -> Path:
    """Write that model."""
    return make_scripted(folder, TEMPLATE, ANSWERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A program of `package`: how it is asked once, without a person, and the `settings` it reads.

    `settings` is a file below its home; one of variables is read by a shell.
    """

    package: str
    command: str
    settings: str


AGENTS: Final[Mapping[str, Agent]] = MappingProxyType(
    {
        "codex": Agent(
            package="@openai/codex",
            command="codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox",
            settings=".codex/config.toml",
        ),
        "claude-code": Agent(
            package="@anthropic-ai/claude-code",
            command="claude -p --allowedTools=Bash",
            settings="variables",
        ),
        "opencode": Agent(
            package="opencode-ai",
            command="opencode run --auto",
            settings=".config/opencode/opencode.json",
        ),
        "continue": Agent(
            package="@continuedev/cli",
            command="cn --config ~/.continue/config.yaml --auto -p",
            settings=".continue/config.yaml",
        ),
        "pi": Agent(
            package="@earendil-works/pi-coding-agent",
            command="pi --model shardnet/scripted -p",
            settings=".pi/agent/models.json",
        ),
        "cline-cli": Agent(package="cline", command="cline", settings="once"),
        "aider": Agent(
            package="aider-chat",
            command=f"aider --yes-always --no-git --no-check-update --file {FILE} --message",
            settings=".aider.conf.yml",
        ),
    }
)


async def ask_agent(name: str, served: Served, programs: str, home: Path, timeout_s: float) -> str:
    """Have an agent do PROMPT in a new home, as `shardnet connect` sets it up; return its output.

    `programs` are the folders of the installed commands, as in PATH.
    """
    agent = AGENTS[name]
    settings = home / agent.settings
    settings.parent.mkdir(parents=True)
    settings.write_text(PROGRAMS[name].write(served) + "\n")
    (home / "work").mkdir()
    reads = "" if settings.suffix else f". {shlex.quote(str(settings))} && "
    asking = await asyncio.create_subprocess_shell(
        f"{reads}exec {agent.command} {shlex.quote(PROMPT)}",
        cwd=home / "work",
        env={"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "NO_PROXY": "*"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(timeout_s):
            said, _ = await asking.communicate()
    finally:
        if asking.returncode is None:
            asking.kill()
    return said.decode(errors="replace")
