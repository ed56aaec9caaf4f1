"""Windows' own Python and torch, under Wine: what a user does there, and rings with Linux.

Wine is not Windows: docs/windows.md says what this does not show.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from support.system.netns import NotPermittedError, open_network
from support.system.nodes import Machine, NodeProcess, Result, open_machine
from support.system.sites import meet
from support.system.terminals import CTRL_C, at_terminal
from support.system.wine import LAB_VARIABLE, Lab, NoWineError, WindowsMachine, seen

import shardnet

pytestmark = pytest.mark.skipif(
    not os.environ.get(LAB_VARIABLE), reason="scripts/check_windows runs it"
)
BUNDLED = Path(shardnet.__file__).parent / "assets" / "default_model"
HASHES = Path(__file__).parents[2] / "scripts" / "benchmarks" / "hash_forms.py"
PROMPT = "It was a fine morning in the spring, and Miss Bennet"
ASKED = ("generate", PROMPT, "--max-tokens", "24", "--logprobs", "2", "--json")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    lab = Lab(Path(os.environ[LAB_VARIABLE]))
    try:
        lab.make()
    except NoWineError as error:
        pytest.skip(f"no Windows here: {error}")
    lab.install()
    yield lab
    lab.end()


@pytest.fixture(scope="module")
def windows(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WindowsMachine]:
    machine = lab.machine(tmp_path_factory.mktemp("windows") / "Jörg Müller")
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def linux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with open_machine(tmp_path_factory.mktemp("linux") / "machine") as machine:
        yield machine


@pytest.fixture(scope="module")
def said(linux: Machine) -> dict[str, Any]:
    """What one process says on Linux."""
    return wrote(linux.run(*ASKED))


@pytest.fixture(scope="module")
def wendy(windows: WindowsMachine) -> NodeProcess:
    return windows.start_nodes("wendy")[0]


@pytest.fixture(scope="module")
def linus(linux: Machine) -> NodeProcess:
    return linux.start_nodes("linus")[0]


def wrote(result: Result) -> dict[str, Any]:
    """Text, tokens and log-probabilities of `generate --json`."""
    answer = result.json
    return {name: answer[name] for name in ("text", "token_ids", "logprobs")}


def test_one_process_computes_the_bits_of_linux(
    windows: WindowsMachine, said: dict[str, Any]
) -> None:
    assert wrote(windows.run(*ASKED)) == said


def test_nodes_of_one_machine_make_a_ring(windows: WindowsMachine, said: dict[str, Any]) -> None:
    assert wrote(windows.run(*ASKED, "--local", "2")) == said


@pytest.mark.parametrize(
    "cut", [("--layers", "0-5,5-8"), ("--nodes-per-stage", "2")], ids=["layers", "each layer"]
)
@pytest.mark.parametrize("windows_leads", [False, True])
def test_a_ring_of_both_systems_computes_the_bits_of_linux(
    linux: Machine,
    windows: WindowsMachine,
    linus: NodeProcess,
    wendy: NodeProcess,
    said: dict[str, Any],
    windows_leads: bool,
    cut: tuple[str, str],
) -> None:
    nodes = [linus.address, wendy.address]
    asks = windows if windows_leads else linux
    ring = ",".join(reversed(nodes) if windows_leads else nodes)
    assert wrote(asks.run(*ASKED, "--nodes", ring, *cut)) == said
    assert "kernels" not in wendy.log


@pytest.mark.parametrize("isa", ["", "avx2"])
def test_every_form_of_weights_gives_the_bits_of_linux(lab: Lab, isa: str) -> None:
    """Of the product's kernels, by hash: all packed forms, one row and several, two threads."""
    forced = {"SHARDNET_ISA": isa} if isa else {}
    there = json.loads(lab.run(seen(HASHES), **forced))
    here = subprocess.run(
        [sys.executable, HASHES], check=True, capture_output=True, env={**os.environ, **forced}
    )
    assert there == json.loads(here.stdout)


def test_a_folder_may_have_spaces_and_umlauts(
    windows: WindowsMachine, wendy: NodeProcess, said: dict[str, Any]
) -> None:
    folder = shutil.copytree(BUNDLED, windows.folder / "Jörgs Modelle" / "kleines Modell")
    asked = (*ASKED, "--nodes", wendy.address, "--model", seen(folder))
    assert wrote(windows.run(*asked)) == said


def test_chat_takes_lines_of_a_pipe(windows: WindowsMachine, wendy: NodeProcess) -> None:
    lines = "\ufeffGrüße, 世界!\r\n/exit\r\nnever read\r\n".encode()
    asked = ("chat", "--nodes", wendy.address, "--max-tokens", "8", "--temperature", "0")
    result = windows.begin(*asked, stdin=lines).wait()
    assert (result.code, len(result.stdout.split()) > 2) == (0, True), result.stderr
    assert "\r" not in result.stdout


def test_programs_ask_a_server(
    windows: WindowsMachine, wendy: NodeProcess, said: dict[str, Any]
) -> None:
    server = windows.begin("serve", "--nodes", wendy.address, "--port", "0", "--json")
    try:
        url = json.loads(server.stdout.wait_for("\n"))["url"]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
            ask = partial(client.completions.create, model="default", prompt=PROMPT, max_tokens=24)
            assert ask(temperature=0).choices[0].text == said["text"]
            parts = ask(temperature=0, stream=True)
            assert "".join(part.choices[0].text for part in parts) == said["text"]
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("generate", "a", "--model", r"C:\nowhere\model"), 1, r"C:\nowhere\model"),
        (("generate", "a", "--wrong"), 2, "--wrong"),
        (("--version",), 0, ""),
    ],
)
def test_commands_end_with_the_codes_of_linux(
    windows: WindowsMachine, arguments: tuple[str, ...], code: int, words: str
) -> None:
    result = windows.run(*arguments)
    assert (result.code, words in result.stderr) == (code, True), result.stderr


@pytest.mark.parametrize(
    ("arguments", "until"),
    [
        (("generate", PROMPT, "--ignore-eos", "--max-tokens", "1000"), "Bennet"),
        (("generate", PROMPT, "--ignore-eos", "--max-tokens", "1000", "--local", "2"), "ring: "),
    ],
    ids=["generate", "local"],
)
def test_ctrl_c_ends_a_command_and_what_it_began(
    lab: Lab, windows: WindowsMachine, arguments: tuple[str, ...], until: str
) -> None:
    before = lab.processes()
    with at_terminal(windows, *arguments) as terminal:
        terminal.screen.wait_for(until)
        terminal.type(CTRL_C, "interrupt")
        assert terminal.wait() == 130
    while lab.processes() - before:  # ends at the deadline of every test
        time.sleep(0.05)


def test_a_ring_goes_on_without_a_node_of_windows(
    windows: WindowsMachine, linux: Machine, linus: NodeProcess
) -> None:
    lost = windows.start_nodes("willa")[0]
    asked = ("generate", PROMPT, "--max-tokens", "900", "--ignore-eos", "--temperature", "0")
    alone = linux.run(*asked, "--nodes", linus.address).stdout
    running = linux.begin(*asked, "--nodes", f"{linus.address},{lost.address}")
    try:
        running.stdout.wait_for(alone[:40])
    finally:
        lost.kill()
    result = running.wait()
    assert (result.code, result.stdout) == (0, alone), result.stderr
    assert "recover" in result.stderr


def test_announcements_on_loopback_are_heard_by_the_other_system_and_ctrl_c_ends_a_node(
    lab: Lab, tmp_path: Path
) -> None:
    """There each takes the other for another machine, which its loopback address does not reach."""
    there, here = lab.machine(tmp_path / "windows", SHARDNET_NO_MDNS=""), tmp_path / "linux"
    with contextlib.closing(there), contextlib.closing(Machine(here, environment={})) as linux:
        [lena] = linux.start_nodes("lena")
        with at_terminal(there, "node", "--port", "0", "--threads", "1") as wilma:
            wilma.screen.wait_for("no usable address")
            lena.stderr.wait_for("no usable address")
            wilma.type(CTRL_C, "node stopped")
            assert wilma.wait() == 0


def test_nodes_of_both_systems_find_each_other(lab: Lab, tmp_path: Path) -> None:
    with contextlib.ExitStack() as left:
        try:
            hosts = left.enter_context(open_network(2)).hosts
        except NotPermittedError as error:
            pytest.skip(str(error))
        key = tmp_path / "cluster.key"
        linux = Machine(
            tmp_path / "linux",
            prefix=hosts[0].prefix,
            environment={"SHARDNET_KEY_FILE": str(key)},
        )
        left.callback(linux.close)
        assert linux.run("key", "new").code == 0
        elsewhere = lab.elsewhere(tmp_path / "drive", hosts[1].prefix)
        left.callback(elsewhere.end)
        there = elsewhere.machine(
            tmp_path / "windows", SHARDNET_NO_MDNS="", SHARDNET_KEY_FILE=seen(key)
        )
        left.callback(there.close)
        (lena,), (wilma,) = linux.start_nodes("lena"), there.start_nodes("wilma")
        meet(lena, wilma)
        for machine in (linux, there):
            assert machine.nodes_with("lena", "wilma")
