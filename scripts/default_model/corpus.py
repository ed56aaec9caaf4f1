"""The text: where it comes from, how it is cleaned, what is held out, and its tokenizer.

This module knows novels and tokens. It must not know models.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

NOVELS = (
    "sensesensibility",
    "prideprejudice",
    "mansfieldpark",
    "emma",
    "northangerabbey",
    "persuasion",
)
HELD_OUT_EVERY, HELD_OUT_AT = 20, 10
BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1


def read_novel(name: str) -> list[str]:
    """Return the lines of one data set of the R package janeaustenr.

    Raises:
        SystemExit: R or the package is missing; the message says what to install.
    """
    source = f"writeLines(enc2utf8(janeaustenr::{name}), useBytes = TRUE)"
    try:
        done = subprocess.run(["Rscript", "-e", source], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"cannot read the novel {name!r}: apt-get install r-base-core r-cran-janeaustenr"
        ) from error
    return done.stdout.decode("utf-8").splitlines()


def split_chapters(lines: Iterable[str]) -> list[str]:
    """Return the chapters of a novel, one string each, with a blank line between paragraphs.

    Title pages, headings, volume marks, scene breaks, printers' notes in brackets, and the marks
    of emphasis (`_so_`) are left out, so that the model learns prose alone. Lines are unwrapped.
    """
    chapters: list[str] = []
    for part in re.split(r"(?im)^\s*CHAPTER [0-9IVXLC]+\.?\s*$", "\n".join(lines))[1:]:
        body = re.split(r"(?m)^(?:THE END|FINIS|Finis|\*Vide .*)$", part)[0]
        paragraphs = (" ".join(p.split()).replace("_", "") for p in re.split(r"\n\s*\n", body))
        kept = [p for p in paragraphs if re.search("[a-z]", p) and not p.startswith("[")]
        chapters.append("\n\n".join(kept))
    return chapters


def load_corpus() -> tuple[list[str], list[str]]:
    """Return (training chapters, held-out chapters): every twentieth chapter is held out.

    The rule counts chapters through all six novels in the order of `NOVELS`, so the held-out text
    does not depend on the tokenizer, the seed or the recipe.
    """
    chapters = [chapter for name in NOVELS for chapter in split_chapters(read_novel(name))]
    held_out = chapters[HELD_OUT_AT::HELD_OUT_EVERY]
    return [c for i, c in enumerate(chapters) if i % HELD_OUT_EVERY != HELD_OUT_AT], held_out


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Return a byte-level BPE of `vocab` entries that puts the bos token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, chapter: str) -> list[int]:
    """Return the ids of one chapter between bos and eos."""
    return [*tokenizer.encode(chapter).ids, EOS_ID]
