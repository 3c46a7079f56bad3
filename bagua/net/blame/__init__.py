"""Who holds a job up: the verdict, and how ranks come to it by themselves."""

from __future__ import annotations

from collections.abc import Mapping

from bagua.env import read_text
from bagua.launch_environment import job_position

_DEFAULT_STALL_S = 30  # of BAGUA_NET_STALL_S


def start_in_job(environment: Mapping[str, str]) -> None:
    """In a process that is one rank of several, as the launcher says. Without effect where BAGUA_NET_STALL_S is 0 or
    invalid, which the plugin reports."""
    if job_position(environment).world_size in (None, 0, 1):
        return
    try:
        stall_s = int(read_text(environment, "BAGUA_NET_STALL_S") or _DEFAULT_STALL_S)
    except ValueError:
        return
    if stall_s > 0:
        # Imported here: most processes that import torch are no ranks.
        from bagua.net.blame.in_job import start

        start(stall_s)
