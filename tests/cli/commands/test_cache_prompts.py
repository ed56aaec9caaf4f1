"""`shardnet cache` and `status` say what is on disk of finished prompts."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from support.cluster.checkup_facts import reply
from typer.testing import CliRunner

from shardnet.cluster.store.model_cache import CachedModel, ModelCache, ModelUse
from shardnet.files import note_model
from shardnet.stage.prefixes.prefix_store import PrefixStore
from shardnet.wire.messages.diagnostics import (
    DeputyState,
    PartState,
    PrefixState,
    StageState,
    StandbyState,
)
from shardnet_cli.commands.status import (
    _deputy_lines,
    _part_lines,
    _prefix_lines,
    _standby_lines,
)
from shardnet_cli.main import app

KEY = bytes(16)


def test_prompts_are_listed_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDNET_CACHE_DIR", str(tmp_path))
    store = PrefixStore(tmp_path / "prefixes", 1 << 20)
    names = []
    for layers in ("layers 0-3", "layers 4-7"):
        files = store.of_stage(layers, "/m/llama", layers)
        files.begin()
        files.write(files.path(KEY, "kv"), KEY, memoryview(bytes(1 << 20)))
        names.append(files.path(KEY, "kv").parent.name)
    cli = CliRunner()
    listed = cli.invoke(app, ["cache", "ls"]).stdout
    assert re.search(r"1.0 MiB of prompts  used \d+ seconds ago  layers 4-7 of /m/llama", listed)
    entries = json.loads(cli.invoke(app, ["cache", "ls", "--json"]).stdout)
    assert {entry["prompts"] for entry in entries} == {"layers 0-3", "layers 4-7"}
    assert cli.invoke(app, ["cache", "rm", names[0][:12]]).exit_code == 0
    [left] = json.loads(cli.invoke(app, ["cache", "ls", "--json"]).stdout)
    assert (left["model_id"], left["prompts"]) == (names[1], "layers 4-7")
    assert cli.invoke(app, ["cache", "rm", "--all"]).exit_code == 0
    assert json.loads(cli.invoke(app, ["cache", "ls", "--json"]).stdout) == []


def test_nothing_is_deleted_by_digits_that_begin_two_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDNET_CACHE_DIR", str(tmp_path))
    for cache, form, name in (("packed", "quant", "ab1"), ("prefixes", "layers", "ab2")):
        note_model(tmp_path / cache / name, {"model": "/m/llama", form: "int8"})
    replica = tmp_path / "models" / ("ab3" + "0" * 61)
    replica.mkdir(parents=True, mode=0o700)
    cli = CliRunner()
    refused = cli.invoke(app, ["cache", "rm", "ab"])
    assert refused.exit_code == 1
    assert "ab begins the ids of 3 models (ab3000000000, ab1, ab2)" in refused.stderr
    for prefix in ("ab2", "ab3"):
        assert cli.invoke(app, ["cache", "rm", prefix]).exit_code == 0
    [left] = json.loads(cli.invoke(app, ["cache", "ls", "--json"]).stdout)
    assert left["model_id"] == "ab1"


def test_what_others_use_or_delete_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node of this machine evicts one of three models, and uses another, once all are listed."""
    monkeypatch.setenv("SHARDNET_CACHE_DIR", str(tmp_path))
    ids = [digit * 64 for digit in "abc"]
    for used_s, model_id in enumerate(ids):
        (tmp_path / "models" / model_id).mkdir(parents=True, mode=0o700)
        os.utime(tmp_path / "models" / model_id, (-used_s, -used_s))
    other, list_all = ModelCache(tmp_path), ModelCache.models
    uses: list[ModelUse] = []

    def models(cache: ModelCache) -> list[CachedModel]:
        found = list_all(cache)
        if not uses:
            other.remove(ids[0])
            uses.append(other.use(ids[1]))
        return found

    monkeypatch.setattr(ModelCache, "models", models)
    done = CliRunner().invoke(app, ["cache", "rm", "--all"])
    uses[0].close()
    assert done.exit_code == 0, done.stderr
    gone, stays, deleted = done.stderr.splitlines()
    assert gone == "aaaaaaaaaaaa is gone: another process has deleted it meanwhile"
    assert stays == "bbbbbbbbbbbb is in use and stays: `shardnet unload` frees it"
    assert deleted.startswith("deleted cccccccccccc")


def test_status_tells_of_prompts_where_any_are_kept_and_for_whom_it_stands_by() -> None:
    stage = StageState(
        model="/m",
        layers=(0, 4),
        dtype="float32",
        kernel="packed",
        weight_bytes=1,
        room_blocks=4,
        used_blocks=0,
    )
    assert _prefix_lines(stage) == []
    kept = PrefixState(
        used_bytes=3 << 30, limit_bytes=20 << 30, saved_positions=1024, restored_positions=512
    )
    stage = replace(stage, prefixes=kept)
    assert _prefix_lines(stage) == [
        "prompts  3.00 GiB of 20.00 GiB on disk, 1024 positions saved, 512 restored"
    ]
    assert _standby_lines(stage) == _part_lines(stage) == []
    parts = [
        PartState(layers=(0, 2), devices=["cuda:0", "cuda:1"], weight_bytes=1 << 30),
        PartState(layers=(2, 3), devices=["cpu"], weight_bytes=1 << 20),
    ]
    assert _part_lines(replace(stage, parts=parts)) == [
        "device   cuda:0 + cuda:1: layers 0-1, each shared by them, 1.00 GiB",
        "device   cpu: layer 2, 1 MiB",
    ]
    standby = StandbyState(node="bert", layers=(4, 8), weight_bytes=3 << 30)
    assert _standby_lines(replace(stage, standby=standby)) == [
        "standby  layers 4-7 (3.00 GiB), if bert is lost"
    ]


def test_status_tells_who_goes_on_for_whom() -> None:
    report = reply("anna").report
    assert report is not None
    assert _deputy_lines(report) == []
    bert, cleo = (DeputyState(node=name, n_requests=1) for name in ("bert", "cleo"))
    assert _deputy_lines(replace(report, deputy=bert, deputy_of=[cleo])) == [
        "deputy   goes on with 1 request of cleo, if it is lost",
        "deputy   bert goes on with 1 request, if this node is lost",
    ]


def test_a_disk_that_fails_is_not_told_as_a_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDNET_CACHE_DIR", str(tmp_path))
    (tmp_path / "models" / ("a" * 64)).mkdir(parents=True, mode=0o700)
    failing = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(ModelCache, "_delete", failing)
    done = CliRunner().invoke(app, ["cache", "rm", "--all"])
    assert done.exit_code == 1
    assert "the disk fails" in done.stderr
    assert "in use" not in done.stderr
