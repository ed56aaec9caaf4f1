#!/usr/bin/env python3
"""Train drafters for the bundled model, to try --speculate with: minutes on two cores.

    python scripts/train_drafters.py eagle3 /tmp/eagle3

Kinds: `mtp`, a checkpoint of GLM-4.5's form that says what the model says, with a layer behind it
for --speculate mtp; `eagle3`, an EAGLE-3 head; `dflash`, a block drafter; `model`, a model of two
layers. They learn what the model says next, in texts that it has written, and what texts of this
repository say (code, edits of code, JSON, prose), so that they can draft in texts that it would not
write. The model stays as it is. It needs torch, safetensors, tokenizers and transformers. Equal
seeds give the same drafter on one machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drafters.block import BLOCK_LAYERS, Block
from drafters.chains import EAGLE_LAYERS, Eagle, Small
from drafters.files import make_mtp, write_block, write_eagle, write_mtp, write_small
from drafters.texts import given_texts, own_texts
from drafters.training import Texts, block_loss, chain_loss, read, train
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from shardnet.assets import DEFAULT_MODEL_PATH


def main() -> None:
    """Train the drafter and write it."""
    options = _parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    model: Any = LlamaForCausalLM.from_pretrained(DEFAULT_MODEL_PATH, dtype=torch.float32)
    model.eval().requires_grad_(requires_grad=False)
    texts = _texts(model, options)
    print(f"{texts.ids.numel()} tokens after {time.perf_counter() - began:.0f} s", flush=True)
    MAKE[options.kind](model, texts, options)
    print(f"{options.folder}: written after {time.perf_counter() - began:.0f} s")


def _texts(model: Any, options: argparse.Namespace) -> Texts:
    """Return as many texts that the model writes as texts that are given."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL_PATH / "tokenizer.json"))
    n_own = options.texts // 8 * 4
    own = own_texts(model, n_own, options.length)
    given = given_texts(tokenizer, options.texts - n_own, options.length, options.seed)
    layers = {*EAGLE_LAYERS, *BLOCK_LAYERS, model.config.num_hidden_layers}
    written = torch.arange(options.texts) < n_own
    return read(model, torch.cat((own, given)), written, tuple(sorted(layers)))


def _make_eagle(model: Any, texts: Texts, options: argparse.Namespace) -> None:
    n_ids = len(texts.table)
    counts = torch.bincount(texts.ids.flatten(), minlength=n_ids)
    eagle = Eagle(model, counts.topk(n_ids // 2).indices.sort().values)
    _train(eagle, chain_loss, texts, options)
    write_eagle(options.folder, eagle)


def _make_mtp(model: Any, texts: Texts, options: argparse.Namespace) -> None:
    mtp = make_mtp(model)
    _train(mtp, chain_loss, texts, options)
    write_mtp(options.folder, mtp)


def _make_block(model: Any, texts: Texts, options: argparse.Namespace) -> None:
    block = Block(model)
    _train(block, block_loss, texts, options)
    write_block(options.folder, block)


def _make_small(model: Any, texts: Texts, options: argparse.Namespace) -> None:
    small = Small(model)
    _train(small, chain_loss, texts, options)
    write_small(options.folder, small)


def _train(
    drafter: nn.Module,
    loss: Callable[[Any, Texts], Tensor],
    texts: Texts,
    options: argparse.Namespace,
) -> None:
    loss_of = partial(loss, drafter)
    train(drafter, texts, loss_of, n_steps=options.steps, bfloat16=options.bfloat16)


MAKE = {"mtp": _make_mtp, "eagle3": _make_eagle, "dflash": _make_block, "model": _make_small}


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=MAKE)
    parser.add_argument("folder", type=Path, help="where to write the drafter")
    parser.add_argument("--texts", type=int, default=128, help="a multiple of 8")
    parser.add_argument("--length", type=int, default=192, help="tokens of a text")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--bfloat16", action="store_true", help="multiply so: faster where the processor can"
    )
    options = parser.parse_args()
    if options.texts < 8 or options.texts % 8:
        parser.error(f"--texts {options.texts}: give a multiple of 8")
    return options


if __name__ == "__main__":
    main()
