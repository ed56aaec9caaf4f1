"""From facts to findings: a cluster that is well, and every way in which it is not."""

from __future__ import annotations

from dataclasses import replace as replace_field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from support.cluster.checkup_facts import (
    CLUSTER,
    GIB,
    NO_KEY,
    OK_KEY,
    address_of,
    facts,
    findings,
    heard,
    interface,
    record,
    reply,
    the_one,
    unlinked,
    view,
    with_info,
)
from support.soak import examples
from support.strategies.msgspec_strategies import values

from shardnet.cluster.diagnosis.diagnosis import diagnose
from shardnet.cluster.diagnosis.facts import Facts, KeyFacts, ModelAsked, Severity
from shardnet.cluster.placement.figures import HeldModel, ModelShape
from shardnet.errors import (
    AuthenticationError,
    LinkClosedError,
    PeerSilentError,
    VersionMismatchError,
)
from shardnet.types import DType, NodeId
from shardnet.wire.messages.diagnostics import AddressView, PressureState, RefusedHost
from shardnet.wire.messages.membership import ReportReply

OTHER = "b" * 16
BERT = address_of("bert")
SHAPE = ModelShape(
    n_layers=10,
    layer_bytes=GIB,
    embedding_bytes=GIB // 2,
    head_bytes=GIB // 2,
    hop_bytes=4096,
    context=2048,
    kv_block_bytes=2**20,
    activation_bytes=2**20,
)
"""About 11.3 GiB."""


def refused(
    error: type[Exception], why: str, age_s: float = 5.0, remedy: str | UnsetType = UNSET
) -> RefusedHost:
    code = getattr(error, "code")  # noqa: B009
    return RefusedHost(host="10.0.0.9", code=code, why=why, n_times=3, age_s=age_s, remedy=remedy)


def bert_at(*seen: str) -> Facts:
    """Anna has no link to bert, whose addresses were seen like this."""
    addresses = [
        AddressView(address=f"10.0.{number}.2:7433", seen=each, why="as it was")  # type: ignore[arg-type]
        for number, each in enumerate(seen)
    ]
    return facts(reply("anna", unlinked("bert", *addresses)))


def test_a_cluster_that_is_well_has_nothing_but_good_news() -> None:
    said = diagnose(facts())
    assert findings(facts()) == set()
    assert {finding.topic for finding in said} >= {"key", "node", "version", "link", "multicast"}
    lines = "\n".join(finding.line for finding in said)
    assert "linked at 10.0.0.2:7433, round trip 0.4 ms" in lines
    assert "heard by multicast on eth0 3 s ago" in lines


def test_problems_come_first_and_what_is_fine_last() -> None:
    said = diagnose(bert_at("refused"))
    order = ["problem", "info", "ok"]
    severities = [finding.severity.value for finding in said]
    assert severities == sorted(severities, key=order.index)
    assert severities[0] == "problem"


# --- keys, names, versions


@pytest.mark.parametrize(
    ("key", "severity", "words"),
    [
        (KeyFacts(path="/k", failure="the key file /k is open to others"), "problem", "open to"),
        (KeyFacts(path="/k"), "info", "there is no cluster key at /k"),
        (KeyFacts(path="/k", is_set_aside=True), "info", "--insecure"),
        (KeyFacts(path="/k", fingerprint=CLUSTER), "ok", f"cluster {CLUSTER}"),
    ],
)
def test_the_key_of_this_machine(key: KeyFacts, severity: str, words: str) -> None:
    [finding] = [f for f in diagnose(facts(key=key)) if f.topic == "key"]
    assert finding.severity.value == severity
    assert words in finding.line


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (
            OTHER,
            CLUSTER,
            ["that of cluster bbbb", "on bert", "shardnet key show", "if they belong"],
        ),
        ("", CLUSTER, ["no cluster key on bert", "run `shardnet key join` there"]),
        (OTHER, "", ["none on anna", "run `shardnet key join` on anna"]),
    ],
)
def test_a_node_with_another_key_is_told_by_fingerprints(
    theirs: str, ours: str, words: list[str]
) -> None:
    peer = unlinked("bert", refusal="it has another cluster key, or one of both has none")
    multicast = heard(records=[record("bert", cluster=theirs)])
    told = facts(reply("anna", peer, cluster=ours, multicast=multicast))
    line = the_one(told, "key").line
    assert all(word in line for word in words), line


def test_another_protocol_version_is_told() -> None:
    peer = unlinked("bert", refusal="it speaks protocol version 2 and this node 1: install")
    multicast = heard(records=[record("bert", protocol=2)])
    told = facts(reply("anna", peer, multicast=multicast))
    assert "protocol version 2" in the_one(told, "version").line


def test_other_software_is_told_of_nodes_that_could_and_could_not_be_asked() -> None:
    other = view("bert", version="0.3.0")
    assert "0.3.0" in the_one(facts(reply("anna", other)), "version", Severity.INFO).line
    bert = with_info(reply("bert", view("anna")), version="0.0.9")
    told = facts(reply("anna", view("bert")), bert)
    assert "0.0.9" in the_one(told, "version").line


def test_two_nodes_with_one_name_are_told_apart_by_their_ids() -> None:
    twin = replace(reply("bert", view("anna")), name="anna")
    told = facts(reply("anna", replace(view("bert"), name="anna")), twin)
    line = the_one(told, "name").line
    assert "2 nodes have this name: anna (anna-i), anna (bert-i)" in line
    assert "--name" in line


def test_the_record_of_a_node_that_was_restarted_is_no_second_node() -> None:
    """Its old id lingers, and another one answers at its address."""
    old = unlinked("bert", AddressView(address=BERT, seen="other node"), node="old-id")
    told = facts(reply("anna", view("bert"), old), reply("bert", view("anna")))
    assert findings(told) == {("info", "link", "anna → bert (old-id)")}


def test_two_machines_with_one_id_are_told() -> None:
    twin = with_info(reply("anna", view("bert")), host_id="another-host")
    told = facts(reply("anna", view("bert")), twin, reply("bert", view("anna")))
    assert "another-host and host-of-anna" in the_one(told, "name").line


# --- links


def test_what_is_wrong_with_a_gpu_is_told_of_its_node() -> None:
    trouble = "GPU 0: it computes at 800 of 2000 MHz: it is too warm; see its cooling"
    bert = reply("bert", view("anna"), gpu_troubles=[trouble])
    found = the_one(facts(reply("anna", view("bert")), bert), "gpu", Severity.INFO)
    assert found.line == f"bert: {trouble}"


def test_who_computes_without_the_compiled_kernels_is_named() -> None:
    bert, cleo = with_info(reply("bert"), isa="none"), with_info(reply("cleo"), isa="off")
    well = with_info(reply("anna"), isa="avx2")
    said = findings(facts(well, bert, cleo, has_kernels=False))
    assert {found for found in said if found[1] == "kernels"} == {
        ("problem", "kernels", "bert"),
        ("info", "kernels", "cleo"),
    }
    nobody = replace_field(facts(), replies=(), asked="", has_kernels=False)
    finding = the_one(nobody, "kernels", Severity.INFO)
    assert finding.where == "this machine"
    assert "many times slower" in finding.what
    assert "C compiler" in finding.remedy


@pytest.mark.parametrize(
    ("seen", "topic", "words"),
    [
        (["refused"], "port", ["nothing listens there", "start `shardnet node` there"]),
        (["dropped"], "port", ["though mDNS shows it", "no answer at all", "firewall"]),
        (["hangs"], "port", ["accepted and then nothing", "frozen"]),
        (["unreachable"], "port", ["cannot be reached", "routes"]),
        (["failed"], "port", ["as it was", "see whether a node"]),
        (["other key"], "key", ["another cluster key", "shardnet key join"]),
        (["other version"], "version", ["another version", "update the older one"]),
        (["unreachable", "refused", "dropped"], "port", ["firewall", "10.0.1.2:7433 (the conn"]),
        (["other node", "hangs"], "port", ["frozen", "10.0.0.2:7433 (another node"]),
    ],
)
def test_a_node_that_is_not_reached(seen: list[str], topic: str, words: list[str]) -> None:
    finding = the_one(bert_at(*seen), topic)
    assert finding.where == "anna → bert"
    assert all(word in finding.line for word in words), finding.line


@pytest.mark.parametrize("seen", [["other node"], ["not tried"], [], ["answers"]])
def test_a_node_that_may_just_have_come_or_gone_is_no_problem(seen: list[str]) -> None:
    assert findings(bert_at(*seen)) == {("info", "link", "anna → bert")}


def test_a_node_that_nobody_tells_of_any_more_has_left() -> None:
    gone = unlinked("bert", AddressView(address=BERT, seen="refused"), told_by=[])
    assert (
        "it was here and has left"
        in the_one(facts(reply("anna", gone)), "link", Severity.INFO).line
    )


def test_a_port_that_only_one_side_reaches_is_told_by_the_side_that_does_not() -> None:
    closed = view("bert", address="", addresses=[AddressView(address=BERT, seen="dropped")])
    told = facts(reply("anna", closed), reply("bert", view("anna")))
    finding = the_one(told, "port")
    assert finding.where == "anna → bert"
    assert f"linked, but not to be reached from this side: {BERT} (no answer" in finding.what
    assert "firewall" in finding.remedy


def test_the_address_that_is_used_and_why_the_others_are_not() -> None:
    addresses = [
        AddressView(address=BERT, seen="answers", rtt_s=0.0004),
        AddressView(address="10.1.0.1:7433", seen="other node", why="another node answers there"),
        AddressView(address="[fd00::2]:7433", seen="answers", rtt_s=0.003),
    ]
    told = facts(reply("anna", view("bert", addresses=addresses)), reply("bert", view("anna")))
    finding = the_one(told, "address", Severity.INFO)
    assert finding.what.startswith(f"uses {BERT}; ")
    assert "not 10.1.0.1:7433: another node answers there" in finding.what
    assert "not [fd00::2]:7433: answers in 3 ms, and is not better" in finding.what


def test_a_slow_round_trip_and_a_bandwidth_are_told() -> None:
    slow = view("bert", rtt_s=0.05, bytes_per_s=11.5e6)
    told = facts(reply("anna", slow), reply("bert", view("anna")))
    finding = the_one(told, "link", Severity.INFO)
    assert "round trip 50 ms, about 12 MB/s" in finding.what
    assert "cable" in finding.remedy


def test_unlike_packet_sizes_are_told_once() -> None:
    bert = reply("bert", view("anna"), interfaces=[interface("10.0.0.2", mtu=9000)])
    finding = the_one(facts(reply("anna", view("bert")), bert), "mtu", Severity.INFO)
    assert "1500 bytes on eth0 and 9000 bytes on eth0" in finding.what


@pytest.mark.parametrize(
    ("ahead_s", "words"),
    [(90.0, "90.0 s ahead of"), (-2.5, "2.5 s behind"), (1.6e8, "5.1 years ahead of")],
)
def test_a_clock_that_is_wrong_is_information(ahead_s: float, words: str) -> None:
    bert = replace(reply("bert", view("anna")), clock_ahead_s=ahead_s)
    finding = the_one(facts(reply("anna", view("bert")), bert), "clock", Severity.INFO)
    assert words in finding.what


def test_where_a_node_is_announced_and_why_not_at_its_other_addresses() -> None:
    bridge = interface(
        "172.17.0.1",
        interface="docker0",
        is_told=False,
        verdict="bridge of containers or virtual machines: other hosts may have the same address",
    )
    lo = interface("127.0.0.1", interface="lo", is_told=False, verdict="loopback")
    other = interface("10.5.0.1", interface="eth1", is_told=False)
    many = [interface("10.0.0.1"), bridge, lo, other]
    said = diagnose(facts(reply("anna", interfaces=many)))
    [finding] = [f for f in said if f.topic == "address"]
    assert finding.severity is Severity.OK
    assert "announced at 10.0.0.1 (eth0); not 172.17.0.1 (docker0): bridge" in finding.what
    assert "not 10.5.0.1 (eth1): it does not listen there" in finding.what
    assert "127.0.0.1" not in finding.what
    alone = reply("anna", interfaces=[lo])
    assert ("info", "address", "anna") in findings(facts(alone))


# --- multicast


def test_a_record_that_came_another_way_counts_until_an_announcement_is_overdue() -> None:
    for listening_s, unheard in ((5.0, 0), (1000.0, 1)):
        multicast = heard("anna", records=[record("bert")], listening_s=listening_s)
        told = facts(reply("anna", view("bert"), multicast=multicast), reply("bert", view("anna")))
        assert len(findings(told)) == unheard


@pytest.mark.parametrize(
    ("multicast", "severity", "words"),
    [
        (heard(state="off"), "info", "neither announces itself"),
        (heard(state="failed", failure="no network"), "problem", "no network"),
    ],
)
def test_mdns_that_is_off_or_fails(multicast: object, severity: str, words: str) -> None:
    bert = reply("bert", view("anna"), multicast=multicast)
    told = facts(reply("anna", view("bert")), bert)
    [finding] = [f for f in diagnose(told) if f.topic == "multicast" and f.where == "bert"]
    assert finding.severity.value == severity
    assert words in finding.line


def test_a_peer_whose_mdns_is_off_is_not_expected_to_be_heard() -> None:
    silent = reply("anna", view("bert"), multicast=heard())
    bert = reply("bert", view("anna"), multicast=heard(state="off"))
    assert ("info", "multicast", "anna → bert") in findings(facts(silent, bert))


# --- strangers, and what the command was given


@pytest.mark.parametrize(
    ("host", "severity"),
    [
        (refused(AuthenticationError, "it holds another cluster key", remedy="run"), "problem"),
        (refused(AuthenticationError, "it holds another cluster key", 500, "run"), "info"),
        (refused(AuthenticationError, "it does not speak TLS; it is no node"), "info"),
        (refused(VersionMismatchError, "the peer speaks version 2", remedy="install"), "problem"),
        (refused(PeerSilentError, "no hello came within 5 s"), "info"),
    ],
)
def test_a_stranger_that_was_refused(host: RefusedHost, severity: str) -> None:
    told = facts(reply("anna", view("bert"), refused=[host]), reply("bert", view("anna")))
    [finding] = [f for f in diagnose(told) if "10.0.0.9" in f.line]
    assert finding.severity.value == severity
    assert "it refused 10.0.0.9 3 times, at last" in finding.what


def test_a_connection_that_was_only_opened_is_nothing_to_tell() -> None:
    host = refused(LinkClosedError, "the peer closed the connection")
    told = facts(reply("anna", view("bert"), refused=[host]), reply("bert", view("anna")))
    assert findings(told) == set()


def test_named_addresses_are_told_whoever_was_given_them() -> None:
    lost = AddressView(address="10.0.0.7:7433", seen="refused", why="10.0.0.7:7433: nothing there")
    fine = AddressView(address="10.0.0.8:7433", seen="answers", rtt_s=0.001)
    told = facts(reply("anna", view("bert"), unreached=[lost]), named=(lost, fine))
    assert {f.where for f in diagnose(told) if "10.0.0.7" in f.what} == {"anna", "this machine"}
    assert any("10.0.0.8:7433 answers, round trip 1 ms" in f.what for f in diagnose(told))


def test_without_a_node_only_what_shows_is_judged() -> None:
    alone = replace_field(facts(), replies=(), asked="", found=())
    assert findings(alone) == {
        ("info", "node", "this machine"),
        ("info", "multicast", "this machine"),
    }
    found = (record("bert"), record("cleo", cluster=OTHER))
    told = findings(replace_field(alone, found=found))
    assert ("problem", "key", f"cleo ({address_of('cleo')})") in told
    assert len(told) == 2


def test_a_node_that_does_not_answer_or_gives_no_report_is_told() -> None:
    deaf = AddressView(address=BERT, seen="hangs", why=f"{BERT}: no answer within 2 s")
    assert "restart it" in the_one(facts(deaf=(deaf,)), "node").line
    keyless = AddressView(
        address=BERT, seen="other key", why=f"{BERT}: no key", remedy="run `key join`"
    )
    for key, remedy in ((OK_KEY, "that it was started with"), (NO_KEY, "; run `key join`")):
        line = the_one(facts(deaf=(keyless,), key=key), "node").line
        assert f"the node at {BERT} does not answer: no key; " in line
        assert line.endswith(remedy)
    late = replace_field(facts(), replies=(), failure="it took longer than 10 s")
    assert "gave no report: it took longer" in the_one(late, "node").line
    missing = ReportReply(request=1, node="bert-id", name="bert", failure="no report within 4 s")
    assert findings(facts(reply("anna", view("bert")), missing)) == {("info", "node", "bert")}


# --- a model


def asked(**changes: object) -> ModelAsked:
    values_ = {"model": "/m", "model_id": "1" * 64, "shape": SHAPE, "dtype": DType.BFLOAT16}
    return ModelAsked(**values_ | changes)  # type: ignore[arg-type]


def with_memory(*gib: int, model: ModelAsked | None = None, **report: object) -> Facts:
    """Nodes with so much memory, that all have the checkpoint unless `report` says otherwise."""
    replies = [
        with_info(
            reply(name, **{"model_id": "1" * 64, **report}),  # type: ignore[arg-type]
            memory_bytes=size * GIB,
        )
        for name, size in zip(("anna", "bert", "cleo"), gib, strict=False)
    ]
    return replace_field(facts(), replies=tuple(replies), model=model or asked())


@pytest.mark.parametrize(
    ("gib", "severity", "words"),
    [
        ([4, 16], Severity.OK, "fits alone on bert"),
        ([8, 6], Severity.OK, "fits on no node alone, together on anna (8.00 GiB), bert (6.00"),
        ([4, 4], Severity.PROBLEM, "does not fit: anna has 4.00 GiB"),
        ([], Severity.OK, "no node was there to ask"),
    ],
)
def test_whether_a_model_fits_and_where(gib: list[int], severity: Severity, words: str) -> None:
    [finding] = [f for f in diagnose(with_memory(*gib)) if f.where == "/m"]
    assert finding.severity is severity
    assert words in finding.line


def test_a_node_that_has_less_for_a_stage_than_it_reports_counts_with_that() -> None:
    """As one of two devices between which a layer does not lie."""
    held = {NodeId("anna-id"): HeldModel(shape=SHAPE, memory_bytes=4 * GIB)}
    for model, severity in ((asked(), Severity.OK), (asked(held=held), Severity.PROBLEM)):
        [finding] = [f for f in diagnose(with_memory(16, model=model)) if f.where == "/m"]
        assert finding.severity is severity


def test_nodes_that_drain_or_rest_hold_no_model() -> None:
    """As in plans, which are made without them."""
    both = with_memory(4, 16)
    anna, bert = both.replies
    for leaves in ({"is_draining": True}, {"rests": "its owner types"}):
        told = replace_field(both, replies=(anna, with_info(bert, **leaves)))
        assert "does not fit: anna has 4.00 GiB" in the_one(told, "model").line
        found = [
            f.line for f in diagnose(told) if f.where == "bert" and "takes no layers" in f.what
        ]
        assert len(found) == 1
        alone = replace_field(told, replies=told.replies[1:])
        assert any("no node takes layers now" in finding.line for finding in diagnose(alone))


def test_a_checkpoint_that_is_missing_or_another_one() -> None:
    missing = {"model_id": "", "model_failure": "there is no checkpoint folder at /m"}
    assert ("info", "model", "anna") in findings(with_memory(16, **missing))
    has, has_not = with_memory(16).replies + with_memory(16, **missing).replies
    told = facts(has, replace(has_not, node="bert-id", name="bert"), model=asked())
    assert "takes its part from a node that has" in the_one(told, "model", Severity.INFO).line
    full = with_memory(16, **missing, disk_free_bytes=GIB)
    assert "its disk has 1.00 GiB free" in the_one(full, "model").line
    other = with_memory(16, model_id="2" * 64)
    assert "another model there" in the_one(other, "model").line


def test_a_model_that_this_machine_cannot_read_is_told() -> None:
    unread = asked(shape=None, failure="there is no checkpoint folder at /m")
    line = the_one(with_memory(16, model=unread), "model").line
    assert "no checkpoint folder" in line
    assert "check the path" in line


@pytest.mark.parametrize(
    ("available", "stalled", "words"),
    [
        (1, None, "1.00 GiB of 64.00 GiB of memory are available; end other programs"),
        (5, 0.5, "programs waited for memory in 50% of the last 10 s; end other programs"),
        (5, 0.05, ""),
        (20, 0.9, ""),  # somebody else's container is at its limit
    ],
)
def test_machines_short_of_memory_and_nodes_that_rest(
    available: int, stalled: float | None, words: str
) -> None:
    pressure = PressureState(available_bytes=available * GIB, total_bytes=64 * GIB, stalled=stalled)
    told = facts(with_info(reply("anna", pressure=pressure), rests="its owner types"))
    assert "takes no layers: its owner types" in the_one(told, "node", Severity.INFO).line
    lines = [finding.line for finding in diagnose(told) if finding.topic == "memory"]
    assert [words in line for line in lines] == [True] * bool(words)


# --- whatever is told


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(replies=st.lists(values(ReportReply), max_size=3), model=st.booleans())
def test_whatever_nodes_tell_there_are_lines_and_no_failure(
    replies: list[ReportReply], model: bool
) -> None:
    said = diagnose(facts(*replies, model=asked() if model else None))
    assert all(finding.line.isprintable() for finding in said)
