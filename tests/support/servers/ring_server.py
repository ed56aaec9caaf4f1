"""The HTTP server of this process over a ring of two node processes."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.system.nodes import Crew

from shardnet.api import Client
from shardnet.api.client import connect
from shardnet.api.serve.server import serving
from shardnet.api.server.settings import Listening, Settings
from shardnet.assets import DEFAULT_MODEL_PATH
from shardnet.wire.messages.plans import ModelChoice

DEADLINE_S = 120.0
CALL_MARKS = ("</tool_call>", "<tool_call>")
THINK_MARKS = ("</think>", "<think>")

TOOL_TEMPLATE = """{{ bos_token }}
{%- for tool in tools or [] %}{{ tool.function | tojson }}
{% endfor %}
{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}assistant: """
"""That of a model which writes calls as Hermes does."""


@asynccontextmanager
async def served(
    crew: Crew, model: str, settings: Settings | None = None, context: int = 0
) -> AsyncIterator[tuple[str, Client]]:
    """Serve a model on two of the nodes; give the URL and a client of the same ring."""
    nodes = [crew.nodes[number].address for number in (0, 2)]
    listening = Listening(host="127.0.0.1", port=0, settings=settings or Settings())
    async with asyncio.timeout(DEADLINE_S), connect(nodes[0]) as client:
        client.choice = ModelChoice(model=model, nodes=nodes, context=context)
        async with serving(client, listening) as url:
            yield url, client


THINK_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}
{% endfor %}assistant: {% if enable_thinking is not defined or enable_thinking %}<think>
{% endif %}"""
"""That of a model whose prompts begin its reasoning unless they are told not to."""


def make_tool_model(
    folder: Path, template: str = TOOL_TEMPLATE, marks: tuple[str, str] = CALL_MARKS
) -> Path:
    """Write the bundled model with a chat template that knows tools, and tokens for its marks."""
    shutil.copytree(DEFAULT_MODEL_PATH, folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": template}))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    model = tokenizer["model"]
    for mark, merge in zip(marks, model["merges"][:-3:-1], strict=True):
        token_id = model["vocab"].pop("".join(merge))  # the last tokens that were made
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": token_id, "content": mark, **flags})
    del model["merges"][-2:]
    file.write_text(json.dumps(tokenizer))
    return folder
