"""Writes grammars in llguidance's form of Lark: literals, marks, JSON by a schema, free text.

Pure. Must not know any format of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from shardnet.api.chat_formats.marks import TokenText
from shardnet.constraints import MAX_CONSTRAINT_CHARACTERS
from shardnet.errors import UsageError
from shardnet.json_schemas import close_objects

_SLASH: Final = r"\/"
_ONE_LINE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is spaced unless its schema says otherwise, as for every other constraint."""


class Lark:
    """One grammar. Its methods return expressions, which stand in the bodies of rules.

    A mark is its token where the tokenizer has one, as readers of calls want it, else its text.
    """

    def __init__(self, tokens: Mapping[int, TokenText]) -> None:
        self._ids = {token.text: token_id for token_id, token in tokens.items()}
        self._rules: list[str] = []
        self._n_characters = 0

    def text(self, start: str) -> str:
        """Return the grammar whose whole output is the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules])

    def has(self, mark: str) -> bool:
        """Say whether a mark is a token."""
        return mark in self._ids

    def mark(self, mark: str) -> str:
        """Write a mark."""
        return f"<[{self._ids[mark]}]>" if mark in self._ids else self.literal(mark)

    def literal(self, text: str) -> str:
        """Write a text as it is."""
        return json.dumps(text, ensure_ascii=False)

    def any_of(self, expressions: Iterable[str]) -> str:
        """Write alternatives."""
        return self.rule(" | ".join(expressions))

    def rule(self, body: str, options: str = "") -> str:
        """Write a rule of its own; return its name."""
        name = f"r{len(self._rules)}"
        self.define(name + options, body)
        return name

    def define(self, name: str, body: str) -> None:
        """Write a rule that has a name. Raises UsageError where the grammar becomes too long."""
        self._rules.append(f"{name}: {body}")
        self._n_characters += len(self._rules[-1])
        if self._n_characters > MAX_CONSTRAINT_CHARACTERS:
            raise UsageError(
                f"a grammar of these tools has more than {MAX_CONSTRAINT_CHARACTERS} characters",
                remedy="give fewer tools or smaller schemas, or tool_choice auto",
            )

    def json(self, schema: Mapping[str, Any]) -> str:
        """Write JSON that is valid by a schema with closed objects. Raises UsageError for none."""
        said = schema.get("x-guidance", {})
        spaced = {**_ONE_LINE, **said} if isinstance(said, dict) else said
        try:
            closed = close_objects(schema)
            return self.rule("%json " + json.dumps({**closed, "x-guidance": spaced}))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the schema is no JSON: {error}") from error

    def text_to(self, end: str, before: str = "") -> str:
        """Write any text up to the mark `end`, and with it the text `before` that mark."""
        if self.has(end):
            # One expression: lexers take as much text as they can, what is before the mark too.
            return f"/(?s:.*){re.escape(before).replace('/', _SLASH)}/ {self.mark(end)}"
        return self.rule("/(?s:.*)/", f"[suffix={self.literal(before + end)}]")
