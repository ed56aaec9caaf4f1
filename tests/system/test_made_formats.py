"""Conversations in the formats of this year's models: thinking and calls, in each form, on a ring.

What the model writes is a script; the prompts are those of the real formats.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.servers.ring_server import served
from support.system.nodes import Crew
from support.system.parrot import make_scripted

from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.settings import Settings

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DSML = """Yes.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Bern</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "｜DSML｜")
HUNYUAN = """{%- set x = ':6124c78e' %}
{%- set effort = reasoning_effort if reasoning_effort is defined else 'high' %}
{%- if effort not in ['high', 'no_think'] %}{{ raise_exception('effort ' ~ effort) }}{% endif %}
{%- for tool in tools or [] %}{{ tool.function.name }}<tool_calls{{ x }}>{% endfor %}
{%- for message in messages %}<｜hy_start{{ x }}｜>{{ message.role }}<｜hy_middle{{ x }}｜>
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call{{ x }}>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}<arg_key{{ x }}>{{ key }}</arg_key{{ x }}>
{{- '<arg_value' ~ x ~ '>' ~ value ~ '</arg_value' ~ x ~ '>' }}{% endfor %}{% endfor %}
{%- endfor %}<think{{ x }}>{{ '</think' ~ x ~ '>' if effort == 'no_think' }}"""
"""In the shape of Hunyuan 4's: two efforts, one of them no thinking, and marks with a suffix."""
FORMATS: dict[str, tuple[str | None, dict[str, str], tuple[str, ...]]] = {
    "DeepSeek-V4": (
        None,
        {"<think>": "I look.</think>", "</think>": DSML},
        (*DEEPSEEK, "<｜latest_reminder｜>"),
    ),
    "DeepSeek-V4.1": (
        None,
        {
            "<think>": "I look.</think>",
            "</think>": DSML.replace("｜DSML｜tool_", "｜DSML｜ ")
            .replace("｜DSML｜invoke", "｜DSML｜ invoke")
            .replace("｜DSML｜parameter", "｜DSML｜ parameter"),
        },
        (*DEEPSEEK, "<｜System｜>"),
    ),
    "Hunyuan 4": (
        HUNYUAN,
        {
            "<think:6124c78e>": "I look.</think:6124c78e>",
            "</think:6124c78e>": "Yes.<tool_calls:6124c78e><tool_call:6124c78e>weather"
            "<arg_key:6124c78e>city</arg_key:6124c78e><arg_value:6124c78e>Bern"
            "</arg_value:6124c78e></tool_call:6124c78e></tool_calls:6124c78e>",
        },
        tuple(
            f"<{slash}{name}:6124c78e>"
            for name in ("tool_calls", "tool_call", "arg_key", "arg_value")
            for slash in ("", "/")
        ),
    ),
}
KEYS = Settings(keys=Keyring([parse_key("ann:one", 1)]))


@pytest.mark.parametrize("name", FORMATS)
def test_thinking_and_calls_are_told_apart_in_each_form(
    name: str, trio: Crew, tmp_path: Path
) -> None:
    import anthropic  # here: test_http_server says why
    import openai

    model = str(make_scripted(tmp_path / "scripted", *FORMATS[name]))

    async def main() -> None:
        async with (
            served(trio, model, KEYS) as (url, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="one", max_retries=0) as client,
            anthropic.AsyncAnthropic(base_url=url, api_key="one", max_retries=0) as other,
        ):
            asked: Any = {"model": "scripted", "temperature": 0}
            words: Any = [{"role": "user", "content": "Rain?"}]
            function: Any = {"name": "weather", "parameters": CITY}
            tools: Any = [{"type": "function", "function": function}]
            for effort, thought in (("none", None), ("high", "I look."), ("low", "I look.")):
                common = {**asked, "messages": words, "tools": tools, "reasoning_effort": effort}
                chat = await client.chat.completions.create(**common)
                message = chat.choices[0].message
                assert (message.content, getattr(message, "reasoning_content", None)) == (
                    *("Yes.", thought),
                )
                assert chat.choices[0].finish_reason == "tool_calls"
                [call] = message.tool_calls
                assert (call.function.name, json.loads(call.function.arguments)) == (
                    *("weather", {"city": "Bern"}),
                )
                stream = await client.chat.completions.create(**common, stream=True)
                deltas = [piece.choices[0].delta async for piece in stream if piece.choices]
                assert "".join(delta.content or "" for delta in deltas) == "Yes."
                thoughts = (getattr(delta, "reasoning_content", None) or "" for delta in deltas)
                assert "".join(thoughts) == (thought or "")
                parts = [part for delta in deltas for part in delta.tool_calls or ()]
                assert "".join(part.function.name or "" for part in parts) == "weather"
                text = "".join(part.function.arguments or "" for part in parts)
                assert json.loads(text) == {"city": "Bern"}

            told = [*words, message.model_dump(exclude_none=True)]
            told.append({"role": "tool", "tool_call_id": call.id, "content": "sun"})
            again = await client.chat.completions.create(
                **asked, messages=told, tools=tools, reasoning_effort="none"
            )
            assert again.choices[0].message.tool_calls

            tool: Any = {"type": "function", "strict": True, **function}
            response = await client.responses.create(
                **asked, input="Rain?", tools=[tool], reasoning={"effort": "high"}
            )
            kinds = [item.type for item in response.output]
            assert kinds == ["reasoning", "message", "function_call"]
            assert json.loads(response.output[-1].arguments) == {"city": "Bern"}

            blocks = await other.messages.create(
                model="scripted",
                extra_body={"temperature": 0},
                messages=words,
                max_tokens=99,
                tools=[{"name": "weather", "input_schema": CITY}],
                thinking={"type": "enabled", "budget_tokens": 1024},
            )
            assert [block.type for block in blocks.content] == ["thinking", "text", "tool_use"]
            assert blocks.content[-1].input == {"city": "Bern"}

            place = {**CITY, "properties": {"city": {"enum": ["Chur"]}}}
            forced = await client.chat.completions.create(
                **asked,
                messages=words,
                tools=[{"type": "function", "function": {**function, "parameters": place}}],
                tool_choice="required",
                parallel_tool_calls=False,
                reasoning_effort="none",
            )
            [call] = forced.choices[0].message.tool_calls
            assert json.loads(call.function.arguments) == {"city": "Chur"}

    asyncio.run(main())
