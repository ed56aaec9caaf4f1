"""The check in conftest.py that a test leaves nothing behind can itself fail a test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

LEAKING_TESTS = """
import asyncio, os, socket, subprocess, sys, threading

KEPT = []

def test_clean():
    async def main():
        await asyncio.gather(asyncio.sleep(0), asyncio.to_thread(int))
    asyncio.run(main())
    subprocess.run([sys.executable, "-c", ""], check=True)
    with socket.socket():
        threading.Thread(target=int).start()

def test_task():
    async def sleeper():
        await asyncio.Event().wait()
    async def main():
        KEPT.append(asyncio.create_task(sleeper()))
        await asyncio.sleep(0)
    asyncio.run(main())

def test_thread():
    event = threading.Event()
    KEPT.append(event)
    threading.Thread(target=event.wait, name="forgotten", daemon=True).start()

def test_socket():
    KEPT.append(socket.socket())

def test_file():
    KEPT.append(open(__file__))

def test_child():
    KEPT.append(subprocess.Popen(["sleep", "600"]))
"""


def test_each_kind_of_leak_fails_its_test(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    conftest = tmp_path / "conftest.py"
    text = conftest.read_text().replace("GRACE_S = 30.0", "GRACE_S = 0.05")
    conftest.write_text(text.replace('pytest_plugins = ("support.seconds",)', ""))
    (tmp_path / "test_leaks.py").write_text(LEAKING_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-p", "no:asyncio", "-W", "ignore", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = result.stdout
    assert "6 passed, 5 errors" in report, report + result.stderr
    for name, left in (
        ("test_task", "task <coroutine object"),
        ("test_thread", "thread forgotten"),
        ("test_socket", "open socket:["),
        ("test_file", "open " + str(tmp_path)),
        ("test_child", "child process"),
    ):
        start = report.index(f"ERROR at teardown of {name}")
        assert f"the test left behind: {left}" in report[start:], report
