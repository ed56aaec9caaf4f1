"""Benchmark one stage with a whole model against llama.cpp, on the same GGUF files in one run.

Needs the package llama-cpp-python, which builds llama.cpp: install it beside shardnet. Without
--same-file FILE the files are those of a random checkpoint of the TinyLlama-1.1B shape, which
llama.cpp quantises from one in BF16, once; they stay beside the checkpoint. Decode and prefill
take turns in this process, with the same number of threads; every load is in a process of its
own. docs/benchmarks.md says what each figure is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from bench_ring import random_1b, read_bandwidth
from bench_steps import make_step
from llama_cpp_model import LlamaCppModel, quantise, start

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import ShardnetError
from shardnet.model.kernels.linear import KernelChoice, probe
from shardnet.stage.estimate.memory_estimate import kv_block_bytes, state_bytes
from shardnet.stage.load import load_stage
from shardnet.types import BLOCK_POSITIONS, PREFILL_CHUNK_ROWS, Arith, DType, LayerRange, SlotId

KINDS = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q4_0", "IQ4_XS", "Q3_K_M", "BF16")
N_PROMPT = 512
N_TOKENS = 12
N_POSITIONS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load in a fresh process, up to the logits of the first token.

    `anonymous_bytes` and `mapped_bytes` are what the process holds more than before, of its own
    memory and of pages of files; `peak_bytes` the most that both were meanwhile.
    """

    load_s: float
    anonymous_bytes: int
    mapped_bytes: int
    peak_bytes: int

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the process holds more than before."""
        return self.anonymous_bytes + self.mapped_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The figures of one program with one file: medians, of loads the fastest."""

    decode_tok_s: float
    prefill_tok_s: float
    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both programs with one file. Ratios above 1 are in favour of shardnet, but for loads.

    `limit_gb_s` is the best streaming read of the run; `share_of_limit` what shardnet's decode
    reads of the file against it; `read_bytes` are those of a token, `position_bytes` what keys,
    values and entries of a position take, `state_bytes` what else a sequence does; `ring` what two
    nodes decode against one process. Without llama.cpp what is its own is None.
    """

    file: str
    file_bytes: int
    read_bytes: int
    position_bytes: int
    state_bytes: int
    limit_gb_s: float
    shardnet: Side
    llama_cpp: Side | None
    decode_ratio: float | None
    prefill_ratio: float | None
    load_ratio: float | None
    share_of_limit: float
    ring: float | None


class Model(Protocol):
    """A whole model that reads prompts and makes steps."""

    def prefill(self) -> None:
        """Read N_PROMPT tokens into an empty cache."""

    def decode(self) -> None:
        """Make N_TOKENS steps of one token behind the prompt."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--same-file",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE.gguf",
        help="the files to compare on; none: those of the random checkpoint",
    )
    parser.add_argument(
        "--files",
        type=lambda text: text.split(","),
        default=KINDS,
        metavar="Q4_K_M,Q8_0",
        help="which files of the random checkpoint",
    )
    parser.add_argument(
        "--make-only", action="store_true", help="write the random checkpoint's files, no more"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isa", default="", help="of shardnet: avx2, ...")
    parser.add_argument(
        "--arith", type=Arith, default=Arith.FAST, choices=list(Arith), help="of shardnet"
    )
    parser.add_argument("--ring", action="store_true", help="also two nodes against one process")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.isa:  # for the processes that are started too
        os.environ["SHARDNET_ISA"] = arguments.isa
        if arguments.isa == "avx2":  # torch reads these when it first computes
            os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    files = [path.absolute() for path in arguments.same_file] or [
        _random_file(kind, arguments.threads) for kind in arguments.files
    ]
    if arguments.make_only:
        print("\n".join(str(file) for file in files))
        return
    torch.set_num_threads(arguments.threads)
    found = []
    for file in files:
        try:
            found.append(
                compare(file, arguments.threads, arguments.rounds, arguments.arith, arguments.ring)
            )
        except ShardnetError as error:
            print(f"shardnet does not take {file.name}: {error}", file=sys.stderr)
            continue
        if not arguments.json:
            print_row(found[-1], with_head=len(found) == 1)
    if arguments.json:
        print(json.dumps([asdict(comparison) for comparison in found], indent=2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Prompt tokens per second of both programs; the ratio is the median of the rounds' ratios."""

    shardnet_tok_s: float
    llama_cpp_tok_s: float
    ratio: float


def compare_prefill(kind: str, threads: int, rounds: int) -> Prefill:
    """Measure a prompt of N_PROMPT tokens by turns, with a file of the random checkpoint."""
    file = _random_file(kind, threads)
    ours, theirs = _Shardnet(file), _LlamaCpp(file, threads)
    ours_s, theirs_s = [], []
    for _ in range(rounds):
        ours_s.append(_timed(ours.prefill))
        theirs_s.append(_timed(theirs.prefill))
    theirs.close()
    return Prefill(
        shardnet_tok_s=N_PROMPT / statistics.median(ours_s),
        llama_cpp_tok_s=N_PROMPT / statistics.median(theirs_s),
        ratio=statistics.median(a / b for a, b in zip(theirs_s, ours_s, strict=True)),
    )


def compare(
    file: Path,
    threads: int,
    rounds: int,
    arith: Arith = Arith.FAST,
    with_ring: bool = False,
    *,
    with_llama_cpp: bool = True,
) -> Comparison:
    """Measure both programs with a file, or shardnet alone.

    Raises ShardnetError for a file that shardnet does not take.
    """
    config = Checkpoint.open(file).config
    layers, dtype = LayerRange(0, config.n_layers), DType.BFLOAT16
    _read_once(file)
    ours_loads, theirs_loads = [], []
    for _ in range(rounds):
        ours_loads.append(_in_process(partial(_load_ours, arith=arith), file, threads))
        if with_llama_cpp:
            theirs_loads.append(_in_process(_load_theirs, file, threads))
    ours = _Shardnet(file, arith=arith)
    theirs = _LlamaCpp(file, threads) if with_llama_cpp else None
    limits, ours_s, theirs_s, ours_prefill_s, theirs_prefill_s = [], [], [], [], []
    for _ in range(rounds):
        limits.append(read_bandwidth())
        ours_prefill_s.append(_timed(ours.prefill))
        ours_s.append(_timed(ours.decode) / N_TOKENS)
        if theirs is not None:
            theirs_prefill_s.append(_timed(theirs.prefill))
            theirs_s.append(_timed(theirs.decode) / N_TOKENS)
    if theirs is not None:
        theirs.close()
    del ours
    read_bytes = _read_bytes_per_token(file)
    return Comparison(
        file=file.name,
        file_bytes=file.stat().st_size,
        read_bytes=read_bytes,
        position_bytes=kv_block_bytes(config, layers, dtype) // BLOCK_POSITIONS,
        state_bytes=state_bytes(config, layers, dtype),
        limit_gb_s=max(limits) / 1e9,
        shardnet=_side(ours_s, ours_prefill_s, ours_loads),
        llama_cpp=_side(theirs_s, theirs_prefill_s, theirs_loads) if theirs else None,
        decode_ratio=_ratio(theirs_s, ours_s),
        prefill_ratio=_ratio(theirs_prefill_s, ours_prefill_s),
        load_ratio=_ratio(
            [load.load_s for load in ours_loads], [load.load_s for load in theirs_loads]
        ),
        share_of_limit=read_bytes / max(limits) / statistics.median(ours_s),
        ring=_ring(file, threads, rounds) if with_ring else None,
    )


def _side(steps_s: list[float], prefills_s: list[float], loads: list[Load]) -> Side:
    return Side(
        decode_tok_s=1 / statistics.median(steps_s),
        prefill_tok_s=N_PROMPT / statistics.median(prefills_s),
        load=min(loads, key=lambda load: load.load_s),
    )


def _ratio(above: Sequence[float], below: Sequence[float]) -> float | None:
    """Return the median of the rounds' ratios; None where one side was not measured."""
    if not above or not below:
        return None
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def print_row(found: Comparison, *, with_head: bool) -> None:
    """Print a row of docs/benchmarks.md: shardnet / llama.cpp, and the ratio."""
    sides = [side for side in (found.shardnet, found.llama_cpp) if side is not None]

    def both(figure: Callable[[Side], str]) -> str:
        return " / ".join(figure(side) for side in sides)

    cells = {
        "file": found.file,
        "MB": f"{found.file_bytes / 1e6:.0f}",
        "MB a token": f"{found.read_bytes / 1e6:.0f}",
        "bytes a position": f"{found.position_bytes}",
        "state, MB": f"{found.state_bytes / 1e6:.1f}",
        "decode tok/s": both(lambda side: f"{side.decode_tok_s:.2f}"),
        "ratio": _bold(found.decode_ratio),
        "of the limit": f"{found.share_of_limit:.2f} of {found.limit_gb_s:.1f} GB/s",
        "prefill tok/s": both(lambda side: f"{side.prefill_tok_s:.1f}"),
        "ratio ": _bold(found.prefill_ratio),
        "load s": both(lambda side: f"{side.load.load_s:.2f}"),
        "ratio  ": _bold(found.load_ratio),
        "resident to the file": both(
            lambda side: f"{side.load.resident_bytes / found.file_bytes:.2f}"
        ),
        "own + mapped MB": both(lambda side: _megabytes(side.load)),
        "peak MB": both(lambda side: f"{side.load.peak_bytes / 1e6:.0f}"),
        "ring": _bold(found.ring),
    }
    if with_head:
        print(f"| {' | '.join(name.strip() for name in cells)} |")
        print(f"|{'---|' * len(cells)}")
    print(f"| {' | '.join(cells.values())} |", flush=True)


def _bold(ratio: float | None) -> str:
    return "" if ratio is None else f"**{ratio:.2f}**"


def _megabytes(load: Load) -> str:
    return f"{load.anonymous_bytes / 1e6:.0f} + {load.mapped_bytes / 1e6:.0f}"


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class _Shardnet:
    """All layers of a checkpoint as one stage, without scheduler, wire or sampler."""

    def __init__(
        self, path: Path, n_positions: int = N_POSITIONS, arith: Arith = Arith.FAST
    ) -> None:
        checkpoint = Checkpoint.open(path)
        choice = _choose(checkpoint, arith)
        self._model = load_stage(
            checkpoint,
            LayerRange(0, checkpoint.config.n_layers),
            choice=choice,
            device=torch.device("cpu"),
            room_blocks=n_positions // BLOCK_POSITIONS,
            context=n_positions,
            progress=lambda done, total: None,
        )

    def prefill(self) -> None:
        """Read N_PROMPT tokens into an empty cache."""
        self._model.kv.free(SlotId(0))
        prompt = _prompt()
        for place in range(0, N_PROMPT, PREFILL_CHUNK_ROWS):
            end = place + PREFILL_CHUNK_ROWS
            self.step(place, prompt[place:end], n_sampled=int(end >= N_PROMPT))

    def decode(self) -> None:
        """Make N_TOKENS steps of one token behind the prompt."""
        for number in range(N_TOKENS):
            self.step(N_PROMPT + number, [17 + number])

    @torch.inference_mode()
    def step(self, position: int, token_ids: Sequence[int], *, n_sampled: int = 1) -> None:
        """Compute tokens at `position`, and the logits of the last if `n_sampled` is 1."""
        self._model.forward(make_step([(0, position, token_ids)], n_sampled=n_sampled), None)


class _LlamaCpp:
    """The same model in llama.cpp."""

    def __init__(self, path: Path, threads: int) -> None:
        self._model = LlamaCppModel(path, threads, context=N_POSITIONS, most_rows=N_PROMPT)

    def prefill(self) -> None:
        """Read N_PROMPT tokens into an empty cache."""
        self._model.clear()
        self._model.step(_prompt())

    def decode(self) -> None:
        """Make N_TOKENS steps of one token behind the prompt."""
        for number in range(N_TOKENS):
            self._model.step([17 + number])

    def close(self) -> None:
        """Free everything."""
        self._model.close()


def _prompt() -> list[int]:
    return [(7 * n) % 30_000 + 5 for n in range(N_PROMPT)]


def _in_process(work: Callable[[Path, int], Load], file: Path, threads: int) -> Load:
    """Run `work` in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, (file, threads))


def _choose(checkpoint: Checkpoint, arith: Arith) -> KernelChoice:
    dtype = checkpoint.config.checkpoint_dtype
    return probe(torch.device("cpu"), "auto", dtype, arith=arith)


def _load_ours(file: Path, threads: int, arith: Arith) -> Load:
    torch.set_num_threads(threads)
    _choose(Checkpoint.open(file), arith)  # loads code
    return _measured(lambda: _load_and_step(file, arith))


def _load_and_step(file: Path, arith: Arith) -> _Shardnet:
    model = _Shardnet(file, BLOCK_POSITIONS, arith)
    model.step(0, [17])
    return model


def _load_theirs(file: Path, threads: int) -> Load:
    start()

    def load() -> LlamaCppModel:
        model = LlamaCppModel(file, threads, context=BLOCK_POSITIONS, most_rows=32)
        model.step([17])
        return model

    return _measured(load)


def _measured(load: Callable[[], object]) -> Load:
    """Time `load` and see what the process holds while its result lives. Linux only."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak counts from here
    before = _memory()
    began = time.perf_counter()
    kept = load()
    load_s = time.perf_counter() - began
    after = _memory()
    del kept
    return Load(
        load_s=load_s,
        anonymous_bytes=after["RssAnon"] - before["RssAnon"],
        mapped_bytes=after["RssFile"] + after["RssShmem"] - before["RssFile"] - before["RssShmem"],
        peak_bytes=after["VmHWM"] - before["VmRSS"],
    )


def _memory() -> dict[str, int]:
    """Read this process's bytes of memory by kind."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    sizes = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): 1024 * int(size) for name, size, _ in sizes}


def _read_once(file: Path) -> None:
    """Have the file's pages in the page cache."""
    with file.open("rb") as opened:
        for _ in iter(partial(opened.read, 1 << 24), b""):
            pass


def _read_bytes_per_token(file: Path) -> int:
    """Return the bytes of the tensors that a token reads.

    All but tables of which it reads rows, and of experts those that it visits.
    """
    import gguf

    reader = gguf.GGUFReader(file)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    looked_up = sizes["token_embd.weight"] if "output.weight" in sizes else 0
    looked_up += sizes.get("per_layer_token_embd.weight", 0)
    counts = {
        name.rpartition(".")[2]: int(reader.fields[name].contents())
        for name in reader.fields
        if name.endswith((".expert_count", ".expert_used_count"))
    }
    of_experts = sum(size for name, size in sizes.items() if "_exps." in name)
    unread = (
        of_experts * (1 - counts["expert_used_count"] / counts["expert_count"]) if counts else 0
    )
    return sum(sizes.values()) - looked_up - round(unread)


def _ring(file: Path, threads: int, rounds: int) -> float:
    """Return what two nodes decode against one process, by bench_ring.py."""
    script = Path(__file__).with_name("bench_ring.py")
    options = ["--threads", str(threads), "--rounds", str(rounds), "--prompt", "64", "--json"]
    told = subprocess.run(
        [sys.executable, str(script), "--checkpoint", str(file), *options],
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(json.loads(told.stdout)["decode_tok_s"]["ring_to_one_process"])


def _random_file(kind: str, threads: int) -> Path:
    """Return the random checkpoint as GGUF, quantised by llama.cpp."""
    source = random_1b()
    plain = _plain_gguf(source)
    return quantise(plain, source.with_name(f"{source.name}-{kind}.gguf"), kind, threads)


def _plain_gguf(source: Path) -> Path:
    """Write the checkpoint as GGUF in BF16, once."""
    import gguf
    from gguf.quants import quantize
    from safetensors.torch import load_file

    path = source.with_name(f"{source.name}-BF16.gguf")
    if path.exists():
        return path
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{n}>".encode() for n in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    packed = gguf.GGMLQuantizationType.BF16
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            values = tensor.float().numpy()  # the order within heads does not change the speed
            other = names.get_name(name, try_suffixes=(".weight",))
            if other is None:
                raise SystemExit(f"{file}: llama.cpp has no name for {name}")
            if values.ndim == 1:
                writer.add_tensor(other, values)
            else:
                writer.add_tensor(other, quantize(values, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").rename(path)
    return path


if __name__ == "__main__":
    main()
