#!/usr/bin/env python3
"""Train the small language model that ships with shardnet.

The script goes from an operating-system package of public-domain novels to a Hugging Face
checkpoint folder: corpus, tokenizer, model, optimizer, training, held-out score, export, check.
It needs torch, tokenizers, safetensors and transformers, and nothing of shardnet itself: the model
is an ordinary Llama checkpoint, and the script must stay able to judge the runtime, not lean on it.

    apt-get install r-base-core r-cran-janeaustenr
    python scripts/train_default_model.py --minutes 10 --output /tmp/model
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from default_model.checkpoint import Shipped, check_same, export, write_card
from default_model.corpus import BOS_ID, EOS_ID, encode, load_corpus, train_tokenizer
from default_model.llama import Llama, Shape
from default_model.muon import Muon
from default_model.scoring import SCORING_CONTEXT, loss_sum, score
from torch import Tensor, nn

SAMPLE_PROMPT = "It is a truth universally acknowledged, that"
SIZE_LIMIT_BYTES = 16_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the model is trained; a budget in steps repeats, one in minutes fits the machine."""

    minutes: float
    steps: int | None
    seed: int
    threads: int
    batch_tokens: int
    muon_lr: float
    adam_lr: float
    weight_decay: float
    dropout: float
    warmup: float = 0.04
    # (progress at which it begins, tokens in a window): short windows are cheap, long ones are
    # needed only so that the model has seen every position it offers.
    stages: tuple[tuple[float, int], ...] = ((0.0, 256), (0.7, 512), (0.9, 1024))

    def context_at(self, progress: float) -> int:
        """Return the number of tokens in a window at `progress` in [0, 1]."""
        return max(context for start, context in self.stages if start <= progress)


def make_optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the embedding and the gains."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    return [
        Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_at(progress: float, warmup: float) -> float:
    """Return the share of the full learning rate at `progress` in [0, 1]: rise, then cosine."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def batches(stream: Tensor, recipe: Recipe, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) [B, T] for ever, each token once an epoch, cut anew every epoch.

    Every window begins with bos, as every prompt will, wherever in a chapter it was cut.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    n_rows = recipe.batch_tokens // context
    while True:
        offset = int(torch.randint(context, (), generator=generator))
        n_windows = (len(stream) - offset) // context
        windows = stream[offset : offset + n_windows * context].view(n_windows, context)
        order = torch.randperm(n_windows, generator=generator)
        for picks in order[: n_windows // n_rows * n_rows].view(-1, n_rows):
            targets = windows[picks]
            inputs = targets.roll(1, dims=1)
            inputs[:, 0] = BOS_ID
            yield inputs, targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a training run took."""

    steps: int
    n_tokens: int
    seconds: float


def compiled(model: Llama, recipe: Recipe) -> nn.Module:
    """Return the model compiled for every window length of the recipe, forward and backward."""
    forward = cast("nn.Module", torch.compile(model, dynamic=False))
    for _, context in recipe.stages:
        blank = torch.full((recipe.batch_tokens // context, context), EOS_ID)
        loss_sum(forward, blank, blank).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return forward


def train(model: Llama, stream: Tensor, recipe: Recipe) -> Effort:
    """Train the model in place until the budget of the recipe is spent, printing its progress."""
    optimizers = make_optimizers(model, recipe)
    full_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    sources = {context: batches(stream, recipe, context) for _, context in recipe.stages}
    model.train()
    forward = compiled(model, recipe)
    began = time.monotonic()
    shown_loss, n_tokens = math.nan, 0
    for step in itertools.count():
        elapsed = time.monotonic() - began
        progress = step / recipe.steps if recipe.steps else elapsed / (60 * recipe.minutes)
        if progress >= 1:
            break
        inputs, targets = next(sources[recipe.context_at(progress)])
        loss = loss_sum(forward, inputs, targets) / targets.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer, full_rate in zip(optimizers, full_rates, strict=True):
            optimizer.param_groups[0]["lr"] = full_rate * rate_at(progress, recipe.warmup)
            optimizer.step()
            optimizer.zero_grad()
        n_tokens += targets.numel()
        shown_loss = loss.item() if step == 0 else 0.95 * shown_loss + 0.05 * loss.item()
        if step % 20 == 0:
            print(
                f"{progress:6.1%}  step {step:5d}  epoch {n_tokens / len(stream):5.2f}"
                f"  loss {shown_loss:.3f}  {n_tokens / (time.monotonic() - began):.0f} tokens/s",
                flush=True,
            )
    model.eval()
    return Effort(steps=step, n_tokens=n_tokens, seconds=time.monotonic() - began)


def card_fields(
    shape: Shape, recipe: Recipe, effort: Effort, held_out: Sequence[str], shipped: Shipped
) -> dict[str, object]:
    """Return every figure of the card; the loss is that of the files as transformers reads them."""
    tokenizer = shipped.tokenizer.backend_tokenizer
    result = score(shipped, tokenizer, held_out)
    print(f"held out: {result.nats_per_token:.3f} nats/token, {result.bits_per_byte:.4f} bits/byte")
    sample = shipped.sample(SAMPLE_PROMPT, 160, recipe.seed)
    print(sample)
    return {
        **asdict(shape),
        **asdict(recipe),
        **asdict(effort),
        "minutes_taken": f"{effort.seconds / 60:.1f}",
        "pace": "steps" if recipe.steps else "clock",
        "million_tokens": f"{effort.n_tokens / 1e6:.1f}",
        "nats_per_token": f"{result.nats_per_token:.3f}",
        "bits_per_byte": f"{result.bits_per_byte:.4f}",
        "held_out_tokens": result.n_tokens,
        "held_out_bytes": result.n_bytes,
        "held_out_chapters": len(held_out),
        "held_out_sha256": hashlib.sha256("\n\n".join(held_out).encode()).hexdigest(),
        "scoring_context": SCORING_CONTEXT,
        "half_context": SCORING_CONTEXT // 2,
        "longest": recipe.context_at(1.0),
        "stages": ", ".join(f"{context} from {start:.0%}" for start, context in recipe.stages),
        "parameters": f"{sum(p.numel() for p in shipped.parameters()):,}",
        "sample": "\n>\n".join(f"> {p}" for p in sample.split("\n\n")),
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line; the defaults are the recipe of the shipped model."""
    parser = argparse.ArgumentParser(description="Train the model that ships with shardnet.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--score", action="store_true", help="only score the model in --output")
    parser.add_argument("--minutes", type=float, default=37.0, help="training time (default 37)")
    parser.add_argument("--steps", type=int, help="train this many steps instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=640)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=3072, help="a multiple of 1024")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=0.02)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    given = parser.parse_args()
    if given.batch_tokens < 1 or given.batch_tokens % 1024:
        parser.error(f"--batch-tokens must be a multiple of 1024, not {given.batch_tokens}")
    return given


def main() -> None:
    """Train, export, check and describe a model, or score one that exists."""
    given = vars(parse_arguments())
    shape = Shape(**{k: given[k] for k in given.keys() & Shape.__dataclass_fields__.keys()})
    recipe = Recipe(**{k: given[k] for k in given.keys() & Recipe.__dataclass_fields__.keys()})
    folder: Path = given["output"]
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    chapters, held_out = load_corpus()
    if given["score"]:
        shipped = Shipped(folder)
        print(score(shipped, shipped.tokenizer.backend_tokenizer, held_out))
        return
    tokenizer = train_tokenizer(chapters, shape.vocab)
    stream = torch.tensor([i for chapter in chapters for i in encode(tokenizer, chapter)])
    print(f"{len(chapters)} chapters, {len(stream)} tokens; held out: {len(held_out)} chapters")
    model = Llama(shape, recipe.dropout)
    effort = train(model, stream, recipe)
    export(model, shape, tokenizer, folder)
    shipped = Shipped(folder)
    check_same(model, shipped, held_out[0])
    write_card(folder, card_fields(shape, recipe, effort, held_out, shipped))
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size_bytes / 1e6:.1f} MB")
    if size_bytes > SIZE_LIMIT_BYTES:
        raise SystemExit(f"{folder} is {size_bytes} bytes, more than {SIZE_LIMIT_BYTES}")


if __name__ == "__main__":
    main()
