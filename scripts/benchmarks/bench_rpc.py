"""A ring of two nodes beside llama.cpp's RPC with two servers, on the same GGUF file in one run.

Needs llama.cpp's own programs, built with -DGGML_RPC=ON: --programs names their folder. Both are
measured on loopback, each node and server with so many threads, and in one process beside. The four
take turns; figures are medians over rounds, of a prompt alone and of an answer alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORMS = ("shardnet, one node", "shardnet, two nodes", "llama.cpp, one process", "llama.cpp, RPC")
START_S, RUN_S = 30.0, 900.0


def by_shardnet(asked: argparse.Namespace, n_nodes: int) -> tuple[float, float]:
    """Measure a ring: prompt tokens and tokens of an answer by second."""
    command = [sys.executable, "-m", "shardnet_cli", "bench", "--json", "--rounds", "1"]
    command += ["--local", str(n_nodes), "--threads", str(asked.threads), "--parallel", "1"]
    command += ["--model", asked.file, "--prompt", str(asked.prompt), "--tokens", str(asked.tokens)]
    command += ["--context", str(asked.prompt + asked.tokens + 64)]
    [speed] = json.loads(_run(command))["speeds"]
    return speed["prefill_tok_s"], speed["decode_tok_s"]


def by_llama_cpp(asked: argparse.Namespace, n_servers: int) -> tuple[float, float]:
    """Measure llama-bench, alone or with the layers on RPC servers."""
    command = [str(asked.programs / "llama-bench"), "-m", asked.file, "-o", "json", "-r", "1"]
    command += ["-p", str(asked.prompt), "-n", str(asked.tokens), "-t", str(asked.threads)]
    with _servers(asked, n_servers) as addresses:
        if addresses:
            command += ["--rpc", ",".join(addresses), "-ngl", "99"]
        rows: list[dict[str, Any]] = json.loads(_run(command))
    by_kind = {row["n_gen"] > 0: row["avg_ts"] for row in rows}
    return by_kind[False], by_kind[True]


@contextmanager
def _servers(asked: argparse.Namespace, n_servers: int) -> Iterator[list[str]]:
    ports = [_free_port() for _ in range(n_servers)]
    program = str(asked.programs / "ggml-rpc-server")
    commands = [[program, "-p", str(port), "-t", str(asked.threads)] for port in ports]
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        for port in ports:
            _wait_for(port)
        yield [f"127.0.0.1:{port}" for port in ports]
    finally:
        for process in running:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    sys.exit(f"error: no RPC server listens on port {port} after {START_S:.0f} s")


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, check=False, env=os.environ
    )
    if done.returncode:
        sys.exit(f"error: {command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench rpc")
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("--programs", type=Path, required=True, help="llama.cpp's build/bin")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
    for _ in range(asked.rounds):
        for number, form in enumerate(FORMS):
            measure = by_shardnet if number < 2 else by_llama_cpp
            n_others = (number % 2) + 1 if number < 2 else 2 * (number % 2)
            found[form].append(measure(asked, n_others))
    for form, speeds in found.items():
        prompt, answer = (statistics.median(each) for each in zip(*speeds, strict=True))
        print(f"{form:<24} prompt {prompt:7.1f} tokens/s, answer {answer:6.1f} tokens/s")


if __name__ == "__main__":
    main()
