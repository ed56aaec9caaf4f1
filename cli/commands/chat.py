"""`shardnet chat`: a conversation with the model of the ring.

Knows the terminal: lines in, text out, what the keys do. The whole conversation is sent every turn;
the ring still holds what it has computed of it and computes only what is new.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from shardnet.api.requests import GenerationOptions, Message
from shardnet.assets import DEFAULT_MODEL_NAME
from shardnet.errors import ShardnetError
from shardnet.types import SamplingParams

from ..finding.target import open_target
from ..flags.cluster_access import Access
from ..flags.help_sections import examples
from ..flags.option_groups import takes_groups
from ..flags.ring_options import RingOptions, Wanted
from ..flags.sampling_options import MaxTokens, SamplingOptions, Temperature
from ..output.exit_codes import EXIT_FAILURE, StreamedText, counted, exit_codes, say, write_out
from ..output.progress import LoadBars

if TYPE_CHECKING:
    from shardnet.api.blocking import BlockingClient
    from shardnet.api.client import Client

HELP = "/exit or Ctrl-D leaves, /reset starts a new conversation, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring(RingOptions):
    optimise: str = ""  # no flag here: there is one sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampling(SamplingOptions):
    """The flags of `generate`, without those that make no sense in a conversation."""

    max_tokens: MaxTokens = 1024
    min_tokens: int = 0
    temperature: Temperature = 0.7
    logit_bias: list[str] | None = None
    stop_token_id: list[int] | None = None
    ignore_eos: bool = False
    bos: str = "auto"
    keep_special_tokens: bool = False


@examples(
    "shardnet chat --model qwen3",
    'shardnet chat --model ~/models/Qwen3-4B --system "Be brief."',
    "shardnet chat --local 2 --temperature 0 < questions.txt",
)
@takes_groups
def chat(*, ring: _Ring, access: Access, sampling: _Sampling) -> None:
    """Chat with the model: each line is a message, the answer streams.

    Needs a model with a chat template. /exit or Ctrl-D leaves, /reset starts a new conversation,
    Ctrl-C stops an answer. Standard input may be a file or a pipe: each of its lines is a message.
    """
    params, options = sampling.params(), sampling.generation()
    wanted = ring.wanted(access)
    warn_of_base_model(wanted.choice.model)
    with exit_codes():
        from shardnet.api.blocking import opened

        with opened(_client(wanted)) as client:
            _talk(Conversation(client, params, options, sampling.system))


def warn_of_base_model(model: str) -> None:
    """Warn that the bundled model has a chat template and was not trained on conversations."""
    if model == DEFAULT_MODEL_NAME:
        say(
            "warning: the bundled model continues stories and was not trained on conversations; "
            "name a chat model with --model"
        )


@contextlib.asynccontextmanager
async def _client(wanted: Wanted) -> AsyncIterator[Client]:
    async with open_target(wanted) as target:
        target.client.choice = target.choice
        yield target.client


class Conversation:
    """The messages so far, and the options with which the next answer is generated."""

    def __init__(
        self,
        client: BlockingClient,
        sampling: SamplingParams,
        options: GenerationOptions,
        system: str,
    ) -> None:
        self._client = client
        self._sampling = sampling
        self._options = options
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = [*self._system]
        self._ring_is_known = False

    def reset(self) -> None:
        """Remove all messages but the system message."""
        self._messages = [*self._system]

    def ask(self, text: str) -> None:
        """Send a message and print the answer as it streams.

        Ctrl-C stops the answer; the part that came stays in the conversation. Raises ShardnetError
        when generation fails, and then removes the message.
        """
        asked: Message = {"role": "user", "content": text}
        answer, shown = "", StreamedText()
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
                        shown.write(event.text)
                        if event.result is not None:
                            timing = event.result.timing
                            closing = (
                                f"({counted(event.result.usage.n_generated, 'token')}, first after "
                                f"{timing.ttft_s:.2f} s, {timing.decode_tok_s:.1f} tokens/s)"
                            )
            write_out()
            say(closing)
        except ShardnetError:
            shown.break_off()
            raise
        except KeyboardInterrupt:
            write_out()
            say("(stopped)")
        self._messages += [asked, {"role": "assistant", "content": answer}]


def _talk(conversation: Conversation) -> None:
    """Answer each line of standard input, until it ends or /exit."""
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
                say("(a new conversation)")
            case command if command.startswith("/") and len(command.split()) == 1:
                say(f"{command} is not a command: {HELP}")
            case text:
                try:
                    conversation.ask(text)
                except ShardnetError as error:
                    say(f"error: {' '.join(str(error).split())}")
                    if not is_terminal:
                        raise typer.Exit(EXIT_FAILURE) from None


def _read_line(is_terminal: bool) -> str | None:
    """Read one line; None at the end of the input."""
    if not is_terminal:
        return sys.stdin.readline() or None
    while True:
        try:
            return input("> ")
        except EOFError:
            write_out()
            return None
        except KeyboardInterrupt:
            write_out()
            say(f"({HELP})")
