"""What has one cause is one finding, however many nodes meet it, and it names the cause."""

from __future__ import annotations

from dataclasses import replace as replace_field

import pytest
from msgspec.structs import replace
from support.cluster.checkup_facts import (
    CLUSTER,
    HOSTS,
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
)

from shardnet.cluster.diagnosis.facts import Answered, Facts, Severity, Topic
from shardnet.cluster.machine.virtual_networks import VirtualNetworks
from shardnet.errors import AuthenticationError
from shardnet.wire.messages.diagnostics import (
    AddressView,
    MulticastState,
    NodeReport,
    PeerView,
    RefusedHost,
    Seen,
)
from shardnet.wire.messages.membership import ReportReply

OTHER = "b" * 16
BERT = address_of("bert")
LOOPBACK = [interface("127.0.0.1", interface="lo")]
LONELY = ("info", "link", "anna (10.0.0.1:7433)")


def alone(**report: object) -> Facts:
    """Anna knows nobody."""
    return facts(reply("anna", **report))


# --- keys


def test_no_key_beside_a_cluster_that_announces_itself_is_the_one_problem() -> None:
    """Whether a node runs here, on loopback then, or none."""
    found = (record("bert"), record("cleo"))
    here = reply("anna", cluster="", interfaces=LOOPBACK)
    with_node = replace_field(facts(here), key=NO_KEY, found=found)
    without = replace_field(facts(), key=NO_KEY, replies=(), asked="", found=found)
    for told in (with_node, without):
        problems = [line for line in findings(told) if line[0] == "problem"]
        assert problems == [("problem", "key", "this machine")]
        finding = the_one(told, "key")
        assert "it has no cluster key" in finding.what
        assert f"cluster {CLUSTER} are on this network: bert ({BERT}), cleo" in finding.what
        assert "`shardnet key show` on bert and `shardnet key join`" in finding.remedy
    assert findings(with_node) == {("problem", "key", "this machine")}


def test_without_a_key_and_nodes_around_that_is_why_none_is_known() -> None:
    told = replace_field(alone(cluster="", interfaces=LOOPBACK), key=NO_KEY, found=())
    finding = the_one(told, "link", Severity.INFO)
    assert "without a cluster key it serves this machine alone" in finding.what
    assert "key new" in finding.remedy


def test_the_node_here_that_was_started_before_the_key_came_is_one_problem() -> None:
    keyless = AddressView(address="127.0.0.1:7433", seen="other key", why="it has no cluster key")
    own = record("anna", cluster="", address="127.0.0.1:7433")
    told = replace_field(facts(), replies=(), asked="", deaf=(keyless,), found=(own,))
    assert findings(told) == {("problem", "node", "this machine")}
    assert "start it again" in the_one(told, "node").remedy


def with_other_key(viewer: str, *others: str, **report: object) -> ReportReply:
    """A node that leaves others out for their key."""
    peers = [
        unlinked(name, AddressView(address=address_of(name), seen="not tried"), refusal="other key")
        for name in others
    ]
    linked = [view(name) for name in HOSTS if name not in (viewer, *others)]
    records = [record(name, cluster=OTHER) for name in others]
    multicast = heard(viewer, *(name for name in HOSTS if name != viewer), records=records)
    return reply(viewer, *peers, *linked, multicast=multicast, **report)


def test_another_key_is_one_problem_for_all_that_meet_it() -> None:
    """Anna and bert see cleo's record, and refuse the links that she opens with --peer."""
    refused = RefusedHost(
        host="10.0.0.3",
        code=AuthenticationError.code,
        why="it holds another cluster key",
        n_times=3,
        age_s=1.0,
        remedy="run",
    )
    told = facts(*(with_other_key(name, "cleo", refused=[refused]) for name in ("anna", "bert")))
    assert findings(told) == {("problem", "key", "anna, bert → cleo")}


def test_who_holds_another_key_than_all_is_told_so_once() -> None:
    """Cleo has named anna with --peer besides."""
    unreached = AddressView(address=address_of("anna"), seen="other key", why="another key")
    told = facts(
        with_other_key("cleo", "anna", "bert", unreached=[unreached]), asked_node="cleo-id"
    )
    assert findings(told) == {("problem", "key", "cleo → anna, bert")}


def test_a_host_that_several_nodes_refused_is_one_problem() -> None:
    """Without mDNS nothing else shows it."""
    refused = RefusedHost(
        host="10.0.0.9",
        code=AuthenticationError.code,
        why="key",
        n_times=2,
        age_s=9.0,
        remedy="run",
    )
    later = replace(refused, age_s=3.0)
    told = facts(
        reply("anna", view("bert"), refused=[refused]),
        reply("bert", view("anna"), refused=[later]),
    )
    assert findings(told) == {("problem", "key", "anna, bert")}
    assert "it refused 10.0.0.9 4 times, at last 3 s ago: key" in the_one(told, "key").what


def test_a_node_with_another_key_that_has_left_is_nothing_to_tell() -> None:
    gone = unlinked("cleo", refusal="it has another cluster key", told_by=[])
    told = facts(reply("anna", view("bert"), gone), reply("bert", view("anna")))
    assert findings(told) == set()


# --- ports


def closed(name: str, seen: Seen, *, linked: bool = False, host: str = "") -> PeerView:
    tried = AddressView(address=f"{host or HOSTS[name]}:7433", seen=seen)
    return view(name, is_linked=linked, address="", addresses=[tried])


def test_a_port_that_nobody_reaches_is_one_problem() -> None:
    told = facts(
        reply("anna", closed("bert", "dropped", linked=True), view("cleo")),
        reply("cleo", closed("bert", "dropped", linked=True), view("anna")),
    )
    assert findings(told) == {("problem", "port", "anna, cleo → bert")}
    remedy = the_one(told, "port").remedy
    assert remedy.startswith("open TCP port 7433 (`sudo ufw allow 7433/tcp`")


def test_a_machine_that_reaches_nobody_has_one_problem() -> None:
    """The address it was told with --peer is among them."""
    unreached = AddressView(address=BERT, seen="dropped", why="no answer")
    told = alone(
        peers=[closed("bert", "dropped"), closed("cleo", "dropped")], unreached=[unreached]
    )
    assert findings(told) == {("problem", "port", "anna → bert, cleo")}
    assert f"{BERT}, {address_of('cleo')} (no answer at all" in the_one(told, "port").what


def test_two_networks_are_told_as_such() -> None:
    told = alone(
        peers=[
            closed("bert", "unreachable", host="10.9.0.2"),
            closed("cleo", "unreachable", host="10.9.0.3"),
        ]
    )
    assert findings(told) == {("problem", "port", "anna → bert, cleo")}
    finding = the_one(told, "port")
    assert "that is another network than 10.0.0.0/24 of anna" in finding.what
    assert "one network" in finding.remedy
    near = the_one(alone(peers=[closed("bert", "unreachable")]), "port")
    assert "another network" not in near.line
    named = the_one(alone(peers=[closed("bert", "unreachable", host="bert.lan")]), "port")
    assert "another network" not in named.line


def test_an_address_that_is_not_needed_is_no_news() -> None:
    addresses = [
        AddressView(address=BERT, seen="answers", rtt_s=0.0004),
        AddressView(address="[fd00::2]:7433", seen="dropped"),
    ]
    told = facts(reply("anna", view("bert", addresses=addresses)), reply("bert", view("anna")))
    assert findings(told) == set()


# --- multicast: why nobody is known


@pytest.mark.parametrize(
    ("multicast", "severity", "words", "remedy"),
    [
        (
            heard(),
            Severity.PROBLEM,
            "does not even hear itself by multicast on eth0",
            "ufw allow 53",
        ),
        (
            heard("anna"),
            Severity.INFO,
            "no other machine is heard by multicast in 60 min on eth0",
            "client isolation",
        ),
        (
            heard("anna", others=["eth0"]),
            Severity.INFO,
            "other machines are heard by multicast on eth0, but no other node",
            "start `shardnet node` on another machine",
        ),
        (heard(state="off"), Severity.INFO, "was started with --no-mdns", "--peer HOST:7433"),
    ],
)
def test_why_a_node_knows_nobody(
    multicast: MulticastState, severity: Severity, words: str, remedy: str
) -> None:
    told = alone(multicast=replace(multicast, listening_s=3600.0))
    topic = "multicast" if severity is Severity.PROBLEM else "link"
    finding = the_one(told, topic, severity)
    assert words in finding.what
    assert remedy in finding.remedy


def test_mdns_that_was_switched_off_while_others_use_it_names_them() -> None:
    told = replace_field(alone(multicast=heard(state="off")), found=(record("bert"),))
    assert f"mDNS shows bert ({BERT})" in the_one(told, "link", Severity.INFO).what


def test_a_node_that_has_just_started_is_given_time_to_know_others() -> None:
    told = alone(multicast=heard(listening_s=1.0), uptime_s=2.0)
    assert findings(told) == {LONELY}
    assert "it was started 2 s ago" in the_one(told, "link", Severity.INFO).what


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (heard("anna"), "no other machine is heard by multicast"),
        (heard("anna", others=["eth0"]), "other machines are heard by multicast on eth0"),
        (heard(), "a firewall of that machine drops UDP port 5353"),
        (heard(state="off"), "it does not use mDNS"),
    ],
)
def test_a_named_node_that_answers_and_is_not_found_shows_that_mdns_does_not_pass(
    own: MulticastState, words: str
) -> None:
    answered = (Answered(node="bert-id", name="bert", address=BERT),)
    told = facts(reply("anna", multicast=own), reply("bert"), unknown=answered)
    finding = the_one(told, "multicast")
    assert f"it does not find bert ({BERT}) by mDNS, which answers: " in finding.what
    assert words in finding.what
    assert "open UDP port 5353" in finding.remedy
    assert "--peer" in finding.remedy


# --- multicast: nodes that are linked all the same


def linked_without_multicast(**multicast: MulticastState) -> Facts:
    """Three nodes that --peer has linked, and what each has heard."""
    return facts(
        *(
            reply(
                name,
                *(view(other, told_by=["named"]) for other in HOSTS if other != name),
                multicast=multicast.get(name, heard(name)),
            )
            for name in HOSTS
        )
    )


def test_nodes_that_are_linked_without_multicast_are_no_problem_and_one_line() -> None:
    told = linked_without_multicast()
    assert findings(told) == {("info", "multicast", "anna (10.0.0.1:7433)")}
    finding = the_one(told, "multicast", Severity.INFO)
    assert "anna (eth0) from bert, cleo; bert (eth0) from anna, cleo; cleo" in finding.what
    assert finding.remedy.startswith("nothing if these are all; else")
    assert "open UDP port 5353" in finding.remedy


def test_the_firewall_that_keeps_multicast_out_is_named() -> None:
    """Who does not hear itself is behind one, who hears nobody while others do most likely."""
    open_ = {name: heard(name, *HOSTS, others=["eth0"]) for name in ("anna", "bert")}
    told = linked_without_multicast(**open_, cleo=heard())
    what = the_one(told, "multicast", Severity.INFO).what
    assert "never heard by multicast: cleo (eth0) from anna, bert; cleo not even from" in what
    assert "a firewall there drops UDP 5353" in what
    told = linked_without_multicast(**open_, cleo=heard("cleo"))
    what = the_one(told, "multicast", Severity.INFO).what
    assert what.endswith("; no machine at all is heard on cleo")


def test_nodes_that_have_just_started_are_given_time_to_be_heard() -> None:
    told = linked_without_multicast()
    young = [replace(one, report=replace(report_of(one), uptime_s=2.0)) for one in told.replies]
    finding = the_one(facts(*young), "multicast", Severity.INFO)
    assert "they have just been started" in finding.what
    assert finding.remedy == "try again in a moment"


def report_of(one: ReportReply) -> NodeReport:
    assert one.report is not None
    return one.report


# --- networks that pass no multicast


@pytest.mark.parametrize(
    ("networks", "topic", "severity", "words", "remedy"),
    [
        (
            VirtualNetworks(wsl="nat", wsl_hosts=("172.20.3.4",)),
            *("wsl", Severity.PROBLEM),
            "behind NAT: other machines do not reach 172.20.3.4",
            "networkingMode=mirrored",
        ),
        (
            VirtualNetworks(wsl="nat", tailnet_hosts=("100.64.0.2",)),
            *("wsl", Severity.INFO, "do not reach its address", "--tailnet"),
        ),
        (
            VirtualNetworks(wsl="mirrored"),
            *("wsl", Severity.INFO, "in mirrored mode", "New-NetFirewallHyperVRule"),
        ),
        (VirtualNetworks(wsl="other"), "wsl", Severity.INFO, "it is WSL2, where mDNS", "--peer"),
        (
            VirtualNetworks(tailnet_hosts=("100.64.0.2",)),
            *("tailnet", Severity.INFO, "in a tailnet as 100.64.0.2", "start nodes with --tailnet"),
        ),
        (
            VirtualNetworks(tailnet_failure="Tailscale is not connected; run `tailscale up`"),
            *("tailnet", Severity.INFO, "not connected", ""),
        ),
    ],
)
def test_wsl2_and_tailnets_are_told_with_what_to_do(
    networks: VirtualNetworks, topic: Topic, severity: Severity, words: str, remedy: str
) -> None:
    finding = the_one(facts(networks=networks, key=OK_KEY), topic, severity)
    assert words in finding.what
    assert remedy in finding.remedy


def test_nodes_that_are_found_in_a_tailnet_are_fine() -> None:
    linked = replace(view("bert"), told_by=["tailnet", "bert-id"])
    networks = VirtualNetworks(tailnet_hosts=("100.64.0.2",))
    told = facts(reply("anna", linked), networks=networks)
    assert the_one(told, "tailnet", Severity.OK).what.endswith("where nodes find each other")


def test_a_node_that_answers_in_a_tailnet_is_found_with_the_flag() -> None:
    answered = (Answered(node="bert-id", name="bert", address="100.64.0.3:7433"),)
    told = facts(reply("anna", multicast=heard("anna")), reply("bert"), unknown=answered)
    assert "start both nodes with --tailnet" in the_one(told, "multicast").remedy
