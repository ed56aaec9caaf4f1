"""Have lm_eval score a task over HTTP, and transformers on the same checkpoint: the same number.

A ring of node processes in float32 serves the model; lm_eval asks it as its local-completions do,
with batches at once and the server's own tokenizer. The task is a local file of lines with
"context", "choices" and "label", by default made of the texts beside this program: which of four
groups of words goes on a text. Accuracy must be the same, and so must, within 0.001, each
log-likelihood. Needs lm_eval[api]; scripts/check_lm_eval installs it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardnet.api.connections import local_ring
from shardnet.api.serve.server import serving
from shardnet.api.server.settings import Listening
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.runtime.loading.model_facts import find_folder
from shardnet.wire.messages.plans import ModelChoice

TEXTS = Path(__file__).parent / "texts"
N_CHOICES = 4
CONTEXT_WORDS, CHOICE_WORDS = 40, 5
MOST_OFF = 1e-3
NAME = "shardnet_check"

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of a task: accuracy, by length of the choices too, and all log-likelihoods."""

    accuracy: float
    by_length: float
    log_likelihoods: Sequence[Sequence[float]]


def main() -> None:
    """Score both ways and compare; with --json one object on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, prog="scripts/check_lm_eval")
    parser.add_argument("--model", default=DEFAULT_MODEL_NAME)
    parser.add_argument("--task", type=Path, help="a file of JSON lines")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = find_folder(arguments.model)
    if folder is None:
        parser.error(f"--model {arguments.model}: there is no such model here")
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "task.jsonl"
        task = arguments.task.absolute() if arguments.task else made
        if arguments.task is None:
            task.write_text("".join(json.dumps(line) + "\n" for line in _made_task()))
        lines = [json.loads(line) for line in task.read_text(encoding="utf-8").splitlines()]
        by_http = asyncio.run(_by_http(arguments, task, Path(scratch)))
    direct = _score(lines, _by_transformers(folder, lines))
    both = {
        name: {"acc": score.accuracy, "acc_norm": score.by_length}
        for name, score in (("lm_eval", by_http), ("transformers", direct))
    }
    most_off = _most_off(by_http, direct)
    if arguments.json:
        print(json.dumps({"lines": len(lines), **both, "most_off": most_off}, indent=2))
    else:
        for name, score in both.items():
            print(name, " ".join(f"{what} {value:.4f}" for what, value in score.items()))
        print(f"{len(lines)} lines; log-likelihoods differ by {most_off:.2g} at most")
    if both["lm_eval"] != both["transformers"] or not most_off <= MOST_OFF:
        sys.exit("error: the numbers differ")


def _made_task() -> Iterator[Line]:
    """Make lines of the texts: the words that follow, among words from elsewhere in the text."""
    for path in sorted(TEXTS.glob("*.txt")):
        words = path.read_text(encoding="utf-8").split()
        ends = range(CONTEXT_WORDS, len(words) - CHOICE_WORDS, 19)
        for number, end in enumerate(ends):
            others = [ends[(number + 5 * k) % len(ends)] for k in range(1, N_CHOICES)]
            label = number % N_CHOICES
            starts = [*others[:label], end, *others[label:]]
            choices = [" " + " ".join(words[start : start + CHOICE_WORDS]) for start in starts]
            yield {
                "context": " ".join(words[end - CONTEXT_WORDS : end]),
                "choices": choices,
                "label": label,
            }


async def _by_http(arguments: argparse.Namespace, task: Path, scratch: Path) -> Score:
    """Serve the model and let lm_eval ask."""
    choice = ModelChoice(
        model=arguments.model,
        dtype="float32",
        threads=arguments.threads,
        context=arguments.context,
    )
    async with (
        local_ring(arguments.nodes, model=choice, threads=arguments.threads) as client,
        serving(client, Listening(host="127.0.0.1", port=0)) as url,
    ):
        return await asyncio.to_thread(_evaluate, arguments, url, task, scratch)


def _evaluate(arguments: argparse.Namespace, url: str, task: Path, scratch: Path) -> Score:
    # Nothing is looked up outside of this machine.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    os.environ["HF_DATASETS_CACHE"] = str(scratch / "datasets")
    import lm_eval
    from lm_eval.tasks import TaskManager

    config = {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(task)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (scratch / f"{NAME}.yaml").write_text(json.dumps(config))  # YAML too
    evaluated = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": arguments.model,
            "base_url": f"{url}/v1/completions",
            "num_concurrent": arguments.at_once,
            "batch_size": arguments.batch,
            "max_length": arguments.context,
        },
        tasks=[NAME],
        task_manager=TaskManager(include_path=str(scratch), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    found = evaluated["results"][NAME]
    samples = sorted(evaluated["samples"][NAME], key=lambda sample: sample["doc_id"])
    return Score(
        accuracy=found["acc,none"],
        by_length=found["acc_norm,none"],
        log_likelihoods=[
            [float(answer[0]) for answer in sample["filtered_resps"]] for sample in samples
        ],
    )


def _by_transformers(folder: Path, lines: Sequence[Line]) -> list[list[float]]:
    """Return the log-likelihood of each choice behind its context."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    scores = []
    for line in lines:
        n_context = len(encode(line["context"].rstrip()))
        found = []
        for choice in line["choices"]:
            ids = encode(line["context"] + choice)
            with torch.inference_mode():
                logits = model(torch.tensor([ids])).logits[0, n_context - 1 : -1]
            rows = torch.log_softmax(logits.double(), -1)
            found.append(float(rows.gather(1, torch.tensor([ids[n_context:]]).T).sum()))
        scores.append(found)
    return scores


def _score(lines: Sequence[Line], log_likelihoods: Sequence[Sequence[float]]) -> Score:
    """Count the lines whose likeliest choice is the right one, also by character of it."""
    n_right = n_right_by_length = 0
    for line, found in zip(lines, log_likelihoods, strict=True):
        by_length = [one / len(choice) for one, choice in zip(found, line["choices"], strict=True)]
        n_right += found.index(max(found)) == line["label"]
        n_right_by_length += by_length.index(max(by_length)) == line["label"]
    return Score(
        accuracy=n_right / len(lines),
        by_length=n_right_by_length / len(lines),
        log_likelihoods=log_likelihoods,
    )


def _most_off(one: Score, other: Score) -> float:
    return max(
        abs(a - b)
        for found, expected in zip(one.log_likelihoods, other.log_likelihoods, strict=True)
        for a, b in zip(found, expected, strict=True)
    )


if __name__ == "__main__":
    main()
