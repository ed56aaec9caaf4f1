"""The register of this machine's nodes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.full_disk import full_disk

from shardnet.cluster.machine import local_nodes
from shardnet.cluster.machine.folders import runtime_dir
from shardnet.cluster.machine.local_nodes import STALE_S, TOUCH_S, LocalNodes, share_of_cores
from shardnet.cluster.machine.profile import make_host_id
from shardnet.errors import ConfigurationError


def test_a_living_process_is_listed_until_it_is_removed(tmp_path: Path) -> None:
    nodes = LocalNodes(tmp_path / "run")
    assert nodes.list() == []
    entry = nodes.add(node="a", name="A", address="127.0.0.1:1", pid=os.getpid())
    assert nodes.list() == [entry]
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    nodes.remove(entry)
    nodes.remove(entry)
    assert nodes.list() == []


@pytest.mark.parametrize(
    "changes",
    [{"pid": "7"}, {"pid": None}, {"pid": 0}, {"pid": -3}, {"pid": 2**80}, {"started": "noon"}],
)
def test_a_damaged_entry_keeps_nobody_from_the_others(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    nodes = LocalNodes(tmp_path)
    entry = nodes.add(node="a", name="A", address="127.0.0.1:1", pid=os.getpid())
    (tmp_path / "b.json").write_text(json.dumps(asdict(entry) | {"node": "b"} | changes))
    assert nodes.list() == [entry]
    assert not (tmp_path / "b.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the clock counts")
def test_a_node_is_found_after_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = LocalNodes(tmp_path)
    entry = nodes.add(node="a", name="A", address="127.0.0.1:1", pid=os.getpid())
    before_s = psutil.Process().create_time()
    linux: Any = psutil._psplatform
    booted_s = linux.boot_time()
    for jump_s in (5.0, -86400.0, 86400.0):
        monkeypatch.setattr(linux, "boot_time", lambda to_s=booted_s + jump_s: to_s)
        assert psutil.Process().create_time() == before_s + jump_s
        assert nodes.list() == [entry]
        assert nodes.keep(entry, entry.address) == entry


def test_an_entry_follows_the_address_and_comes_back_when_it_was_deleted(tmp_path: Path) -> None:
    nodes = LocalNodes(tmp_path)
    entry = nodes.add(node="a", name="A", address="10.0.0.1:7433", pid=os.getpid())
    moved = nodes.keep(entry, "10.0.0.9:7433")
    assert nodes.list() == [moved]
    assert moved.address == "10.0.0.9:7433"
    (tmp_path / "a.json").unlink()
    assert nodes.keep(moved, moved.address) == moved
    assert nodes.list() == [moved]
    before = (tmp_path / "a.json").stat().st_mtime - 2 * TOUCH_S
    os.utime(tmp_path / "a.json", (before, before))
    nodes.keep(moved, moved.address)
    assert (tmp_path / "a.json").stat().st_mtime > before + TOUCH_S


def test_an_entry_follows_the_name_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS a network may give the machine another name, and the place is that name."""
    nodes = LocalNodes(tmp_path)
    entry = nodes.add(node="a", name="A", address="10.0.0.1:7433", pid=os.getpid())
    monkeypatch.setattr(local_nodes, "this_place", lambda: "mac.fritz.box")
    assert nodes.list() == []
    kept = nodes.keep(entry, entry.address)
    assert nodes.list() == [kept]


def test_containers_that_share_a_folder_see_their_own_nodes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids and loopback addresses of another one mean nothing here. Its entries are not deleted
    while its node keeps them."""
    nodes = LocalNodes(tmp_path)
    ours = nodes.add(node="a", name="A", address="127.0.0.1:1", pid=os.getpid())
    monkeypatch.setattr(local_nodes, "this_place", lambda: "another container")
    assert nodes.list() == []
    theirs = nodes.add(node="b", name="B", address="127.0.0.1:1", pid=os.getpid())
    assert nodes.list() == [theirs]
    monkeypatch.undo()
    assert nodes.list() == [ours]
    path = tmp_path / "b.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 2**31 - 1}))
    assert nodes.list() == [ours]
    assert path.exists()
    long_ago = path.stat().st_mtime - STALE_S - 1
    os.utime(path, (long_ago, long_ago))
    assert nodes.list() == [ours]
    assert not path.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no namespaces")
@pytest.mark.parametrize("kind", ["pid", "net"])
def test_a_place_is_a_container_and_not_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    before, network, host = (
        local_nodes.this_place(),
        local_nodes.this_network(),
        make_host_id(),
    )
    (tmp_path / "link").symlink_to(f"{kind}:[7]")
    name = {"pid": "_PROCESSES", "net": "_NETWORK"}[kind]
    monkeypatch.setattr(local_nodes, name, str(tmp_path / "link"))
    assert local_nodes.this_place() != before
    assert (local_nodes.this_network() == network) is (kind == "pid")
    assert (make_host_id() == host) is (kind == "pid")


def test_on_a_full_disk_nothing_is_left_of_a_node(tmp_path: Path) -> None:
    with full_disk(10), pytest.raises(OSError, match="File too large"):
        LocalNodes(tmp_path).add(node="a", name="A", address="127.0.0.1:1", pid=os.getpid())
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("change", ["no start, no place", "start by the clock", "more"])
def test_nodes_that_run_from_before_an_upgrade_are_listed(change: str, tmp_path: Path) -> None:
    """Their entries are as that version wrote them; a process that took over an id is no node."""
    nodes = LocalNodes(tmp_path)
    entry = asdict(nodes.add(node="n", name="pi", address="127.0.0.1:5", pid=os.getpid()))
    match change:
        case "no start, no place":
            del entry["started"], entry["place"]
        case "start by the clock":
            entry["started"] = psutil.Process().create_time()
        case "more":
            entry["colour"] = "red"
    file = tmp_path / "n.json"
    file.write_text(json.dumps(entry))
    assert [one.name for one in nodes.list()] == ["pi"]
    if "started" in entry:
        file.write_text(json.dumps({**entry, "started": entry["started"] - 100}))
    else:
        os.utime(file, (0, 0))
    assert not nodes.list()
    assert not file.exists()


def test_a_dead_process_is_dropped_and_its_file_deleted(tmp_path: Path) -> None:
    nodes = LocalNodes(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        nodes.add(node="dead", name="D", address="127.0.0.1:2", pid=process.pid)
        assert len(nodes.list()) == 1
        process.kill()
    assert nodes.list() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node": "x"}', '{"pid": "no"}'])
def test_a_file_that_is_no_entry_is_deleted(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert LocalNodes(tmp_path).list() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["open to all", "another's", "another's link"])
def test_a_folder_in_which_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """In a shared /tmp another user may have made it first, and chooses what it leads to."""
    folder, mine = tmp_path / "run", tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "work.json").write_text("{}")
    if how == "another's link":
        folder.symlink_to(mine)
        true_lstat = os.lstat
        status = os.stat_result((*true_lstat(folder)[:4], os.getuid() + 1, *true_lstat(folder)[5:]))
        monkeypatch.setattr(os, "lstat", lambda path: status)
    else:
        mine.rename(folder)
        if how == "open to all":
            folder.chmod(0o777)
        else:
            if not os.getuid():
                os.chown(folder, 4711, -1)
            monkeypatch.setattr(os, "getuid", lambda: 4712)
    nodes = LocalNodes(folder)
    with pytest.raises(ConfigurationError, match="another user can write in"):
        nodes.list()
    with pytest.raises(ConfigurationError, match="SHARDNET_RUNTIME_DIR"):
        nodes.add(node="a", name="A", address="127.0.0.1:1", pid=os.getpid())
    assert [path.name for path in folder.iterdir()] == ["work.json"]


def test_the_folder_is_where_the_environment_says() -> None:
    assert runtime_dir({"SHARDNET_RUNTIME_DIR": "/x"}) == Path("/x")
    assert runtime_dir({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/shardnet")
    assert "shardnet-" in runtime_dir({}).name


def test_on_windows_it_is_in_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions of one user have temporary folders of their own there."""
    monkeypatch.setattr("platformdirs.user_runtime_path", lambda name, appauthor: Path("/p") / name)
    monkeypatch.setattr(sys, "platform", "win32")
    assert runtime_dir({}) == Path("/p/shardnet")
    assert runtime_dir({"SHARDNET_RUNTIME_DIR": "/x"}) == Path("/x")


@pytest.mark.parametrize(("cores", "nodes", "share"), [(8, 1, 8), (8, 3, 2), (2, 5, 1), (4, 0, 4)])
def test_cores_are_shared_out(cores: int, nodes: int, share: int) -> None:
    assert share_of_cores(cores, nodes) == share


def test_without_a_usable_temporary_folder_nodes_are_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk none can be written, and those that registered before still run."""

    def full() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in []")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = runtime_dir({"TMPDIR": str(tmp_path)})
    monkeypatch.setattr(tempfile, "gettempdir", full)
    assert runtime_dir({"TMPDIR": str(tmp_path)}) == before
    assert before.parent == tmp_path
    assert runtime_dir({}).parent == Path("/tmp")
