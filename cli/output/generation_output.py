"""What `generate` shows of its requests: text as it comes, or JSON, in order of the prompts.

Knows events and results, standard output and standard error. Must not know how they are asked for.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardnet.api.events import (
    GenerationEvent,
    GenerationResult,
    GenerationTiming,
    RequestState,
    TokenLogprob,
)
from shardnet.errors import ShardnetError
from shardnet.wire.messages.plans import PlanReply

from .exit_codes import StreamedText, counted, picked, say, write_json
from .plan_text import short_number
from .progress import ProgressLine

_NAME_WIDTH = 20
"""Columns of a token; a longer one moves the rest of its line."""


def logprob_lines(result: GenerationResult) -> Iterator[str]:
    """Yield the lines of a table for the prompt's tokens, and one for the generated tokens.

    Yields nothing for what was not asked for.
    """
    if result.prompt_logprobs is not None:
        first = result.prompt_token_ids[:1]
        yield from _table("prompt", [entry for entry in result.prompt_logprobs if entry])
        if first:
            yield f"(no log-probability: token {first[0]}, with which the prompt begins)"
    if result.logprobs is not None:
        yield from _table("token", result.logprobs)


def _table(title: str, entries: Sequence[TokenLogprob]) -> Iterator[str]:
    likeliest = "  likeliest there" if any(entry.top for entry in entries) else ""
    yield f"{title:{_NAME_WIDTH}}  logprob   share{likeliest}"
    for entry in entries:
        others = ", ".join(
            f"{token_words(top.token_id, top.token)} {top.logprob:.3f}" for top in entry.top
        )
        name = token_words(entry.token_id, entry.token)
        share = f"{100 * math.exp(entry.logprob):.3g} %"
        yield f"{name:{_NAME_WIDTH}} {entry.logprob:8.3f} {share:>7}  {others}".rstrip()


def token_words(token_id: int, token: str) -> str:
    """Write a token in quotes, on one line; by its id where the model has no tokenizer."""
    return json.dumps(token, ensure_ascii=False) if token else str(token_id)


class TextOrIds:
    """The output of one request: its text, or token ids where the model has no tokenizer."""

    def __init__(self) -> None:
        self._is_ids: bool | None = None
        """None until the first token."""
        self._space = ""

    def take(self, event: GenerationEvent) -> str:
        """Return what the event adds: text, or the ids of its tokens with spaces between."""
        if self._is_ids is None and event.tokens:
            self._is_ids = not any(event.tokens)
        if not self._is_ids or not event.token_ids:
            return event.text
        ids, self._space = self._space + " ".join(map(str, event.token_ids)), " "
        return ids


class RecoveryLines:
    """Says on standard error that requests wait for a lost ring to be replaced, once for all."""

    def __init__(self, shown: StreamedText) -> None:
        self._shown = shown
        self._said = ""
        self._expected_s = 0.0

    def take(self, event: GenerationEvent) -> None:
        """Say what the event tells of a recovery, if that is news.

        What counts down is news once it is known how long it takes, and once half of that is left.
        """
        if event.token_ids:
            self._said = ""
        if not event.why:
            return
        is_recovering = event.state is RequestState.RECOVERING
        said = event.why if is_recovering else event.state.value
        is_less = 0 < event.expected_s <= self._expected_s / 2 or not self._expected_s
        if said == self._said and (is_recovering or not event.expected_s or not is_less):
            return
        self._said, self._expected_s = said, event.expected_s
        self._shown.make_way()
        say(event.waits)


class OneText:
    """Prints the text or, `as_json`, the result of one prompt."""

    def __init__(self, *, as_json: bool) -> None:
        self.plan: PlanReply | None = None
        self._as_json = as_json
        self._output = TextOrIds()
        self._shown = StreamedText()
        self._recovery = RecoveryLines(self._shown)

    def take(self, event: GenerationEvent) -> None:
        """Print the event's new text; at the end log-probabilities and timing, on standard error.

        With JSON, which has the log-probabilities, only the timing.
        """
        self._recovery.take(event)
        if not self._as_json:
            self._shown.write(self._output.take(event), end="\n" if event.result else "")
        if event.result is None:
            return
        if self._as_json:
            write_json(as_object(event.result, self.plan))
        else:
            _say_logprobs(event.result)
        say(_closing_line(event.result))

    def close(self) -> bool:
        """Return whether every request succeeded."""
        return True

    def break_off(self) -> None:
        """End an unfinished line: an error follows."""
        self._shown.break_off()


@dataclass(slots=True)
class _Listed:
    """A request of the list: its text not yet shown, and whether it has ended.

    `label` stands above its text, `where` in front of its errors.
    """

    label: str
    where: str
    is_open: bool = False
    text: str = ""
    output: TextOrIds = field(default_factory=TextOrIds)
    has_ended: bool = False
    result: GenerationResult | None = None


@dataclass(slots=True)
class _Counts:
    started_s: float = 0.0
    n_tokens: int = 0
    n_done: int = 0
    n_failed: int = 0
    running: set[int] = field(default_factory=set)

    @property
    def tok_s(self) -> float:
        return self.n_tokens / max(time.monotonic() - self.started_s, 1e-9)


class ListedTexts:
    """Prints texts or results of many requests in the order of the file, each as soon as it can.

    `lines` are the prompts' lines in the file called `name`, of which each has `n_samples`; for
    the samples of one prompt from elsewhere `name` is "". A failure is one line on standard error,
    when it happens; of those that say the same only the first ten.
    """

    def __init__(
        self, name: str, lines: Sequence[int], *, as_json: bool, n_samples: int = 1
    ) -> None:
        self.plan: PlanReply | None = None
        self._as_json = as_json
        self._n_samples = n_samples
        self._file = f"{name}: " if name else ""
        self._unit = "prompts" if n_samples == 1 else "samples"
        self._prompts = [
            _listed(name, line, sample if n_samples > 1 else None)
            for line in lines
            for sample in range(n_samples)
        ]
        self._next = 0
        self._counts = _Counts()
        self._said: Counter[str] = Counter()
        self._shown = StreamedText()
        self._progress = ProgressLine(beside_text=not as_json)
        self._recovery = RecoveryLines(self._shown)

    def take(self, event: GenerationEvent) -> None:
        """Print what this event allows, and an error as soon as it happens."""
        self._count(event)
        self._recovery.take(event)
        if event.error is not None:
            self._say_failure(self._prompts[self._place(event)].where, event.error)
        self._display(event)
        self._progress.show(self._standing())

    def _display(self, event: GenerationEvent) -> None:
        """Store the event's text; print it if all requests before it have ended."""
        prompt = self._prompts[self._place(event)]
        prompt.text += prompt.output.take(event)
        prompt.result = event.result
        prompt.has_ended = event.state.is_end
        if self._place(event) == self._next:
            self._show()

    def _place(self, event: GenerationEvent) -> int:
        return event.index * self._n_samples + event.sample

    def close(self) -> bool:
        """Print totals on standard error; return whether every request succeeded."""
        self._progress.clear()
        counts = self._counts
        for said, n in self._said.items():
            if n > 10:
                say(f"error: {self._file}{n - 10} more {self._unit}: {said}")
        failed = f", {counts.n_failed} failed" if counts.n_failed else ""
        say(
            f"{counts.n_done} of {len(self._prompts)} {self._unit} done{failed}: "
            f"{counted(counts.n_tokens, 'token')}, {counts.tok_s:.1f} tokens/s"
        )
        return not counts.n_failed

    def break_off(self) -> None:
        """End an unfinished line: other output follows."""
        self._progress.clear()
        self._shown.break_off()

    def _say_failure(self, where: str, error: ShardnetError) -> None:
        said = " ".join(str(error).split())
        self._said[said] += 1
        if self._said[said] <= 10:
            self.break_off()
            say(f"error: {where}{said}")

    def _show(self) -> None:
        """Print prompts from the next one on, up to and including the first unfinished one."""
        while self._next < len(self._prompts):
            prompt = self._prompts[self._next]
            if self._as_json:
                if prompt.result is not None:
                    self._progress.clear()
                    write_json(listed_object(prompt.result, self.plan, self._n_samples))
            else:
                self._show_text(prompt)
            if not prompt.has_ended:
                return
            prompt.result, prompt.text = None, ""
            self._next += 1

    def _show_text(self, prompt: _Listed) -> None:
        if not prompt.is_open and (prompt.text or prompt.result is not None):
            self._progress.clear()
            self._shown.write(f"==> {prompt.label} <==\n")
            prompt.is_open = True
        self._shown.write(prompt.text, end="\n\n" if prompt.is_open and prompt.has_ended else "")
        prompt.text = ""
        if prompt.result is not None:
            _say_logprobs(prompt.result)

    def _count(self, event: GenerationEvent) -> None:
        counts = self._counts
        counts.started_s = counts.started_s or time.monotonic()
        counts.n_tokens += len(event.token_ids)
        counts.n_done += event.state is RequestState.FINISHED
        counts.n_failed += event.state is RequestState.FAILED
        if event.state in (RequestState.RUNNING, RequestState.RESUMED):
            counts.running.add(event.request_id)
        else:
            counts.running.discard(event.request_id)

    def _standing(self) -> str:
        counts = self._counts
        return (
            f"{counts.n_done + counts.n_failed} of {len(self._prompts)} {self._unit} done, "
            f"{len(counts.running)} running, {counts.tok_s:.1f} tokens/s"
        )


def _listed(name: str, line: int, sample: int | None) -> _Listed:
    """Label a request by its prompt's line in the file `name`, if any, and its sample number."""
    label = ([str(line)] if name else []) + ([f"sample {sample}"] if sample is not None else [])
    where = [f"{name} line {line}"] if name else []
    if sample is not None:
        where.append(f"sample {sample}")
    return _Listed(label=", ".join(label), where=f"{', '.join(where)}: " if where else "")


class EventLines(ListedTexts):
    """Prints every event at once as a JSON object on its own line: `generate --jsonl`.

    docs/api.md, "Events as lines", lists the keys. A failure is also printed on standard error.
    """

    def __init__(self, name: str, lines: Sequence[int], *, n_samples: int = 1) -> None:
        super().__init__(name, lines, as_json=True, n_samples=n_samples)

    def _display(self, event: GenerationEvent) -> None:
        self._progress.clear()
        for value in _event_objects(event, self.plan):
            write_json({"index": event.index, "sample": event.sample, **value})


def _event_objects(event: GenerationEvent, plan: PlanReply | None) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an event: new text, if any, then its end or its new state."""
    has_news = bool(event.token_ids or event.text or event.prompt_logprobs)
    if has_news:
        scored = {"logprobs": event.logprobs, "prompt_logprobs": event.prompt_logprobs}
        given = {name: [*map(_as_entry, some)] for name, some in scored.items() if some is not None}
        yield {"event": "text", "text": event.text, "token_ids": event.token_ids, **given}
    if event.result is not None:
        yield {"event": "finished", **as_object(event.result, plan)}
    elif event.error is not None:
        yield {"event": "failed", "error": str(event.error), "code": event.error.code}
    elif event.why or event.state is RequestState.RECOVERING:
        yield {"event": event.state.value, "why": event.why, "expected_s": event.expected_s}
    elif event.state is RequestState.QUEUED:
        yield {"event": "queued", "ahead": event.ahead}
    elif not has_news and not (event.logits or event.hidden or event.routing):
        yield {"event": event.state.value}


def listed_object(
    result: GenerationResult, plan: PlanReply | None, n_samples: int
) -> dict[str, Any]:
    """Return `as_object` of one of several results, with its index and sample number."""
    number = {"sample": result.sample} if n_samples > 1 else {}
    return {"index": result.index, **number, **as_object(result, plan)}


def as_object(result: GenerationResult, plan: PlanReply | None) -> dict[str, Any]:
    """Return the object of `generate --json`; its keys are part of the command-line contract."""
    return {
        **picked(result, "model", "prompt_token_ids", "token_ids", "tokens", "text"),
        **picked(result, "finish_reason", "seed", "sample_index"),
        "logprobs": None if result.logprobs is None else [*map(_as_entry, result.logprobs)],
        "prompt_logprobs": None
        if result.prompt_logprobs is None
        else [entry and _as_entry(entry) for entry in result.prompt_logprobs],
        "n_reused": result.usage.n_reused,
        "stages": _stages(plan),
        "timing": msgspec.to_builtins(result.timing),
    }


def _as_entry(logprob: TokenLogprob) -> dict[str, Any]:
    return {**msgspec.to_builtins(logprob, builtin_types=(bytes,)), "bytes": list(logprob.bytes)}


def _stages(plan: PlanReply | None) -> list[dict[str, Any]]:
    stages = plan.stages if plan else []
    return [{"rank": s.rank, "node": s.node, "layers": list(s.layers)} for s in stages]


def _say_logprobs(result: GenerationResult) -> None:
    for line in logprob_lines(result):
        say(line)


def _closing_line(result: GenerationResult) -> str:
    timing = result.timing
    stages = ", ".join(
        f"stage {stage.rank} {stage.compute_ms:.1f} ms + wire {stage.wire_ms:.1f} ms"
        for stage in timing.per_stage
    )
    # one token takes no decode step, so there is no rate
    rate = f", {timing.decode_tok_s:.1f} tokens/s" if timing.decode_tok_s else ""
    joules = joule_words(timing.joules_per_token)
    loaded = f"loaded in {timing.load_s:.1f} s, " if timing.load_s else ""
    return (
        f"{counted(result.usage.n_generated, 'token')} ({result.finish_reason}): {loaded}"
        f"first after {timing.ttft_s:.2f} s{rate}{joules}{_drafted(timing)}"
        + (f"; per step {stages}" if stages else "")
    )


def joule_words(joules_per_token: float | None) -> str:
    """Return what a token took, as the end of a list; "" where that is not known."""
    return "" if joules_per_token is None else f", {short_number(joules_per_token)} J/token"


def _drafted(timing: GenerationTiming) -> str:
    if not timing.n_drafted:
        return ""
    names = " and ".join(each.drafter for each in timing.drafters)
    return f" ({timing.n_accepted} of {timing.n_drafted} draft tokens by {names} were accepted)"
