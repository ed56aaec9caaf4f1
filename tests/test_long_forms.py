"""The ledger of the long forms of tests: a file is green once all of its tests have ended well."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.long_forms import Ledger, files_of, sources_digest

TWO = ["tests/wire/test_a.py::test_x", "tests/wire/test_a.py::test_y", "tests/test_b.py::test_z"]


def ran(ledger: Ledger, nodeid: str, outcome: Any = "passed") -> None:
    for when in ("setup", "call", "teardown"):
        ledger.note(
            pytest.TestReport(
                nodeid=nodeid,
                location=(nodeid, None, ""),
                keywords={},
                outcome=outcome if when == "call" else "passed",
                longrepr=None,
                when=when,  # type: ignore[arg-type]
            )
        )


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the ledger lies, beside files of tests that are there."""
    monkeypatch.setattr("support.long_forms.ROOT", tmp_path)
    for test in TWO:
        file = tmp_path / test.partition("::")[0]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return tmp_path / "ledger.json"


def test_a_file_is_green_when_its_last_test_has_ended_and_none_failed(path: Path) -> None:
    ledger = Ledger(path, "now", "avx2")
    ledger.expect(TWO)
    ran(ledger, TWO[0])
    assert not path.exists()
    ran(ledger, TWO[1], "skipped")
    ran(ledger, TWO[2], "failed")
    again = Ledger(path, "now", "avx2")
    assert [again.is_green(file) for file in ("tests/wire/test_a.py", "tests/test_b.py")] == [
        True,
        False,
    ]
    assert (again.files["tests/wire/test_a.py"].passed, again.files.keys()) == (
        1,
        {"tests/wire/test_a.py"},
    )
    today = datetime.now(UTC).date()
    assert list(again.table(["tests/wire/test_a.py", "tests/test_b.py"])) == [
        "never         0 of   1 files with these sources  tests",
        f"{today}    1 of   1 files with these sources  tests/wire",
    ]


@pytest.mark.parametrize(("sources", "cpu"), [("later", "avx2"), ("now", "off")])
def test_other_sources_and_another_cpu_make_a_file_run_again(
    path: Path, sources: str, cpu: str
) -> None:
    first = Ledger(path, "now", "avx2")
    first.expect(TWO[2:])
    ran(first, TWO[2])
    later = Ledger(path, sources, cpu)
    assert not later.is_green("tests/test_b.py")
    assert next(later.table(["tests/test_b.py"])).startswith(str(datetime.now(UTC).date()))


def test_a_failure_keeps_the_day_on_which_the_file_was_green(path: Path) -> None:
    first = Ledger(path, "now", "avx2")
    first.expect(TWO[2:])
    ran(first, TWO[2])
    kept = path.read_bytes()
    later = Ledger(path, "later", "avx2")
    later.expect(TWO[2:])
    ran(later, TWO[2], "failed")
    assert path.read_bytes() == kept


def test_folders_and_files_are_found_by_their_paths_from_the_root() -> None:
    root = Path(__file__).parents[1]
    found = files_of([str(root / "tests/wire/framing"), __file__])
    assert found == {"tests/wire/framing/test_frames.py", "tests/test_long_forms.py"}
    assert len(sources_digest()) == 16
