"""Folders that cannot be written: said once, with what to do, while all else goes on."""

from __future__ import annotations

from pathlib import Path

from support.system.nodes import Machine
from support.system.parrot import Parrots

from shardnet.cluster.machine.folders import RUNTIME_DIR_VARIABLE

WARNING = "warning: the cache folder"


def test_without_a_cache_all_goes_on(tmp_path: Path, parrots: Parrots) -> None:
    """In a node and in a command without one; each says so once, whatever it cannot keep."""
    file = tmp_path / "file"
    file.touch()
    cache = {"SHARDNET_NO_MDNS": "1", "SHARDNET_CACHE_DIR": str(file / "cache")}
    machine = Machine(tmp_path / "machine", environment=cache)
    try:
        model = ["--model", str(parrots.signs)]
        alone = machine.call("generate", "a", *model)
        assert alone.stdout == "é€😀 Жz.\n"
        assert alone.stderr.count(WARNING) == 1
        assert "(Not a directory)" in alone.stderr
        assert "name another with SHARDNET_CACHE_DIR" in alone.stderr
        [node] = machine.start_nodes("anna")
        for _ in range(2):
            assert machine.call("generate", "a", *model).stdout == "é€😀 Жz.\n"
        assert node.log.count("the last run is not kept") == 1
        assert node.log.count(WARNING) == 1
    finally:
        machine.close()


def test_a_node_that_cannot_be_registered_serves_and_says_how_to_find_it(
    tmp_path: Path, parrots: Parrots
) -> None:
    file = tmp_path / "file"
    file.touch()
    machine = Machine(tmp_path / "machine", environment={"SHARDNET_NO_MDNS": "1"})
    machine.environment[RUNTIME_DIR_VARIABLE] = str(file / "run")
    try:
        [node] = machine.start_nodes("anna")
        assert f"find it with --nodes {node.address}" in node.log
        asked = ["--model", str(parrots.signs), "--nodes", node.address]
        assert machine.call("generate", "a", *asked).stdout == "é€😀 Жz.\n"
    finally:
        machine.close()
