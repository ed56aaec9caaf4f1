"""llama.cpp through the low-level functions of llama-cpp-python: one model, and GGUF files made.

Knows the package, which is not one of shardnet's: it is imported where a model opens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILE_TYPES = {
    "F16": "MOSTLY_F16",
    "BF16": "MOSTLY_BF16",
    "Q4_0": "MOSTLY_Q4_0",
    "Q4_1": "MOSTLY_Q4_1",
    "Q5_0": "MOSTLY_Q5_0",
    "Q5_1": "MOSTLY_Q5_1",
    "Q8_0": "MOSTLY_Q8_0",
    "Q2_K": "MOSTLY_Q2_K",
    "Q3_K_M": "MOSTLY_Q3_K_M",
    "Q4_K_M": "MOSTLY_Q4_K_M",
    "Q5_K_M": "MOSTLY_Q5_K_M",
    "Q6_K": "MOSTLY_Q6_K",
    "IQ4_NL": "MOSTLY_IQ4_NL",
    "IQ4_XS": "MOSTLY_IQ4_XS",
}
"""What files are called by the types of most of their weights, and llama.cpp's constant."""


class LlamaCppModel:
    """A GGUF file in llama.cpp, with one sequence. To be closed."""

    def __init__(self, path: Path, threads: int, *, context: int, most_rows: int) -> None:
        """Load `path` with room for `context` positions, computed at most `most_rows` at once."""
        import llama_cpp

        self._api = llama_cpp
        start()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, most_rows, most_rows
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp has no room for {context} positions of {path}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._position = 0

    def close(self) -> None:
        """Free everything."""
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    @property
    def template(self) -> str:
        """The chat template of the file, "" without one."""
        found = self._api.llama_model_chat_template(self._model, None)
        return found.decode() if found else ""

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a conversation up to where the answer begins, as llama-cpp-python does."""
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        ends = (self._api.llama_vocab_bos(self._vocab), self._api.llama_vocab_eos(self._vocab))
        bos, eos = (self._token_text(token_id) if token_id >= 0 else "" for token_id in ends)
        write = Jinja2ChatFormatter(self.template, eos_token=eos, bos_token=bos)
        return str(write(messages=list(messages)).prompt)

    def _token_text(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it."""
        return str(self._api.llama_vocab_get_text(self._vocab, token_id).decode())

    def token_ids(self, text: str) -> list[int]:
        """Encode a text, with the bos that the file asks for, special tokens parsed."""
        raw = text.encode()
        room = (self._api.llama_token * (len(raw) + 8))()
        n = self._api.llama_tokenize(self._vocab, raw, len(raw), room, len(room), True, True)
        return list(room[:n])

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode token ids; special ones are left out."""
        array = (self._api.llama_token * len(token_ids))(*token_ids)
        room = ctypes.create_string_buffer(64 * len(token_ids) + 64)
        n = self._api.llama_detokenize(
            self._vocab, array, len(token_ids), room, len(room), False, False
        )
        return room.raw[:n].decode("utf-8", "replace")

    def ends(self, token_id: int) -> bool:
        """Say whether a token ends a text."""
        return bool(self._api.llama_vocab_is_eog(self._vocab, token_id))

    def clear(self) -> None:
        """Forget all positions."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        self._position = 0

    def step(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens behind those so far; return the logits [V] of the last, which stay llama's
        until the next step.
        """
        array = (self._api.llama_token * len(token_ids))(*token_ids)
        self._decode(self._api.llama_batch_get_one(array, len(token_ids)))
        self._position += len(token_ids)
        return self._logits(-1)

    def all_logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Compute tokens behind those so far; return the logits [T, V] of all of them."""
        batch = self._api.llama_batch_init(len(token_ids), 0, 1)
        batch.n_tokens = len(token_ids)
        for row, token_id in enumerate(token_ids):
            batch.token[row], batch.pos[row] = token_id, self._position + row
            batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, 1
        self._decode(batch)
        self._api.llama_batch_free(batch)
        self._position += len(token_ids)
        return np.stack([self._logits(row) for row in range(len(token_ids))])

    def greedy(self, prompt: Sequence[int], n_tokens: int) -> list[int]:
        """Continue a prompt by the most likely tokens, up to one that ends the text."""
        self.clear()
        made: list[int] = []
        logits = self.step(prompt)
        while True:
            token_id = int(logits.argmax())
            if self.ends(token_id):
                return made
            made.append(token_id)
            if len(made) == n_tokens:
                return made
            logits = self.step([token_id])

    def _decode(self, batch: object) -> None:
        if self._api.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp failed to compute")

    def _logits(self, row: int) -> NDArray[np.float32]:
        found = self._api.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(found, (self._api.llama_vocab_n_tokens(self._vocab),))


def quantise(source: Path, target: Path, kind: str, threads: int) -> Path:
    """Write the GGUF `source` as `target` in the types of `kind`, a name of FILE_TYPES, once.

    Weights that are quantised already are quantised again from what they mean.
    """
    if target.exists():
        return target
    import llama_cpp

    start()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{FILE_TYPES[kind]}")
    params.nthread, params.allow_requantize = threads, True
    new = target.with_suffix(".new")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(new).encode(), params):
        raise SystemExit(f"llama.cpp cannot write {source} as {kind}")
    new.rename(target)
    return target


class LlamaCppTower:
    """A projector file in llama.cpp, beside a language model of its width. To be closed."""

    def __init__(self, model: Path, mmproj: Path, threads: int) -> None:
        """Load both; of `model` no more than the vocabulary and the width count."""
        from llama_cpp import llama_cpp, mtmd_cpp

        self._api, self._own = llama_cpp, mtmd_cpp
        self._log = start()
        mtmd_cpp.mtmd_log_set(self._log, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        how = mtmd_cpp.mtmd_context_params_default()
        how.use_gpu, how.n_threads, how.print_timings, how.warmup = False, threads, False, False
        self._context = mtmd_cpp.mtmd_init_from_file(str(mmproj).encode(), self._model, how)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot load {mmproj}")
        self._chunks = mtmd_cpp.mtmd_input_chunks_init()

    def close(self) -> None:
        """Free everything."""
        self._own.mtmd_input_chunks_free(self._chunks)
        self._own.mtmd_free(self._context)
        self._api.llama_model_free(self._model)

    def prepare(self, rgb: NDArray[np.uint8]) -> None:
        """Resize and cut a picture [H, W, 3]."""
        own = self._own
        own.mtmd_input_chunks_free(self._chunks)
        self._chunks = own.mtmd_input_chunks_init()
        height, width, _ = rgb.shape
        data = np.ascontiguousarray(rgb).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = own.mtmd_bitmap_init(width, height, data)
        marker = own.mtmd_get_marker(self._context)
        text = own.mtmd_input_text(marker, len(marker), False, True)
        bitmaps = (own.mtmd_bitmap_p_ctypes * 1)(bitmap)
        failed = own.mtmd_tokenize(self._context, self._chunks, ctypes.byref(text), bitmaps, 1)
        own.mtmd_bitmap_free(bitmap)
        if failed:
            raise SystemExit("llama.cpp does not take the picture")

    def encode(self) -> None:
        """Compute the rows of the picture that was prepared last."""
        own = self._own
        for place in range(own.mtmd_input_chunks_size(self._chunks)):
            chunk = own.mtmd_input_chunks_get(self._chunks, place)
            is_text = own.mtmd_input_chunk_get_type(chunk) == own.MTMD_INPUT_CHUNK_TYPE_TEXT
            if not is_text and own.mtmd_encode_chunk(self._context, chunk):
                raise SystemExit("llama.cpp failed to encode the picture")


@cache
def start() -> object:
    """Start llama.cpp without its log, once; return what it calls to log, which must outlive it."""
    import llama_cpp

    handler = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(handler, ctypes.c_void_p(0))
    return handler
