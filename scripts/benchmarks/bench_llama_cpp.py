"""Benchmark decode and prefill of one stage against llama.cpp, in the same weights and one run.

Needs the package llama-cpp-python, which builds llama.cpp: install it beside shardnet. The random
checkpoint of the TinyLlama-1.1B shape is written as GGUF in F16, BF16, Q8_0 and Q4_0 once. Both run
in this process, in turns, with the same number of threads; llama.cpp gives the logits of the last
token, shardnet the sampled token of a whole model in one stage.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from bench_ring import random_1b, read_bandwidth
from bench_steps import make_step

from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.model.config.quantization import Quantization
from shardnet.model.kernels.linear import probe
from shardnet.stage.estimate.memory_estimate import WeightForm, read_bytes_per_step
from shardnet.stage.load import load_stage
from shardnet.stage.stage_model import StageModel
from shardnet.types import (
    PREFILL_CHUNK_ROWS,
    LayerRange,
    SlotId,
)

FORMATS = {"none": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""What shardnet's weights are, and what llama.cpp's are beside them."""
N_PROMPT = 512
N_TOKENS = 12


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = random_1b()
    report = {
        name: _compare(source, name, other, arguments.threads, arguments.rounds)
        for name, other in FORMATS.items()
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
        return
    for name, figures in report.items():
        print(f"{name} beside {FORMATS[name]}:")
        for key, value in figures.items():
            print(f"  {key}: {value:.3g}")


@torch.inference_mode()
def _compare(source: Path, name: str, other: str, threads: int, rounds: int) -> dict[str, float]:
    checkpoint = Checkpoint.open(source)
    kind = Quantization.named(name)
    choice = probe(torch.device("cpu"), "auto", checkpoint.config.checkpoint_dtype, kind)
    whole = LayerRange(0, checkpoint.config.n_layers)
    model = load_stage(
        checkpoint,
        whole,
        choice=choice,
        device=torch.device("cpu"),
        room_blocks=8,
        progress=lambda done, total: None,
    )
    llama = _Llama(_gguf(source, other), threads)
    ours_s, theirs_s, ours_prefill_s, theirs_prefill_s, limits = [], [], [], [], []
    for _ in range(rounds):
        limits.append(read_bandwidth())
        ours_prefill_s.append(_timed(lambda: _prefill(model)))
        ours_s.append(_timed(lambda: _decode(model)) / N_TOKENS)
        theirs_prefill_s.append(_timed(llama.prefill))
        theirs_s.append(_timed(llama.decode) / N_TOKENS)
    read_bytes = read_bytes_per_step(
        checkpoint.config, whole, WeightForm(dtype=choice.dtype, quantization=kind)
    )
    llama.close()
    step_s = min(ours_s)
    return {
        "limit GB/s": max(limits) / 1e9,
        "tok/s": 1 / step_s,
        "share of the limit": read_bytes / max(limits) / step_s,
        "llama.cpp tok/s": 1 / min(theirs_s),
        "ratio": statistics.median(t / o for t, o in zip(theirs_s, ours_s, strict=True)),
        "prefill tok/s": N_PROMPT / min(ours_prefill_s),
        "llama.cpp prefill tok/s": N_PROMPT / min(theirs_prefill_s),
        "prefill ratio": statistics.median(
            t / o for t, o in zip(theirs_prefill_s, ours_prefill_s, strict=True)
        ),
    }


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _step(model: StageModel, position: int, ids: Sequence[int], n_sampled: int) -> None:
    model.forward(make_step([(0, position, ids)], n_sampled=n_sampled), None)


def _prefill(model: StageModel) -> None:
    model.kv.free(SlotId(0))
    for start in range(0, N_PROMPT, PREFILL_CHUNK_ROWS):
        ids = [(7 * n) % 30_000 + 5 for n in range(start, start + PREFILL_CHUNK_ROWS)]
        _step(model, start, ids, 1)


def _decode(model: StageModel) -> None:
    for number in range(N_TOKENS):
        _step(model, N_PROMPT + number, [17 + number], 1)


class _Llama:
    """llama.cpp through the low-level functions of llama-cpp-python."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_load_model_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 1024, N_PROMPT, N_PROMPT
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_new_context_with_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._position = 0

    def prefill(self) -> None:
        """Read the prompt into an empty cache."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._position = 0
        self._eval([(7 * n) % 30_000 + 5 for n in range(N_PROMPT)])

    def decode(self) -> None:
        """Make some steps of one token."""
        for number in range(N_TOKENS):
            self._eval([17 + number])

    def close(self) -> None:
        """Free everything."""
        self._api.llama_free(self._context)
        self._api.llama_free_model(self._model)

    def _eval(self, ids: Sequence[int]) -> None:
        array = (self._api.llama_token * len(ids))(*ids)
        batch = self._api.llama_batch_get_one(array, len(ids))
        if self._api.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp failed to compute")
        self._position += len(ids)


def _gguf(source: Path, kind: str) -> Path:
    """Write the checkpoint in llama.cpp's form, once."""
    import gguf
    from gguf.quants import quantize
    from safetensors.torch import load_file

    path = source.with_name(f"{source.name}-{kind}.gguf")
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
    packed = gguf.GGMLQuantizationType[kind]
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
