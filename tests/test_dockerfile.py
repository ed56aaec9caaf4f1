"""The Dockerfile is one: its instructions, what it copies, its stages, its user, what it runs."""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

from typer.main import get_command

from shardnet_cli.main import app

ROOT = Path(__file__).parents[1]
KNOWN = {
    *("ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL"),
    *("ENTRYPOINT", "CMD"),
}


def instructions() -> list[tuple[str, str]]:
    """The instructions with what follows them, lines joined as Docker joins them."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined)]


def of(kind: str) -> list[str]:
    return [rest for word, rest in instructions() if word == kind]


def test_every_instruction_is_known_and_every_stage_there() -> None:
    found = instructions()
    assert {word for word, _ in found} <= KNOWN
    assert found[0][0] == "ARG"
    stages = [rest.split(" AS ")[1] for rest in of("FROM") if " AS " in rest]
    assert len(of("FROM")) == 2
    asked = [match[1] for rest in of("COPY") if (match := re.search(r"--from=(\S+)", rest))]
    assert asked == stages == ["build"]
    known = {rest.partition("=")[0] for rest in of("ARG")} | {"PATH"}
    for _, rest in found:
        assert set(re.findall(r"\$\{?(\w+)", rest)) <= known
    for command in of("RUN"):
        shlex.split(command)


def test_what_it_copies_is_there_and_is_not_left_out() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        source for rest in of("COPY") if not rest.startswith("--") for source in rest.split()[:-1]
    }
    assert copied == kept
    for source in copied:
        assert (ROOT / source).exists(), source
        dropped = [line for line in ignored if line.startswith("**/")]
        assert not any(fnmatch(source, line.removeprefix("**/")) for line in dropped)
    assert ignored[1] == "*"


def test_it_runs_a_command_of_ours_as_nobody_special() -> None:
    assert of("USER") == ["shardnet"]
    last = [word for word, _ in instructions()].index("USER")
    assert not any(word in ("RUN", "COPY") for word, _ in instructions()[last:])
    [entry], [command] = map(json.loads, of("ENTRYPOINT")), map(json.loads, of("CMD"))
    assert entry == ["shardnet"]
    assert command[0] in get_command(app).commands  # type: ignore[attr-defined]
    json.loads(of("VOLUME")[0])
