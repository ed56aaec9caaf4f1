"""The README's three machines, its lines run as they are written, on hosts of their own.

On loopback, where one machine cannot be three, test_sharing.py and test_security.py are the twins:
one copy among three nodes, and a key that is typed.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.system.netns import Host, NotPermittedError, open_network
from support.system.nodes import Command, Machine
from support.system.parrot import make_parrot
from support.system.weighing import shape_here

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.types import LayerRange

README = Path(__file__).parents[2] / "README.md"
MODEL = "/srv/models/TinyLlama-1.1B"
MIB = 2**20


def lines_of_the_walkthrough() -> dict[str, list[list[str]]]:
    """The commands below each comment of the README's walk-through, taken apart."""
    [block] = re.findall(r"```bash\n(# on anna\n.*?)```", README.read_text("utf-8"), re.DOTALL)
    sections = [part.split("\n") for part in block.strip().split("\n\n")]
    return {head: [shlex.split(line) for line in lines] for head, *lines in sections}


def memory_for_half(checkpoint: Path) -> str:
    """What a node may use, as --memory takes it: two hold the model, and none does alone."""
    context = Checkpoint.open(checkpoint).config.default_context
    shape = shape_here(checkpoint, context, is_measured=False)
    half = shape.n_layers // 2
    layers = LayerRange(0, half), LayerRange(half, shape.n_layers)
    mib = max(map(shape.memory_bytes, layers)) // MIB + 1
    least = shape_here(checkpoint, context)
    assert mib * MIB < least.memory_bytes(least.whole)
    return f"{mib}MiB"


class Person:
    """Somebody in front of one machine, who types what the README says."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.node: Command | None = None

    def type(self, line: list[str], *, answer: str | None = None) -> str:
        """Type a command; return what it prints. `answer` is typed when it asks."""
        match line:
            case ["shardnet", "node"]:
                self.node = self.machine.begin_copy("node")
                return self.node.stdout.wait_for("ready on")
            case ["shardnet", *arguments]:
                result = self.machine.run(*arguments, stdin=answer)
                assert result.code == 0, result.stderr
                return result.stdout
        raise AssertionError(f"the README says {line}, which nobody here can type")


@pytest.fixture
def people(tmp_path: Path) -> Iterator[dict[str, Person]]:
    """Anna, who has the checkpoint, Bert and Cleo."""
    checkpoint = make_parrot(tmp_path / "model", "abcdefgh", ends=False, intermediate=1 << 10)
    memory = memory_for_half(checkpoint)
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(open_network(3)).hosts
        except NotPermittedError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        made = {}
        for name, host in zip(("anna", "bert", "cleo"), hosts, strict=True):
            (tmp_path / name).mkdir()
            prefix = with_model(host, checkpoint) if name == "anna" else host.prefix
            environment = {"SHARDNET_NAME": name, "SHARDNET_MEMORY": memory}
            machine = Machine(tmp_path / name, prefix=prefix, environment=environment)
            stack.callback(machine.close)
            made[name] = Person(machine)
        yield made


def with_model(host: Host, checkpoint: Path) -> tuple[str, ...]:
    """What to put before a command so that it runs on `host` and sees the checkpoint at MODEL."""
    script = (
        f"mount -t tmpfs tmpfs /srv && mkdir -p {MODEL} && "
        f'mount --bind {shlex.quote(str(checkpoint))} {MODEL} && exec "$@"'
    )
    prefix = (*host.prefix, "sh", "-c", script, "sh")
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"nothing can be mounted in a namespace here: {tried.stderr.strip()}")
    return prefix


def test_three_machines_as_the_readme_says(people: dict[str, Person]) -> None:
    steps = lines_of_the_walkthrough()
    heads = iter(steps)
    key = ""
    for line in steps[next(heads)]:
        key = people["anna"].type(line) if "key" in line else key
        if "key" not in line:
            people["anna"].type(line)
    for line in steps[next(heads)]:
        for name in ("bert", "cleo"):
            people[name].type(line, answer=key if "join" in line else None)
    for teller in people.values():
        assert teller.node is not None
        for name, other in people.items():
            if other is not teller:
                teller.node.stderr.wait_for(f"node {name} (")
    listing, planning, generating = steps[next(heads)]
    while not all(name in people["bert"].type(listing) for name in people):
        pass  # a node is late for the list, as on a busy machine
    planned = people["cleo"].type(planning)
    assert "rank 1: " in planned
    assert people["bert"].type([*generating, "--max-tokens", "3"]) == "fgh\n"
