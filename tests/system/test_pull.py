"""`shardnet pull` and `--model ORG/NAME`: real commands against a Hub on loopback."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.models.checkpoints import make_llama
from support.models.gguf_files import write_gguf
from support.models.torch_checkpoints import to_torch_files
from support.servers.hub_server import COMMIT, Hub, open_hub
from support.soak import cases, is_soak
from support.system.nodes import Machine
from support.system.parrot import Parrots, make_parrot

REPO = "lab/parrot"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub(parrots: Parrots) -> Iterator[Hub]:
    with open_hub() as hub:
        hub.add(REPO, parrots.alphabet, **{"modeling.py": b"raise SystemExit", "notes.md": b"-"})
        yield hub


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Iterator[Machine]:
    folder = tmp_path / "machine"
    folder.mkdir()
    environment = {"SHARDNET_NO_MDNS": "1", "HF_HOME": str(folder / "hf"), **hub.environment}
    machine = Machine(folder, environment=environment)
    try:
        yield machine
    finally:
        machine.close()


def fetched(hub: Hub) -> set[str]:
    """The files whose bytes came."""
    return {asked.split()[1] for asked in hub.asked if asked.startswith("GET")}


def test_a_pulled_model_is_used_by_its_name_with_the_network_gone(
    machine: Machine, hub: Hub
) -> None:
    result = machine.run("pull", REPO)
    assert result.code == 0, result.stderr
    folder = Path(result.stdout.strip())
    assert folder.name == COMMIT
    assert (folder / "config.json").is_file()
    assert fetched(hub) == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    again = machine.run("pull", REPO, "--json").json
    assert again["new_bytes"] == 0
    assert again["folder"] == str(folder)
    hub.fails_with = 503
    arguments = ("generate", "--model", REPO, "--max-tokens", "3", "a")
    assert machine.run(*arguments).stdout == "bcd\n"


def test_the_head_downloads_what_nobody_has_and_the_others_fetch_from_it(
    machine: Machine, hub: Hub
) -> None:
    nodes = machine.start_nodes("rosa", "theo")
    addresses = ",".join(node.address for node in nodes)
    command = ("generate", "--model", REPO, "--nodes", addresses, "--max-tokens", "3", "a")
    result = machine.run(*command)
    assert result.stdout == "bcd\n", result.stderr
    assert "the head: downloading" in result.stderr
    assert "pulled lab/parrot" in nodes[0].log
    assert "pulled" not in nodes[1].log
    [asked] = [asked for asked in hub.asked if asked.startswith("GET model.safetensors")]
    assert "bytes=0-" in asked
    n_asked = len(hub.asked)
    assert machine.run(*command).stdout == "bcd\n"
    assert len(hub.asked) == n_asked


def test_a_plan_downloads_nothing_and_says_what_does(machine: Machine, hub: Hub) -> None:
    machine.start_nodes("rosa")
    result = machine.run("plan", "--model", REPO)
    assert result.code == 1
    assert f"`shardnet pull {REPO}` downloads it" in result.error_line
    assert fetched(hub) == set()


def test_a_folder_wins_over_a_name(machine: Machine, hub: Hub) -> None:
    make_parrot(machine.folder / "lab" / "parrot", "xyz", ends=True)
    result = machine.run("generate", "--model", REPO, "x")
    assert result.stdout == "yz\n", result.stderr
    assert hub.asked == []


def test_a_cut_connection_is_resumed(machine: Machine, hub: Hub) -> None:
    hub.add(REPO, make_parrot(machine.folder / "large", "abc", ends=True, intermediate=1 << 12))
    hub.cut_after_bytes = 25_000_000
    result = machine.run("pull", REPO)
    assert result.code == 0, result.stderr
    asked = [a for a in hub.asked if a.startswith("GET model.safetensors")]
    assert len(asked) == 2
    assert "bytes=25000000-" in asked[1]


def test_files_of_an_index_come_together(machine: Machine, hub: Hub, parrots: Parrots) -> None:
    whole = load_file(parrots.alphabet / "model.safetensors")
    names = sorted(whole)
    parts = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    repo = {k: v for k, v in hub.repos[REPO].items() if k != "model.safetensors"}
    for file, held in parts.items():
        save_file({name: whole[name] for name in held}, machine.folder / file)
        repo[file] = (machine.folder / file).read_bytes()
    index = ", ".join(f'"{name}": "{file}"' for file, held in parts.items() for name in held)
    repo["model.safetensors.index.json"] = b'{"weight_map": {%s}}' % index.encode()
    hub.repos["lab/two"], hub.commits["lab/two"] = repo, COMMIT
    result = machine.run("pull", "lab/two")
    assert result.code == 0, result.stderr
    assert set(parts) <= fetched(hub)
    result = machine.run("generate", "--model", "lab/two", "--max-tokens", "3", "a")
    assert result.stdout == "bcd\n", result.stderr


def test_weights_come_in_one_format_only(machine: Machine, hub: Hub, parrots: Parrots) -> None:
    """Where safetensors are not there, torch's file is; the name alone is enough."""
    to_torch_files(parrots.alphabet, machine.folder / "bin")
    files = {"params.json": b"{}", "consolidated.00.pth": b"-", "x.gguf": b"-"}
    hub.add(REPO, machine.folder / "bin", **files)
    result = machine.run("generate", "--model", REPO, "--max-tokens", "3", "a")
    assert result.stdout == "bcd\n", result.stderr
    assert fetched(hub) == {
        *("config.json", "pytorch_model.bin", "tokenizer.json", "tokenizer_config.json")
    }


def test_one_gguf_of_many_is_pulled_and_used_by_name(machine: Machine, hub: Hub) -> None:
    """In two parts, in a folder of its own: no other file of the repository comes."""
    source = make_llama(machine.folder / "source", with_tokenizer=False)
    (machine.folder / "F32").mkdir()
    write_gguf(source, machine.folder / "F32" / "tiny-F32.gguf", split_max_tensors=20)
    parts = {f"F32/{p.name}": p.read_bytes() for p in (machine.folder / "F32").iterdir()}
    assert len(parts) == 2
    hub.repos["lab/ggufs"] = {"config.json": b"{", "tiny-Q8_0.gguf": b"-", **parts}
    hub.commits["lab/ggufs"] = COMMIT
    result = machine.run("pull", "lab/ggufs:f32")
    assert result.code == 0, result.stderr
    assert fetched(hub) == set(parts)
    hub.fails_with = 503
    arguments = ("generate", "--token-ids", "5,6", "--max-tokens", "4", "--json")
    by_name = machine.run(*arguments, "--model", "lab/ggufs:f32").json
    assert by_name["token_ids"] == machine.run(*arguments, "--model", str(source)).json["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    cases(
        [
            (["lab/none"], "neither a folder where it was asked for, nor a model of the Hub"),
            (["lab/gated"], "accept its terms at https://huggingface.co/lab/gated"),
            ([REPO, "--revision", "v9"], "lab/parrot has no revision v9"),
            (
                ["lab/ggufs"],
                "has GGUF files only; there are Q4_0, Q8_0; choose one as lab/ggufs:Q4_0",
            ),
            (["lab/liar"], "index.json names evil.py, which is no tensor file that the Hub has"),
        ],
        [
            (["lab/none-of-it"], "has no weights that are read here (its files: config.json)"),
            (["lab/ggufs:Q2_K"], "has no GGUF of the name Q2_K; there are Q4_0, Q8_0"),
            (
                ["lab/ggufs:Q8_0", "--layers", "0-1"],
                "its weights are in x-Q8_0.gguf; pull it without",
            ),
        ],
    ),
)
def test_what_the_hub_does_not_give_is_named(
    machine: Machine, hub: Hub, arguments: list[str], words: str
) -> None:
    hub.gated.add("lab/gated")
    index = b'{"weight_map": {"a": "evil.py"}}'
    for repo, files in {
        "lab/none-of-it": {"config.json": b"{}"},
        "lab/ggufs": {"x-Q4_0.gguf": b"-", "x-Q8_0.gguf": b"-"},
        "lab/liar": {"config.json": b"{}", INDEX: index, "evil.py": b"-"},
    }.items():
        hub.repos[repo], hub.commits[repo] = files, COMMIT
    result = machine.run("pull", *arguments)
    assert result.code == 1
    assert words in result.error_line
    assert result.stdout == ""


def test_a_name_that_can_be_none_is_wrong_usage(machine: Machine) -> None:
    result = machine.run("pull", "a/../secrets")
    assert result.code == 2
    assert "is not ORG/NAME" in result.stderr


@pytest.mark.parametrize("status", cases([429], [503]))
def test_a_hub_that_fails_is_named_by_its_status(machine: Machine, hub: Hub, status: int) -> None:
    hub.fails_with = status
    result = machine.run("pull", REPO)
    assert result.code == 1
    assert f"the Hub answered {status}" in result.error_line


def test_bytes_that_are_not_those_promised_are_not_kept(machine: Machine, hub: Hub) -> None:
    hub.lies_about = "model.safetensors"
    result = machine.run("pull", REPO)
    assert result.code == 1
    assert "model.safetensors came with another SHA-256" in result.error_line
    hub.lies_about = ""
    result = machine.run("pull", REPO)
    assert result.code == 0, result.stderr
    assert machine.run("generate", "--model", REPO, "--max-tokens", "1", "a").stdout == "b\n"


def test_without_the_network_there_is_one_line(machine: Machine) -> None:
    result = machine.run("pull", REPO, environment={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert result.code == 1
    assert "the Hub cannot be reached" in result.error_line
    result = machine.run("pull", REPO, environment={"HF_HUB_OFFLINE": "1"})
    assert result.code == 1
    assert "downloads are switched off" in result.error_line


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_pull_goes_on_where_it_stopped(
    machine: Machine, hub: Hub, how: signal.Signals
) -> None:
    size = len(hub.repos[REPO]["model.safetensors"])
    hub.cut_after_bytes, hub.holds_after_cut = size // 2, True
    begin = machine.begin if how is signal.SIGINT else machine.begin_copy
    command = begin("pull", REPO)
    hub.until_held()
    command.signal(how)
    result = command.wait()
    hub.holds = hub.holds_after_cut = False
    if how is signal.SIGINT:
        assert result.code == 130
        assert "run the command again to go on" in result.stderr
    told = machine.run("pull", REPO, "--json").json
    begun = [asked for asked in hub.asked if asked.startswith("GET model.safetensors")]
    first = int(begun[-1].partition("bytes=")[2].partition("-")[0])
    assert 0 < first <= size // 2
    assert told["new_bytes"] < size
    assert machine.run("generate", "--model", REPO, "--max-tokens", "1", "a").stdout == "b\n"


# --- some layers only


def replicas(machine: Machine) -> list[str]:
    return machine.run("cache", "ls").stdout.splitlines()


def test_two_machines_pull_their_layers_and_run_together(
    tmp_path: Path, hub: Hub, parrots: Parrots
) -> None:
    """Nobody has the whole model, and no byte of a tensor comes twice."""
    hub.add(REPO, parrots.alphabet)
    size = (parrots.alphabet / "model.safetensors").stat().st_size
    with contextlib.ExitStack() as stack:
        machines = []
        for name, layers in (("rosa", "0-2"), ("theo", "2-4")):
            folder = tmp_path / name
            folder.mkdir()
            environment = {
                "SHARDNET_NO_MDNS": "1",
                "HF_HOME": str(folder / "hf"),
                **hub.environment,
            }
            machine = Machine(folder, environment=environment)
            stack.callback(machine.close)
            told = machine.run("pull", REPO, "--layers", layers, "--json").json
            assert 0 < told["new_bytes"] < 0.8 * size
            assert machine.run("pull", REPO, "--layers", layers, "--json").json["new_bytes"] == 0
            assert REPO in replicas(machine)[0]
            machines.append(machine)
        n_asked = len(hub.asked)
        [theo] = machines[1].start_nodes("theo")
        [rosa] = machines[0].start_nodes("rosa", arguments=["--peer", theo.address])
        rosa.stderr.wait_for("node theo (")
        where = ["--nodes", f"{rosa.address},{theo.address}", "--layers", "0-2,2-4"]
        result = machines[0].run("generate", "--model", REPO, *where, "--max-tokens", "3", "a")
        assert result.stdout == "bcd\n", result.stderr
        assert "fetched" not in rosa.log + theo.log
        assert len(hub.asked) == n_asked


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_a_cut_range_is_resumed(machine: Machine, hub: Hub, parrots: Parrots) -> None:
    hub.add(REPO, parrots.big)
    hub.cut_after_bytes = 3_000_000
    told = machine.run("pull", REPO, "--layers", "0-1", "--json").json
    ranges = [asked for asked in hub.asked if asked.startswith("GET model.safetensors")]
    assert hub.cut_after_bytes == 0
    assert len(ranges) >= 3
    again = machine.run("pull", REPO, "--layers", "0-1", "--json").json
    assert (again["new_bytes"], again["model_id"]) == (0, told["model_id"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--layers", "2-9"], 1, "has 4 layers, not all of layers 2-8"),
        (["--layers", "0-1,1-2"], 2, "is not START-END"),
        (["--layers", "x"], 2, "--layers"),
    ],
)
def test_a_pull_that_makes_no_sense_is_refused(
    machine: Machine, hub: Hub, arguments: list[str], code: int, words: str
) -> None:
    result = machine.run("pull", REPO, *arguments)
    assert result.code == code
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


# --- offline


def test_offline_uses_what_is_here_and_asks_nobody(machine: Machine, hub: Hub) -> None:
    result = machine.run("pull", REPO, "--offline")
    assert result.code == 1
    assert "downloads are switched off (--offline" in result.error_line
    arguments = ("generate", "--model", REPO, "--max-tokens", "3", "a")
    assert "downloads are switched off" in machine.run(*arguments, "--offline").error_line
    folder = machine.run("pull", REPO).stdout
    hub.asked.clear()
    assert machine.run("pull", REPO, "--offline").stdout == folder
    told = machine.run("pull", REPO, "--offline", "--json").json
    assert told == {"model": REPO, "folder": folder.strip(), "new_bytes": 0}
    local = ["--local", "1"] if is_soak() else []
    assert machine.run(*arguments, "--offline", *local).stdout == "bcd\n"
    assert hub.asked == []
