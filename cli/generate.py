"""`shardnet generate`: one prompt to the ring, its text to the terminal."""

from __future__ import annotations

import contextlib
import secrets
import sys
from typing import Annotated, Any

import msgspec
import typer

from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.errors import SamplingError
from shardnet.types import SamplingParams
from shardnet.wire.control import Finished, Generate, NodeProgress, PlanReply, TextPiece, Timing
from shardnet.wire.messages import Sampling

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
    Peer,
    Threads,
    absolute_path,
    check_sendable,
    model_choice,
)
from .progress import LoadBars
from .run import run_command, say
from .target import open_target


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
    threads: Threads = 0,
    key_file: KeyFile = "",
    insecure: Insecure = False,
    token_ids: Annotated[
        str,
        typer.Option("--token-ids", metavar="1,2,3", help="The prompt as ids instead of text."),
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
    message = Generate(
        request=0,
        choice=model_choice(
            model=model, nodes=nodes, layers=layers, context=context, dtype=dtype, threads=threads
        ),
        sampling=_checked(sampling),
        prompt=_prompt_text(prompt, token_ids),
        token_ids=_parse_ids(token_ids) if token_ids else None,
        max_tokens=max_tokens,
        stop=stop or [],
        stop_token_ids=stop_token_id or [],
        ignore_eos=ignore_eos,
        bos=bos,  # type: ignore[arg-type]  # checked above
        keep_special_tokens=keep_special_tokens,
        speculate=speculate if speculate in ("off", "ngram") else absolute_path(speculate),
        draft_tokens=draft_tokens,
        deterministic=deterministic,
    )
    check_sendable(message)
    access = Access(key_file=key_file, insecure=insecure)
    run_command(_run(message, local, peer or [], access, not no_mdns, as_json))


def _parse_bias(entry: str) -> tuple[int, float]:
    token_id, equals, bias = entry.partition("=")
    try:
        if equals:
            return int(token_id), float(bias)
    except ValueError:
        pass
    raise typer.BadParameter(f"'{entry}' is not ID=X, such as 50=-3.5", param_hint="--logit-bias")


def _checked(sampling: SamplingParams) -> Sampling:
    try:
        sampling.check()
    except SamplingError as error:
        raise typer.BadParameter(str(error)) from error
    return Sampling.of(sampling)


def _prompt_text(prompt: str | None, token_ids: str) -> str:
    if (prompt is None) == (not token_ids):
        raise typer.BadParameter("give either PROMPT or --token-ids")
    if prompt != "-":
        return prompt or ""
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


async def _run(
    message: Generate, local: int, peers: list[str], access: Access, mdns: bool, as_json: bool
) -> None:
    async with open_target(
        message.choice, local=local, peers=peers, access=access, mdns=mdns
    ) as target:
        message = msgspec.structs.replace(message, choice=target.choice)
        output = _JsonOutput(message) if as_json else _TextOutput()
        with LoadBars() as bars:
            async with contextlib.aclosing(target.client.generate(message)) as events:
                async for event in events:
                    match event:
                        case PlanReply():
                            bars.expect(event)
                            output.plan = event
                        case NodeProgress():
                            bars.update(event)
                        case TextPiece():
                            bars.stop()
                            output.add(event)
                        case Finished():
                            output.finish(event)
                            say(_closing_line(event, output.n_tokens))


class _TextOutput:
    """Streams the text to standard output."""

    def __init__(self) -> None:
        self.plan: PlanReply | None = None
        self.n_tokens = 0

    def add(self, piece: TextPiece) -> None:
        """Show what is new."""
        self.n_tokens += len(piece.token_ids)
        print(piece.text, end="", flush=True)

    def finish(self, finished: Finished) -> None:
        """Show what was held back, and end the line."""
        print(finished.text, flush=True)


class _JsonOutput(_TextOutput):
    """Collects everything and prints one JSON object at the end."""

    def __init__(self, message: Generate) -> None:
        super().__init__()
        self._message = message
        self._pieces: list[TextPiece] = []

    def add(self, piece: TextPiece) -> None:
        """Keep what is new."""
        self.n_tokens += len(piece.token_ids)
        self._pieces.append(piece)

    def finish(self, finished: Finished) -> None:
        """Print the object."""
        wants_logprobs = self._message.sampling.n_logprobs is not None
        result: dict[str, Any] = {
            "model": self._message.choice.model,
            "prompt_token_ids": finished.prompt_token_ids,
            "token_ids": [token for piece in self._pieces for token in piece.token_ids],
            "tokens": [token for piece in self._pieces for token in piece.tokens],
            "text": "".join(piece.text for piece in self._pieces) + finished.text,
            "finish_reason": finished.finish_reason,
            "seed": self._message.sampling.seed,
            "logprobs": [
                msgspec.to_builtins(detail)
                for piece in self._pieces
                for detail in piece.logprobs or []
            ]
            if wants_logprobs
            else None,
            "stages": _stages(self.plan),
            "timing": msgspec.to_builtins(finished.timing),
        }
        print(msgspec.json.encode(result).decode(), flush=True)


def _stages(plan: PlanReply | None) -> list[dict[str, Any]]:
    stages = plan.stages if plan else []
    return [{"rank": s.rank, "node": s.node, "layers": list(s.layers)} for s in stages]


def _closing_line(finished: Finished, n_tokens: int) -> str:
    timing: Timing = finished.timing
    stages = ", ".join(
        f"stage {stage.rank} {stage.compute_ms:.1f} ms + wire {stage.wire_ms:.1f} ms"
        for stage in timing.per_stage
    )
    loaded = f"loaded in {timing.load_s:.1f} s, " if timing.load_s else ""
    return (
        f"{n_tokens} tokens ({finished.finish_reason}): {loaded}first after {timing.ttft_s:.2f} s, "
        f"{timing.decode_tok_s:.1f} tokens/s{_guessed(timing)}"
        + (f"; per step {stages}" if stages else "")
    )


def _guessed(timing: Timing) -> str:
    if not timing.n_drafted:
        return ""
    return f" ({timing.n_accepted} of {timing.n_drafted} guessed tokens were right)"
