"""The table of what tests take: by folder and by file, the dearest first."""

from __future__ import annotations

import pytest
from support.seconds import KEY, table, taken


def reported(path: str, when: str, clock_s: float, processor_s: float = 0.0) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=f"{path}::test",
        location=(path, None, "test"),
        keywords={},
        outcome="passed",
        longrepr=None,
        when=when,  # type: ignore[arg-type]
        duration=clock_s,
        user_properties=[(KEY, processor_s)] if when == "teardown" else [],
    )


def test_what_files_take_is_added_up_by_folder() -> None:
    calls = [reported("tests/wire/a.py", "call", 2.0), reported("tests/wire/b.py", "call", 9.0)]
    ends = [
        reported("tests/wire/a.py", "teardown", 1.0, 1.5),
        reported("tests/wire/b.py", "teardown", 0.0, 0.5),
        reported("tests/cli/flags/c.py", "teardown", 1.0, 1.0),
    ]
    lines = [line.split() for line in table(taken([*calls, *ends]))]
    assert lines == [
        ["2.0", "12.0", "tests/wire"],
        ["1.0", "1.0", "tests/cli/flags"],
        [],
        ["1.5", "3.0", "tests/wire/a.py"],
        ["1.0", "1.0", "tests/cli/flags/c.py"],
        ["0.5", "9.0", "tests/wire/b.py"],
    ]
