"""`shardnet chat`: a conversation with the model of the ring.

Knows the terminal: lines in, text out, what the keys do. The whole conversation is sent every turn;
the ring still holds what it has computed of it and computes only what is new.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import typer

from shardnet.api.requests import GenerationOptions, Message, name_model
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.errors import SamplingError, ShardnetError
from shardnet.types import SamplingParams
from shardnet.wire.control import ModelChoice

from .access import Access
from .options import (
    Context,
    DTypeName,
    Insecure,
    KeyFile,
    KvDTypeOption,
    Layers,
    Local,
    Model,
    Nodes,
    NoMdns,
    Offline,
    Peer,
    QuantName,
    StreamLayers,
    Threads,
    WireDTypeName,
    keep_offline,
    model_choice,
)
from .progress import LoadBars
from .run import EXIT_FAILURE, exit_codes, say
from .sampling_options import (
    Deterministic,
    DraftTokens,
    FrequencyPenalty,
    MaxTokens,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Speculate,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
)
from .target import open_target

if TYPE_CHECKING:
    from shardnet.api.blocking import Client
    from shardnet.api.client import Client as AsyncClient

HELP = "/exit or Ctrl-D leaves, /reset begins anew, Ctrl-C stops an answer"


def chat(
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
    key_file: KeyFile = "",
    insecure: Insecure = False,
    system: System = "",
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    speculate: Speculate = "off",
    draft_tokens: DraftTokens = 0,
    deterministic: Deterministic = False,
) -> None:
    """Talk with the model: a line is a message, the answer streams.

    Needs a model with a chat template. /exit or Ctrl-D leaves, /reset forgets what was said, Ctrl-C
    stops an answer. Standard input may be a file or a pipe: each of its lines is a message.
    """
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=secrets.randbits(32) if seed is None else seed,
    )
    try:
        sampling.check()
    except SamplingError as error:
        raise typer.BadParameter(str(error)) from error
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
        optimise="",
    )
    options: GenerationOptions = {
        "max_tokens": max_tokens,
        "stop": stop or [],
        "speculate": speculate if speculate in ("off", "ngram") else name_model(speculate),
        "draft_tokens": draft_tokens,
        "deterministic": deterministic,
    }
    access = Access(key_file=key_file, insecure=insecure)
    with exit_codes():
        from shardnet.api.blocking import opened

        with opened(_client(choice, local, peer or [], access, not no_mdns)) as client:
            _talk(Conversation(client, sampling, options, system))


@contextlib.asynccontextmanager
async def _client(
    choice: ModelChoice, local: int, peers: list[str], access: Access, mdns: bool
) -> AsyncIterator[AsyncClient]:
    async with open_target(choice, local=local, peers=peers, access=access, mdns=mdns) as target:
        target.client.choice = target.choice
        yield target.client


class Conversation:
    """What was said, and how to go on from it."""

    def __init__(
        self, client: Client, sampling: SamplingParams, options: GenerationOptions, system: str
    ) -> None:
        self._client = client
        self._sampling = sampling
        self._options = options
        self._told: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = [*self._told]
        self._ring_is_known = False

    def reset(self) -> None:
        """Forget what was said."""
        self._messages = [*self._told]

    def ask(self, text: str) -> None:
        """Send a message and print the answer as it comes.

        Ctrl-C ends the answer; what was said of it stays. Raises ShardnetError, and forgets the
        message, where there is no answer.
        """
        asked: Message = {"role": "user", "content": text}
        answer = ""
        try:
            with LoadBars() as bars:
                events = self._client.generate(
                    [*self._messages, asked],
                    self._sampling,
                    on_plan=None if self._ring_is_known else bars.expect,
                    on_loading=bars.update,
                    **self._options,
                )
                with contextlib.closing(events):
                    for event in events:
                        bars.stop()
                        self._ring_is_known = True
                        if event.error is not None:
                            raise event.error
                        answer += event.text
                        print(event.text, end="", flush=True)
                        if event.result is not None:
                            timing = event.result.timing
                            closing = (
                                f"({event.result.usage.n_generated} tokens, first after "
                                f"{timing.ttft_s:.2f} s, {timing.decode_tok_s:.1f} tokens/s)"
                            )
            print(flush=True)
            say(closing)
        except KeyboardInterrupt:
            print(flush=True)
            say("(stopped)")
        self._messages += [asked, {"role": "assistant", "content": answer}]


def _talk(conversation: Conversation) -> None:
    """Take lines until there are no more."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):  # it lets people edit their lines
            import readline  # noqa: F401
        say(HELP)
    while (line := _read_line(is_terminal)) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                conversation.reset()
                say("(all that was said is forgotten)")
            case command if command.startswith("/") and len(command.split()) == 1:
                say(f"{command} is no command: {HELP}")
            case text:
                try:
                    conversation.ask(text)
                except ShardnetError as error:
                    say(f"error: {' '.join(str(error).split())}")
                    if not is_terminal:
                        raise typer.Exit(EXIT_FAILURE) from None


def _read_line(is_terminal: bool) -> str | None:
    """Read a message, None at the end of the input."""
    if not is_terminal:
        return sys.stdin.readline() or None
    while True:
        try:
            return input("> ")
        except EOFError:
            print(flush=True)
            return None
        except KeyboardInterrupt:
            print(flush=True)
            say(f"({HELP})")
