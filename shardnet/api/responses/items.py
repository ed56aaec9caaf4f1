"""Turns deltas into items, and into the events of a stream.

Pure. Must not know how a request is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from shardnet.api.chat_formats.deltas import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from shardnet.api.openai.logprobs import ContentLogprob
from shardnet.api.responses.answers import (
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    Item,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningItem,
    ReasoningText,
    StreamEvent,
    TextDelta,
    TextDone,
    ThoughtDelta,
    ThoughtDone,
)


class ItemEvents:
    """Divides an answer into items and writes each as events. `new_id` makes ids by a prefix."""

    def __init__(self, new_id: Callable[[str], str]) -> None:
        self._new_id = new_id
        self.items: list[Item] = []
        """The items so far; the last may be open."""
        self._parts: list[str] = []
        """The text of the open item."""
        self._is_open = False
        self._logprobs: list[ContentLogprob] = []
        """Those of tokens whose text has not come."""

    def take(
        self, delta: OutputDelta, logprobs: Sequence[ContentLogprob] = ()
    ) -> Iterator[StreamEvent]:
        """Yield the events of more of the answer, with those of the tokens that came with it."""
        self._logprobs += logprobs
        match delta:
            case ReasoningDelta(text=text):
                if not self._is_last(ReasoningItem):
                    yield from self._begin(ReasoningItem(id=self._new_id("rs")))
                yield self._more_thought(text)
            case ContentDelta(text=text):
                if not self._is_last(MessageItem):
                    yield from self._begin(MessageItem(id=self._new_id("msg")))
                yield self._more_text(text)
            case ToolCallStarted(call_id=call_id, name=name):
                item = CallItem(id=self._new_id("fc"), call_id=call_id or "", name=name)
                yield from self._begin(item)
            case ToolCallDelta(text=text):
                yield self._more_arguments(text)

    def wait(self, logprobs: Sequence[ContentLogprob]) -> None:
        """Keep those of tokens whose text has not come."""
        self._logprobs += logprobs

    def end(self, status: str = "completed") -> Iterator[StreamEvent]:
        """Yield the events that end the item that is open, if one is."""
        if not self._is_open:
            return
        self._is_open = False
        item, index, text = self.items[-1], self._index, "".join(self._parts)
        item.status = status
        match item:
            case MessageItem(id=item_id, content=[part]):
                part.text = text
                yield TextDone(
                    item_id=item_id, output_index=index, text=text, logprobs=part.logprobs
                )
                yield PartDone(item_id=item_id, output_index=index, part=part)
            case ReasoningItem(id=item_id, content=[thought]):
                thought.text = text
                yield ThoughtDone(item_id=item_id, output_index=index, text=text)
                yield PartDone(item_id=item_id, output_index=index, part=thought)
            case CallItem(id=item_id, name=name):
                item.arguments = text
                yield ArgumentsDone(item_id=item_id, output_index=index, name=name, arguments=text)
        yield ItemDone(output_index=index, item=item)

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _is_last(self, kind: type[Item]) -> bool:
        return self._is_open and isinstance(self.items[-1], kind)

    def _begin(self, item: Item) -> Iterator[StreamEvent]:
        yield from self.end()
        self.items.append(item)
        self._is_open, self._parts = True, []
        yield ItemAdded(output_index=self._index, item=item)
        match item:
            case MessageItem(id=item_id, content=content):
                content.append(OutputText(text=""))
                yield PartAdded(item_id=item_id, output_index=self._index, part=content[0])
            case ReasoningItem(id=item_id, content=thoughts):
                thoughts.append(ReasoningText(text=""))
                yield PartAdded(item_id=item_id, output_index=self._index, part=thoughts[0])

    def _more_text(self, text: str) -> StreamEvent:
        item = self.items[-1]
        assert isinstance(item, MessageItem)
        self._parts.append(text)
        logprobs, self._logprobs = self._logprobs, []
        item.content[0].logprobs += logprobs
        return TextDelta(item_id=item.id, output_index=self._index, delta=text, logprobs=logprobs)

    def _more_thought(self, text: str) -> StreamEvent:
        self._parts.append(text)
        self._logprobs = []
        return ThoughtDelta(item_id=self.items[-1].id, output_index=self._index, delta=text)

    def _more_arguments(self, text: str) -> StreamEvent:
        self._parts.append(text)
        self._logprobs = []
        return ArgumentsDelta(item_id=self.items[-1].id, output_index=self._index, delta=text)
