"""The ranks of a run and where they are: all here, or one per launched process. Owns the places."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from bagua.net.bench.errors import BenchError
from bagua.net.bench.launch_environment import LOOPBACK, LaunchEnvironment
from bagua.net.bench.network_path import NetworkPath, choose_path
from bagua.net.bench.remote_place import RemotePlace
from bagua.net.bench.rendezvous import LineConnection, Member, join, meet, network_identity
from bagua.net.bench.ring.options import Options
from bagua.net.bench.ring.places import LocalPlace, Place, serve_rank_zero
from bagua.net.bench.settings import DriverSettings, check_baseline_library, check_driver, check_library
from bagua.net.library import MissingFileError, driver_path, library_path


class Team:
    """places[rank]; leaving the `with` ends every driver everywhere."""

    def __init__(self, places: Sequence[Place], networks: Sequence[str], path: NetworkPath) -> None:
        """networks[rank] is equal for ranks that share a loopback interface (see network_identity)."""
        self.places = list(places)
        self._networks = list(networks)
        self.path = path

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for place in dict.fromkeys(self.places):
            place.close(failed=kind is not None)


def local_team(options: Options, environment: Mapping[str, str]) -> Team:
    ranks = options.ranks or 2
    path = choose_path(
        address=options.address, interface=options.interface, default_address=LOOPBACK, environment=environment
    )
    place = LocalPlace(_settings(options, environment, path, ranks))
    return Team([place] * ranks, [network_identity()] * ranks, path)


def lead_team(
    launch: LaunchEnvironment, options: Options, environment: Mapping[str, str], say: Callable[[str], None]
) -> Team:
    """Rank 0 of a launched run."""
    members = meet(launch, options.timeout_s, say)
    try:
        path = choose_path(
            address=options.address,
            interface=options.interface,
            default_address=_address_towards_others(members),
            environment=environment,
        )
        local_ranks = sum(member.identity == members[0].identity for member in members)
        mine = LocalPlace(_settings(options, environment, path, local_ranks))
        others = [RemotePlace(m.connection, m.host, m.rank) for m in members if m.connection is not None]
    except BaseException:
        for member in members:
            if member.connection is not None:
                member.connection.close()
        raise
    return Team([mine, *others], [member.network for member in members], path)


def _address_towards_others(members: Sequence[Member]) -> str:
    """The address by which the first rank of another host (or else of this one) reached us."""
    connections = [member.connection for member in members if member.connection is not None]
    elsewhere = [
        member.connection
        for member in members
        if member.connection is not None and member.network != members[0].network
    ]
    return (elsewhere or connections)[0].local_address


def follow(launch: LaunchEnvironment, options: Options, environment: Mapping[str, str]) -> int:
    """Every other rank: serve rank 0 until it has finished. Returns the exit code."""
    connection, local_ranks = join(launch, options.timeout_s)
    try:
        place = _own_place(connection, local_ranks, options, environment)
        failed = True
        try:
            failed = serve_rank_zero(connection, place, launch.rank)
        finally:
            place.close(failed=failed)
        # Rank 0 has said what failed.
        return 1 if failed else 0
    finally:
        connection.close()


def _own_place(
    connection: LineConnection, local_ranks: int, options: Options, environment: Mapping[str, str]
) -> LocalPlace:
    try:
        path = choose_path(
            address=options.address,
            interface=options.interface,
            default_address=connection.local_address,
            environment=environment,
        )
        return LocalPlace(_settings(options, environment, path, local_ranks))
    except (BenchError, ValueError) as error:
        connection.send({"failed": str(error)})
        raise


def _settings(options: Options, environment: Mapping[str, str], path: NetworkPath, local_ranks: int) -> DriverSettings:
    native = any(name != "gloo" for name in options.backends)
    plugin = any(name.startswith("plugin") for name in options.backends)
    try:
        driver = options.driver or (driver_path() if native else Path())
        library = options.library or (library_path() if plugin else Path())
    except MissingFileError as error:
        raise BenchError(str(error)) from error
    if native:
        check_driver(driver)
    if plugin:
        check_library(library)
    baseline = options.baseline_library
    if baseline is not None:
        check_baseline_library(baseline)
    return DriverSettings(
        driver=driver.absolute(),
        # dlopen searches its own path for a name without a slash.
        library=library.absolute(),
        channels=options.channels,
        address=path.address,
        interface=path.interface,
        local_ranks=local_ranks,
        timeout_s=options.timeout_s,
        environment=dict(environment),
        baseline_library=None if baseline is None else baseline.absolute(),
    )


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))
