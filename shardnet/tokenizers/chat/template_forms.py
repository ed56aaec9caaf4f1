"""The forms in which a conversation is given to a chat template, until it takes one of them.

Templates differ in what they read: arguments of calls as an object or as text, system messages
anywhere or one at the beginning, some efforts of reasoning. Pure: knows neither jinja2 nor
any template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

Shown = dict[str, Any]
"""A message as a template is given it."""

MAX_DEPTH = 64
"""Of objects and lists in tools and arguments. Templates write them by recursion."""
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL)
"""Strings, whose brackets do not count, and the brackets that do."""
BRACKET_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ONLY = "arguments"
"""The key of arguments that are no object, where their tool has no parameter that is a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Messages, and the texts that a prompt must show if the template has taken them: those of
    `calls` as they are written, not as a JSON string.
    """

    messages: Sequence[Shown]
    calls: Sequence[str] = ()
    systems: Sequence[str] = ()

    def is_usual(self) -> bool:
        """Say whether this is the form that transformers gives a template."""
        return not self.calls and not self.systems

    def is_shown(self, prompt: str) -> bool:
        """Say whether a prompt shows what a template might leave out silently."""
        return all(text.strip() in prompt for text in self.systems) and all(
            text in prompt and f'"{text}"' not in prompt for text in self.calls
        )


def forms_of(
    messages: Sequence[Shown], tools: Sequence[Mapping[str, Any]], *, may_join: bool = True
) -> list[Form]:
    """List the forms in which a conversation may be given to a template, the best first.

    Arguments that are no object are given as they came to a template that shows them so, else as an
    object. All are given as text to a template that takes nothing else, as DeepSeek's. System
    messages that a template takes nowhere else are one at the beginning, if they `may_join`. What
    called a tool and said nothing has an empty text for templates that know no calls.
    """
    texts = [call["arguments"] for said in messages for call in said.get("tool_calls") or ()]
    read = {text: read_object(text) if text.strip() else {} for text in texts}
    broken = [text for text in texts if read[text] is None]

    def as_object(call: Shown) -> object:
        known = read[call["arguments"]]
        return {key_of_text(tools, call["name"]): call["arguments"]} if known is None else known

    def as_it_came(call: Shown) -> object:
        known = read[call["arguments"]]
        return call["arguments"] if known is None else known

    forms = [Form(messages=nested(messages, as_object))]
    if broken:
        forms.insert(0, Form(messages=nested(messages, as_it_came), calls=broken))
    if texts:
        as_text = nested(messages, lambda call: call["arguments"].strip() or "{}")
        forms.append(Form(messages=as_text, calls=[text.strip() or "{}" for text in texts]))
    systems = [said for said in messages if said["role"] == "system"]
    if may_join and (len(systems) > 1 or systems != [*messages[: len(systems)]]):
        forms += [with_systems_first(form) for form in forms]
    if any(map(only_calls, messages)):
        forms += [replace(form, messages=with_texts(form.messages)) for form in forms]
    return forms


EFFORT: Final = "reasoning_effort"
"""What templates call the effort of reasoning."""
_EFFORTS: Final = ("minimal", "low", "medium", "high", "xhigh", "max")
_NEAR: Final = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Efforts that few templates know, and the nearest of low, medium and high."""
_OFF: Final = ("no_think", "none")
"""What templates call no effort: Hunyuan's and Mistral's have no other switch."""
_NONE: Final = re.compile(r"effort[^%{}]*['\"]none['\"]")
"""Where `none` is an effort: elsewhere it is a choice of tools, or a type."""


def efforts_of(source: str, options: Mapping[str, Any]) -> list[Any]:
    """List the efforts that a template may be given for the one of the `options`, the best first.

    It knows those that stand in it in quotes. One that it does not know it may refuse: then the
    nearest is taken that it knows, of two the greater. None is no effort. Where it knows a word for
    no effort, `enable_thinking` says whether that is meant.
    """
    known = [word for word in (*_OFF, *_EFFORTS) if f"'{word}'" in source or f'"{word}"' in source]
    known = [word for word in known if word != "none" or _NONE.search(source)]
    off = next((word for word in known if word in _OFF), None)
    wanted = options.get(EFFORT)
    if off is not None and wanted is None:
        switch = options.get("enable_thinking")
        wanted = None if switch is None else "high" if switch else off
    if wanted in known or wanted not in _EFFORTS:
        return [wanted]
    place = _EFFORTS.index
    near = sorted(
        set(known) - {*_OFF}, key=lambda word: (abs(d := place(word) - place(wanted)), -d)
    )
    return [_NEAR.get(wanted, wanted), *near]


def only_calls(said: Shown) -> bool:
    """Say whether a message has calls and no text."""
    return bool(said.get("tool_calls")) and said.get("content") is None


def with_texts(messages: Sequence[Shown]) -> list[Shown]:
    """Write an empty text in messages that have only calls."""
    return [{**said, "content": ""} if only_calls(said) else said for said in messages]


def with_systems_first(form: Form) -> Form:
    """Join all system messages to one at the beginning, their texts by line breaks."""
    systems = [said for said in form.messages if said["role"] == "system"]
    others = [said for said in form.messages if said["role"] != "system"]
    parts = [part for said in systems for part in parts_of(said["content"])]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    is_text = all(isinstance(said["content"], str | None) for said in systems)
    joined = {**systems[0], "content": "\n".join(texts) if is_text else parts}
    return replace(form, messages=[joined, *others], systems=texts)


def parts_of(content: str | Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
    """Write a content, which is a text or parts, as parts."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def nested(messages: Sequence[Shown], arguments_of: Callable[[Shown], object]) -> list[Shown]:
    """Write the tool calls of messages nested as in OpenAI's API, with the arguments given."""
    return [
        {**said, "tool_calls": [nested_call(call, arguments_of(call)) for call in calls]}
        if (calls := said.get("tool_calls"))
        else said
        for said in messages
    ]


def nested_call(call: Shown, arguments: object) -> Shown:
    """Write one tool call; it has an id if it came with one."""
    named = {"id": call["id"]} if call.get("id") else {}
    function = {"name": call["name"], "arguments": arguments}
    return {**named, "type": "function", "function": function}


def key_of_text(tools: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return the first parameter of a tool that is a text, else a name that says what it holds."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            known = parameters.get("properties") if isinstance(parameters, dict) else None
            for key, schema in known.items() if isinstance(known, dict) else ():
                if isinstance(schema, dict) and schema.get("type") == "string":
                    return str(key)
    return _ONLY


def read_object(text: str) -> Shown | None:
    """Read the JSON of an object; None for anything else."""
    try:
        read = read_nested(text)
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def read_nested(text: str) -> Any:
    """Read JSON of at most MAX_DEPTH nested objects and lists. Raises ValueError.

    Half a pair of surrogates, which no prompt can hold, becomes U+FFFD.
    """
    depth = deepest = 0
    for mark in BRACKETS.findall(text):
        depth += BRACKET_DEPTH.get(mark, 0)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise ValueError(f"nested {deepest} deep, at most {MAX_DEPTH} is read")
    read = json.loads(text)
    if _SURROGATE.search(text):
        whole = json.dumps(read, ensure_ascii=False).encode("utf-16", "surrogatepass")
        return json.loads(whole.decode("utf-16", "replace"))
    return read
