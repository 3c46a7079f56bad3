"""Where the load drivers of this host are started from, by the options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from bagua.net.bench.launch_environment import LOOPBACK
from bagua.net.bench.network_path import NetworkPath, choose_path
from bagua.net.bench.places import LocalPlace
from bagua.net.bench.ring.options import Options
from bagua.net.bench.settings import check_baseline_library, driver_settings
from bagua.net.bench.team import MakePlace, Team


def maker(options: Options, environment: Mapping[str, str]) -> MakePlace:
    return partial(_make, options, environment)


def local_team(options: Options, environment: Mapping[str, str]) -> Team:
    ranks = options.ranks or 2
    place, path = _make(options, environment, LOOPBACK, ranks)
    return Team.local(place, ranks, path)


def _make(
    options: Options, environment: Mapping[str, str], address: str, local_ranks: int
) -> tuple[LocalPlace, NetworkPath]:
    path = choose_path(
        address=options.address, interface=options.interface, default_address=address, environment=environment
    )
    library = options.library if any(name.startswith("plugin") for name in options.backends) else Path()
    settings = driver_settings(options.driver, library, path, environment, local_ranks, options.timeout_s)
    baseline = options.baseline_library
    if baseline is not None:
        check_baseline_library(baseline)
        baseline = baseline.absolute()
    return LocalPlace(replace(settings, channels=options.channels, baseline_library=baseline)), path
