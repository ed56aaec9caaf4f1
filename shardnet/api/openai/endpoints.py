"""The endpoints of OpenAI that there are, and those about tokens."""

from __future__ import annotations

from typing import Any

from shardnet.api.openai.chat import ChatChunk, ChatCompletion, complete_chat
from shardnet.api.openai.chat_body import ChatBody
from shardnet.api.openai.completions import Completion, CompletionBody, complete
from shardnet.api.openai.embeddings import EmbeddingBody, EmbeddingList, embeddings
from shardnet.api.openai.faults import OPENAI
from shardnet.api.openai.infill import InfillAnswer, InfillBody, fill_in
from shardnet.api.openai.models import ModelCard, ModelList, list_models, show_model
from shardnet.api.openai.reranking import Ranking, RerankBody, rank
from shardnet.api.openai.tokens import (
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    TokenizerInfo,
    Tokens,
    detokenize,
    tokenize,
    tokenizer_info,
)
from shardnet.api.server.endpoint import Endpoint


def endpoints() -> list[Endpoint[Any]]:
    """List these endpoints."""
    return [
        Endpoint(
            method="POST",
            path="/v1/chat/completions",
            summary="Continue a conversation",
            handle=complete_chat,
            dialect=OPENAI,
            body=ChatBody,
            answer=ChatCompletion,
            chunk=ChatChunk,
            counts=True,
        ),
        Endpoint(
            method="POST",
            path="/v1/completions",
            summary="Continue texts or token ids",
            handle=complete,
            dialect=OPENAI,
            body=CompletionBody,
            answer=Completion,
            chunk=Completion,
            counts=True,
        ),
        Endpoint(
            method="POST",
            path="/infill",
            summary="What stands between two texts, in llama-server's form",
            handle=fill_in,
            dialect=OPENAI,
            body=InfillBody,
            answer=InfillAnswer,
            chunk=InfillAnswer,
            counts=True,
        ),
        Endpoint(
            method="POST",
            path="/v1/embeddings",
            summary="Texts or token ids as vectors",
            handle=embeddings,
            dialect=OPENAI,
            body=EmbeddingBody,
            answer=EmbeddingList,
            counts=True,
        ),
        *(
            Endpoint(
                method="POST",
                path=path,
                summary="Documents in the order of how well they answer a query",
                handle=rank,
                dialect=OPENAI,
                body=RerankBody,
                answer=Ranking,
                counts=True,
            )
            for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        ),
        Endpoint(
            method="GET",
            path="/v1/models",
            summary="The models that may be asked for",
            handle=list_models,
            dialect=OPENAI,
            answer=ModelList,
        ),
        Endpoint(
            method="GET",
            path="/v1/models/{name:path}",
            summary="One model",
            handle=show_model,
            dialect=OPENAI,
            answer=ModelCard,
        ),
        Endpoint(
            method="POST",
            path="/tokenize",
            summary="Text to token ids",
            handle=tokenize,
            dialect=OPENAI,
            body=TokenizeBody,
            answer=Tokens,
            counts=True,
        ),
        Endpoint(
            method="POST",
            path="/detokenize",
            summary="Token ids to text",
            handle=detokenize,
            dialect=OPENAI,
            body=DetokenizeBody,
            answer=Detokenized,
            counts=True,
        ),
        Endpoint(
            method="GET",
            path="/tokenizer_info",
            summary="The tokens that begin and end a text, and the chat template",
            handle=tokenizer_info,
            dialect=OPENAI,
            answer=TokenizerInfo,
        ),
    ]
