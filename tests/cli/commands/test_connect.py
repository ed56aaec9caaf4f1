"""Settings that are printed for programs can be read by them."""

from __future__ import annotations

import json
import re
import shlex
import tomllib

import pytest
import yaml

from shardnet.api.programs import PROGRAMS, Served
from shardnet.errors import UsageError
from shardnet_cli.commands import connect as command
from shardnet_cli.commands.connect import connect
from shardnet_cli.commands.serve import DEFAULT_PORT

SERVED = Served(url="http://h:1/llm", key="s3'cret\"", model="org/M ü", context=4096)


def written(name: str) -> str:
    return PROGRAMS[name].write(SERVED)


def exported(name: str) -> dict[str, str]:
    pairs = [shlex.split(line)[1].partition("=") for line in written(name).splitlines()]
    return {variable: value for variable, _, value in pairs}


def test_settings_read_back_as_they_were_meant() -> None:
    openai = f"{SERVED.url}/v1"
    webui = exported("openwebui")
    assert webui == {"OPENAI_API_BASE_URL": openai, "OPENAI_API_KEY": SERVED.key}
    claude = exported("claude-code")
    assert (claude["ANTHROPIC_BASE_URL"], claude["ANTHROPIC_AUTH_TOKEN"]) == (
        SERVED.url,
        SERVED.key,
    )
    assert claude["ANTHROPIC_MODEL"] == SERVED.model
    codex = tomllib.loads(written("codex"))
    provider = codex["model_providers"][codex["model_provider"]]
    assert (codex["model"], codex["model_context_window"]) == (SERVED.model, SERVED.context)
    assert (provider["base_url"], provider["wire_api"]) == (openai, "responses")
    assert provider["experimental_bearer_token"] == SERVED.key

    [model] = yaml.safe_load(written("continue"))["models"]
    assert (model["apiBase"], model["apiKey"], model["model"]) == (
        openai,
        SERVED.key,
        SERVED.model,
    )
    aider = yaml.safe_load(written("aider"))
    assert (aider["openai-api-base"], aider["model"]) == (openai, f"openai/{SERVED.model}")
    zed = json.loads(written("zed"))["language_models"]["openai_compatible"]["shardnet-ring"]
    assert zed["api_url"] == openai
    assert zed["available_models"][0]["max_tokens"] == SERVED.context
    assert SERVED.url in json.loads(written("vscode")).values()
    compile(written("langchain"), "settings", "exec")
    [model] = json.loads(written("pi"))["providers"]["shardnet"]["models"]
    assert (model["id"], model["contextWindow"]) == (SERVED.model, SERVED.context)
    assert exported("goose")["OPENAI_HOST"] == SERVED.url
    assert shlex.split(written("cline-cli"))[-1] == SERVED.model
    for name in ("cline", "roo", "home-assistant"):
        assert SERVED.model in written(name)


def test_it_says_where_settings_belong_or_what_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.DEFAULT_URL.endswith(f":{DEFAULT_PORT}")
    connect("aider", url="http://10.0.0.5:8000/v1/")
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == 'openai-api-base: "http://10.0.0.5:8000/v1"'
    assert "~/.aider.conf.yml" in said.err
    connect()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*PROGRAMS]
    assert any("~/.aider.conf.yml" in line for line in lines)
    for client, url, why in (
        ("aidr", command.DEFAULT_URL, "did you mean 'aider'"),
        ("aider", "10.0.0.5:8000", "http://10.0.0.5:8000"),
        ("aider", "http://[::1", "no address of a server"),
    ):
        with pytest.raises(UsageError, match=re.escape(why)):
            connect(client, url=url)
