"""Runs all checks and makes the report."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from bagua.gpu_presence import has_gpu
from bagua.net import native, nccl_config_file
from bagua.net.activation import Surroundings
from bagua.net.doctor.activation_check import check_activation
from bagua.net.doctor.choice import check_choice
from bagua.net.doctor.finding import Report, Section, Status, skip
from bagua.net.doctor.library_check import check_library, missing_library
from bagua.net.doctor.nccl_check import check_nccl, check_tuning
from bagua.net.doctor.network_check import check_interfaces, check_rdma
from bagua.net.doctor.protection_check import check_protection
from bagua.net.doctor.self_test import check_loopback
from bagua.net.doctor.settings_check import check_settings
from bagua.net.library import MissingFileError, library_path, loader_search_path
from bagua.net.nccl_library import find_nccl_libraries, find_torch
from bagua.net.nccl_release import wheel_release
from bagua.version import __version__


def examine(environment: Mapping[str, str]) -> Report:
    """`environment` is what a job would be started with."""
    files = nccl_config_file.config_files(environment)
    config = nccl_config_file.read_settings(files)
    effective = {setting.name: setting.value for setting in config} | dict(environment)
    torch = find_torch()
    nccl = find_nccl_libraries(environment)

    library: Path | None = None
    surroundings: Surroundings | None = None
    try:
        library = library_path()
    except MissingFileError as error:
        library_section = missing_library(str(error))
        activation = Section("activation", "Activation", (skip("not checked: there is no library"),))
    else:
        library_section = check_library(library)
        surroundings = Surroundings(library, tuple(config), wheel_release(), tuple(loader_search_path(environment)))
        activation = check_activation(environment, surroundings, torch, nccl)

    rdma = check_rdma(effective)
    settings = check_settings(environment, config, files)
    settings_fail = settings.status is Status.FAIL
    protection = check_protection(effective, settings_fail=settings_fail)
    return Report(
        __version__,
        (
            library_section,
            activation,
            check_nccl(
                nccl,
                torch,
                effective,
                surroundings,
                reopens_by_name=bool(library_section.facts.get("reopens_by_name", False)),
                has_gpu=has_gpu(),
            ),
            check_interfaces(effective),
            rdma,
            settings,
            check_tuning(effective, settings_fail=settings_fail),
            protection,
            check_loopback(effective, library, settings_fail=settings_fail or protection.status is Status.FAIL),
            check_choice(_used_interfaces(effective), has_rdma=rdma.status is Status.WARN),
        ),
        python=sys.executable,
    )


def _used_interfaces(environment: Mapping[str, str]) -> list[native.Interface]:
    try:
        return [row for row in native.interfaces(environment) if row.used]
    except (ValueError, RuntimeError):
        return []  # the section of the interfaces says why
