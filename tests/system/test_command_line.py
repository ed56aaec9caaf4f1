"""The contract of the command line: keys, exit codes, and one line for each refusal."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from support.system.nodes import Crew, Machine, Result
from support.system.parrot import Parrots

from shardnet import __version__


def test_the_ready_line_names_the_node_its_address_and_process(trio: Crew) -> None:
    node = trio.nodes[0]
    ready = node.ready
    assert set(ready) >= {"event", "node", "name", "host", "port", "pid", "version"}
    assert ready["event"] == "ready"
    assert ready["name"] == "anna"
    assert ready["host"] == "127.0.0.1"
    assert ready["pid"] == node.pid
    assert ready["version"] == __version__
    assert node.stdout.text.count("\n") == 1


def test_nodes_json_lists_every_node_of_the_machine(trio: Crew, parrots: Parrots) -> None:
    model = str(parrots.alphabet)
    which = ["--nodes", trio.addresses(2, 0), "--layers", "0-2,2-4"]
    trio.generate("a", parrots.alphabet, *which, "--max-tokens", "1")
    found = trio.machine.nodes_with("anna", "bert", "cleo")
    assert [found[name]["node"] for name in ("anna", "bert", "cleo")] == [
        node.ready["node"] for node in trio.nodes
    ]
    anna = found["anna"]
    assert anna["address"] == trio.nodes[0].address
    assert anna["version"] == __version__
    assert anna["device"].startswith(("cpu", "cuda"))
    assert 0 < anna["memory_free_bytes"] < anna["memory_bytes"]
    assert anna["stage"] == {"model": model, "layers": [2, 4], "rank": 1}
    assert found["cleo"]["stage"] == {"model": model, "layers": [0, 2], "rank": 0}


def test_nodes_lists_a_node_that_is_named(trio: Crew, machine: Machine) -> None:
    assert machine.run("nodes", "--json").json == []
    named = machine.nodes_with("bert", arguments=["--peer", trio.nodes[1].address])
    assert named["bert"]["node"] == trio.nodes[1].ready["node"]


def test_plan_json_says_who_would_run_what(trio: Crew, parrots: Parrots) -> None:
    arguments = ["--model", str(parrots.big), "--nodes", trio.addresses(1, 2), "--context", "512"]
    plan = trio.machine.call("plan", "--json", *arguments).json
    assert plan["model"] == str(parrots.big)
    assert plan["context"] == 512
    assert plan["left_out"] == []
    assert plan["predicted_tok_s"] > 0
    assert isinstance(plan["why"], str)
    keys = {"rank", "node", "layers", "weight_bytes", "kv_bytes", "compute_ms", "hop_ms"}
    assert all(set(stage) >= keys for stage in plan["stages"])
    assert [stage["rank"] for stage in plan["stages"]] == [0, 1]
    assert [stage["node"] for stage in plan["stages"]] == [n.ready["node"] for n in trio.nodes[1:]]
    assert plan["stages"][0]["layers"][0] == 0
    assert plan["stages"][0]["layers"][1] == plan["stages"][1]["layers"][0]
    assert plan["stages"][1]["layers"][1] == 4
    assert all(stage["weight_bytes"] > 0 and stage["kv_bytes"] > 0 for stage in plan["stages"])
    assert all(stage["compute_ms"] > 0 and stage["hop_ms"] > 0 for stage in plan["stages"])
    named = [node.ready["node"] for node in trio.nodes[1:]]
    nodes, [link] = plan["measured"]["nodes"], plan["measured"]["links"]
    assert [node["node"] for node in nodes] == named
    for node in nodes:
        figures = ("layer_ms", "layer_256_ms", "embed_ms", "head_ms", "disk_bytes_per_s")
        assert all(node[figure] > 0 for figure in (*figures, "memory_bytes", "measured_at_s"))
        assert node["why_not"] is None
    assert {link["from"], link["to"]} == set(named)
    assert link["round_trip_ms"] > 0
    assert link["bytes_per_s"] > 0


def test_plan_says_what_a_gather_of_two_nodes_takes(trio: Crew, parrots: Parrots) -> None:
    """On a busy machine a node may answer too late to be measured; then it is once more."""
    arguments = ["--model", str(parrots.big), "--nodes", trio.addresses(1, 2), "--context", "512"]
    took_ms = None
    while took_ms is None:
        plan = trio.machine.call("plan", "--json", "--again", *arguments).json
        [link] = plan["measured"]["links"]
        took_ms = link["gather_ms"]
    assert took_ms > 0
    assert link["gather_bytes_per_s"] > 0
    text = trio.machine.call("plan", *arguments).stdout
    assert "MB/s; a gather " in text


def test_plan_for_many_sequences_says_so(trio: Crew, parrots: Parrots) -> None:
    arguments = ["--model", str(parrots.big), "--nodes", trio.addresses(0, 1)]
    plan = trio.machine.call("plan", *arguments, "--optimise", "throughput")
    assert "tokens/s of many sequences" in plan.stdout
    wrong = trio.machine.call("plan", *arguments, "--optimise", "beauty")
    assert wrong.code == 2
    assert "choose latency or throughput" in wrong.stderr


def test_plan_loads_nothing(trio: Crew, parrots: Parrots) -> None:
    before = [node.log.count("loaded layer") for node in trio.nodes]
    trio.machine.call("plan", "--model", str(parrots.signs), "--nodes", trio.addresses())
    assert [node.log.count("loaded layer") for node in trio.nodes] == before


def test_generate_json_has_the_keys_of_the_contract(trio: Crew, parrots: Parrots) -> None:
    arguments = ["--nodes", trio.addresses(0, 1), "--layers", "0-1,1-4", "--max-tokens", "5"]
    command = ["generate", "abc", "--model", str(parrots.alphabet), *arguments]
    answer = trio.machine.run(*command, "--seed", "7", "--json").json
    assert answer["model"] == str(parrots.alphabet)
    assert len(answer["prompt_token_ids"]) == 3
    assert len(answer["token_ids"]) == 5
    assert answer["tokens"] == ["d", "e", "f", "g", "h"]
    assert answer["text"] == "defgh"
    assert answer["finish_reason"] == "length"
    assert answer["seed"] == 7
    assert answer["logprobs"] is None
    assert answer["stages"] == [
        {"rank": 0, "node": trio.nodes[0].ready["node"], "layers": [0, 1]},
        {"rank": 1, "node": trio.nodes[1].ready["node"], "layers": [1, 4]},
    ]
    timing = answer["timing"]
    assert set(timing) >= {"load_s", "ttft_s", "decode_tok_s", "total_s", "per_stage"}
    assert timing["total_s"] >= timing["ttft_s"] > 0
    assert [stage["rank"] for stage in timing["per_stage"]] == [0, 1]
    for stage in timing["per_stage"]:
        assert set(stage) >= {"rank", "compute_ms", "queue_ms", "wire_ms"}
        assert stage["compute_ms"] > 0


def test_generate_ends_its_text_with_a_closing_line(trio: Crew, parrots: Parrots) -> None:
    command = ["generate", "a", "--model", str(parrots.signs), "--nodes", trio.addresses(0, 1)]
    result = trio.machine.call(*command)
    assert result.code == 0
    assert result.stdout == "é€😀 Жz.\n"
    closing = result.stderr.splitlines()[-1]
    for part in ("tokens/s", "first after", "stage 0", "stage 1", "wire"):
        assert part in closing


WRONG_USAGE = [
    ["generate"],
    ["generate", "a", "--token-ids", "1,2"],
    ["generate", "a", "--no-such-flag"],
    ["generate", "--token-ids", "1,x"],
    ["generate", "a", "--max-tokens", "-1"],
    ["generate", "a", "--temperature", "-0.5"],
    ["generate", "a", "--temperature", "nan"],
    ["generate", "a", "--top-p", "0"],
    ["generate", "a", "--top-p", "1.5"],
    ["generate", "a", "--top-k", "-1"],
    ["generate", "a", "--min-p", "1.5"],
    ["generate", "a", "--repetition-penalty", "0"],
    ["generate", "a", "--presence-penalty", "-2.5"],
    ["generate", "a", "--frequency-penalty", "nan"],
    ["generate", "a", "--logit-bias", "5"],
    ["generate", "a", "--logit-bias", "5=much"],
    ["generate", "a", "--logit-bias", "5=101"],
    ["generate", "a", "--logit-bias", "5=1", "--logit-bias", "5=2"],
    ["generate", "a", "--min-tokens", "-1"],
    ["generate", "a", "--prompt-logprobs", "101"],
    ["generate", "a", "--seed", "-1"],
    ["generate", "a", "--logprobs", "-1"],
    ["generate", "a", "--bos", "perhaps"],
    ["generate", "a", "--dtype", "int3"],
    ["generate", "a", "--layers", "0-4,5-8"],
    ["node", "--port", "70000"],
    ["node", "--memory", "much"],
    ["node", "--device", "tpu"],
    ["node", "--peer", "here"],
    ["generate", "a", "--nodes", "127.0.0.1:99999"],
    ["bench", "--perplexity", "/no/such/text"],
    ["no-such-command"],
]


@pytest.mark.parametrize("usage", WRONG_USAGE, ids=" ".join)
def test_wrong_usage_exits_with_2_and_names_the_flag(machine: Machine, usage: list[str]) -> None:
    """In this process, since there are many; the next test is the same with a real one."""
    check_usage_error(usage, machine.call(*usage))


@pytest.mark.parametrize(
    "usage",
    [
        ["a", "--max-tokens", "5000000000"],
        ["a", "--context", "999999999999"],
        ["a", "--stop-token-id", "999999999999"],
        ["--token-ids=-1"],
        ["--token-ids", "9" * 30],
        ["a" * (1 << 20) + "b"],
        ["a", "--model", "x" * 5000],
    ],
    ids=lambda usage: " ".join(usage)[:40],
)
def test_values_that_no_message_holds_are_wrong_usage(machine: Machine, usage: list[str]) -> None:
    result = machine.call("generate", *usage)
    assert result.code == 2
    assert "this request cannot be sent" in result.stderr


def test_a_process_exits_with_2_too(machine: Machine) -> None:
    usage = ["generate", "a", "--temperature", "-1"]
    check_usage_error(usage, machine.run(*usage))


def check_usage_error(usage: list[str], result: Result) -> None:
    """Check that wrong usage is refused, naming the flag or else the last word."""
    assert result.code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    flag = next((part for part in usage if part.startswith("--")), usage[-1])
    assert flag.removeprefix("--") in result.stderr


def test_an_unknown_configuration_key_is_named_with_the_nearest(machine: Machine) -> None:
    machine.config_path.write_text("contxt = 512\n")
    error = machine.call("plan").error
    assert str(machine.config_path) in error
    assert "contxt" in error
    assert "context" in error


@pytest.mark.parametrize("text", ["context = [", 'context = "many"\n'])
def test_an_unusable_configuration_is_refused(machine: Machine, text: str) -> None:
    machine.config_path.write_text(text)
    result = machine.call("plan")
    assert result.code in (1, 2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_flag_before_variable_before_file(trio: Crew, parrots: Parrots, machine: Machine) -> None:
    machine.config_path.write_text("context = 300\n[plan]\ndtype = 'float32'\n")
    arguments = ["plan", "--json", "--model", str(parrots.alphabet), "--nodes", trio.addresses(0)]
    variable = {"SHARDNET_CONTEXT": "400"}
    assert machine.call(*arguments).json["context"] == 300
    assert machine.call(*arguments, environment=variable).json["context"] == 400
    plan = machine.call(*arguments, "--context", "500", environment=variable).json
    assert plan["context"] == 500
    assert plan["dtype"] == "float32"


def test_a_node_beyond_loopback_without_protection_is_refused(machine: Machine) -> None:
    error = machine.run("node", "--host", "0.0.0.0", "--port", "0").error
    assert "0.0.0.0" in error
    assert "--insecure" in error


def test_a_port_in_use_is_named(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = machine.run("node", "--port", str(port)).error
    assert str(port) in error
    assert "--port" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_a_device_that_is_not_here_is_named(machine: Machine) -> None:
    assert "--device cuda" in machine.run("node", "--device", "cuda", "--port", "0").error


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (["plan", "--context", "many"], "for --context: 'many': give a whole number"),
        (["plan", "--local", "-1"], "for --local: '-1': give 0 or more"),
        (["node", "--port", "70000"], "for --port: '70000': give 65535 or less"),
        (["generate", "a", "--temperature", "hot"], "for --temperature: 'hot': give a number"),
        (["bench", "--parallel", "1", "--parallel", "x"], "'x': give a whole number"),
        (["pull", "file:///m/a%20b"], "use --model /m/a b"),
        (["pull", "./m"], "use --model ./m"),
        (["pull", "https://host/m"], "download the file with another program and give its path"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_a_wrong_value_is_told_with_what_would_do(
    machine: Machine, usage: list[str], words: str
) -> None:
    result = machine.call(*usage)
    assert result.code == 2
    assert words in " ".join(result.stderr.split())


def test_a_wrong_value_is_told_with_where_it_stands(machine: Machine) -> None:
    by_variable = machine.call("plan", environment={"SHARDNET_CONTEXT": "many"})
    assert "for SHARDNET_CONTEXT: 'many': give a whole number" in by_variable.stderr
    machine.config_path.write_text("local = -1\n")
    by_file = machine.call("plan")
    assert f"for local in {machine.config_path}: -1: give 0 or more" in by_file.stderr
    assert by_variable.code == by_file.code == 2


@pytest.mark.parametrize("group", [[], ["key"], ["cache"], ["service"]], ids=" ".join)
def test_no_line_of_a_list_of_commands_is_cut(machine: Machine, group: list[str]) -> None:
    shown = machine.call(*group, "--help").stdout
    assert "Commands:" in shown
    assert "..." not in shown.split("Commands:")[1]


def test_a_node_that_is_not_asked_is_not_denied(machine: Machine) -> None:
    """It runs without a key, which this command has."""
    machine.start_nodes("open")
    assert machine.run("key", "new").code == 0
    told = machine.run("status")
    assert "node open of this machine is not asked" in told.stderr
    assert "no node of this machine can be asked" in told.error


@pytest.mark.parametrize(
    "usage",
    [
        ["generate", "x", "--model", "~nobody-here/x"],
        ["generate", "x", "--trace", "~nobody-here/x"],
        ["generate", "--prompts-file", "~nobody-here/x"],
        ["generate", "x", "--json-schema", "~nobody-here/x"],
    ],
)
def test_the_home_of_a_user_who_is_not_there_is_named(machine: Machine, usage: list[str]) -> None:
    result = machine.call(*usage)
    assert result.code in (1, 2)
    assert "~nobody-here" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_unloading_nothing_is_said(machine: Machine) -> None:
    machine.start_nodes("empty")
    assert "no model was loaded" in machine.run("unload").stderr


def test_nodes_and_local_exclude_each_other(machine: Machine) -> None:
    error = machine.call("generate", "a", "--nodes", "127.0.0.1:1", "--local", "2").error
    assert "--nodes" in error
    assert "--local" in error


def test_the_register_forgets_a_node_that_was_killed(machine: Machine, tmp_path: Path) -> None:
    machine.runtime_dir.mkdir()
    entry = {"node": "0" * 32, "name": "gone", "address": "127.0.0.1:1", "pid": 1, "started": -9.0}
    (machine.runtime_dir / f"{'0' * 32}.json").write_text(json.dumps(entry))
    assert machine.run("nodes", "--json").json == []
    assert list(machine.runtime_dir.iterdir()) == []


def test_a_peer_beside_a_node_of_this_machine_is_said_not_to_be_asked(
    trio: Crew, parrots: Parrots
) -> None:
    asked = ["generate", "a", "--model", str(parrots.signs), "--peer"]
    words = "is not asked: the node of this machine is"
    stranger = trio.machine.call(*asked, "127.0.0.1:9")
    assert stranger.code == 0
    assert f"--peer 127.0.0.1:9 {words}" in stranger.stderr
    assert words not in trio.machine.call(*asked, trio.nodes[0].address).stderr


def test_of_an_endless_prompt_no_more_is_read_than_shows_it(machine: Machine) -> None:
    result = machine.call("generate", "-", stdin="a" * (2**20 + 1000))
    assert result.code == 2
    assert f"text of {2**20 + 1} characters: give text of at most {2**20}" in result.stderr
