"""The ranks of a run and where they are: all here, or one per launched process. Owns the places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from bagua.net.bench.driver_process import DriverProcess
from bagua.net.bench.errors import BenchError
from bagua.net.bench.launch_environment import LaunchEnvironment
from bagua.net.bench.network_path import NetworkPath
from bagua.net.bench.places import LocalPlace, Place, Request
from bagua.net.bench.remote_place import RemotePlace, serve
from bagua.net.bench.rendezvous import Member, join, meet, network_identity

# Of an address of this host, towards the other ranks, and the number of ranks here. May raise BenchError or ValueError.
MakePlace = Callable[[str, int], tuple[LocalPlace, NetworkPath]]


class Team:
    """places[rank]; leaving the `with` ends every process everywhere."""

    def __init__(
        self,
        places: Sequence[Place],
        networks: Sequence[str],
        path: NetworkPath,
        local_ranks: Sequence[int] = (),
        members: Sequence[Member] = (),
    ) -> None:
        """networks[rank] is equal for ranks that share a loopback interface (see network_identity). local_ranks[rank]
        counts those of its host. members: of a launched run."""
        self.members = members
        self.places = list(places)
        self._networks = list(networks)
        self.path = path
        self.local_ranks = list(local_ranks) or list(range(len(places)))

    @staticmethod
    def local(place: LocalPlace, ranks: int, path: NetworkPath) -> Team:
        return Team([place] * ranks, [network_identity()] * ranks, path)

    @property
    def ranks(self) -> int:
        return len(self.places)

    @property
    def hosts(self) -> int:
        return len(set(self._networks))

    @property
    def measured_link(self) -> int:
        """The rank whose connection to the next one stands for the path: it leaves rank 0's host if any does."""
        leaving = self._leaving()
        return leaving[0] if leaving else 0

    @property
    def links(self) -> int:
        """Connections of the ring that share that path."""
        return len(self._leaving()) or self.ranks

    def _leaving(self) -> list[int]:
        home = self._networks[0]
        following = [*self._networks[1:], home]
        return [
            rank
            for rank, (own, next_one) in enumerate(zip(self._networks, following, strict=True))
            if own == home != next_one
        ]

    def close(self, *, failed: bool) -> None:
        """Safe to call again. The agents of other hosts exit with 1 if it failed."""
        for place in dict.fromkeys(self.places):
            place.close(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)


def lead_team(
    launch: LaunchEnvironment,
    timeout_s: float,
    say: Callable[[str], None],
    make: MakePlace,
    facts: Mapping[str, Any] | None = None,
) -> Team:
    """Rank 0 of a launched run. `facts`: of this rank; see Member."""
    members = meet(launch, timeout_s, say, facts=facts)
    try:
        mine, path = make(_address_towards_others(members), _ranks_with(members, members[0]))
    except BaseException:
        for member in members:
            if member.connection is not None:
                member.connection.close()
        raise
    others = [RemotePlace(m.connection, m.host, m.rank) for m in members if m.connection is not None]
    local_ranks = [_ranks_with(members[:rank], member) for rank, member in enumerate(members)]
    return Team([mine, *others], [member.network for member in members], path, local_ranks, members)


def _ranks_with(members: Sequence[Member], member: Member) -> int:
    return sum(one.identity == member.identity for one in members)


def _address_towards_others(members: Sequence[Member]) -> str:
    """The address by which the first rank of another host (or else of this one) reached us."""
    others = [(member.network == members[0].network, member.connection) for member in members[1:]]
    connection = min(others, key=lambda other: other[0])[1]
    assert connection is not None
    return connection.local_address


def follow(
    launch: LaunchEnvironment,
    timeout_s: float,
    make: MakePlace,
    request: Callable[..., Request],
    facts: Mapping[str, Any] | None = None,
) -> int:
    """Every other rank: serve rank 0, which reports, until it has finished. Returns the exit code."""
    connection, local_ranks = join(launch, timeout_s, facts)
    try:
        try:
            place, _ = make(connection.local_address, local_ranks)
        except (BenchError, ValueError) as error:
            connection.send({"failed": str(error)})
            raise

        def start(order: Mapping[str, Any]) -> DriverProcess:
            wanted = request(**order)
            if wanted.rank != launch.rank:
                raise BenchError(f"rank {launch.rank} was told to start a process of rank {wanted.rank}")
            return place.start(wanted)

        failed = True
        try:
            failed = serve(connection, start)
        finally:
            place.close(failed=failed)
        return 1 if failed else 0
    finally:
        connection.close()
