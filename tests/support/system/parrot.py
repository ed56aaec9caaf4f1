"""A checkpoint that says what it was told: each token has one successor.

The hidden state is the token's one-hot vector, attention and MLP add nothing, and the LM head holds
the table of successors; so a test knows every token beforehand, whatever the split, and can make
any text appear: characters of several tokens, stop strings, end-of-text tokens. Weights that change
nothing make it as large, and so as slow, as a test wants.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Weights = np.ndarray[Any, np.dtype[np.float32]]

BOS_ID, EOS_ID = 0, 1
N_TOKENS = 258
LONG = 100_000
"""So many tokens take minutes, whatever the model."""

HIDDEN = 320
"""At least one component per token, rounded to what two heads of keys take."""
HEAD, KV_HEADS = 32, 2
"""Small heads: each node computes sines and cosines of half of one for all positions, LONG of them,
whenever it loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parrots:
    """Folders of checkpoints. `alphabet` says abc…z for ever, `big` the same, slowly and from much
    memory; `signs` says characters of one to four tokens after an `a` and then ends."""

    alphabet: Path
    big: Path
    signs: Path


def make_parrots(folder: Path) -> Parrots:
    """Write all of them into `folder`."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return Parrots(
        alphabet=make_parrot(folder / "alphabet", letters, ends=False, positions=LONG),
        big=make_parrot(folder / "big", letters, ends=False, intermediate=1 << 14, positions=LONG),
        signs=make_parrot(folder / "signs", "aé€😀 Жz.", ends=True),
    )


def make_parrot(
    folder: Path,
    text: str,
    *,
    ends: bool,
    layers: int = 4,
    intermediate: int = 16,
    positions: int = 8192,
) -> Path:
    """Write a checkpoint that continues each character of `text` with the next one.

    No byte may occur twice in the UTF-8 of `text`, since a token knows its successor only. After
    the last one comes the end-of-text token if it `ends`, else the first one again. Tokens are
    bytes; a prompt gets no bos. The file has about `layers * intermediate * 1920` bytes.
    """
    tokenizer = _byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(set(ids)) == len(ids), f"a byte of {text!r} occurs twice"
    config = _config(layers, intermediate, positions)
    successors = pairwise([*ids, EOS_ID if ends else ids[0]])
    return _write(folder, tokenizer, config, _tensors(layers, intermediate, successors))


def make_scripted(
    folder: Path, template: str | None, answers: Mapping[str, str], tokens: Sequence[str] = ()
) -> Path:
    """Write a checkpoint whose chat template is a script: the mark that it ends with is answered.

    Each mark is a token, and each line of its answer another one, as are <|im_end|> and `tokens`
    (which begin with <, where an answer has them); no line may occur twice. Behind an answer that
    ends with a mark comes that mark's. Prompts have what the template writes of the conversation,
    so they are as short as it makes them.
    """
    tokenizer = _byte_tokenizer()
    own = [*answers, *tokens]
    within = [each for each in (*own, "<|im_end|>") if each.startswith("<")]
    pattern = "|".join(map(re.escape, sorted(within, key=len, reverse=True)))
    tokenizer.add_tokens(
        [AddedToken(each, normalized=False, special=each in answers) for each in own]
    )
    successors: list[tuple[int, int]] = []
    for mark, answer in answers.items():
        lines = answer.splitlines(keepends=True)
        pieces = [mark]
        pieces += (part for line in lines for part in re.split(f"({pattern})", line) if part)
        added = [AddedToken(piece, normalized=False) for piece in pieces if piece not in own]
        assert tokenizer.add_tokens(added) == len(added), f"a line of {answer!r} occurs twice"
        known = tokenizer.get_vocab()
        ids = [known[piece] for piece in pieces]
        successors += pairwise(ids if pieces[-1] in answers else [*ids, EOS_ID])
    n_tokens = tokenizer.get_vocab_size()
    assert n_tokens <= HIDDEN, "too many lines"
    config = {**_config(4, 16, LONG), "vocab_size": n_tokens}
    return _write(folder, tokenizer, config, _tensors(4, 16, successors, n_tokens), template)


def _write(
    folder: Path,
    tokenizer: Tokenizer,
    config: dict[str, Any],
    tensors: dict[str, Weights],
    template: str | None = None,
) -> Path:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    names |= {"chat_template": template} if template is not None else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    _write_safetensors(folder / "model.safetensors", tensors)
    return folder


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    assert tokenizer.get_vocab_size() == N_TOKENS
    return tokenizer


def _config(layers: int, intermediate: int, positions: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": N_TOKENS,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def _tensors(
    layers: int, intermediate: int, successors: Iterable[tuple[int, int]], n_tokens: int = N_TOKENS
) -> dict[str, Weights]:
    embedding = np.eye(n_tokens, HIDDEN, dtype=np.float32)
    head = np.zeros((n_tokens, HIDDEN), dtype=np.float32)
    for token_id, following in successors:
        head[following, token_id] = 1
    norm = np.ones(HIDDEN, dtype=np.float32)
    wide, narrow = (intermediate, HIDDEN), (HIDDEN, intermediate)
    zero = np.zeros((), dtype=np.float32)
    tensors: dict[str, Weights] = {"model.embed_tokens.weight": embedding}
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": wide,
            "mlp.up_proj": wide,
            "mlp.down_proj": narrow,
        }
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            tensors[f"{prefix}.{name}.weight"] = np.broadcast_to(zero, shape)
        tensors[f"{prefix}.input_layernorm.weight"] = norm
        tensors[f"{prefix}.post_attention_layernorm.weight"] = norm
    return tensors | {"model.norm.weight": norm, "lm_head.weight": head}


def _write_safetensors(path: Path, tensors: dict[str, Weights]) -> None:
    """Write the tensors in bfloat16, the upper half of a float32."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.size
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            if not any(tensor.strides):  # of zeros alone: a hole, which takes neither time nor disk
                file.seek(2 * tensor.size, os.SEEK_CUR)
                continue
            file.write((tensor.view(np.uint32) >> 16).astype("<u2").tobytes())
