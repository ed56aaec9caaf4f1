"""`shardnet generate`: prompts to the ring, their text to the terminal."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from shardnet.api.requests import (
    GenerationOptions,
    Message,
    Prompt,
    make_requests,
    name_model,
)
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
    KvDTypeOption,
    Layers,
    Local,
    Model,
    Nodes,
    NoMdns,
    Offline,
    Optimise,
    Peer,
    QuantName,
    StreamLayers,
    Threads,
    WireDTypeName,
    keep_offline,
    model_choice,
)
from .progress import LoadBars
from .prompts_file import read_prompts
from .run import EXIT_FAILURE, run_command
from .sampling_options import (
    Deterministic,
    DraftTokens,
    FrequencyPenalty,
    LogitBias,
    MaxTokens,
    MinP,
    MinTokens,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Speculate,
    Stop,
    StopTokenId,
    System,
    Temperature,
    TopK,
    TopP,
    parse_bias,
)
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
    offline: Offline = False,
    layers: Layers = "",
    context: Context = 0,
    dtype: DTypeName = "auto",
    wire_dtype: WireDTypeName = "",
    quant: QuantName = "none",
    kv_dtype: KvDTypeOption = "auto",
    stream_layers: StreamLayers = "",
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
    chat: Annotated[
        bool,
        typer.Option("--chat", help="PROMPT is a user's message: use the model's chat template."),
    ] = False,
    system: System = "",
    max_tokens: MaxTokens = 256,
    min_tokens: MinTokens = 0,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    seed: Seed = None,
    stop: Stop = None,
    stop_token_id: StopTokenId = None,
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
    speculate: Speculate = "off",
    draft_tokens: DraftTokens = 0,
    deterministic: Deterministic = False,
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
    record_routing: Annotated[
        str,
        typer.Option(
            "--record-routing",
            metavar="FILE.npz",
            help="Save which experts each row visited, layer by layer.",
        ),
    ] = "",
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
        logit_bias=tuple(parse_bias(entry) for entry in logit_bias or ()),
        min_tokens=min_tokens,
        seed=secrets.randbits(32) if seed is None else seed,
        n_logprobs=logprobs,
    )
    if bos not in ("auto", "on", "off"):
        raise typer.BadParameter(f"'{bos}': choose auto, on or off", param_hint="--bos")
    keep_offline(offline)
    choice = model_choice(
        model=model,
        nodes=nodes,
        layers=layers,
        context=context,
        dtype=dtype,
        wire_dtype=wire_dtype,
        quant=quant,
        kv_dtype=kv_dtype,
        stream_layers=stream_layers,
        threads=threads,
        optimise=optimise,
    )
    save = SaveFlags(
        save_logits=save_logits,
        logits_rows=logits_rows,
        save_hidden=save_hidden,
        hidden_rows=hidden_rows,
        hidden_before_norm=hidden_before_norm,
        record_routing=record_routing,
    )
    outputs = save.outputs(prompt_logprobs)
    if system and not chat:
        raise typer.BadParameter("it stands in a chat template: add --chat", param_hint="--system")
    lines, prompts = _prompts(prompt, token_ids, prompts_file, _checked(sampling))
    if chat:
        prompts = [replace(asked, content=_conversation(asked, system)) for asked in prompts]
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


def _conversation(asked: Prompt, system: str) -> list[Message]:
    """Make messages of a prompt, for --chat."""
    if not isinstance(asked.content, str):
        what = "text, no token ids; messages need no --chat"
        raise typer.BadParameter(f"a chat template takes {what}", param_hint="--chat")
    told: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*told, {"role": "user", "content": asked.content}]


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
