"""Conversations: `generate --chat`, messages in the Python API, and `shardnet chat` on a pipe."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.soak import cases
from support.system.nodes import Machine, NodeProcess, open_machine
from support.system.parrot import EOS_ID, LONG, N_TOKENS, Parrots, make_scripted

from shardnet.api import Client, Message, connect
from shardnet.errors import CheckpointError, UsageError
from shardnet.transport.loop import run

TEMPLATE = """{%- for tool in tools or [] -%}{{ tool.function.name }}{%- endfor -%}
{%- for message in messages -%}
{{ '<' + message.role[0] + '>' + message.content }}
{%- endfor -%}{{ last }}"""
"""The parrot goes on after the last character of the last message."""


@pytest.fixture
def talker(parrots: Parrots, tmp_path: Path) -> Path:
    folder = shutil.copytree(parrots.alphabet, tmp_path / "talker")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node of another machine than the commands."""
    with open_machine(tmp_path_factory.mktemp("rosa") / "machine") as machine:
        [node] = machine.start_nodes("rosa")
        yield node


@pytest.mark.parametrize("stages", cases([""], ["--local=2"]))
def test_a_prompt_is_written_in_the_models_template(
    machine: Machine, talker: Path, stages: str
) -> None:
    common = ["generate", "--model", str(talker), "--max-tokens", "4", "--json"]
    chatted = machine.call(*common, *stages.split(), "--chat", "--system", "be good", "abc").json
    plain = machine.call(*common, "--bos", "off", "<s>be good<u>abc").json
    assert chatted["text"] == "defg"
    assert chatted["prompt_token_ids"] == plain["prompt_token_ids"]


def test_of_the_bundled_model_no_answers_are_to_be_expected(
    machine: Machine, node: NodeProcess, talker: Path
) -> None:
    warning = "was not trained on conversations"
    asked = ["generate", "--nodes", node.address, "--max-tokens", "1", "a"]
    assert warning in machine.call(*asked, "--chat").stderr
    assert warning not in machine.call(*asked).stderr
    assert warning not in machine.call(*asked, "--chat", "--model", str(talker)).stderr


def test_a_list_may_hold_messages(machine: Machine, talker: Path, tmp_path: Path) -> None:
    lines = [
        json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        json.dumps({"messages": [{"role": "user", "content": "m"}], "max_tokens": 3}),
    ]
    (tmp_path / "list").write_text("\n".join(lines))
    result = machine.call("generate", "--model", str(talker), "--prompts-file", tmp_path / "list")
    assert result.stdout == "==> 1 <==\nbc\n\n==> 2 <==\nnop\n\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chat", "--token-ids", "1,2"], "a chat template takes text"),
        (["--system", "be good", "a"], "add --chat"),
    ],
)
def test_what_no_template_can_say_is_wrong_usage(
    machine: Machine, arguments: list[str], words: str
) -> None:
    result = machine.call("generate", *arguments)
    assert result.code == 2
    assert words in result.stderr


def test_a_model_without_a_template_writes_a_dialogue(
    machine: Machine, node: NodeProcess, parrots: Parrots
) -> None:
    model = [
        "--model",
        str(parrots.alphabet),
        "--nodes",
        node.address,
        "--max-tokens",
        "3",
        "--json",
    ]
    chatted = machine.call("generate", *model, "--chat", "--system", "be", "a").json
    plain = machine.call("generate", *model, "--bos", "off", "be\n\nUser: a\n\nAssistant:").json
    assert chatted["prompt_token_ids"] == plain["prompt_token_ids"]
    node.stderr.wait_for("has no chat template: conversations are written as a dialogue")


def shorten_rendering(node: NodeProcess) -> None:
    """Allow the processes of the node that render templates a second, where the system lets us.

    One renders the conversation, one, once that is given up, a plain one. Each sets a limit of its
    own when a rendering begins: only that takes it half a second.
    """
    shortened: set[int] = set()
    while sys.platform == "linux" and len(shortened) < 2:
        for child in psutil.Process(node.pid).children():
            with contextlib.suppress(psutil.Error):  # another one may end
                is_new = child.pid not in shortened
                is_it = is_new and "template_program" in " ".join(child.cmdline())
                if is_it and child.cpu_times().user >= 0.5:
                    child.rlimit(psutil.RLIMIT_CPU, (1, child.rlimit(psutil.RLIMIT_CPU)[1]))
                    shortened.add(child.pid)
        time.sleep(0.02)


def test_a_template_that_loops_fails_its_request_alone(
    machine: Machine, node: NodeProcess, talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another prompt is answered while it runs; then it is named."""
    endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    (talker / "chat_template.jinja").write_text(endless)
    model = ["--model", str(talker), "--nodes", node.address]
    assert machine.call("generate", *model, "--max-tokens", "1", "a").stdout == "b\n"
    looping = machine.begin_copy("generate", *model, "--chat", "a")
    looping.stderr.wait_for("ring: ")
    assert machine.call("generate", *model, "--max-tokens", "1", "b").stdout == "c\n"
    shorten_rendering(node)
    result = looping.wait()
    assert result.code == 1
    assert "chat_template.jinja was not done after 5 s" in result.error_line


def test_messages_in_the_python_api(node: NodeProcess, talker: Path) -> None:
    """A second turn finds what the first one has computed."""

    async def talk(client: Client) -> None:
        messages: list[Message] = [{"role": "user", "content": "x" * 400 + "a"}]
        [first] = await client.complete(messages, max_tokens=4)
        assert (first.text, first.usage.n_reused) == ("bcde", 0)
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "m"},
        ]
        [second] = await client.complete(messages, max_tokens=2)
        assert second.text == "no"
        assert second.usage.n_reused >= len(first.prompt_token_ids)
        asked = client.generate(
            [{"role": "user", "content": "x" * 400 + "a"}],
            max_tokens=2,
            tools=[{"type": "function", "function": {"name": "fff"}}],
            template_options={"last": "ghi"},
        )
        events = [event async for event in asked]
        (tail,) = {event.prompt_tail for event in events if event.prompt_tail}
        assert (tail[-5:], len(tail), events[-1].token_ids) == ("xaghi", 64, ())
        result = events[-1].result
        assert result is not None
        assert result.text == "jk"
        assert len(result.prompt_token_ids) == len(first.prompt_token_ids) + 6
        described = await client.describe_tokenizer()
        assert described.template == TEMPLATE
        special = {token.token_id: token.text for token in described.added if token.is_special}
        assert special[described.eos_ids[0]].startswith("<")
        with pytest.raises(UsageError, match="'messages' is not the name"):
            await client.complete(messages, template_options={"messages": "x"})
        with pytest.raises(UsageError, match="give each a role, and a content"):
            await client.complete([{"role": "user"}])  # type: ignore[list-item]
        (talker / "chat_template.jinja").write_text("{{ nothing.at_all }}")
        with pytest.raises(CheckpointError, match=r"chat_template\.jinja line 1: UndefinedError"):
            await client.complete(messages)

    async def main() -> None:
        async with connect(node.address, model=str(talker)) as client:
            await talk(client)

    run(main())


def test_a_conversation_over_a_pipe(machine: Machine, node: NodeProcess, talker: Path) -> None:
    (talker / "generation_config.json").write_text('{"top_k": 1}')
    said = "abc\n\nx\n/what\n/reset\nm\n/exit\nnever\n"
    command = machine.begin_copy(
        *("chat", "--model", str(talker), "--nodes", node.address, "--max-tokens", "3"),
        *("--system", "z"),
        stdin=said,
    )
    result = command.wait()
    assert result.code == 0, result.stderr
    assert result.stdout == "def\nyza\nnop\n"
    assert "/what is not a command" in result.stderr
    assert "(a new conversation)" in result.stderr
    words = "sampling as the model recommends: temperature 1, top-k 1"
    assert result.stderr.count(words) == 1
    assert result.stderr.count("ring: ") == 1
    assert result.stderr.count("(3 tokens, first after ") == 3


def test_a_byte_order_mark_is_no_part_of_a_conversation(
    machine: Machine, node: NodeProcess, talker: Path
) -> None:
    """The line behind it is a command or a message as any other."""
    asked = ["chat", "--model", str(talker), "--nodes", node.address, "--max-tokens", "3"]
    for encoding in ("utf-8-sig", "utf-16"):
        lines = "/system z\nabc\n/exit\nnever\n".encode(encoding)
        result = machine.begin_copy(*asked, "--temperature", "0", stdin=lines).wait()
        assert (result.code, result.stdout) == (0, "def\n"), result.stderr
        assert "(system message: z)" in result.stderr


def test_ctrl_c_ends_an_answer_and_the_conversation_goes_on(
    machine: Machine, node: NodeProcess, talker: Path
) -> None:
    command = machine.begin_copy(
        *("chat", "--model", str(talker), "--nodes", node.address, "--temperature", "0"),
        *("--context", str(LONG), "--max-tokens", str(LONG // 3)),
        stdin="a\n!m\n",
    )
    command.stdout.wait_for("bcdef")
    command.signal(signal.SIGINT)
    command.stdout.wait_for("\nnopq")
    command.signal(signal.SIGINT)
    result = command.wait()
    assert result.code == 0, result.stderr
    assert result.stderr.count("(stopped)") == 2


def test_an_error_ends_a_conversation_over_a_pipe(
    machine: Machine, parrots: Parrots, tmp_path: Path
) -> None:
    folder = shutil.copytree(parrots.alphabet, tmp_path / "raising")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only poems') }}")
    command = machine.begin_copy("chat", "--model", str(folder), stdin="a\nb\n")
    result = command.wait()
    assert result.code == 1
    assert "only poems" in result.error_line


ENDING = """{%- for message in messages -%}{{ message.content }}<|im_end|>
{% endfor -%}{% if add_generation_prompt %}<|answer|>{% endif %}"""


@pytest.mark.parametrize(
    ("flags", "text", "n_tokens"),
    [
        (["--chat"], "yes\n", 2),
        (["--chat", "--regex", "yes\n(no\n)*"], "yes\n", 2),
        (["--chat", "--ignore-eos", "--max-tokens", "3"], "yes\n<|im_end|>no\n", 3),
        (["--bos", "off"], "yes\n<|im_end|>no\n", 4),  # no conversation
    ],
)
def test_an_answer_ends_where_the_template_ends_one(
    machine: Machine, tmp_path: Path, flags: list[str], text: str, n_tokens: int
) -> None:
    """No file names the token: config and tokenizer both have the base model's."""
    folder = make_scripted(tmp_path / "m", ENDING, {"<|answer|>": "yes\n<|im_end|>no\n"})
    prompt = "a" if "--chat" in flags else "a<|answer|>"
    said = machine.call("generate", "--model", str(folder), "--json", *flags, prompt).json
    assert said["text"] == text
    yes, end, no, eos = *range(N_TOKENS + 1, N_TOKENS + 4), EOS_ID
    assert said["token_ids"] == [yes, end, no, eos][:n_tokens]


def test_an_answer_ends_at_the_end_token_of_the_tokenizer_too(
    machine: Machine, tmp_path: Path
) -> None:
    """A fine-tune has its own there, and that of its base in generation_config.json."""
    folder = make_scripted(tmp_path / "m", "<|answer|>", {"<|answer|>": "yes\n<|im_end|>no\n"})
    (folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<|im_end|>"}))
    asked = ["generate", "--model", str(folder), "--json", "a<|answer|>"]
    assert machine.call(*asked).json["text"] == "yes\n"
    assert machine.call(*asked, "--ignore-eos", "--max-tokens", "3").json["text"].endswith("no\n")
    held_back = machine.call(*asked, "--min-tokens", "3").json
    assert held_back["token_ids"][1] != machine.call(*asked).json["token_ids"][1]
