"""Benchmark random GGUF files in the shapes of known models, beside llama.cpp if it is installed.

Files are written once, beside the system's other temporary files, 1 to 7 GB each.
docs/benchmarks.md says what each figure is; bench_llama_cpp.py measures.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch
from bench_llama_cpp import compare, print_row
from shape_files import SHAPES, write_shape


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/bench shapes")
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isa", default="", help="of shardnet: avx2, ...")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / "shardnet-bench-shapes"
    )
    parser.add_argument("--keep", action="store_true", help="keep each file for the next run")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    names = arguments.shapes or list(SHAPES)
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"no such shape: {', '.join(unknown)}")
    if arguments.isa:  # for the processes that are started too
        os.environ["SHARDNET_ISA"] = arguments.isa
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name in names:
        file = write_shape(SHAPES[name], arguments.folder / f"{name}.gguf")
        has_llama_cpp = find_spec("llama_cpp") is not None
        found.append(
            compare(file, arguments.threads, arguments.rounds, with_llama_cpp=has_llama_cpp)
        )
        if not arguments.json:
            print_row(found[-1], with_head=len(found) == 1)
        if not arguments.keep:
            file.unlink()
    if arguments.json:
        print(json.dumps([asdict(comparison) for comparison in found], indent=2))


if __name__ == "__main__":
    main()
