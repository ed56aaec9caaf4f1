"""`shardnet generate`: prompts to the ring, their text to the terminal."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from shardnet.api.requests import GenerationOptions, Prompt, make_requests, name_model
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.errors import SamplingError, UsageError
from shardnet.types import SamplingParams
from shardnet.wire.control import ModelChoice, PlanReply

from .access import Access
from .options import (
    Context,
    DTypeName,
    Insecure,
    Json,
    KeyFile,
    Layers,
    Local,
    Model,
    Nodes,
    NoMdns,
    Optimise,
    Peer,
    Threads,
    WireDTypeName,
    model_choice,
)
from .progress import LoadBars
from .prompts_file import read_prompts
from .run import EXIT_FAILURE, run_command
from .saved_rows import SavedRows, SaveFlags
from .target import Target, open_target
from .texts import ListedTexts, OneText


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Text to continue; - reads standard input."),
    ] = None,
    model: Model = DEFAULT_MODEL_NAME,
    nodes: Nodes = "",
    local: Local = 0,
    peer: Peer = None,
    no_mdns: NoMdns = False,
    layers: Layers = "",
    context: Context = 0,
    dtype: DTypeName = "auto",
    wire_dtype: WireDTypeName = "",
    threads: Threads = 0,
    optimise: Optimise = "",
    key_file: KeyFile = "",
    insecure: Insecure = False,
    token_ids: Annotated[
        str,
        typer.Option("--token-ids", metavar="1,2,3", help="The prompt as ids instead of text."),
    ] = "",
    prompts_file: Annotated[
        str,
        typer.Option(
            "--prompts-file",
            metavar="F",
            help="Many prompts: one a line, as text or JSON; - reads standard input.",
        ),
    ] = "",
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", min=0, help="Make at most so many tokens; 0 only reads the prompt."
        ),
    ] = 256,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", help="Make no stop id before so many tokens.")
    ] = 0,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 takes the likeliest token every time.")
    ] = 0.0,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Draw among the K likeliest tokens; 0 is off.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw among the likeliest tokens that sum up to P.")
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option("--min-p", help="Draw among tokens at least P times as likely as the best."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty",
            metavar="X",
            help="Above 1: make tokens of the prompt and the answer less likely; 1 is off.",
        ),
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option(
            "--presence-penalty", metavar="X", help="Lower the logit of tokens of the answer by X."
        ),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option(
            "--frequency-penalty",
            metavar="X",
            help="Lower the logit of tokens of the answer by X each time they come.",
        ),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias",
            metavar="ID=X",
            help="Add X, from -100 to 100, to a token's logit; may be given several times.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Draw the same way again. Default: a random seed, reported."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="STR", help="End before this text.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option("--stop-token-id", metavar="ID", min=0, help="End after this token."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on where the model would end.")
    ] = False,
    bos: Annotated[
        str,
        typer.Option(
            "--bos",
            metavar="auto|on|off",
            help="Put the bos token in front: as the tokenizer says, always, or never.",
        ),
    ] = "auto",
    keep_special_tokens: Annotated[
        bool, typer.Option("--keep-special-tokens", help="Show special tokens in the text.")
    ] = False,
    speculate: Annotated[
        str,
        typer.Option(
            "--speculate",
            metavar="off|ngram|PATH",
            help="Guess tokens ahead, several verified at once: by look-up in the text, or by the "
            "small model at PATH on the head.",
            envvar="SHARDNET_SPECULATE",
        ),
    ] = "off",
    draft_tokens: Annotated[
        int,
        typer.Option(
            "--draft-tokens",
            metavar="N",
            min=0,
            help="Guess at most N tokens at once. Default: as many as pay.",
            show_default=False,
        ),
    ] = 0,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="The same tokens whoever else is served, with speculation or without; slower.",
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs", metavar="K", help="With --json: each token's logprob and the K likeliest."
        ),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option(
            "--prompt-logprobs",
            metavar="K",
            help="With --json: the same for the prompt's tokens.",
        ),
    ] = None,
    save_logits: Annotated[
        str,
        typer.Option("--save-logits", metavar="FILE.npz", help="Save the raw logits of rows."),
    ] = "",
    logits_rows: Annotated[
        str,
        typer.Option(
            "--logits-rows",
            metavar="all|last|K",
            help="Of all rows, those of the prompt and of new tokens but the last, or of the last "
            "K. Default: all.",
        ),
    ] = "",
    save_hidden: Annotated[
        str,
        typer.Option("--save-hidden", metavar="FILE.npz", help="Save the hidden states of rows."),
    ] = "",
    hidden_rows: Annotated[
        str,
        typer.Option(
            "--hidden-rows",
            metavar="all|last|K|mean",
            help="As --logits-rows, or the mean of all. Default: all.",
        ),
    ] = "",
    hidden_before_norm: Annotated[
        bool,
        typer.Option(
            "--hidden-before-norm", help="Hidden states in front of the final norm, not behind it."
        ),
    ] = False,
    priority: Annotated[
        int,
        typer.Option(
            "--priority", min=-100, max=100, help="Go before requests with a smaller one."
        ),
    ] = 0,
    deadline: Annotated[
        float | None,
        typer.Option(
            "--deadline",
            metavar="SECONDS",
            min=0,
            help="Fail when not done so long after the ring had the prompt.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Generate on the ring and stream the text.

    The node of this machine is asked, or the nodes named with --nodes or started with --local;
    without any, the model runs in this process.
    """
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=tuple(_parse_bias(entry) for entry in logit_bias or ()),
        min_tokens=min_tokens,
        seed=secrets.randbits(32) if seed is None else seed,
        n_logprobs=logprobs,
    )
    if bos not in ("auto", "on", "off"):
        raise typer.BadParameter(f"'{bos}': choose auto, on or off", param_hint="--bos")
    choice = model_choice(
        model=model,
        nodes=nodes,
        layers=layers,
        context=context,
        dtype=dtype,
        wire_dtype=wire_dtype,
        threads=threads,
        optimise=optimise,
    )
    save = SaveFlags(
        save_logits=save_logits,
        logits_rows=logits_rows,
        save_hidden=save_hidden,
        hidden_rows=hidden_rows,
        hidden_before_norm=hidden_before_norm,
    )
    outputs = save.outputs(prompt_logprobs)
    lines, prompts = _prompts(prompt, token_ids, prompts_file, _checked(sampling))
    job = _Job(
        prompts=prompts,
        lines=lines,
        file=prompts_file,
        choice=choice,
        sampling=sampling,
        options={
            "max_tokens": max_tokens,
            "stop": stop or [],
            "stop_token_ids": stop_token_id or [],
            "ignore_eos": ignore_eos,
            "bos": bos,  # type: ignore[typeddict-item]  # checked above
            "keep_special_tokens": keep_special_tokens,
            "priority": priority,
            "deadline_s": deadline,
            "speculate": speculate if speculate in ("off", "ngram") else name_model(speculate),
            "draft_tokens": draft_tokens,
            "deterministic": deterministic,
            "outputs": outputs,
        },
        saved=SavedRows(save.files(), len(prompts)),
        as_json=as_json,
    )
    job.check()
    access = Access(key_file=key_file, insecure=insecure)
    run_command(_run(job, local, peer or [], access, not no_mdns))


def _parse_bias(entry: str) -> tuple[int, float]:
    token_id, equals, bias = entry.partition("=")
    try:
        if equals:
            return int(token_id), float(bias)
    except ValueError:
        pass
    raise typer.BadParameter(f"'{entry}' is not ID=X, such as 50=-3.5", param_hint="--logit-bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What to generate, and how to show it. `lines` are those of `file`, "" where there is none."""

    prompts: Sequence[Prompt]
    lines: Sequence[int]
    file: str
    choice: ModelChoice
    sampling: SamplingParams
    options: GenerationOptions
    saved: SavedRows
    as_json: bool

    def check(self) -> None:
        """Raise typer.BadParameter for what cannot be asked, before anybody is asked."""
        for number, prompt in enumerate(self.prompts):
            where = f"{self.file} line {self.lines[number]}: " if self.file else ""
            try:
                make_requests(prompt, self.sampling, self.choice, **self.options)
            except UsageError as error:
                raise typer.BadParameter(f"{where}{error}") from error

    def output(self) -> OneText | ListedTexts:
        """Make what shows the texts."""
        if not self.file:
            return OneText(as_json=self.as_json)
        return ListedTexts(self.file, self.lines, as_json=self.as_json)


def _checked(sampling: SamplingParams) -> SamplingParams:
    try:
        sampling.check()
    except SamplingError as error:
        raise typer.BadParameter(str(error)) from error
    return sampling


def _prompts(
    prompt: str | None, token_ids: str, prompts_file: str, sampling: SamplingParams
) -> tuple[list[int], list[Prompt]]:
    if sum((prompt is not None, bool(token_ids), bool(prompts_file))) != 1:
        raise typer.BadParameter("give one of PROMPT, --token-ids and --prompts-file")
    if prompts_file:
        return read_prompts(prompts_file, sampling)
    if token_ids:
        return [], [Prompt(_parse_ids(token_ids))]
    return [], [Prompt(_read_standard_input() if prompt == "-" else prompt or "")]


def _read_standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8 text: {error}") from error


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"'{text}' is not a list such as 1,2,3", param_hint="--token-ids"
        ) from error


async def _run(job: _Job, local: int, peers: list[str], access: Access, mdns: bool) -> None:
    output = job.output()
    with job.saved:
        async with open_target(
            job.choice, local=local, peers=peers, access=access, mdns=mdns
        ) as target:
            await _show(job, target, output)
        job.saved.write()
    if not output.close():
        raise typer.Exit(EXIT_FAILURE)


async def _show(job: _Job, target: Target, output: OneText | ListedTexts) -> None:
    """Ask for everything, and hand on what comes."""
    with LoadBars() as bars:

        def on_plan(plan: PlanReply) -> None:
            bars.expect(plan)
            output.plan = plan

        events = target.client.generate(
            job.prompts if job.file else job.prompts[0],
            job.sampling,
            model=target.choice,
            on_plan=on_plan,
            on_loading=bars.update,
            **job.options,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                bars.stop()
                output.take(event)
                if event.result is not None:
                    job.saved.take(event.result)
