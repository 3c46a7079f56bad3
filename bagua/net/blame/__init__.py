"""Who holds a job up: the verdict, and how ranks come to it by themselves."""

from __future__ import annotations

from collections.abc import Mapping

from bagua.env import read_text

_DEFAULT_STALL_S = 30  # of BAGUA_NET_STALL_S
# Where the plugin looks, too (net_plugin/stats/stats_page.cc).
_WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def start_in_job(environment: Mapping[str, str]) -> None:
    """In a process that is one rank of several, as the launcher says. Without effect where BAGUA_NET_STALL_S is 0 or
    invalid, which the plugin reports."""
    sizes = [environment[name].strip() for name in _WORLD_SIZE_VARIABLES if name in environment]
    if not sizes or sizes[0] in ("", "0", "1"):
        return
    try:
        stall_s = int(read_text(environment, "BAGUA_NET_STALL_S") or _DEFAULT_STALL_S)
    except ValueError:
        return
    if stall_s > 0:
        # Imported here: most processes that import torch are no ranks.
        from bagua.net.blame.in_job import start

        start(stall_s)
