"""The program that finds and renders a stranger's chat template, in a process of its own.

Its jobs are those that chat_template.py asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardnet.guard.job_loop import serve
from shardnet.tokenizers.chat.chat_template import ChatTemplate, TemplateMessage, TemplateOptions


def find(folder: str, own: Mapping[str, Any] | None) -> tuple[object, bytes]:
    """Find the template of a checkpoint folder, `own` being that of the tokenizer's file."""
    template = ChatTemplate.find(Path(folder), None if own is None else ChatTemplate(**own))
    return asdict(template), b""


def render(
    template: Mapping[str, Any],
    messages: Sequence[TemplateMessage],
    options: Mapping[str, Any],
    memory_bytes: int,
) -> tuple[object, bytes]:
    """Render messages. jinja2 is imported by the first."""
    from shardnet.tokenizers.chat.template_renderer import render_template

    made = TemplateOptions(**options)
    return render_template(ChatTemplate(**template), messages, memory_bytes, made), b""


def behind(template: Mapping[str, Any]) -> tuple[object, bytes]:
    """Say what a template writes behind an answer."""
    from shardnet.tokenizers.chat.template_renderer import behind_answer

    return behind_answer(ChatTemplate(**template)), b""


def main() -> None:
    """Do jobs until nobody asks."""
    serve({"find": find, "render": render, "behind": behind})
