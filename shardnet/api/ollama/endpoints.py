"""The endpoints of Ollama that there are."""

from __future__ import annotations

from typing import Any

from shardnet.api.ollama.answers import OllamaChatAnswer, OllamaGenerated
from shardnet.api.ollama.body import OllamaChat, OllamaGenerate, OllamaShow
from shardnet.api.ollama.copying import (
    OllamaCopy,
    OllamaCreate,
    OllamaDelete,
    copy,
    create,
    delete,
)
from shardnet.api.ollama.embeddings import (
    OllamaEmbed,
    OllamaEmbedded,
    OllamaOldEmbed,
    OllamaOldEmbedded,
    embed_text,
    embed_texts,
)
from shardnet.api.ollama.facts import ModelFacts
from shardnet.api.ollama.faults import OLLAMA
from shardnet.api.ollama.generating import STREAM_TYPE, chat, generate
from shardnet.api.ollama.models import (
    OllamaModels,
    OllamaShown,
    OllamaVersion,
    Running,
    Show,
    Tags,
    version,
)
from shardnet.api.ollama.pulling import OllamaProgress, OllamaPull, Pulls, push
from shardnet.api.server.endpoint import Endpoint


def endpoints() -> list[Endpoint[Any]]:
    """List these endpoints."""
    facts = ModelFacts()
    return [
        Endpoint(
            method="POST",
            path="/api/copy",
            summary="Give a model a further name",
            handle=copy,
            dialect=OLLAMA,
            body=OllamaCopy,
        ),
        Endpoint(
            method="POST",
            path="/api/create",
            summary="Give a model a further name, as one that is made of it",
            handle=create,
            dialect=OLLAMA,
            body=OllamaCreate,
            answer=OllamaProgress,
            chunk=OllamaProgress,
            chunk_type=STREAM_TYPE,
        ),
        Endpoint(
            method="DELETE",
            path="/api/delete",
            summary="Drop a name that was given",
            handle=delete,
            dialect=OLLAMA,
            body=OllamaDelete,
        ),
        Endpoint(
            method="POST",
            path="/api/push",
            summary="Not done by this server: the answer says what is",
            handle=push,
            dialect=OLLAMA,
        ),
        Endpoint(
            method="POST",
            path="/api/pull",
            summary="Pull a model of the Hugging Face Hub to this machine",
            handle=Pulls(),
            dialect=OLLAMA,
            body=OllamaPull,
            answer=OllamaProgress,
            chunk=OllamaProgress,
            chunk_type=STREAM_TYPE,
            counts=True,
        ),
        Endpoint(
            method="GET",
            path="/api/version",
            summary="The version of Ollama's API",
            handle=version,
            dialect=OLLAMA,
            answer=OllamaVersion,
        ),
        Endpoint(
            method="GET",
            path="/api/tags",
            summary="The models that may be asked for",
            handle=Tags(facts),
            dialect=OLLAMA,
            answer=OllamaModels,
        ),
        Endpoint(
            method="GET",
            path="/api/ps",
            summary="The models that are loaded",
            handle=Running(facts),
            dialect=OLLAMA,
            answer=OllamaModels,
        ),
        Endpoint(
            method="POST",
            path="/api/show",
            summary="What is known of a model",
            handle=Show(facts),
            dialect=OLLAMA,
            body=OllamaShow,
            answer=OllamaShown,
        ),
        Endpoint(
            method="POST",
            path="/api/chat",
            summary="Continue a conversation",
            handle=chat,
            dialect=OLLAMA,
            body=OllamaChat,
            answer=OllamaChatAnswer,
            chunk=OllamaChatAnswer,
            chunk_type=STREAM_TYPE,
            counts=True,
        ),
        Endpoint(
            method="POST",
            path="/api/generate",
            summary="Answer a prompt, or continue it as it is",
            handle=generate,
            dialect=OLLAMA,
            body=OllamaGenerate,
            answer=OllamaGenerated,
            chunk=OllamaGenerated,
            chunk_type=STREAM_TYPE,
            counts=True,
        ),
        Endpoint(
            method="POST",
            path="/api/embed",
            summary="Texts as vectors",
            handle=embed_texts,
            dialect=OLLAMA,
            body=OllamaEmbed,
            answer=OllamaEmbedded,
            counts=True,
        ),
        Endpoint(
            method="POST",
            path="/api/embeddings",
            summary="A text as a vector, in the older form",
            handle=embed_text,
            dialect=OLLAMA,
            body=OllamaOldEmbed,
            answer=OllamaOldEmbedded,
            counts=True,
        ),
    ]
