"""Chat templates in the shape of those that fail, or refuse, what other templates take."""

from __future__ import annotations

QWEN = """{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Qwen 3.5 to 3.8: the system message is the first, and the only one."""

GLM = """[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>
{{ message.content or '' }}
{%- for tc in message.tool_calls or [] %}{% set tc = tc.function if tc.function else tc %}
<tool_call>{{ tc.name }}{% set _args = tc.arguments %}
{%- for k, v in _args.items() %}<arg_key>{{ k }}</arg_key><arg_value>
{{- v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}</tool_call>
{%- endfor %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
"""GLM 4.5 to 5: each argument is an element."""

CODER = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}{% set tool_call = tool_call.function %}
<tool_call>
<function={{ tool_call.name }}>
{%- if tool_call.arguments is defined %}
{%- for args_name, args_value in tool_call.arguments|items %}
<parameter={{ args_name }}>
{{ args_value if args_value is string else args_value | tojson | safe }}
</parameter>{% endfor %}{% endif %}
</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Qwen3-Coder: each argument is an element, by a filter that takes nothing but an object."""
