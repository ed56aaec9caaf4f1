"""The endpoints of Anthropic that there are."""

from __future__ import annotations

from typing import Any

from shardnet.api.anthropic.answers import MessageAnswer, StreamEvent
from shardnet.api.anthropic.body import ContinuedBody, ConversationBody
from shardnet.api.anthropic.faults import ANTHROPIC
from shardnet.api.anthropic.messages import TokensCounted, continue_messages, count_tokens
from shardnet.api.server.endpoint import Endpoint


def endpoints() -> list[Endpoint[Any]]:
    """List these endpoints."""
    return [
        Endpoint(
            method="POST",
            path="/v1/messages",
            summary="Continue a conversation, in Anthropic's form",
            handle=continue_messages,
            dialect=ANTHROPIC,
            body=ContinuedBody,
            answer=MessageAnswer,
            chunk=StreamEvent,
            counts=True,
        ),
        Endpoint(
            method="POST",
            path="/v1/messages/count_tokens",
            summary="How many tokens a conversation has, in Anthropic's form",
            handle=count_tokens,
            dialect=ANTHROPIC,
            body=ConversationBody,
            answer=TokensCounted,
            counts=True,
        ),
    ]
