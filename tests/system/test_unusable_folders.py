"""Folders that cannot be written: said once, with what to do, while all else goes on."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
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


NO_TEMPORARY = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/nowhere']"
"""What Python runs first: /tmp and the current folder cannot be written."""


@pytest.fixture
def crammed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine without a folder for temporary files; this process has none, either."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(NO_TEMPORARY)
    said = {"SHARDNET_NO_MDNS": "1", "PYTHONPATH": str(tmp_path / "first")}
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    for variable in (RUNTIME_DIR_VARIABLE, "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    machine = Machine(tmp_path / "machine", environment=said)
    machine.environment.pop(RUNTIME_DIR_VARIABLE)
    machine.environment["TMPDIR"] = str(tmp_path / "nowhere")
    yield machine
    machine.close()


def test_without_a_folder_for_temporary_files_all_goes_on(
    crammed: Machine, parrots: Parrots
) -> None:
    """What imports most is begun as a user begins it, and ends with the code of what it did."""
    model = ["--model", str(parrots.signs)]
    generating = crammed.begin("generate", *model, "a", "--threads", "2")
    assert crammed.call("nodes").stdout.startswith("no nodes found")
    assert "shardnet/default" in crammed.call("models").stdout
    assert crammed.call("plan", *model).code == 0
    generated = generating.wait()
    assert (generated.code, generated.stdout) == (0, "é€😀 Жz.\n")
    assert "terminate" not in generated.stderr
    assert "Traceback" not in generated.stderr
    ended = crammed.call("status")
    assert ended.code == 1
    assert ended.error_line.startswith("no node runs on this machine")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere identities are such files anyway")
def test_what_needs_a_folder_for_temporary_files_says_so_in_one_line(
    crammed: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cluster key, where the system has no files in memory."""
    assert crammed.call("key", "new").code == 0
    monkeypatch.delattr(os, "memfd_create")
    for command in ("nodes", "models", "node"):
        ended = crammed.call(command)
        assert (ended.code, ended.stdout) == (1, "")
        assert ended.error_line.startswith("there is no folder for temporary files: ")
        assert "set TMPDIR to a folder that this user may write" in ended.error_line
