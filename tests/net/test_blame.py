"""`bagua-net blame`: who holds a job up, in made-up pages and among real processes that stop or do nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace

import pytest
from support.fresh_process import RunNet
from support.load_driver import StartDriver, connect_ring, plugin_library, quit_all
from support.processes import wait_until
from support.stats_page import Comm, Nic, page_bytes, page_of_this_process

from bagua.net.blame.verdict import Verdict, verdict
from bagua.net.stats import HostReport, report, snapshot

SEND, RECEIVE = 0, 1
BYTES = 1 << 20


def host(
    name: str,
    pid: int,
    rank: int,
    *waits: tuple[int, str, int],
    state: str = "S",
    age_s: int = 30,
    failed_s: float | None = None,
    nics: tuple[Nic, ...] = (),
) -> HostReport:
    """A host with one process, which waits in these directions for processes on these hosts."""
    posted = [int(time.monotonic() * 1000) - 1000 * age_s]
    comms = [
        Comm(f"10.0.0.9:1 (host {peer_host}, process {peer})", direction=direction, posted_ms=posted)
        for direction, peer_host, peer in waits
    ]
    with page_of_this_process(page_bytes(comms, rank=rank, host=name, nics=nics)):
        found = report(None, snapshot(os.getpid()))
    [process] = found.processes
    process = replace(process, pid=1000 + pid, own_pid=pid, state=state)
    process = replace(process, last_failure_age_s=failed_s, last_failure="the last failure")
    return replace(found, host=name, processes=[process])


def with_comm(report: HostReport, **changes: object) -> HostReport:
    """The only comm of its only process is different."""
    [process] = report.processes
    [comm] = process.comms
    return replace(report, processes=[replace(process, comms=[replace(comm, **changes)])])  # type: ignore[arg-type]


def kinds(found: Verdict) -> list[tuple[int | None, str]]:
    return [(one.party.rank, one.kind) for one in found.culprits]


class TestVerdict:
    def test_nobody_waits(self) -> None:
        found = verdict([host("a", 1, 0, (RECEIVE, "b", 2), age_s=3), host("b", 2, 1)], 60)
        assert (found.culprits, found.waits) == ((), ())

    def test_a_chain_is_followed_to_the_process_that_is_stopped(self) -> None:
        ring = [
            host("a", 1, 0, (RECEIVE, "c", 3)),
            host("b", 2, 1, (RECEIVE, "a", 1), (SEND, "c", 3)),
            host("c", 3, 2, (RECEIVE, "b", 2), state="T"),
        ]
        found = verdict(ring, 5)
        assert kinds(found) == [(2, "stopped")]
        [culprit] = found.culprits
        assert culprit.problem == "rank 2 (host c, pid 3) is stopped, by SIGSTOP, a terminal or a debugger."
        assert culprit.remedy == "Continue it on c: kill -CONT 1003"
        assert len(found.waits) == 4

    def test_a_process_that_waits_for_nobody(self) -> None:
        found = verdict([host("a", 1, 0, (RECEIVE, "b", 2)), host("b", 2, 1)], 5)
        assert kinds(found) == [(1, "idle")]
        assert re.match(r"rank 1 \(host b, pid 2\) has not sent for 3\d", found.culprits[0].problem)
        found = verdict([host("a", 1, 0, (SEND, "b", 2)), host("b", 2, 1)], 5)
        assert "has not posted a receive for 3" in found.culprits[0].problem

    def test_a_process_that_has_ended_on_a_host_that_was_looked_at(self) -> None:
        found = verdict([host("a", 1, 0, (RECEIVE, "b", 2)), host("b", 7, 3)], 5)
        assert [(one.kind, str(one.party)) for one in found.culprits] == [("ended", "process 2 (host b)")]
        found = verdict([host("a", 1, 0, (RECEIVE, "b", 2)), host("b", 2, 1, state="Z")], 5)
        assert kinds(found) == [(1, "ended")]

    def test_a_process_that_cannot_be_looked_at_may_not_have_ended(self) -> None:
        waiter = host("a", 1, 0, (RECEIVE, "b", 2))
        found = verdict([waiter, replace(host("b", 7, 3), denied=4)], 5)
        assert "or is one of 4 processes of other users" in found.culprits[0].problem
        found = verdict([waiter, replace(host("b", 7, 3), problems=["Process 2: ..."])], 5)
        assert "or is one of 1 whose statistics cannot be read" in found.culprits[0].problem

    def test_a_connection_that_failed_is_followed_to_the_process_that_ended(self) -> None:
        reports = [
            host("a", 1, 0, (RECEIVE, "b", 2)),
            with_comm(host("b", 2, 1, (RECEIVE, "c", 3), failed_s=40), state="failed"),
            host("c", 9, 4),
        ]
        found = verdict(reports, 5)
        assert [(one.kind, str(one.party)) for one in found.culprits] == [("ended", "process 3 (host c)")]
        assert found.culprits[0].seconds == pytest.approx(40, abs=5)

    def test_a_connection_that_failed_between_processes_that_run(self) -> None:
        ring = [
            host("a", 1, 0, (RECEIVE, "c", 3)),
            host("b", 2, 1, (RECEIVE, "a", 1)),
            with_comm(host("c", 3, 2, (RECEIVE, "b", 2), failed_s=40), state="failed"),
        ]
        found = verdict(ring, 5)
        assert kinds(found) == [(1, "failed")]
        assert "connection of rank 2 (host c, pid 3) with rank 1" in found.culprits[0].problem
        assert "the last failure" in found.culprits[0].remedy

    def test_a_process_that_waits_for_a_stopped_one_within_its_host(self) -> None:
        """Over shared memory or NVLink, which Bagua-Net does not see."""
        idle, stopped = host("b", 2, 1), host("b", 3, 2, state="T")
        both = replace(idle, processes=[*idle.processes, *stopped.processes])
        found = verdict([host("a", 1, 0, (RECEIVE, "b", 2)), both], 5)
        assert kinds(found) == [(2, "stopped")]
        both = replace(idle, processes=[*idle.processes, *host("b", 3, 2).processes])
        found = verdict([host("a", 1, 0, (RECEIVE, "b", 2)), both], 5)
        assert kinds(found) == [(1, "idle")]
        assert "another rank of its host" in found.culprits[0].remedy

    def test_a_stopped_process_of_another_job_on_the_same_host(self) -> None:
        here = [host("a", 1, 0, (RECEIVE, "b", 2)), host("b", 2, 1)]
        assert kinds(verdict([*here, host("b", 12, 1, state="T")], 5)) == [(1, "idle")]
        reports = [*here, host("b", 10, 0, state="T")]
        assert kinds(verdict(reports, 5, members={("a", 1), ("b", 2)})) == [(1, "idle")]
        reports = [*here, host("b", 3, 2, state="T")]
        assert kinds(verdict(reports, 5, members={("a", 1), ("b", 2)})) == [(2, "stopped")]

    def test_who_follows_waits_a_little_shorter(self) -> None:
        reports = [host("a", 1, 0, (RECEIVE, "b", 2), age_s=6), host("b", 2, 1, (RECEIVE, "c", 3), age_s=4)]
        assert kinds(verdict([*reports, host("c", 3, 2)], 5)) == [(2, "idle")]

    def test_jobs_on_the_same_hosts_are_judged_apart(self) -> None:
        reports = [
            *(host("a", 1, 0, (RECEIVE, "b", 2)), host("b", 2, 1)),
            *(host("a", 11, 0, (SEND, "b", 12)), host("b", 12, 1, (RECEIVE, "a", 11))),
            host("a", 21, 0, (RECEIVE, "b", 22), age_s=3),
        ]
        assert sorted(kinds(verdict(reports, 5))) == [(1, "idle"), (1, "network")]
        assert kinds(verdict(reports, 5, members={("a", 11)})) == [(1, "network")]
        assert kinds(verdict(reports, 5, members={("a", 1), ("a", 21)})) == [(1, "idle")]

    def test_a_host_without_a_report_is_named(self) -> None:
        """It gave none, or was not looked at."""
        for silent, problem, remedy in (
            (["node-b"], "process 2 (host b) is on a host that gave no report.", "node-b"),
            ([], "is on a host that was not looked at", "Add it: --hosts a,b"),
        ):
            found = verdict([host("a", 1, 0, (RECEIVE, "b", 2))], 5, silent)
            assert kinds(found) == [(None, "unknown")]
            assert problem in found.culprits[0].problem
            assert remedy in found.culprits[0].remedy

    def test_both_ends_wait_for_the_same_data(self) -> None:
        pair = [host("a", 1, 0, (SEND, "b", 2)), host("b", 2, 1, (RECEIVE, "a", 1))]
        found = verdict(pair, 5)
        assert kinds(found) == [(1, "network")]
        assert "The data of rank 0 (host a, pid 1) does not reach rank 1 (host b, pid 2) over eth0" in (
            found.culprits[0].problem
        )

    def test_a_nic_that_is_down_is_named(self) -> None:
        down = Nic("eth1", state=4, since_ms=1)
        pair = [host("a", 1, 0, (SEND, "b", 2), nics=(down,)), host("b", 2, 1, (RECEIVE, "a", 1))]
        problem = verdict(pair, 5).culprits[0].problem
        assert " On a, eth1 has no carrier, for " in problem
        assert "On b" not in problem

    def test_data_that_the_kernel_has_and_that_does_not_arrive(self) -> None:
        """A small message is no request any more once it is in the buffer of the socket."""
        circle = [
            host("a", 1, 0, (RECEIVE, "b", 2), (SEND, "b", 2)),
            host("b", 2, 1, (RECEIVE, "a", 1), (SEND, "a", 1)),
        ]
        for one in circle:
            [process] = one.processes
            process.comms[1] = replace(process.comms[1], outstanding=0, oldest_request_s=None, messages=7)
            process.comms[0] = replace(process.comms[0], messages=7)
        assert kinds(verdict(circle, 5)) == []
        comms = circle[1].processes[0].comms
        comms[0] = replace(comms[0], messages=6)
        assert kinds(verdict(circle, 5)) == [(1, "network")]
        # The rest waits for a receive that is not posted.
        comms[0] = replace(comms[0], streams=[replace(comms[0].streams[0], state="parked")])
        assert kinds(verdict(circle, 5)) == []

    def test_a_circle_blames_nobody(self) -> None:
        circle = [host("a", 1, 0, (RECEIVE, "b", 2)), host("b", 2, 1, (RECEIVE, "a", 1))]
        found = verdict(circle, 5)
        assert found.culprits == ()
        assert len(found.waits) == 2

    def test_who_connects_knows_only_the_address_of_the_other_host(self) -> None:
        receiver = host("b", 2, 1, (RECEIVE, "a", 1))
        [comm] = receiver.processes[0].comms
        told = replace(comm, peer="10.0.0.1:5 (host a, process 1)")
        sender = host("a", 1, 0, (SEND, "b", 2))
        unnamed = replace(sender.processes[0].comms[0], peer="10.0.0.1:7 (process 1)")
        third = replace(sender.processes[0], host="c", rank=2, own_pid=3, pid=3, comms=[unnamed])
        reports = [
            replace(receiver, processes=[replace(receiver.processes[0], comms=[told])]),
            replace(sender, host="c", processes=[third]),
        ]
        found = verdict(reports, 5)
        assert {(wait.waiter.rank, wait.target.host) for wait in found.waits} == {(1, "a"), (2, "a")}

    def test_who_connects_finds_the_receiver_that_names_it(self) -> None:
        sender = with_comm(host("a", 1, 0, (SEND, "b", 2)), peer="10.0.0.77:7 (process 2)")
        receiver = host("b", 2, 1, (RECEIVE, "a", 1), age_s=0)
        assert kinds(verdict([sender, receiver], 5)) == [(1, "idle")]

    def test_a_peer_whose_process_is_unknown_has_not_ended(self) -> None:
        nameless = with_comm(host("a", 1, 0, (RECEIVE, "b", 2)), peer="10.0.0.9:1 over eth0", same_host=True)
        found = verdict([nameless, host("b", 2, 1)], 5)
        assert [one.kind for one in found.culprits] == ["unknown"]

    def test_names_from_a_page_that_mean_nothing(self) -> None:
        found = verdict([host("a", 1, 0, (RECEIVE, "\x1b[2J, process", 2))], 5)
        assert found.culprits[0].kind == "unknown"
        assert "\x1b" not in found.culprits[0].problem


def test_a_real_ring_that_is_held_up(start_driver: StartDriver, net: RunNet) -> None:
    options = ["ring", "--nranks", 3, "--transport", "plugin", "--library", plugin_library()]
    variables = {"WORLD_SIZE": "3", "BAGUA_NET_STALL_S": "1", "BAGUA_DRIVER_LOG": "warn"}
    ranks = [start_driver(*options, "--rank", rank, RANK=str(rank), **variables) for rank in range(3)]
    connect_ring(ranks)

    def blamed() -> list[tuple[int, str]]:
        """Other tests may run processes at the same time."""
        shown = net("blame", "--after", 0.3, "--json")
        assert shown.returncode in (0, 1), shown.stderr
        return [(one["party"]["pid"], one["kind"]) for one in json.loads(shown.stdout)["culprits"]]

    pids = [rank.process.pid for rank in ranks]
    for rank in ranks[:2]:
        rank.say(f"verify {BYTES}")
    wait_until(lambda: (pids[2], "idle") in blamed(), "the rank that does nothing")
    ranks[2].process.send_signal(signal.SIGSTOP)
    wait_until(lambda: (pids[2], "stopped") in blamed(), "the rank that is stopped")
    # One line of each rank that waits says for whom.
    wait_until(lambda: all("has waited for" in rank.log() for rank in ranks[:2]), "the lines of both")
    assert f"process {pids[2]}" in ranks[0].log()
    assert "nothing has arrived" in ranks[0].log()
    ranks[2].process.send_signal(signal.SIGCONT)
    ranks[2].say(f"verify {BYTES}")
    for rank in ranks:
        rank.expect("verified")
    for rank in ranks[:2]:
        assert "goes on, after at least" in rank.log()
    quit_all(ranks)


def test_a_terminal_shows_verdict_and_remedy(net: RunNet) -> None:
    posted = [int(time.monotonic() * 1000) - 3_000_000]
    comm = Comm("10.0.0.9:1 (host nowhere, process 4242)", direction=RECEIVE, posted_ms=posted)
    with page_of_this_process(page_bytes([comm], rank=5)):
        shown = net("blame", "--after", 2000)
    assert shown.returncode == 1
    lines = shown.stdout.splitlines()
    assert lines[0] == "process 4242 (host nowhere) is on a host that was not looked at."
    assert re.match(r"Others wait for it since 30\d\d s\. Add it: --hosts node1,nowhere", lines[1])
    assert "rank 5 (host node1, pid " in shown.stdout
