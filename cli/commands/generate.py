"""`shardnet generate`: prompts to the ring, their text to the terminal, their traces to a file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer

from shardnet.api.events import GenerationEvent
from shardnet.api.requests import ContentPart, GenerationOptions, Message, Prompt, make_requests
from shardnet.api.traces import RequestTrace, chrome_trace
from shardnet.errors import ConfigurationError, UsageError
from shardnet.files import expanded, write_whole
from shardnet.output_params import OutputParams
from shardnet.sampling_params import SamplingParams
from shardnet.wire.framing.schema import MAX_TEXT
from shardnet.wire.messages.plans import PlanReply

from ..finding.target import Target, open_target
from ..flags.lazy_group import examples
from ..flags.options import Access, Json, flag, takes_groups
from ..flags.ring_options import RingOptions, Wanted
from ..flags.sampling_options import SamplingOptions, read_prompts
from ..output.exit_codes import EXIT_FAILURE, counted, no_text, run_command, say, standard_input
from ..output.generation_output import EventLines, ListedTexts, OneText
from ..output.progress import LoadBars
from .chat import warn_of_base_model

MAX_TRACED: Final = 256
"""The first so many requests are written: viewers grow slow with more."""


@examples(
    'shardnet generate "It is a truth universally acknowledged"',
    'shardnet generate --model qwen3 --chat "Why is the sky blue?"',
    'shardnet generate --model gemma3 --chat --image cat.jpg "What is this?"',
    'shardnet generate --local 2 --temperature 0.7 --seed 5 "She had never"',
    "shardnet generate --prompts-file prompts.txt --json > answers.jsonl",
)
@takes_groups
def generate(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input."),
    ] = None,
    ring: RingOptions,
    access: Access,
    token_ids: str = flag(
        "",
        "--token-ids 1,2,3",
        "The prompt as token ids; needs no tokenizer, without one ids are printed.",
    ),
    prompts_file: str = flag(
        "",
        "--prompts-file F",
        "Many prompts, one per line, as text or JSON; - reads standard input.",
    ),
    n: int = flag(1, "--n N", "Samples of each prompt.", min=1, hides_default=True),
    chat: bool = flag(
        False, "--chat", "PROMPT is a user's message: use the model's chat template."
    ),
    image: list[str] | None = flag(
        None,
        "--image FILE",
        "A picture that goes before PROMPT, or where it has the model's own token for one. May "
        "be repeated.",
    ),
    sampling: SamplingOptions,
    logprobs: int | None = flag(
        None,
        "--logprobs K",
        "Show the log-probability of each token and the K likeliest: a table on standard "
        "error, or in --json and --jsonl.",
    ),
    prompt_logprobs: int | None = flag(
        None, "--prompt-logprobs K", "The same for the prompt's tokens."
    ),
    priority: int = flag(
        0, "--priority N", "Run before requests with a lower priority.", min=-100, max=100
    ),
    deadline: float | None = flag(
        None,
        "--deadline SECONDS",
        "Fail unless done this long after the ring received the prompt.",
        min=0,
    ),
    trace: str = flag(
        "",
        "--trace FILE",
        "Write where the time went on every node, for chrome://tracing or Perfetto.",
    ),
    as_json: Json = False,
    as_lines: bool = flag(
        False, "--jsonl", "Print each event as it comes, one JSON object per line (docs/api.md)."
    ),
) -> None:
    """Generate on the ring and stream the text.

    Asks the nodes of --nodes or --local, else the node of this machine, else the nearest one found
    on the network; without any, the model runs in this process.
    """
    params = sampling.params(logprobs)
    options = sampling.generation()
    wanted = ring.wanted(access)
    if sampling.system and not chat:
        raise typer.BadParameter("it needs a chat template: add --chat", param_hint="--system")
    if as_json and as_lines:
        raise typer.BadParameter("choose one of --json and --jsonl")
    lines, prompts = _prompts(prompt, token_ids, prompts_file, params)
    pictures = [Path(file) for file in image or ()]
    if chat:
        prompts = [
            replace(asked, content=_conversation(asked, sampling.system, pictures))
            for asked in prompts
        ]
    job = _Job(
        prompts=prompts,
        lines=lines,
        file=prompts_file,
        wanted=wanted,
        sampling=params,
        options={
            **options,
            "adapters": sampling.adapters(wanted.choice),
            "pictures": [] if chat else pictures,
            "priority": priority,
            "deadline_s": deadline,
            "trace": bool(trace),
            "outputs": OutputParams(n_prompt_logprobs=prompt_logprobs),
        },
        n_samples=n,
        as_json=as_json,
        as_lines=as_lines,
        trace=trace,
    )
    job.check()
    if chat:
        warn_of_base_model(wanted.choice.model)
    run_command(_run(job))


def _conversation(asked: Prompt, system: str, pictures: Sequence[Path]) -> list[Message]:
    """Make the messages of --chat. Raises typer.BadParameter for a prompt that is not text."""
    if not isinstance(asked.content, str):
        what = "text, not token ids; messages need no --chat"
        raise typer.BadParameter(f"a chat template takes {what}", param_hint="--chat")
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    if not pictures:
        return [*start, {"role": "user", "content": asked.content}]
    shown: list[ContentPart] = [{"type": "image", "image": picture} for picture in pictures]
    content: list[ContentPart] = [*shown, {"type": "text", "text": asked.content}]
    return [*start, {"role": "user", "content": content}]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What to generate, and how to show it. `lines` are those of `file`, "" where there is none."""

    prompts: Sequence[Prompt]
    lines: Sequence[int]
    file: str
    wanted: Wanted
    sampling: SamplingParams
    options: GenerationOptions
    n_samples: int
    as_json: bool
    as_lines: bool
    trace: str

    def check(self) -> None:
        """Raise typer.BadParameter for a request that no ring could run, before one is opened."""
        for number, prompt in enumerate(self.prompts):
            where = f"{self.file} line {self.lines[number]}: " if self.file else ""
            try:
                make_requests(
                    prompt, self.sampling, self.wanted.choice, n=self.n_samples, **self.options
                )
            except UsageError as error:
                raise typer.BadParameter(f"{where}{error}") from error

    def output(self) -> OneText | ListedTexts:
        """Choose how events are shown."""
        if self.as_lines:
            return EventLines(self.file, self.lines or [0], n_samples=self.n_samples)
        if not self.file and self.n_samples == 1:
            return OneText(as_json=self.as_json)
        return ListedTexts(
            self.file, self.lines or [0], as_json=self.as_json, n_samples=self.n_samples
        )


def _prompts(
    prompt: str | None, token_ids: str, prompts_file: str, sampling: SamplingParams
) -> tuple[list[int], list[Prompt]]:
    if sum((prompt is not None, bool(token_ids), bool(prompts_file))) != 1:
        raise typer.BadParameter("give one of PROMPT, --token-ids and --prompts-file")
    if prompts_file:
        return read_prompts(prompts_file, sampling)
    if token_ids:
        return [], [Prompt(parse_ids(token_ids))]
    return [], [Prompt(_read_standard_input() if prompt == "-" else prompt or "")]


def _read_standard_input() -> str:
    """Read a prompt: at most one character more than a prompt may have."""
    try:
        return standard_input().read(MAX_TEXT + 1)
    except UnicodeDecodeError as error:
        raise typer.BadParameter(no_text(error)) from error


def parse_ids(text: str, flag: str = "--token-ids") -> list[int]:
    """Read numbers with commas between. Raises typer.BadParameter."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"'{text}' is not a list such as 1,2,3", param_hint=flag
        ) from error


async def _run(job: _Job) -> None:
    output = job.output()
    traces = TraceFile(job.trace) if job.trace else None
    async with open_target(job.wanted) as target:
        await _show(job, target, output, traces)
    if traces is not None:
        traces.write()
    if not output.close():
        raise typer.Exit(EXIT_FAILURE)


async def _show(
    job: _Job, target: Target, output: OneText | ListedTexts, traces: TraceFile | None
) -> None:
    """Send the requests and pass each event to `output`."""
    with LoadBars() as bars:

        def on_plan(plan: PlanReply) -> None:
            bars.expect(plan)
            output.plan = plan

        events = target.client.generate(
            # A prompt in a list fails by an event, a prompt alone by an exception.
            job.prompts if job.file or job.as_lines else job.prompts[0],
            job.sampling,
            n=job.n_samples,
            model=target.choice,
            on_plan=on_plan,
            on_loading=bars.update,
            **job.options,
        )
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    bars.stop()
                    output.take(event)
                    if traces is not None:
                        traces.take(event)
            finally:
                output.break_off()


class TraceFile:
    """Collects the traces of requests. Raises ConfigurationError if it cannot be written later."""

    def __init__(self, name: str) -> None:
        self._path = expanded(name)
        self._traces: dict[str, RequestTrace] = {}
        if not self._path.parent.is_dir():
            raise ConfigurationError(
                f"--trace: there is no folder {self._path.parent}", remedy="make it first"
            )

    def take(self, event: GenerationEvent) -> None:
        """Take the trace of a request that has ended."""
        if event.result is None or event.result.trace is None:
            return
        if len(self._traces) < MAX_TRACED:
            sample = f", sample {event.sample}" if event.sample else ""
            self._traces[f"prompt {event.index}{sample}"] = event.result.trace

    def write(self) -> None:
        """Write the file. Raises ConfigurationError."""
        try:
            content = json.dumps(chrome_trace(self._traces)).encode()
            write_whole(self._path, content, mode=0o644)
        except OSError as error:
            raise ConfigurationError(
                f"--trace: {self._path} cannot be written: {error.strerror}",
                remedy="name another file",
            ) from error
        steps = {step.step for trace in self._traces.values() for step in trace.steps}
        say(f"wrote {counted(len(steps), 'step')} to {self._path}: open it in ui.perfetto.dev")
