"""Follows who waits for whom, to the processes that nobody can go on without.

A request that is outstanding for long names a peer, and so does a connection that failed. A peer that waits for another
one is held up itself; what remains is a process that has ended, is stopped, or waits for nobody: it has not posted its
part. If there is none, data that was sent and has not arrived was held up by the network.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bagua.net.stats.nics import state_text
from bagua.net.stats.peers import peer_process
from bagua.net.stats.reports import CommReport, HostReport, ProcessReport

# As `ps` has them.
_STOPPED = ("T", "t")
_ENDED = ("Z", "X")

# Whoever waits because another one waits began a little later.
_FOLLOWS = 0.5

_Key = tuple[str, int]  # host and process id, as a process has them itself


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
        failure: the last one of the waiter, if this connection has failed; then `seconds` are since that.
    """

    waiter: Party
    target: Party
    direction: str
    interface: str
    seconds: float
    requests: int
    retransmits: int
    failure: str | None = None


@dataclass(frozen=True)
class Culprit:
    """
    Attributes:
        kind: "ended", "stopped", "idle" (runs, and waits for nobody), "failed" (runs, and its connection failed),
            "network", or "unknown" (it could not be looked at).
        seconds: the longest that anybody waits for it.
        problem, remedy: for people.
    """

    party: Party
    kind: str
    seconds: float
    problem: str
    remedy: str

    @property
    def advice(self) -> str:
        return f"Others wait for it since {self.seconds:.0f} s. {self.remedy}"


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        culprits: those waited for longest first; empty: nobody waits, or they wait in a circle.
        waits: the longest first.
    """

    culprits: tuple[Culprit, ...]
    waits: tuple[Wait, ...]


def verdict(
    reports: Sequence[HostReport],
    least_s: float,
    silent: Sequence[str] = (),
    members: Collection[_Key] | None = None,
) -> Verdict:
    """
    Args:
        least_s: shorter waits are normal.
        silent: hosts that were asked for a report and gave none.
        members: hosts and pids, as the processes name them, of which one must wait: only jobs that have one are
            judged. None: all.
    """
    known = {(one.host, one.own_pid): one for report in reports for one in report.processes}
    waits = sorted(_waits(known, _FOLLOWS * least_s), key=lambda wait: -wait.seconds)
    view = _View(known, reports, silent, {wait.waiter for wait in waits}, members or ())
    culprits: list[Culprit] = []
    shown: list[Wait] = []
    for group in _connected(waits):
        if group[0].seconds < least_s:
            continue
        if members is not None and not any((one.waiter.host, one.waiter.pid) in members for one in group):
            continue
        shown += group
        found: dict[Party, Culprit] = {}
        for wait in group:
            culprit = view.culprit(wait)
            if culprit is not None:
                found.setdefault(culprit.party, culprit)
        culprits += tuple(found.values()) or _failed(group) or tuple(_broken_paths(known, group))
    culprits.sort(key=lambda one: -one.seconds)
    shown.sort(key=lambda wait: -wait.seconds)
    return Verdict(tuple(culprits), tuple(shown))


def _waits(known: Mapping[_Key, ProcessReport], least_s: float) -> Iterable[Wait]:
    hosts = _PeerHosts(known.values())
    for process in known.values():
        groups: dict[tuple[Party, str, str, bool], list[tuple[float, int, int]]] = {}
        for comm in process.comms:
            failed = comm.state == "failed"
            seconds = process.last_failure_age_s if failed else comm.oldest_request_s
            if seconds is None or seconds < least_s:
                continue
            host, pid = hosts.peer_of(process, comm)
            peer = known.get((host, pid))
            target = Party(host, pid, None if peer is None else peer.rank)
            groups.setdefault((target, comm.direction, comm.interface, failed), []).append(
                (seconds, comm.outstanding, comm.retransmits)
            )
        waiter = Party(process.host, process.own_pid, process.rank)
        for (target, direction, interface, failed), found in groups.items():
            ages, requests, retransmits = zip(*found, strict=True)
            failure = (process.last_failure or "") if failed else None
            yield Wait(waiter, target, direction, interface, max(ages), sum(requests), sum(retransmits), failure)


def _connected(waits: Sequence[Wait]) -> list[list[Wait]]:
    """In groups that have no process in common, as those of several jobs on one host have; in the same order."""
    leader: dict[Party, Party] = {}

    def leader_of(party: Party) -> Party:
        while leader.setdefault(party, party) != party:
            leader[party] = leader[leader[party]]
            party = leader[party]
        return party

    for wait in waits:
        if wait.target.pid >= 0:  # else anybody
            leader[leader_of(wait.waiter)] = leader_of(wait.target)
    groups: dict[Party, list[Wait]] = {}
    for wait in waits:
        groups.setdefault(leader_of(wait.waiter), []).append(wait)
    return list(groups.values())


class _PeerHosts:
    """Who is connected to knows the other's host, not the other way round."""

    def __init__(self, processes: Iterable[ProcessReport]) -> None:
        self._by_ends: dict[tuple[_Key, int], str] = {}  # who connected, and the pid that it connected to
        self._by_address: dict[str, str] = {}
        for process in processes:
            for comm in process.comms:
                address, host, pid = peer_process(comm.peer)
                if host is not None:
                    self._by_ends[(host, pid), process.own_pid] = process.host
                    self._by_address[address] = host

    def peer_of(self, process: ProcessReport, comm: CommReport) -> _Key:
        address, host, pid = peer_process(comm.peer)
        if comm.same_host:
            return process.host, pid
        ends = (process.host, process.own_pid), pid
        return host or self._by_ends.get(ends) or self._by_address.get(address, address), pid


class _View:
    """What is known of the processes of the job."""

    def __init__(
        self,
        known: Mapping[_Key, ProcessReport],
        reports: Sequence[HostReport],
        silent: Sequence[str],
        waiting: set[Party],
        members: Collection[_Key],
    ) -> None:
        self._known = known
        self._members = members
        self._taken = {known[key].rank for key in members if key in known}  # ranks
        self._hosts = {host for host, _ in known} | {report.host for report in reports}
        self._denied = sum(report.denied for report in reports)
        self._unread = sum(len(report.problems) for report in reports)
        self._silent = silent
        self._waiting = waiting

    def culprit(self, wait: Wait) -> Culprit | None:
        """Whom the wait is to be blamed on; None: whoever is waited for is held up itself."""
        party, seconds = wait.target, wait.seconds
        process = self._known.get((party.host, party.pid))
        if process is None and (party.pid < 0 or party.host not in self._hosts):
            return self._unseen(wait)
        if process is None or process.state in _ENDED:
            return Culprit(
                party,
                "ended",
                seconds,
                f"{party} has ended{self._doubt() if process is None else ''}.",
                "Look at its log, and for the OOM killer in dmesg.",
            )
        if process.state in _STOPPED:
            return _stopped(party, process, seconds)
        if party in self._waiting or wait.failure is not None:
            return None
        return self._idle(wait, process)

    def _idle(self, wait: Wait, process: ProcessReport) -> Culprit:
        # NCCL uses shared memory and NVLink within a host, so that a rank may wait for another one there unseen.
        others = [one for (host, _), one in self._known.items() if host == process.host and one is not process]
        others = [one for one in others if self._may_be_of_one_job(one, process)]
        for one in others:
            if one.state in _STOPPED:
                return _stopped(Party(one.host, one.own_pid, one.rank), one, wait.seconds)
        missing = "sent" if wait.direction == "receive" else "posted a receive"
        remedy = f"See what it does instead, on {wait.target.host}: py-spy dump --pid {process.pid}"
        if others:
            remedy += ". If it waits for another rank of its host, look at those, too"
        return Culprit(
            wait.target,
            "idle",
            wait.seconds,
            f"{wait.target} has not {missing} for {wait.seconds:.0f} s. It runs, and waits for no other process over "
            "Bagua-Net.",
            remedy,
        )

    def _may_be_of_one_job(self, one: ProcessReport, process: ProcessReport) -> bool:
        if (one.host, one.own_pid) in self._members:
            return True
        if one.world_size != process.world_size:
            return False
        return one.rank is None or (one.rank != process.rank and one.rank not in self._taken)

    def _unseen(self, wait: Wait) -> Culprit:
        party = wait.target
        if party.pid < 0:
            problem = f"{wait.waiter} waits for a process on {party.host} that its statistics do not name."
            remedy = "Use the same version of Bagua-Net for the job and for this command."
        elif self._silent:
            problem = f"{party} is on a host that gave no report."
            remedy = f"No report from {', '.join(self._silent)}: look whether the host and its network are up."
        else:
            problem = f"{party} is on a host that was not looked at."
            remedy = f"Add it: --hosts {wait.waiter.host},{party.host}"
        return Culprit(party, "unknown", wait.seconds, problem, remedy)

    def _doubt(self) -> str:
        doubt = ""
        if self._denied:
            doubt += f", or is one of {self._denied} processes of other users that this user may not look at"
        if self._unread:
            doubt += f", or is one of {self._unread} whose statistics cannot be read"
        return doubt


def _stopped(party: Party, process: ProcessReport, seconds: float) -> Culprit:
    return Culprit(
        party,
        "stopped",
        seconds,
        f"{party} is stopped, by SIGSTOP, a terminal or a debugger.",
        f"Continue it on {party.host}: kill -CONT {process.pid}",
    )


def _failed(waits: Sequence[Wait]) -> tuple[Culprit, ...]:
    """The first connection that failed, between processes that run: others fail because of it."""
    for wait in waits:
        if wait.failure is not None:
            problem = f"The connection of {wait.waiter} with {wait.target} has failed. Both processes run."
            remedy = f"The last failure of {wait.waiter}: {wait.failure or 'unknown'}"
            return (Culprit(wait.target, "failed", wait.seconds, problem, remedy),)
    return ()


def _broken_paths(known: Mapping[_Key, ProcessReport], waits: Sequence[Wait]) -> Iterable[Culprit]:
    """Where data was sent that does not arrive, though its receiver waits for it."""
    hosts = _PeerHosts(known.values())
    sending = {(wait.waiter, wait.target) for wait in waits if wait.direction == "send"}
    for wait in waits:
        sender = known.get((wait.target.host, wait.target.pid))
        if wait.direction != "receive" or sender is None:
            continue
        receiver = known[wait.waiter.host, wait.waiter.pid]
        arriving = _comms(hosts, receiver, sender, "receive")
        leaving = _comms(hosts, sender, receiver, "send")
        if any(comm.interface == wait.interface for comm in leaving):  # elsewhere hosts have names of their own
            arriving = [comm for comm in arriving if comm.interface == wait.interface]
            leaving = [comm for comm in leaving if comm.interface == wait.interface]
        if any(stream.state == "parked" for comm in arriving for stream in comm.streams):
            continue  # what was sent has arrived, and there is no receive for it
        # A small message is no outstanding request any more once the kernel has it.
        is_under_way = sum(comm.messages for comm in leaving) > sum(comm.messages for comm in arriving)
        if is_under_way or (wait.target, wait.waiter) in sending:
            unusable = [
                f" On {one.host}, {state_text(nic)}."
                for one in (sender, receiver)
                for nic in one.nics
                if nic.is_unusable
            ]
            yield Culprit(
                wait.waiter,
                "network",
                wait.seconds,
                f"The data of {wait.target} does not reach {wait.waiter} over {wait.interface}; "
                f"{sum(comm.retransmits for comm in leaving)} segments were sent again." + "".join(unusable),
                f"Look at the network between {wait.target.host} and {wait.waiter.host}: "
                f"bagua-net doctor --peer {wait.waiter.host}",
            )


def _comms(hosts: _PeerHosts, process: ProcessReport, peer: ProcessReport, direction: str) -> list[CommReport]:
    key = (peer.host, peer.own_pid)
    return [one for one in process.comms if one.direction == direction and hosts.peer_of(process, one) == key]
