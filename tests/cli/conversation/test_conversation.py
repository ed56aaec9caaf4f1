"""A conversation without a ring: what is sent, what commands do, what is kept in files."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardnet.api.events import GenerationEvent, RequestState
from shardnet.errors import CapacityError, UsageError
from shardnet.sampling_params import SamplingParams
from shardnet.wire.messages.extras import RecommendedSampling
from shardnet.wire.messages.plans import PlanReply
from shardnet_cli.commands.chat import COMMANDS, _do, help_lines, read_command
from shardnet_cli.conversation.conversation import (
    MAX_SAVED_BYTES,
    MOST_ENTRIES,
    Conversation,
    KeptLines,
    dropped,
    history_path,
    load,
    read_piped,
    recommended_words,
    save,
)

ADVICE = RecommendedSampling(temperature=0.6, top_p=0.95, repetition_penalty=1.05)
PLAN = PlanReply(
    request=0,
    model="m",
    model_id="ab" * 32,
    dtype="float32",
    wire_dtype="float32",
    context=512,
    stages=[],
    why="",
    recommended=ADVICE,
)


class Answering:
    """A client whose answers number themselves; `fails` are the numbers of those that fail."""

    def __init__(self, *fails: int) -> None:
        self.asked: list[tuple[list[str], int]] = []
        self._fails = fails

    def generate(
        self, messages: list[Any], sampling: SamplingParams, *, on_plan: Any, **_: Any
    ) -> Iterator[GenerationEvent]:
        self.asked.append(([said["content"] for said in messages], sampling.sample_index))
        number = len(self.asked)
        on_plan(PLAN)
        if number in self._fails:
            raise CapacityError("full")
        usage = SimpleNamespace(n_prompt=30, n_generated=1, n_reused=20)
        timing = SimpleNamespace(ttft_s=0.5, decode_tok_s=9.0)
        result = cast(Any, SimpleNamespace(usage=usage, timing=timing))
        yield GenerationEvent(
            request_id=1,
            index=0,
            sample=0,
            state=RequestState.FINISHED,
            token_ids=(7,),
            text=f"answer {number}",
            result=result,
        )


def conversation(client: Answering, system: str = "", **options: Any) -> Conversation:
    return Conversation(cast(Any, client), SamplingParams(temperature=0.7), options, system)


def test_retry_draws_another_answer_to_the_last_message() -> None:
    client = Answering(3)
    talk = conversation(client, "be good")
    with pytest.raises(UsageError, match="no message yet"):
        talk.retry()
    talk.ask("one")
    talk.retry()
    assert [said["content"] for said in talk.messages] == ["be good", "one", "answer 2"]
    with pytest.raises(CapacityError):
        talk.retry()
    assert [said["content"] for said in talk.messages] == ["be good", "one", "answer 2"]
    talk.ask("two")
    assert client.asked == [
        (["be good", "one"], 0),
        (["be good", "one"], 1),
        (["be good", "one"], 2),
        (["be good", "one", "answer 2", "two"], 0),
    ]
    talk.reset()
    assert [said["content"] for said in talk.messages] == ["be good"]


def test_a_message_that_fails_is_removed() -> None:
    talk = conversation(Answering(1))
    with pytest.raises(CapacityError):
        talk.ask("one")
    assert talk.messages == []


def test_what_the_model_recommends_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    talk = conversation(Answering(), recommended=["temperature", "top_k", "top_p"])
    talk.ask("one")
    talk.ask("two")
    words = "sampling as the model recommends: temperature 0.6, top-p 0.95\n"
    assert capsys.readouterr().err.count(words) == 1
    assert recommended_words(ADVICE, ["repetition_penalty"]) == "repetition penalty 1.05"
    assert recommended_words(ADVICE, []) == recommended_words(None, ["top_p"]) == ""


def test_stats_tell_tokens_speed_and_context() -> None:
    talk = conversation(Answering())
    assert len(list(talk.stats())) == 1
    talk.ask("one")
    assert list(talk.stats()) == [
        "1 answer of 1 token; 2 messages in the conversation",
        "last answer: 1 token, first after 0.50 s, 9.0 tokens/s; of 30 tokens before it 20 were "
        "still in the KV cache; it ended at 31 of a context of 512",
    ]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/system be good", ("/system", "be good")),
        ("/system be\ngood", ("/system", "be\ngood")),
        ("/quit", ("/exit", "")),
        ("\x1a", ("/exit", "")),
        ("/what", ("/what", "")),
        ("/usr/bin", None),
        ("/usr is a folder", None),
        ("a /save", None),
        ("", None),
    ],
)
def test_a_slash_begins_a_command_or_a_path(text: str, command: tuple[str, str] | None) -> None:
    assert read_command(text) == command


def test_commands_change_and_keep_the_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = conversation(Answering())
    _do("/system", "be ü", talk)
    talk.ask('"one"\n')
    saved = tmp_path / "said.json"
    for _ in range(2):  # what is a conversation is replaced
        _do("/save", str(saved), talk)
    assert [m["role"] for m in json.loads(saved.read_text())["messages"]] == [
        *("system", "user", "assistant"),
    ]
    before = talk.messages
    _do("/reset", "", talk)
    _do("/system", "-", talk)
    assert talk.messages == []
    _do("/load", str(saved), talk)
    assert talk.messages == before
    for command in ("/save", "/load", "/image"):
        for name in ("~nobody-here/x", "a\0b"):
            with pytest.raises(UsageError):
                _do(command, name, talk)
    assert talk.messages == before
    _do("/nope", "", talk)
    _do("/help", "", talk)
    shown = capsys.readouterr().err
    assert "/nope is not a command" in shown
    assert all(line in shown for line in help_lines())
    assert all(len(line) <= 80 for line in help_lines()[:-1])
    assert len(help_lines()) == len(COMMANDS) + 1


@pytest.mark.parametrize(
    "content",
    [b"no json", b"[]", b'{"messages": [{"role": "root", "content": ""}]}', b"\xff", b"{}"],
)
def test_another_file_is_neither_loaded_nor_replaced(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "other"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="holds no conversation"):
        load(file)
    with pytest.raises(UsageError, match="is not replaced"):
        save([], file)
    assert file.read_bytes() == content
    with pytest.raises(UsageError, match="cannot be read"):
        load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="cannot be written"):
        save([], file / "below")


def test_half_a_surrogate_pair_in_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "saved"
    file.write_text(r'{"messages": [{"role": "user", "content": "a\ud83d"}]}')
    with pytest.raises(UsageError, match=r"messages\[0\]\.content has half a surrogate pair"):
        load(file)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_SAVED_BYTES + 1)
    with pytest.raises(UsageError, match="more than"):
        load(tmp_path / "large")


def test_what_was_typed_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    kept = KeptLines(tmp_path / "own" / "history")
    assert kept.read() == []
    for number in range(MOST_ENTRIES + 2):
        kept.add(f"{number}\nü")
    assert kept.read()[0] == "2\nü"
    assert len((tmp_path / "own" / "history").read_text().splitlines()) == MOST_ENTRIES
    assert (tmp_path / "own" / "history").stat().st_mode & 0o777 == 0o600


def test_what_was_typed_is_kept_beside_long_texts_and_lines_that_were_cut_off(
    tmp_path: Path,
) -> None:
    path = tmp_path / "history"
    kept = KeptLines(path)
    kept.add("first")
    for number in range(5):
        kept.add(f"{number} " + "x" * (1 << 20))
    with path.open("a") as file:
        file.write('"cut\n')
    kept.add("last")
    assert [entry[:5] for entry in kept.read()] == ["2 xxx", "3 xxx", "4 xxx", "last"]
    assert path.stat().st_size < 4 << 20


def test_a_variable_names_the_history_or_turns_it_off(tmp_path: Path) -> None:
    assert history_path({"SHARDNET_CHAT_HISTORY": ""}) is None
    assert history_path({"SHARDNET_CHAT_HISTORY": "/x"}) == Path("/x")
    found = history_path({"SHARDNET_CACHE_DIR": str(tmp_path)})
    assert found == tmp_path / "chat-history.jsonl"


def test_pictures_are_dropped_by_their_names_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (r"C:\a\cat.png", r"D:\a cat.PNG"):
        Path(name).write_bytes(b"cat")
        written = f'"{name}"' if " " in name else name
        assert dropped(f"what is {written} ?") == ("what is ?", [Path(name)])


def test_pictures_go_with_the_next_message_and_into_files(tmp_path: Path) -> None:
    picture = tmp_path / "a cat.png"
    picture.write_bytes(b"cat")
    for text, rest in (
        (f"'{picture}' what is it?", "what is it?"),
        (f"what is {str(picture).replace(' ', chr(92) + ' ')} ?", "what is ?"),
        (f"file://{str(picture).replace(' ', '%20')}", ""),
    ):
        assert dropped(text) == (rest, [picture])
    assert dropped("is /no/such.png here?") == ("is /no/such.png here?", [])


def test_pictures_are_dropped_as_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backslashes separate there, and paths begin with a drive."""
    monkeypatch.chdir(tmp_path)
    picture = Path("C:\\pictures\\a cat.png")  # here it is one name
    bare = Path("C:/cat.png")
    bare.parent.mkdir()
    for path in (picture, bare):
        path.write_bytes(b"cat")
    assert dropped(f'"{picture}" what is it?') == ("what is it?", [picture])
    assert dropped(f"{bare} what is it?") == ("what is it?", [bare])
    monkeypatch.setattr(os, "sep", "\\")
    (tmp_path / "D:\\cat.png").write_bytes(b"cat")
    assert dropped("D:\\cat.png") == ("", [Path("D:\\cat.png")])
    client = Answering()
    talk = conversation(client)
    _do("/image", str(picture), talk)
    talk.ask("what is it?")
    talk.ask("more")
    shown = [{"type": "image", "image": b"cat"}, {"type": "text", "text": "what is it?"}]
    assert client.asked[0][0] == [shown]
    assert client.asked[1][0][-1] == "more"
    save(talk.messages, tmp_path / "talk.json")
    assert load(tmp_path / "talk.json") == talk.messages
    with pytest.raises(UsageError, match="cannot be read"):
        _do("/image", str(tmp_path / "none.png"), talk)


def test_a_line_that_is_no_text_ends_a_piped_conversation() -> None:
    lines = io.TextIOWrapper(io.BytesIO(b"one\ncaf\xe9\n"), encoding="utf-8")
    with pytest.raises(UsageError, match="standard input is not utf-8 text"):
        read_piped(lines)


def test_what_an_answer_waits_for_behind_a_lost_ring_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Recovering(Answering):
        def generate(self, *args: Any, **options: Any) -> Iterator[GenerationEvent]:
            told = GenerationEvent(request_id=1, index=0, sample=0, state=RequestState.RECOVERING)
            yield replace(told, why="bert was lost", expected_s=3.5)
            again = "reading 3,900 tokens again"
            yield replace(told, state=RequestState.RESUMED, why=again, expected_s=11.2)
            yield from super().generate(*args, **options)

    conversation(Recovering()).ask("hello")
    said = capsys.readouterr()
    assert said.out == "answer 1\n"
    assert said.err.splitlines()[:2] == [
        "recovering, about 4 s: bert was lost",
        "reading 3,900 tokens again, about 12 s",
    ]
