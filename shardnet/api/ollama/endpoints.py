"""The endpoints of Ollama that there are."""

from __future__ import annotations

from typing import Any

from shardnet.api.ollama.answers import OllamaChatAnswer, OllamaGenerated
from shardnet.api.ollama.body import OllamaChat, OllamaGenerate, OllamaShow
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
from shardnet.api.ollama.pulling import (
    OllamaCopy,
    OllamaCreate,
    OllamaDelete,
    OllamaProgress,
    OllamaPull,
    Pulls,
    copy,
    create,
    delete,
    push,
)
from shardnet.api.server.endpoint import Endpoint


def endpoints() -> list[Endpoint[Any]]:
    """List these endpoints."""
    facts = ModelFacts()
    return [
        OLLAMA.at("POST /api/copy", "Give a model a further name", copy, OllamaCopy),
        OLLAMA.at(
            "POST /api/create",
            "Give a model a further name, as one that is made of it",
            create,
            OllamaCreate,
            OllamaProgress,
            chunk=OllamaProgress,
            chunk_type=STREAM_TYPE,
        ),
        OLLAMA.at("DELETE /api/delete", "Drop a name that was given", delete, OllamaDelete),
        OLLAMA.at("POST /api/push", "Not done by this server: the answer says what is", push),
        OLLAMA.at(
            "POST /api/pull",
            "Pull a model of the Hugging Face Hub to this machine",
            Pulls(),
            OllamaPull,
            OllamaProgress,
            chunk=OllamaProgress,
            chunk_type=STREAM_TYPE,
            counts=True,
        ),
        OLLAMA.at("GET /api/version", "The version of Ollama's API", version, answer=OllamaVersion),
        OLLAMA.at(
            "GET /api/tags", "The models that may be asked for", Tags(facts), answer=OllamaModels
        ),
        OLLAMA.at("GET /api/ps", "The models that are loaded", Running(facts), answer=OllamaModels),
        OLLAMA.at(
            "POST /api/show", "What is known of a model", Show(facts), OllamaShow, OllamaShown
        ),
        OLLAMA.at(
            "POST /api/chat",
            "Continue a conversation",
            chat,
            OllamaChat,
            OllamaChatAnswer,
            chunk=OllamaChatAnswer,
            chunk_type=STREAM_TYPE,
            counts=True,
        ),
        OLLAMA.at(
            "POST /api/generate",
            "Answer a prompt, or continue it as it is",
            generate,
            OllamaGenerate,
            OllamaGenerated,
            chunk=OllamaGenerated,
            chunk_type=STREAM_TYPE,
            counts=True,
        ),
        OLLAMA.at(
            "POST /api/embed",
            "Texts as vectors",
            embed_texts,
            OllamaEmbed,
            OllamaEmbedded,
            counts=True,
        ),
        OLLAMA.at(
            "POST /api/embeddings",
            "A text as a vector, in the older form",
            embed_text,
            OllamaOldEmbed,
            OllamaOldEmbedded,
            counts=True,
        ),
    ]
