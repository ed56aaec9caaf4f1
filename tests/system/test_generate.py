"""The main job on real nodes: the same text on any split, streamed, stopped and shared."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.servers.proxy import slow_link
from support.soak import cases, is_soak
from support.system.nodes import Crew, Machine, open_machine
from support.system.parrot import EOS_ID, LONG, Parrots, make_parrot

from shardnet.api.client import connect
from shardnet.wire.messages.plans import ModelChoice

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
SIGNS = "é€😀 Жz."
"""What the `signs` checkpoint says after an `a`."""

BUNDLED = ["It is a truth", "--temperature", "0.8", "--top-k", "50", "--seed", "3"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the bundled model says in one process, with one thread and without any node."""
    machine = Machine(tmp_path_factory.mktemp("alone"))
    command = ["generate", *BUNDLED, "--max-tokens", "40", "--threads", "1", "--json"]
    answer: dict[str, Any] = machine.run(*command).json
    assert [stage["layers"] for stage in answer["stages"]] == [[0, 8]]
    assert answer["text"].replace("\n", "").isprintable()
    return answer


@pytest.mark.parametrize("nodes", cases([(0,), (2, 1, 0)], [(1, 0)]))
def test_the_split_changes_no_token(trio: Crew, alone: dict[str, Any], nodes: tuple[int]) -> None:
    where = ["--nodes", trio.addresses(*nodes)]
    answer = trio.machine.call("generate", *BUNDLED, "--max-tokens", "40", "--json", *where).json
    assert len(answer["stages"]) == len(nodes)
    assert answer["token_ids"] == alone["token_ids"]
    assert answer["text"] == alone["text"]


def test_a_second_request_loads_nothing(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(), "--max-tokens", "3", "--json"]
    trio.generate("a", parrots.alphabet, *where)
    logs = [_loads(node.log) for node in trio.nodes]
    answer = trio.generate("x", parrots.alphabet, *where).json
    assert answer["text"] == "yza"
    assert answer["timing"]["load_s"] == 0
    assert [_loads(node.log) for node in trio.nodes] == logs


def _loads(log: str) -> list[str]:
    """Return what was loaded and freed; other lines may come by an answer's time, or late."""
    return [line for line in log.splitlines() if line.startswith(("loaded ", "freed "))]


def test_another_plan_for_the_same_model_is_carried_out(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 1), "--max-tokens", "3", "--json"]
    for layers in ("0-1,1-4", "0-3,3-4"):
        answer = trio.generate("a", parrots.alphabet, *where, "--layers", layers).json
        told = [f"{start}-{end}" for start, end in (s["layers"] for s in answer["stages"])]
        assert ",".join(told) == layers
        assert answer["text"] == "bcd"


HALVES = [(0, 2), (2, 4)]
"""As planned, a busy node gets fewer layers."""


@pytest.mark.skipif(not is_soak(), reason="scripts/soak runs it")
def test_another_model_frees_the_first_on_every_node(
    trio: Crew, parrots: Parrots, tmp_path: Path
) -> None:
    """Torch keeps some memory when it first works with large weights: hence the first round."""
    huge = make_parrot(tmp_path / "huge", ALPHABET, ends=False, intermediate=1 << 15)
    share = (huge / "model.safetensors").stat().st_size // 2
    pair = trio.nodes[:2]
    assert trio.says("a", huge, 0, 1, layers=HALVES) == "bcd"
    assert trio.says("a", parrots.alphabet, 0, 1) == "bcd"
    empty = [node.private_bytes for node in pair]
    assert trio.says("a", huge, 0, 1, layers=HALVES) == "bcd"
    loaded = [node.private_bytes for node in pair]
    assert trio.says("a", parrots.alphabet, 0, 1) == "bcd"
    after = [node.private_bytes for node in pair]
    for number in range(2):
        assert loaded[number] > empty[number] + 0.7 * share
        assert after[number] < empty[number] + 0.3 * share


def test_unload_frees_the_model_on_every_node(trio: Crew, parrots: Parrots) -> None:
    trio.says("a", parrots.big, 1, 0, layers=HALVES)
    share = (parrots.big / "model.safetensors").stat().st_size // 2
    loaded = [node.private_bytes for node in trio.nodes[:2]]
    assert trio.machine.call("unload", "--nodes", trio.nodes[0].address).code == 0
    for node, before in zip(trio.nodes, loaded, strict=False):
        end_s = time.monotonic() + 10  # a large piece may be held a moment longer
        while node.private_bytes >= before - 0.5 * share and time.monotonic() < end_s:
            time.sleep(0.05)
        assert node.private_bytes < before - 0.5 * share
    for node in trio.nodes[:2]:
        told = trio.machine.state(node)
        assert told["stage"] is None
        assert told["memory_free_bytes"] == told["memory_bytes"]


def test_a_running_request_keeps_its_model(trio: Crew, parrots: Parrots) -> None:
    with slow_link(trio.nodes[1].ready["port"]) as to_bert:
        running = trio.begin(parrots.big, f"{trio.addresses(0)},{to_bert}")
        others = [
            trio.machine.begin_copy(
                "generate", "a", "--model", str(parrots.alphabet), "--nodes", nodes
            )
            for nodes in (trio.addresses(0, 1), trio.addresses(1, 0), trio.addresses(2, 1))
        ]
        unloading = trio.machine.begin_copy("unload", "--nodes", trio.nodes[0].address)
        for other in [*others, unloading]:
            error = other.wait().error
            assert str(parrots.big) in error
            assert "wait" in error
            assert "--local" not in error
        check_way_out(trio, parrots)
        running.stdout.wait_for(re.compile("[a-z]"), after=len(running.stdout.text))
        running.signal(signal.SIGINT)
        result = running.wait()
    assert result.code == 130
    assert (ALPHABET * (LONG // 26 + 1))[1:].startswith(result.stdout.rstrip("\n"))


def check_way_out(trio: Crew, parrots: Parrots) -> None:
    """Check that who has named no node is told how to do without the one that was asked."""
    anna = trio.nodes[0]
    lines = trio.machine.folder / "lines.txt"
    lines.write_text("a\nb\n")
    for arguments, stdin in [
        (("generate", "a"), None),
        (("generate", "--prompts-file", str(lines)), None),
        (("chat",), "a\n"),
        (("inspect", "a", "--out", str(lines.with_suffix(".safetensors"))), None),
    ]:
        command = trio.machine.begin_copy(*arguments, "--model", str(parrots.alphabet), stdin=stdin)
        told = command.wait()
        assert told.code == 1
        assert "is generating with" in told.stderr, arguments
        assert "--local 1" in told.stderr
        assert f"end node anna ({anna.address}, process {anna.pid}): kill {anna.pid}" in told.stderr


def test_a_request_that_comes_close_behind_unloads_nothing(trio: Crew, parrots: Parrots) -> None:
    """Of requests for two models at one moment, each is carried out or refused by name."""
    for _ in range(10 if is_soak() else 2):
        said = trio.say_at_once([("a", parrots.alphabet), ("z", parrots.signs)], 0, 1)
        assert {"bcd", "."} & set(said)
        refused = [text for text in said if text not in ("bcd", ".")]
        assert all("is generating with" in text for text in refused), refused


def test_a_node_sends_the_client_on_to_the_head(trio: Crew, parrots: Parrots) -> None:
    """The oldest node of the machine is asked; another one leads the ring that it is in."""
    ready = trio.generate("a", parrots.alphabet, "--nodes", trio.addresses(1, 0), "--json").json
    result = trio.generate("m", parrots.alphabet, "--max-tokens", "3", "--json")
    assert "anna" in result.stderr.splitlines()[0]
    assert result.json["stages"] == ready["stages"]
    assert result.json["text"] == "nop"
    assert result.json["timing"]["load_s"] == 0


def test_a_peer_is_asked_where_no_node_runs(trio: Crew, parrots: Parrots, machine: Machine) -> None:
    arguments = ["--model", str(parrots.alphabet), "--max-tokens", "3", "--json"]
    trio.machine.call("unload", "--nodes", trio.addresses(0))
    result = machine.call("generate", "a", *arguments, "--peer", trio.nodes[2].address)
    assert trio.nodes[2].address in result.stderr
    assert result.json["text"] == "bcd"


@pytest.fixture(scope="module")
def newcomer(trio: Crew, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """A node of little memory on a machine of its own, which was told of two peers."""
    peers = ["--peer", trio.nodes[1].address, "--peer", "127.0.0.1:1"]
    with open_machine(tmp_path_factory.mktemp("newcomer") / "machine") as machine:
        nodes = machine.start_nodes("dora", arguments=[*peers, "--memory", "50MB"])
        yield Crew(machine=machine, nodes=nodes)


def test_a_node_plans_over_the_peers_it_was_told(
    trio: Crew, newcomer: Crew, parrots: Parrots
) -> None:
    """A peer that answers is used, one that does not is named and does no harm."""
    newcomer.nodes[0].stderr.wait_for("127.0.0.1:1")
    newcomer.nodes[0].stderr.wait_for("node bert (")
    wanted = ["--layers", "0-2,2-4", "--max-tokens", "3", "--json"]
    answer = newcomer.generate("a", parrots.alphabet, *wanted).json
    first, second = (stage["node"] for stage in answer["stages"])
    assert first == newcomer.nodes[0].ready["node"]
    assert second in {node.ready["node"] for node in trio.nodes}  # whom the peer knows counts too
    assert answer["text"] == "bcd"


def test_a_model_too_large_for_its_nodes_is_refused(newcomer: Crew, parrots: Parrots) -> None:
    error = newcomer.generate("a", parrots.big, "--nodes", newcomer.addresses()).error
    assert "dora" in error
    assert "--memory" in error
    assert newcomer.says("a", parrots.alphabet) == "bcd"


def test_two_requests_share_a_ring(trio: Crew, parrots: Parrots) -> None:
    where = ["--model", str(parrots.big), "--nodes", trio.addresses(0, 1), "--max-tokens", "30"]
    trio.says("a", parrots.big, 0, 1)
    first, second = (trio.machine.begin_copy("generate", prompt, *where) for prompt in "an")
    assert first.wait().stdout == (ALPHABET * 2)[1:31] + "\n"
    assert second.wait().stdout == (ALPHABET * 2)[14:44] + "\n"


def test_a_long_prompt_goes_round_in_chunks(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(), "--max-tokens", "2", "--json"]
    answer = trio.machine.call(
        *("generate", "-", "--model", str(parrots.alphabet), *where), stdin=ALPHABET * 60 + "abc"
    ).json
    assert len(answer["prompt_token_ids"]) == 26 * 60 + 3
    assert answer["text"] == "de"


def test_a_byte_order_mark_is_no_part_of_a_prompt(trio: Crew, parrots: Parrots) -> None:
    asked = ["generate", "-", "--model", str(parrots.alphabet), "--nodes", trio.addresses(0)]
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        typed = trio.machine.begin_copy(
            *asked, "--max-tokens", "3", "--json", stdin="a".encode(encoding)
        )
        answer = typed.wait().json
        assert (len(answer["prompt_token_ids"]), answer["text"]) == (1, "bcd"), encoding


def test_pieces_hold_whole_characters_only(trio: Crew, parrots: Parrots) -> None:
    pieces = asyncio.run(_pieces(trio, parrots.signs))
    assert pieces == list(SIGNS)


async def _pieces(trio: Crew, model: Path) -> list[str]:
    nodes = trio.addresses(0, 2).split(",")
    choice = ModelChoice(model=str(model), nodes=nodes)
    async with (
        connect(nodes[0]) as client,
        aclosing(client.generate("a", model=choice)) as events,
    ):
        return [event.text async for event in events if event.text]


def test_a_cut_character_is_marked(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--max-tokens", "3"]
    assert trio.generate("a", parrots.signs, *where).stdout == "é\ufffd\n"


@pytest.mark.parametrize(
    ("stops", "text", "n_tokens"),
    [
        (["😀 Ж"], "é€", 12),
        (["€😀!", "Жz"], "é€😀 ", 13),
        (["é€"], "", 5),
    ],
)
def test_a_stop_string_never_shows(
    trio: Crew, parrots: Parrots, stops: list[str], text: str, n_tokens: int
) -> None:
    """Its characters are several tokens each, and it spans several characters."""
    arguments = [part for stop in stops for part in ("--stop", stop)]
    where = ["--nodes", trio.addresses(0, 2)]
    assert trio.generate("a", parrots.signs, *where, *arguments).stdout == text + "\n"
    answer = trio.generate("a", parrots.signs, *where, *arguments, "--json").json
    assert answer["text"] == text
    assert answer["finish_reason"] == "stop"
    assert len(answer["token_ids"]) == n_tokens


def test_the_end_of_text_is_a_token_without_text(trio: Crew, parrots: Parrots) -> None:
    answer = trio.generate("z", parrots.signs, "--nodes", trio.addresses(0, 2), "--json").json
    assert answer["token_ids"][1:] == [EOS_ID]
    assert answer["tokens"] == [".", "</s>"]
    assert answer["text"] == "."
    assert answer["finish_reason"] == "stop"


def test_a_stop_token_id_ends_the_text(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--json"]
    [stop_id] = trio.generate("d", parrots.alphabet, *where, "--max-tokens", "1").json["token_ids"]
    arguments = ["--stop-token-id", str(stop_id), "--max-tokens", "30"]
    answer = trio.generate("a", parrots.alphabet, *where, *arguments).json
    assert answer["text"] == "bcd"
    assert answer["token_ids"][-1] == stop_id
    assert answer["finish_reason"] == "stop"


def test_the_end_of_the_context_ends_the_text(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--context", "16", "--json"]
    answer = trio.generate("abcd", parrots.alphabet, *where).json
    assert answer["text"] == ALPHABET[4:16]
    assert answer["finish_reason"] == "length"


def test_a_prompt_may_be_token_ids(trio: Crew, parrots: Parrots) -> None:
    where = ["--model", str(parrots.alphabet), "--nodes", trio.addresses(0, 2), "--json"]
    ids = trio.machine.call("generate", "xy", *where, "--max-tokens", "1").json["prompt_token_ids"]
    prompt = ["--token-ids", ",".join(map(str, ids)), "--max-tokens", "3"]
    answer = trio.machine.call("generate", *prompt, *where).json
    assert answer["prompt_token_ids"] == ids
    assert answer["text"] == "zab"


def test_penalties_and_bias_change_what_is_said(trio: Crew, parrots: Parrots) -> None:
    """The parrot's next letter has a logit of about 18, all others 0."""
    where = ["--nodes", trio.addresses(0, 2), "--max-tokens", "3", "--json"]
    said = trio.generate("a", parrots.alphabet, *where).json["token_ids"]
    bias = ["--logit-bias", f"{said[1]}=-100", "--logit-bias", "60=9.5", "--min-p", "0.1"]
    changed = trio.generate("a", parrots.alphabet, *where, *bias, "--temperature", "1").json
    assert changed["token_ids"][:2] == [said[0], 60]
    penalty = ["--repetition-penalty", "100", "--logit-bias", "60=0.5"]
    assert trio.generate("az", parrots.alphabet, *where).json["text"] == "abc"
    assert trio.generate("az", parrots.alphabet, *where, *penalty).json["token_ids"][0] == 60


def test_the_end_is_held_back(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--max-tokens", "4", "--json"]
    answer = trio.generate("z", parrots.signs, *where, "--min-tokens", "3").json
    assert len(answer["token_ids"]) >= 3
    assert EOS_ID not in answer["token_ids"][:3]


def test_a_bias_beyond_the_vocabulary_is_refused(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 2)]
    error = trio.generate("a", parrots.alphabet, *where, "--logit-bias", "999=1").error
    assert "logit-bias names token 999" in error


def test_no_tokens_at_all(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--max-tokens", "0", "--json"]
    answer = trio.generate("abc", parrots.alphabet, *where).json
    assert (answer["token_ids"], answer["text"], answer["finish_reason"]) == ([], "", "length")
    assert answer["timing"]["total_s"] > 0


def test_logprobs_tell_of_every_token(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--json"]
    arguments = ["--logprobs", "2", "--max-tokens", "2", "--temperature", "0.1", "--seed", "1"]
    answer = trio.generate("a", parrots.signs, *where, *arguments).json
    assert [entry["token_id"] for entry in answer["logprobs"]] == answer["token_ids"]
    first = answer["logprobs"][0]
    assert set(first) >= {"token_id", "token", "bytes", "logprob", "top"}
    assert first["bytes"] == [0xC3]
    assert first["token"] == "\ufffd"
    assert -1e-3 < first["logprob"] <= 0
    assert len(first["top"]) == 2
    assert first["top"][0] == [first["token_id"], "\ufffd", first["logprob"]]
    assert first["top"][1][2] < -10


def test_a_seed_that_was_drawn_is_told(trio: Crew, parrots: Parrots) -> None:
    arguments = ["--nodes", trio.addresses(0), "--temperature", "1", "--max-tokens", "2", "--json"]
    seeds = {trio.generate("a", parrots.signs, *arguments).json["seed"] for _ in range(2)}
    assert len(seeds) == 2


def test_an_empty_prompt_is_refused(trio: Crew, parrots: Parrots) -> None:
    error = trio.generate("", parrots.alphabet, "--nodes", trio.addresses(0, 2)).error
    assert "prompt is empty" in error


def test_a_prompt_beyond_the_context_is_refused(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 2), "--context", "16"]
    error = trio.generate("a" * 16, parrots.alphabet, *where).error
    assert "16" in error
    assert "give --context " in error
    assert f"the model takes up to {LONG}, and the nodes have room for" in error
    assert trio.generate("a" * 15, parrots.alphabet, *where).stdout == "b\n"


def test_a_context_beyond_the_model_is_refused(trio: Crew, parrots: Parrots) -> None:
    arguments = ["--nodes", trio.addresses(0, 2), "--context", str(LONG + 1)]
    error = trio.generate("a", parrots.alphabet, *arguments).error
    assert str(LONG + 1) in error
    assert str(LONG) in error.replace(str(LONG + 1), "")


def test_layers_that_do_not_fit_the_model_are_refused(trio: Crew, parrots: Parrots) -> None:
    where = ["--nodes", trio.addresses(0, 2)]
    for layers in ("0-2,2-5", "0-1,1-3", "0-4", "0-1,1-2,2-4"):
        asked = ["plan", "--model", str(parrots.alphabet), *where, "--layers", layers]
        assert "layers" in trio.machine.call(*asked).error


def test_a_token_id_beyond_the_vocabulary_is_refused(trio: Crew, parrots: Parrots) -> None:
    where = ["--model", str(parrots.alphabet), "--nodes", trio.addresses(0, 2)]
    error = trio.machine.call("generate", "--token-ids", "1,99999", *where).error
    assert "99999" in error


def test_another_head_takes_the_nodes_and_gives_them_back(trio: Crew, parrots: Parrots) -> None:
    """A head whose place was taken knows that its ring is no more."""
    for nodes in ((0,), (0, 1), (1, 0), (0, 1), (1,), (0,)):
        assert trio.says("a", parrots.alphabet, *nodes) == "bcd"
