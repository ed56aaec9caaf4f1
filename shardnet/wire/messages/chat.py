"""Messages of a conversation as they travel, and what a client asks of a model's tokenizer.

Knows the fields, their types and their bounds (docs/protocol.md section 8). Knows nothing of
templates nor of what models write.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from shardnet.types import U32, Row, Strict
from shardnet.wire.framing.schema import Name, Numbered, Reply, Text
from shardnet.wire.messages.plans import ModelChoice

MAX_TOOL_CALLS: Final = 1 << 10
MAX_TEMPLATE_OPTIONS: Final = 32
MAX_ADDED_TOKENS: Final = 1 << 14
MAX_ADDED_TEXT: Final = 256

ToolsText = Annotated[str, Meta(max_length=1 << 20)]
"""Tools as the JSON text of a list of objects, "" for none."""

_WHOLE: Final = 2**53
_REAL: Final = 1e300
OptionValue = (
    bool
    | Annotated[int, Meta(ge=-_WHOLE, le=_WHOLE)]
    | Annotated[float, Meta(ge=-_REAL, le=_REAL)]
    | Annotated[str, Meta(max_length=4096)]
    | None
)
TemplateOptions = Annotated[list[tuple[Name, OptionValue]], Meta(max_length=MAX_TEMPLATE_OPTIONS)]
"""Names and values that a chat template gets beside the messages, such as `enable_thinking`."""


MAX_PICTURES_BYTES: Final = 24 << 20
"""Files of the pictures of one request, together: with them it fits into a CONTROL frame."""


class Picture(Strict, frozen=True, kw_only=True):
    """The file of a picture: PNG, JPEG, WebP or GIF. With the `detail` low it takes fewer tokens,
    where the model can.
    """

    data: Annotated[bytes, Meta(max_length=MAX_PICTURES_BYTES)]
    detail: Literal["auto", "low", "high"] = "auto"


class ToolCall(Strict, frozen=True, kw_only=True):
    """A tool call in an assistant's message. `arguments` is the JSON text of an object."""

    id: Name = ""
    name: Name
    arguments: Text = "{}"


class ChatMessage(Strict, frozen=True, kw_only=True):
    """One message of a conversation. `role` is system, user, assistant, tool or what else the
    model's chat template knows. Where there are `parts` they are the content: texts, and pictures
    by their numbers in the request.

    `tool_call_id` and `name` say what a tool's message answers. Empty fields but `content` are not
    shown to the template.
    """

    role: Name
    content: Text | None
    reasoning_content: Text = ""
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOL_CALLS)] = []
    tool_call_id: Name = ""
    name: Name = ""
    parts: Annotated[list[Text | U32], Meta(max_length=1 << 14)] = []


class AddedToken(Row, frozen=True, array_like=True):
    """A token beside those that text is split into. Special ones are left out of text."""

    token_id: U32
    text: Annotated[str, Meta(max_length=MAX_ADDED_TEXT)]
    is_special: bool


class DescribeTokenizer(Numbered, frozen=True, kw_only=True):
    """Ask what is special about the tokenizer of a model, and for its chat template.

    Answered by TokenizerDescribed or Redirect; the ring is built if needed, as for Generate.
    """

    choice: ModelChoice


class TokenizerDescribed(Reply, frozen=True, kw_only=True):
    """Answers DescribeTokenizer: ids that begin and end a text, added tokens, the chat template.

    Tokens of more than 256 characters are left out. `template` is "" where there is none. It `sees`
    if prompts may have pictures.
    """

    bos_id: U32 | None
    eos_ids: Annotated[list[U32], Meta(max_length=1024)]
    added: Annotated[list[AddedToken], Meta(max_length=MAX_ADDED_TOKENS)]
    template: Text
    sees: bool = False
