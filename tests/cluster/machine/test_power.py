from __future__ import annotations

from pathlib import Path

from shardnet.cluster.machine.power import runs_on_battery


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir()
    for file, text in files.items():
        (folder / name / file).write_text(text + "\n")


def test_a_battery_counts_only_where_it_alone_gives_power(tmp_path: Path) -> None:
    assert not runs_on_battery(tmp_path / "missing")
    assert not runs_on_battery(tmp_path)
    mouse = {"type": "Battery", "scope": "Device", "status": "Discharging", "online": "1"}
    supply(tmp_path, "mouse", **mouse)
    assert not runs_on_battery(tmp_path)
    supply(tmp_path, "BAT0", type="Battery", status="Discharging")
    assert runs_on_battery(tmp_path)
    supply(tmp_path, "AC", type="Mains", online="1")
    assert not runs_on_battery(tmp_path)
    (tmp_path / "AC" / "online").write_text("0\n")
    assert runs_on_battery(tmp_path)
