"""Open WebUI, run as `shardnet connect` sets it up, and asked over its own HTTP API."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from shardnet.api.programs import PROGRAMS, Served

QUIET: Final = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "secret",
    "HF_HUB_OFFLINE": "1",
    "OFFLINE_MODE": "true",
    "RAG_EMBEDDING_ENGINE": "openai",
    "NO_PROXY": "*",
}
"""What keeps it from asking anybody but the server: it fetches no embedding model."""
ACCOUNT: Final = {"name": "Ann", "email": "ann@home.arpa", "password": "secret of Ann"}


@asynccontextmanager
async def open_webui(
    command: Path, served: Served, home: Path, ollama: str = ""
) -> AsyncIterator[httpx.AsyncClient]:
    """Start it at home in an empty folder; give a client with the account that signed up first.

    `ollama` is the address of a server without a key that it asks in Ollama's form, too.
    """
    settings = home / "variables"
    settings.write_text(PROGRAMS["openwebui"].write(served) + "\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {"HOME": str(home), "DATA_DIR": str(home), "OLLAMA_BASE_URL": ollama}
    asked = await asyncio.create_subprocess_shell(
        f". {shlex.quote(str(settings))} && "
        f"exec {shlex.quote(str(command))} serve --host 127.0.0.1 --port {port}",
        cwd=home,
        env={"PATH": os.environ["PATH"], **QUIET, **own, "ENABLE_OLLAMA_API": str(bool(ollama))},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            while not await _is_up(client):
                assert asked.returncode is None, f"it ended with {asked.returncode}"
                await asyncio.sleep(0.5)
            account = (await client.post("/api/v1/auths/signup", json=ACCOUNT)).json()
            client.headers["Authorization"] = f"Bearer {account['token']}"
            yield client
    finally:
        if asked.returncode is None:
            asked.terminate()
        await asked.wait()


async def _is_up(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).is_success
    except httpx.TransportError:
        return False


async def answer_of(
    client: httpx.AsyncClient, path: str, body: dict[str, Any] | None = None
) -> Any:
    """Ask it; return the JSON that it answers."""
    answer = await client.request("POST" if body else "GET", path, json=body)
    assert answer.is_success, f"{path}: {answer.status_code} {answer.text}"
    return answer.json()
