"""Frameworks that programs are written with, as their packages are today, on a ring."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.servers.ring_server import make_tool_model, served
from support.soak import is_soak
from support.system.nodes import Crew

from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.settings import Settings

PACKAGES = (
    *("litellm", "langchain-openai", "openai-agents", "instructor", "pydantic-ai-slim[openai]"),
)
INSTALL_S = 900
ASK_S = 300
PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "frameworks.py"
EXPECTED = {
    ("litellm", "overflow"): ["ContextWindowExceededError"],
    ("litellm", "overflow in Anthropic's form"): ["ContextWindowExceededError"],
    ("litellm", "rerank"): [2],
    ("langchain-openai", "overflow"): ["ContextOverflowError"],
    ("langchain-openai", "json_schema"): ["Bern", "Uri"],
    ("langchain-openai", "function_calling"): ["Bern", "Uri"],
    ("instructor", "response model"): ["Bern", "Uri"],
    ("pydantic-ai-slim", "output type"): ["Bern", "Uri"],
    ("openai-agents", "OpenAIChatCompletionsModel"): ["Bern", "Uri"],
    ("openai-agents", "OpenAIResponsesModel"): ["Bern", "Uri"],
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the packages beside nothing of ours; return that interpreter."""
    given = os.environ.get("SHARDNET_TEST_PROGRAMS")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("programs")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "-q", *PACKAGES]
    installed = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if installed.returncode:
        pytest.skip(f"the packages cannot be installed here: {installed.stderr[-300:]}")
    return folder / "bin" / "python"


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it: it installs packages")
def test_frameworks_get_what_they_ask_for(python: Path, trio: Crew, tmp_path: Path) -> None:
    model = str(make_tool_model(tmp_path / "tools"))

    async def main() -> str:
        settings = Settings(keys=Keyring([parse_key("ann:one", 1)]))
        async with served(trio, model, settings) as (url, _):
            variables = {**os.environ, "SHARDNET_URL": f"{url}/v1", "NO_PROXY": "*"}
            asking = await asyncio.create_subprocess_exec(
                python, PROGRAM, env=variables, stdout=subprocess.PIPE
            )
            async with asyncio.timeout(ASK_S):
                told, _ = await asking.communicate()
            return told.decode()

    lines = [json.loads(line) for line in asyncio.run(main()).splitlines() if line[:1] == "["]
    for package, number, what, result in lines:
        print(f"| {package} | {number} | {what} | {result} |")
    found = {(package, what): result for package, _, what, result in lines}
    assert found.keys() == EXPECTED.keys()
    wrong = {key: result for key, result in found.items() if result not in EXPECTED[key]}
    assert not wrong
