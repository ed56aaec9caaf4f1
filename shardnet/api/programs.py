"""How programs are set up to ask a server: the form of each one's settings.

Writes no files, asks nobody. `shardnet connect` prints what the dashboard shows.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from shardnet.errors import UsageError, shown

KEY_PLACEHOLDER: Final = "YOUR-KEY"
KEY_VARIABLE: Final = "SHARDNET_RING_API_KEY"
"""What programs that read the key from a variable are told: the name that Zed makes itself."""
DEFAULT_CONTEXT: Final = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a program has to know: the server's address without /v1, key, model and its context."""

    url: str
    key: str
    model: str
    context: int = DEFAULT_CONTEXT

    @property
    def openai(self) -> str:
        """The address for programs that speak OpenAI's API."""
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """How one program is set up: `where` its settings are, what to `write` there, a `note`."""

    where: str
    write: Callable[[Served], str]
    note: str = ""


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _text(value: str) -> str:
    """Quote a text as JSON, TOML, YAML and Python all read it."""
    return json.dumps(value, ensure_ascii=False)


def _variables(values: Mapping[str, str]) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in values.items())


def _fields(values: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in values.items())


def _open_webui(served: Served) -> str:
    return _variables({"OPENAI_API_BASE_URL": served.openai, "OPENAI_API_KEY": served.key})


def _claude_code(served: Served) -> str:
    return _variables(
        {
            "ANTHROPIC_BASE_URL": served.url,
            "ANTHROPIC_AUTH_TOKEN": served.key,
            "ANTHROPIC_MODEL": served.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": served.model,
        }
    )


def _codex(served: Served) -> str:
    return (
        f"model = {_text(served.model)}\n"
        'model_provider = "shardnet"\n'
        f"model_context_window = {served.context}\n"
        "show_raw_agent_reasoning = true\n\n"
        "[model_providers.shardnet]\n"
        'name = "shardnet"\n'
        f"base_url = {_text(served.openai)}\n"
        f"experimental_bearer_token = {_text(served.key)}\n"
        'wire_api = "responses"'
    )


def _cline(served: Served) -> str:
    return _fields(
        {
            "API Provider": "OpenAI Compatible",
            "Base URL": served.openai,
            "API Key": served.key,
            "Model ID": served.model,
            "Context Window Size": str(served.context),
        }
    )


def _cline_cli(served: Served) -> str:
    given = {"-p": "openai-compatible", "-b": served.openai, "-k": served.key, "-m": served.model}
    return shlex.join(["cline", "auth", *(word for pair in given.items() for word in pair)])


def _continue(served: Served) -> str:
    return (
        "name: shardnet\n"
        "version: 0.0.1\n"
        "schema: v1\n"
        "models:\n"
        "  - name: shardnet\n"
        "    provider: openai\n"
        f"    model: {_text(served.model)}\n"
        f"    apiBase: {_text(served.openai)}\n"
        f"    apiKey: {_text(served.key)}\n"
        "    roles: [chat, edit, apply]\n"
        "    defaultCompletionOptions:\n"
        f"      contextLength: {served.context}"
    )


def _aider(served: Served) -> str:
    return (
        f"openai-api-base: {_text(served.openai)}\n"
        f"openai-api-key: {_text(served.key)}\n"
        f"model: {_text('openai/' + served.model)}\n"
        "show-model-warnings: false"
    )


def _opencode(served: Served) -> str:
    limit = {"context": served.context, "output": served.context // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "shardnet",
        "options": {"baseURL": served.openai, "apiKey": served.key},
        "models": {served.model: {"name": served.model, "tool_call": True, "limit": limit}},
    }
    return _json({"model": f"shardnet/{served.model}", "provider": {"shardnet": provider}})


def _pi(served: Served) -> str:
    provider = {
        "baseUrl": served.openai,
        "api": "openai-completions",
        "apiKey": served.key,
        "models": [
            {
                "id": served.model,
                "contextWindow": served.context,
                "maxTokens": served.context // 4,
            }
        ],
    }
    return _json({"providers": {"shardnet": provider}})


def _goose(served: Served) -> str:
    return _variables(
        {
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": served.model,
            "GOOSE_CONTEXT_LIMIT": str(served.context),
            "OPENAI_HOST": served.url,
            "OPENAI_API_KEY": served.key,
        }
    )


def _zed(served: Served) -> str:
    model = {
        "name": served.model,
        "max_tokens": served.context,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True},
    }
    provider = {"api_url": served.openai, "available_models": [model]}
    return _json({"language_models": {"openai_compatible": {"shardnet-ring": provider}}})


def _vscode(served: Served) -> str:
    return _json({"github.copilot.chat.byok.ollamaEndpoint": served.url})


def _langchain(served: Served) -> str:
    return (
        "from langchain_openai import ChatOpenAI\n\n"
        "model = ChatOpenAI(\n"
        f"    base_url={_text(served.openai)},\n"
        f"    api_key={_text(served.key)},\n"
        f"    model={_text(served.model)},\n"
        ")"
    )


def _home_assistant(served: Served) -> str:
    return _fields({"URL": served.url, "Model": served.model})


PROGRAMS: Final[Mapping[str, Program]] = MappingProxyType(
    {
        "openwebui": Program(
            where="the environment of Open WebUI",
            write=_open_webui,
            note="in a container, the address must be one that reaches this machine from there",
        ),
        "claude-code": Program(
            where="the shell that starts claude",
            write=_claude_code,
            note="Claude Code asks for /v1/messages",
        ),
        "codex": Program(
            where="~/.codex/config.toml",
            write=_codex,
            note="what stands before [model_providers.shardnet] belongs above all tables of the "
            "file; Codex asks for /v1/responses",
        ),
        "cline": Program(where="Cline's settings, API Configuration", write=_cline),
        "cline-cli": Program(where="a shell, once: it keeps them", write=_cline_cli),
        "roo": Program(where="Roo Code's settings, Providers", write=_cline),
        "continue": Program(where="~/.continue/config.yaml", write=_continue),
        "aider": Program(where="~/.aider.conf.yml", write=_aider),
        "opencode": Program(
            where="~/.config/opencode/opencode.json, or opencode.json in a project", write=_opencode
        ),
        "pi": Program(
            where="~/.pi/agent/models.json",
            write=_pi,
            note="then `pi --model shardnet/MODEL`, or choose it with /model",
        ),
        "goose": Program(where="the shell that starts goose", write=_goose),
        "zed": Program(
            where="Zed's settings.json",
            write=_zed,
            note=f"the key is read from {KEY_VARIABLE}, or entered in the settings of the agent",
        ),
        "vscode": Program(
            where="VS Code's settings.json",
            write=_vscode,
            note="then choose the model under 'Chat: Manage Language Models', Ollama; no key is "
            "sent, so the server must have none",
        ),
        "langchain": Program(where="a Python program", write=_langchain),
        "home-assistant": Program(
            where="Settings, Devices & services, Add integration, Ollama",
            write=_home_assistant,
            note="for a server without a key",
        ),
    }
)


def server_address(url: str) -> str:
    """Return the server's address without /v1. Raises UsageError for no URL of HTTP."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_address = False
    if not is_address or any(character.isspace() for character in url):
        raise UsageError(
            f"{shown(url)} is no address of a server", remedy="give one like http://10.0.0.5:8000"
        )
    return url.rstrip("/").removesuffix("/v1")
