"""Weights that go from node to node: one copy of a checkpoint among several machines.

The machines have homes, and so caches, of their own. That only some of them have the checkpoint is
arranged with a path that means the working folder of each node.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.models.gguf_files import write_gguf
from support.models.model_stores import put_in_ollama
from support.soak import cases, is_soak
from support.system.nodes import Machine, NodeProcess, Result
from support.system.parrot import Parrots, make_parrot
from support.system.sites import Site, address, meet, open_site
from tokenizers import Tokenizer

from shardnet.cluster.sharing.bulk_client import BulkClient, SourceRefused
from shardnet.transport import tcp
from shardnet.wire.messages.handshake import Hello, PeerRole, Purpose

MODEL = "/proc/self/cwd/model"
OWN_HOST = "127.0.0.9"
"""An address that nobody else asks for ports at: one that was given back there stays free."""

pytestmark = pytest.mark.skipif(
    not Path(MODEL).parent.exists(), reason="this system has no /proc/self/cwd"
)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    """Three machines, each with a home of its own."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()
            machine = Machine(tmp_path / name)
            stack.callback(machine.close)
            made.append(machine)
        yield made


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 8 MB."""
    folder = tmp_path_factory.mktemp("large") / "parrot"
    return make_parrot(folder, "abcdefgh", ends=False, intermediate=1 << 10)


def copy(checkpoint: Path, machine: Machine) -> None:
    """Let the nodes of a machine find a checkpoint at MODEL."""
    (machine.folder / "model").symlink_to(checkpoint)


def start(machine: Machine, name: str, *arguments: str) -> NodeProcess:
    """Start a node whose working folder is its machine's."""
    [node] = machine.start_nodes(name, arguments=arguments, cwd=machine.folder)
    return node


def start_all(
    machines: Sequence[Machine], names: Sequence[str], *arguments: str
) -> list[NodeProcess]:
    """Start a node on each machine, all at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda m, name: start(m, name, *arguments), machines, names))


def ask(*nodes: NodeProcess | str) -> tuple[str, ...]:
    """A command line that has these nodes, or addresses, say three tokens of MODEL."""
    addresses = ",".join(node if isinstance(node, str) else node.address for node in nodes)
    return ("generate", "a", "--model", MODEL, "--nodes", addresses, "--max-tokens", "3")


NAMES = ("anna", "bert", "cleo")


def say(site: Site, nodes: Sequence[NodeProcess]) -> Result:
    """What all three machines say of MODEL together when the second one asks, as rank 0.

    Addresses are named on loopback alone, where there may be strangers.
    """
    ring = ",".join(address(site, n, nodes[n]) for n in (1, 0, 2))
    split = ("--layers", "0-2,2-3,3-4", *([] if site.hosts else ["--nodes", ring]))
    return site.machines[1].run("generate", "a", "--model", MODEL, "--max-tokens", "30", *split)


@pytest.mark.parametrize("kind", cases(["loopback"], ["namespaces"]))
def test_one_copy_is_enough(kind: str, parrots: Parrots, tmp_path: Path) -> None:
    """Asked is a node without the copy, which then is rank 0; each stage fetches its range."""
    with open_site(kind, 3, tmp_path) as site:
        copy(parrots.alphabet, site.machines[0])
        nodes = start_all(site.machines, NAMES)
        meet(*nodes)
        result = say(site, nodes)
        assert result.stdout == "bcdefghijklmnopqrstuvwxyzabcde\n", result.stderr
        assert [node.log.count("fetched") for node in nodes] == [0, 1, 1]
        assert result.stderr.count("fetching") == 2


def test_after_a_restart_no_weights_move(machines: list[Machine], parrots: Parrots) -> None:
    """Though the path still means nothing on the node that had to fetch. The plan says it first."""
    copy(parrots.alphabet, machines[0])
    anna = start(machines[0], "anna")
    for n_fetched in (1, 0):
        bert = start(machines[1], "bert", "--peer", anna.address)
        bert.stderr.wait_for("node anna (")
        ring = ("--nodes", f"{bert.address},{anna.address}", "--model", MODEL)
        stages = machines[1].call("plan", "--json", *ring).json["stages"]
        assert [stage["fetch_from"] for stage in stages] == [["anna"] * n_fetched, []]
        assert [stage["fetch_bytes"] > 0 for stage in stages] == [bool(n_fetched), False]
        assert machines[1].call(*ask(bert, anna)).stdout == "bcd\n"
        assert [node.log.count("fetched") for node in (anna, bert)] == [0, n_fetched]
        bert.stop()
    [cached] = machines[1].call("cache", "ls", "--json").json
    assert (cached["name"], cached["in_use"]) == (MODEL, False)
    assert 0 < cached["bytes"] < cached["whole_bytes"]
    assert machines[0].call("cache", "ls", "--json").json == []


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_a_model_of_ollamas_store_runs_where_only_a_peer_has_it(
    machines: list[Machine], parrots: Parrots, tmp_path: Path
) -> None:
    """The head is told a part of its name, and fetches its own half."""
    source = shutil.copytree(parrots.alphabet, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")  # numpy, which writes GGUF, has no bfloat16
    save_file({name: x.float() for name, x in tensors.items()}, source / "model.safetensors")
    gguf = write_gguf(source, tmp_path / "parrot.gguf")
    put_in_ollama(machines[0].folder / ".ollama" / "models", gguf, "lab/parrot", "1b")
    anna = start(machines[0], "anna")
    bert = start(machines[1], "bert", "--peer", anna.address)
    bert.stderr.wait_for("node anna (")
    found = machines[1].call("models", "--json").json
    assert found["silent"] == []
    [model] = [model for model in found["models"] if model["store"] == "Ollama"]
    assert (model["name"], model["node_name"]) == ("ollama:lab/parrot:1b", "anna")
    assert (model["size_bytes"], model["fits"]) == (gguf.stat().st_size, True)
    a, *rest = Tokenizer.from_file(str(parrots.alphabet / "tokenizer.json")).encode("abcd").ids
    ring = ("--nodes", f"{bert.address},{anna.address}", "--model", "parrot:1b")
    answer = machines[1].call(
        "generate", "--token-ids", str(a), "--max-tokens", "3", "--json", *ring
    )
    assert answer.json["token_ids"] == rest
    assert [node.log.count("fetched") for node in (anna, bert)] == [0, 1]


@pytest.mark.parametrize("kind", cases(["loopback"], ["namespaces"]))
def test_a_source_that_goes_in_the_middle_is_left_and_the_others_finish(
    kind: str, large: Path, tmp_path: Path
) -> None:
    """Two of three have the copy. While the third one fetches from both, one has its cable pulled,
    or is killed where there is no cable.
    """
    with open_site(kind, 3, tmp_path) as site:
        for machine in site.machines[:2]:
            copy(large, machine)
        nodes = start_all(site.machines, NAMES, "--share-rate", "3MiB")
        meet(*nodes)
        cleo = address(site, 2, nodes[2])
        running = site.machines[2].begin_copy(*ask(cleo))
        running.stderr.wait_for("fetching")
        if site.hosts:
            site.hosts[1].unplug()
        else:
            nodes[1].kill()
        result = running.wait()
        assert (result.code, result.stdout) == (0, "bcd\n"), result.stderr
        assert "fetched" in nodes[2].log


def test_a_fetch_goes_on_where_it_was_ended(machines: list[Machine], large: Path) -> None:
    """First by Ctrl-C, then by the death of the only source, which would take two minutes."""
    copy(large, machines[0])
    alone = ("--host", OWN_HOST)
    anna = start(machines[0], "anna", "--share-rate", "64KiB", *alone)
    cleo = start(machines[2], "cleo", "--peer", anna.address)
    cleo.stderr.wait_for("node anna (")
    running = machines[2].begin_copy(*ask(cleo))
    running.stderr.wait_for("fetching")
    running.signal(signal.SIGINT)
    assert running.wait().code == 130

    running = machines[2].begin_copy(*ask(cleo))
    running.stderr.wait_for("fetching")
    anna.kill()
    error = running.wait().error
    assert "no node sends tensor" in error
    assert anna.address in error

    assert "no node sends tensor" in machines[2].call(*ask(cleo)).error
    after = len(cleo.log)
    _, _, port = anna.address.rpartition(":")
    start(machines[0], "anna", "--port", port, *alone)
    cleo.stderr.wait_for("node anna (", after=after)
    assert machines[2].call(*ask(cleo)).stdout == "bcd\n"
    assert "fetched" in cleo.log


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_two_nodes_of_one_machine_share_what_they_fetch(
    machines: list[Machine], parrots: Parrots
) -> None:
    """And what they use cannot be deleted before it is unloaded."""
    copy(parrots.alphabet, machines[0])
    anna = start(machines[0], "anna")
    bert, cleo = start_all([machines[1]] * 2, ("bert", "cleo"), "--peer", anna.address)
    for node in (bert, cleo):
        node.stderr.wait_for("node anna (")
    assert machines[1].call(*ask(bert, cleo)).stdout == "bcd\n"
    assert machines[1].call(*ask(cleo, bert)).stdout == "bcd\n"
    moved = [node.log.count("fetched") for node in (bert, cleo)]
    assert machines[1].call(*ask(bert, cleo)).stdout == "bcd\n"
    assert [node.log.count("fetched") for node in (bert, cleo)] == moved
    [cached] = machines[1].call("cache", "ls", "--json").json
    assert cached["in_use"]
    assert "in use by a node" in machines[1].call("cache", "rm", cached["model_id"][:8]).error
    assert machines[1].call("unload", "--nodes", bert.address).code == 0
    assert machines[1].call("cache", "rm", "--all").code == 0
    assert machines[1].call("cache", "ls", "--json").json == []
    assert "abc begins no model's id in" in machines[1].call("cache", "rm", "abc").error
    assert machines[1].call("cache", "rm").code == 2
    assert machines[1].call(*ask(bert, cleo)).stdout == "bcd\n"


def test_a_cache_limit_is_kept_and_named(machines: list[Machine], parrots: Parrots) -> None:
    copy(parrots.alphabet, machines[0])
    anna = start(machines[0], "anna")
    cleo = start(machines[2], "cleo", "--peer", anna.address, "--cache-limit", "1MiB")
    cleo.stderr.wait_for("node anna (")
    error = machines[2].call(*ask(cleo)).error
    assert "above the limit of 1048576; raise --cache-limit" in error


def test_weights_are_not_given_to_clients(machines: list[Machine]) -> None:
    anna = start(machines[0], "anna")
    hello = Hello(purpose=Purpose.BULK, role=PeerRole.CLIENT, node="x", name="x", version="0")

    async def main() -> None:
        link = await tcp.connect("127.0.0.1", anna.ready["port"], hello)
        with pytest.raises(SourceRefused, match="weights go from node to node only"):
            await BulkClient(link, "f" * 64).skeleton()
        await link.close()

    asyncio.run(main())


def test_two_fine_tunes_of_one_shape_are_refused_by_name(
    machines: list[Machine], tmp_path: Path
) -> None:
    """They differ in nothing but values: same config, tokenizer, headers and sizes."""
    text = "abcdefgh"
    for machine, weights in ((machines[0], text), (machines[1], text[::-1])):
        folder = make_parrot(tmp_path / f"of-{weights}", text, ends=False)
        if weights != text:
            tune(folder / "model.safetensors")
        copy(folder, machine)
    anna = start(machines[0], "anna")
    bert = start(machines[1], "bert", "--peer", anna.address)
    bert.stderr.wait_for("node anna (")
    said = machines[0].call(*ask(anna, bert))
    assert "the nodes hold different models: anna has " in said.error
    assert re.search(r", bert \(127\.0\.0\.1:\d+\) has [0-9a-f]{12}; copy one", said.error)
    assert said.error.endswith("copy one checkpoint to both")


def tune(file: Path) -> None:
    """Change the values of one tensor, in place, as training does."""
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    weights[name] = weights[name] + 0.5
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_an_empty_folder_at_the_path_is_none(machines: list[Machine], parrots: Parrots) -> None:
    """The node with the folder fetches from the one with the checkpoint, head or not."""
    copy(parrots.alphabet, machines[0])
    (machines[1].folder / "model").mkdir()
    anna = start(machines[0], "anna")
    bert = start(machines[1], "bert", "--peer", anna.address)
    bert.stderr.wait_for("node anna (")
    assert machines[1].call(*ask(bert, anna)).stdout == "bcd\n"
    assert machines[0].call(*ask(anna, bert)).stdout == "bcd\n"
    assert "fetched" in bert.log


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_a_copy_at_another_path_is_as_good(machines: list[Machine], parrots: Parrots) -> None:
    """A node that was asked for it there once knows its id, uses it, and gives it to others."""
    copy(parrots.alphabet, machines[0])
    (machines[1].folder / "elsewhere").symlink_to(parrots.alphabet)
    anna = start(machines[0], "anna")
    bert = start(machines[1], "bert", "--peer", anna.address)
    bert.stderr.wait_for("node anna (")
    there = ("generate", "a", "--model", "/proc/self/cwd/elsewhere", "--max-tokens", "3")
    assert machines[1].call(*there, "--nodes", bert.address).stdout == "bcd\n"
    assert machines[0].call(*ask(anna, bert)).stdout == "bcd\n"
    assert "fetched" not in bert.log
