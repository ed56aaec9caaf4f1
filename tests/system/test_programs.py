"""Programs and frameworks as their packages are today, on a ring: agents, and what others use."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.encoder_checkpoints import make_encoder
from support.programs.agents import AGENTS, FILE, SAID, ask_agent, make_agent_model
from support.programs.open_webui import answer_of, open_webui
from support.servers.ring_server import make_tool_model, served
from support.soak import is_soak
from support.system.nodes import Crew, open_machine

from shardnet.api.programs import Served
from shardnet.api.server.keys import Keyring, parse_key
from shardnet.api.server.settings import Settings
from shardnet.assets import DEFAULT_MODEL_NAME

PACKAGES = {
    "frameworks": (
        *("litellm", "langchain-openai", "langgraph", "openai-agents", "instructor"),
        "pydantic-ai-slim[openai]",
    ),
    "indexes": ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like"),
}
"""What each program asks with; these two want different versions of `openai`."""
INSTALL_S = 900
ASK_S = 300
FOLDER = Path(__file__).parents[1] / "support" / "programs"
PLACE: list[Any] = ["Bern", "Uri"]
EXPECTED: dict[str, dict[tuple[str, str], list[Any]]] = {
    "frameworks": {
        ("litellm", "overflow"): ["ContextWindowExceededError"],
        ("litellm", "overflow in Anthropic's form"): ["ContextWindowExceededError"],
        ("litellm", "rerank"): [2],
        ("langchain-openai", "overflow"): ["ContextOverflowError"],
        ("langchain-openai", "json_schema"): PLACE,
        ("langchain-openai", "function_calling"): PLACE,
        ("langgraph", "graph"): PLACE,
        ("instructor", "response model"): PLACE,
        ("pydantic-ai-slim", "output type"): PLACE,
        ("openai-agents", "OpenAIChatCompletionsModel"): PLACE,
        ("openai-agents", "OpenAIResponsesModel"): PLACE,
    },
    "indexes": {
        ("llama-index-core", "stream"): [True],
        ("llama-index-core", "structured output"): PLACE,
        ("llama-index-core", "embeddings"): [256],
    },
}


def install(folder: Path, *commands: Sequence[str]) -> Path:
    """Make an environment beside nothing of ours and run commands in it; return their folder."""
    bins = folder / "bin"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for program, *arguments in commands:
        command = [str(bins / program) if program == "pip" else program, "install", *arguments]
        installed = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
        if installed.returncode:
            pytest.skip(f"{arguments[-1]} cannot be installed here: {installed.stderr[-300:]}")
    return bins


@pytest.fixture(scope="module", params=PACKAGES)
def program(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """Install what a program asks with; return the interpreter for it, and its name."""
    given = os.environ.get("SHARDNET_TEST_PROGRAMS")
    name = request.param
    if given:
        return Path(given) / name / "bin" / "python", name
    folder = tmp_path_factory.mktemp(name)
    return install(folder, ["pip", "-q", *PACKAGES[name]]) / "python", name


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it: it installs packages")
def test_frameworks_get_what_they_ask_for(
    program: tuple[Path, str], trio: Crew, tmp_path: Path
) -> None:
    python, name = program
    model = str(make_tool_model(tmp_path / "tools"))

    async def main() -> str:
        settings = Settings(keys=Keyring([parse_key("ann:one", 1)]))
        async with served(trio, model, settings) as (url, _):
            variables = {**os.environ, "SHARDNET_URL": f"{url}/v1", "NO_PROXY": "*"}
            asking = await asyncio.create_subprocess_exec(
                *(python, "-P", FOLDER / f"{name}.py"), env=variables, stdout=subprocess.PIPE
            )
            async with asyncio.timeout(ASK_S):
                told, _ = await asking.communicate()
            return told.decode()

    lines = [json.loads(line) for line in asyncio.run(main()).splitlines() if line[:1] == "["]
    for package, number, what, result in lines:
        print(f"| {package} | {number} | {what} | {result} |")
    found = {(package, what): result for package, _, what, result in lines}
    expected = EXPECTED[name]
    assert found.keys() == expected.keys()
    assert not {key: result for key, result in found.items() if result not in expected[key]}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install the coding agents; return the folders of their commands, as in PATH."""
    given = os.environ.get("SHARDNET_TEST_AGENTS")
    if given:
        return given
    folder = tmp_path_factory.mktemp("agents")
    (folder / "package.json").write_text("{}")
    *ours, last = (agent.package for agent in AGENTS.values())
    npm = ["npm", "--no-audit", "--no-fund", *ours]
    return f"{folder / 'node_modules' / '.bin'}:{install(folder, npm, ['pip', '-q', last])}"


@pytest.mark.skipif(
    not is_soak() or shutil.which("npm") is None, reason="scripts/soak runs it where npm is"
)
@pytest.mark.parametrize("name", AGENTS)
def test_agents_have_a_file_written_by_a_ring(
    agents: str, trio: Crew, tmp_path: Path, name: str
) -> None:
    model = make_agent_model(tmp_path / "scripted")

    async def main() -> str:
        settings = Settings(keys=Keyring([parse_key("ann:one", 1)]))
        async with served(trio, str(model), settings) as (url, _):
            asked = Served(url=url, key="one", model="scripted")
            return await ask_agent(name, asked, agents, tmp_path / "home", ASK_S / 3)

    said = asyncio.run(main())
    file = tmp_path / "home" / "work" / FILE
    assert file.exists(), said
    assert file.read_text() == f"{SAID}\n"


@pytest.fixture(scope="module")
def open_webui_command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install Open WebUI beside nothing of ours but our version of torch; return its command."""
    given = os.environ.get("SHARDNET_TEST_OPEN_WEBUI")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("webui")
    packages = (f"torch=={version('torch').partition('+')[0]}", "open-webui")
    return install(folder, *(["pip", "-q", package] for package in packages)) / "open-webui"


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it: it installs packages")
def test_open_webui_lists_models_and_chats(
    open_webui_command: Path, trio: Crew, tmp_path: Path
) -> None:
    """In both forms that it asks in, whole and streamed, with the title that it has made."""
    model = make_agent_model(tmp_path / "scripted")
    talk = [{"role": "user", "content": "Say."}]

    async def main() -> None:
        async with served(trio, str(model), context=4096) as (url, _):
            asked = Served(url=url, key="none", model="scripted")
            started = open_webui(open_webui_command, asked, tmp_path, url)
            async with asyncio.timeout(ASK_S), started as client:
                names = [one["id"] for one in (await answer_of(client, "/api/models"))["data"]]
                assert {"scripted", DEFAULT_MODEL_NAME} <= {*names}
                body = {"model": "scripted", "messages": talk}
                whole = await answer_of(client, "/api/chat/completions", {**body, "stream": False})
                assert whole["choices"][0]["message"]["content"] == "A file"
                stream = await client.post("/api/chat/completions", json={**body, "stream": True})
                pieces = [line for line in stream.text.splitlines() if '"A file"' in line]
                assert pieces, stream.text
                title = await answer_of(client, "/api/v1/tasks/title/completions", body)
                assert title["choices"][0]["message"]["content"] == "A file"
                tags = (await answer_of(client, "/ollama/api/tags"))["models"]
                assert {"scripted", DEFAULT_MODEL_NAME} <= {one["model"] for one in tags}
                whole = await answer_of(client, "/ollama/api/chat", {**body, "stream": False})
                assert whole["message"]["content"] == "A file"

    asyncio.run(main())


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it: it installs packages")
@pytest.mark.parametrize("program", ["frameworks"], indirect=True)
def test_programs_choose_among_the_models_of_a_household(
    open_webui_command: Path, program: tuple[Path, str], tmp_path: Path
) -> None:
    """Two that write and one that makes vectors, by Open WebUI and LiteLLM at one address."""
    coder = make_agent_model(tmp_path / "coder")
    notes = make_encoder(tmp_path / "notes", "BertModel")
    names = ("coder", "story", "notes")
    places = (str(coder), DEFAULT_MODEL_NAME, str(notes))
    (tmp_path / "household.toml").write_text(
        "".join(
            f'[models.{name}]\nmodel = "{place}"\n'
            for name, place in zip(names, places, strict=True)
        )
    )
    talk = [{"role": "user", "content": "Say."}]
    body = {"messages": talk, "stream": False, "max_tokens": 12, "temperature": 0}

    async def ask(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=ASK_S) as client:
            story = (
                await client.post("/v1/chat/completions", json={**body, "model": "story"})
            ).json()["choices"][0]["message"]["content"]
        said = {"coder": "A file", "story": story}
        asked = Served(url=url, key="none", model="coder")
        started = open_webui(open_webui_command, asked, tmp_path, url)
        async with asyncio.timeout(ASK_S), started as client:
            listed = [one["id"] for one in (await answer_of(client, "/api/models"))["data"]]
            assert {*names} <= {*listed}
            for name, text in said.items():
                whole = await answer_of(client, "/api/chat/completions", {**body, "model": name})
                content = whole["choices"][0]["message"]["content"]
                assert content == text if name == "coder" else content  # it leaves temperature out
                assert whole["model"] == name
        variables = {**os.environ, "SHARDNET_URL": f"{url}/v1", "NO_PROXY": "*"}
        asking = await asyncio.create_subprocess_exec(
            *(program[0], "-P", FOLDER / "household.py"), env=variables, stdout=subprocess.PIPE
        )
        async with asyncio.timeout(ASK_S):
            told, _ = await asking.communicate()
        found = dict(json.loads(line) for line in told.decode().splitlines() if line[:1] == "[")
        assert found == {**said, "notes": 32}

    with open_machine(tmp_path / "machine") as machine:
        more = ("--http", "127.0.0.1:0", "--household", str(tmp_path / "household.toml"))
        [node] = machine.start_nodes("anna", arguments=more)
        asyncio.run(ask(node.ready["http"]))


def test_a_scripted_ring_calls_tools_and_ends_in_each_form(trio: Crew, tmp_path: Path) -> None:
    """What agents do, in short: a call, its result, and a text behind it."""
    model = make_agent_model(tmp_path / "scripted")
    schema = {"type": "object", "properties": {"command": {}, "cmd": {}, "description": {}}}
    user = {"role": "user", "content": "Write."}

    async def main() -> None:
        async with (
            served(trio, str(model)) as (url, _),
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):

            async def told(path: str, body: dict[str, Any]) -> Any:
                answer = await client.post(path, json={"model": "scripted", **body})
                assert answer.status_code == 200, answer.text
                return answer.json()

            chat: dict[str, Any] = {"messages": [user]}
            chat["tools"] = [
                {"type": "function", "function": {"name": "bash", "parameters": schema}}
            ]
            [first] = (await told("/v1/chat/completions", chat))["choices"]
            [call] = first["message"]["tool_calls"]
            assert SAID in json.loads(call["function"]["arguments"])["command"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": ""}
            chat["messages"] += [first["message"], result]
            [last] = (await told("/v1/chat/completions", chat))["choices"]
            assert last["message"]["content"] == "The file is written."

            tool = {"type": "function", "name": "exec_command", "parameters": schema}
            response = await told("/v1/responses", {"input": "Write.", "tools": [tool]})
            [item] = response["output"]
            assert SAID in json.loads(item["arguments"])["cmd"]
            output = {"type": "function_call_output", "call_id": item["call_id"], "output": ""}
            after = {"input": [output], "previous_response_id": response["id"], "tools": [tool]}
            [item] = (await told("/v1/responses", after))["output"]
            assert item["content"][0]["text"] == "The file is written."

            words = {"max_tokens": 99, "tools": [{"name": "Bash", "input_schema": schema}]}
            message = await told("/v1/messages", {"messages": [user], **words})
            [block] = message["content"]
            assert SAID in block["input"]["command"]
            answer = {"type": "tool_result", "tool_use_id": block["id"], "content": ""}
            turns = [user, {"role": "assistant", "content": [block]}]
            turns.append({"role": "user", "content": [answer]})
            message = await told("/v1/messages", {"messages": turns, **words})
            assert message["content"][0]["text"] == "The file is written."

    asyncio.run(main())
