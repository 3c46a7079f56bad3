"""Follows who waits for whom, to the processes that nobody can go on without.

A request that is outstanding for long names a peer. A peer that waits for another one is held up itself; what remains
is a process that has ended, is stopped, or waits for nobody: it has not posted its part. If there is none, two
processes that wait for each other on the same connection are held up by the network between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bagua.net.stats.peers import peer_process
from bagua.net.stats.reports import HostReport, ProcessReport

# As `ps` has them.
_STOPPED = ("T", "t")
_ENDED = ("Z", "X")


@dataclass(frozen=True, order=True)
class Party:
    """A process.

    Attributes:
        host: as the process names it.
        pid: as the process itself sees it.
        rank: None: nobody says.
    """

    host: str
    pid: int
    rank: int | None = None

    def __str__(self) -> str:
        where = f"host {self.host}, pid {self.pid}"
        return f"process {self.pid} (host {self.host})" if self.rank is None else f"rank {self.rank} ({where})"


@dataclass(frozen=True)
class Wait:
    """
    Attributes:
        direction: "receive": data of `target` has not come; "send": `target` has not taken data.
        seconds: of the oldest request.
        requests: that are outstanding.
        retransmits: TCP segments that were sent again on these connections, ever.
    """

    waiter: Party
    target: Party
    direction: str
    interface: str
    seconds: float
    requests: int
    retransmits: int


@dataclass(frozen=True)
class Culprit:
    """
    Attributes:
        kind: "ended", "stopped", "idle" (runs, and waits for nobody), "network", or "unknown" (its host was not looked
            at).
        seconds: the longest that anybody waits for it.
        problem, remedy: for people.
    """

    party: Party
    kind: str
    seconds: float
    problem: str
    remedy: str


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        culprits: those waited for longest first; empty: nobody waits, or they wait in a circle.
        waits: the longest first.
    """

    culprits: tuple[Culprit, ...]
    waits: tuple[Wait, ...]


def verdict(reports: Sequence[HostReport], least_s: float) -> Verdict:
    """
    Args:
        reports: of all hosts that were looked at.
        least_s: shorter waits are normal.
    """
    known = {(one.host, one.own_pid): one for report in reports for one in report.processes}
    waits = sorted(_waits(known, least_s), key=lambda wait: -wait.seconds)
    hosts = {one.host for one in known.values()} | {report.host for report in reports}
    denied = sum(report.denied for report in reports)
    waiting = {wait.waiter for wait in waits}
    found: dict[Party, Culprit] = {}
    for wait in waits:
        if wait.target in found:
            continue
        process = known.get((wait.target.host, wait.target.pid))
        culprit = _culprit(wait, process, wait.target in waiting, wait.target.host in hosts, denied)
        if culprit is not None:
            found[wait.target] = culprit
    return Verdict(tuple(found.values() or _broken_paths(waits)), tuple(waits))


def _waits(known: Mapping[tuple[str, int], ProcessReport], least_s: float) -> Iterable[Wait]:
    # Who is connected to knows the other's host, not the other way round.
    parsed = [peer_process(comm.peer) for process in known.values() for comm in process.comms]
    host_of = {address: host for address, host, _ in parsed if host is not None}
    for process in known.values():
        groups: dict[tuple[Party, str, str], list[tuple[float, int, int]]] = {}
        for comm in process.comms:
            if comm.state != "open" or comm.oldest_request_s is None or comm.oldest_request_s < least_s:
                continue
            address, host, pid = peer_process(comm.peer)
            host = process.host if comm.same_host else host or host_of.get(address, address)
            peer = known.get((host, pid))
            target = Party(host, pid, None if peer is None else peer.rank)
            groups.setdefault((target, comm.direction, comm.interface), []).append(
                (comm.oldest_request_s, comm.outstanding, comm.retransmits)
            )
        waiter = Party(process.host, process.own_pid, process.rank)
        for (target, direction, interface), found in groups.items():
            seconds, requests, retransmits = zip(*found, strict=True)
            yield Wait(waiter, target, direction, interface, max(seconds), sum(requests), sum(retransmits))


def _culprit(
    wait: Wait, process: ProcessReport | None, waits_itself: bool, is_looked_at: bool, denied: int
) -> Culprit | None:
    party, seconds = wait.target, wait.seconds
    if process is None and not is_looked_at:
        return Culprit(
            party,
            "unknown",
            seconds,
            f"{party} is on a host that was not looked at.",
            f"Add it: --hosts {wait.waiter.host},{party.host}",
        )
    if process is None or process.state in _ENDED:
        doubt = f", or is one of {denied} processes of other users that this user may not look at" if denied else ""
        return Culprit(
            party, "ended", seconds, f"{party} has ended{doubt}.", "Look at its log, and for the OOM killer in dmesg."
        )
    if process.state in _STOPPED:
        return Culprit(
            party,
            "stopped",
            seconds,
            f"{party} is stopped, by SIGSTOP, a terminal or a debugger.",
            f"Continue it on {party.host}: kill -CONT {process.pid}",
        )
    if waits_itself:
        return None
    missing = "sent" if wait.direction == "receive" else "posted a receive"
    return Culprit(
        party,
        "idle",
        seconds,
        f"{party} has not {missing} for {seconds:.0f} s. It runs, and waits for no other process.",
        f"See what it does instead, on {party.host}: py-spy dump --pid {process.pid}",
    )


def _broken_paths(waits: Sequence[Wait]) -> Iterable[Culprit]:
    """Where both ends wait for the same data."""
    receiving = {(wait.target, wait.waiter, wait.interface) for wait in waits if wait.direction == "receive"}
    for wait in waits:
        if wait.direction == "send" and (wait.waiter, wait.target, wait.interface) in receiving:
            yield Culprit(
                wait.target,
                "network",
                wait.seconds,
                f"The data of {wait.waiter} does not reach {wait.target} over {wait.interface}; "
                f"{wait.retransmits} segments were sent again.",
                f"Look at the network between {wait.waiter.host} and {wait.target.host}: "
                f"bagua-net doctor --peer {wait.target.host}",
            )
