"""The collectives that ranks are in, from torch's flight recorder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bagua.rank_list import rank_list


def last_collective() -> dict[str, Any] | None:
    """The collective that this process has not finished, the first of several, or else the last one.

    Returns:
        name, number in its group, group and whether it is finished; None: the flight recorder knows of none.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    # The second is that of gloo, in torch without NCCL.
    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
        found = next((one for one in entries if not _is_finished(one)), entries[-1] if entries else None)
        return found and {
            "name": str(found["profiling_name"]).rpartition(":")[2],
            "number": int(found["p2p_seq_id" if found["is_p2p"] else "collective_seq_id"]),
            "group": str(found["process_group"][1] or found["process_group"][0]),
            "finished": _is_finished(found),
        }
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):  # another torch
        return None


def _is_finished(entry: Mapping[str, Any]) -> bool:
    return entry["state"] == "completed" or bool(entry["retired"])


def described(collectives: Mapping[int, Any]) -> list[str]:
    """One line for all ranks that are in the same collective."""
    together: dict[str, list[int]] = {}
    for rank, one in sorted(collectives.items()):
        if one is not None:
            state = "has finished" if one["finished"] else "is in"
            together.setdefault(f"{state} {one['name']}, number {one['number']} of {one['group']}", []).append(rank)
    return [f"{each_of(ranks)} {what}" for what, ranks in sorted(together.items(), key=lambda one: one[1])]


def each_of(ranks: Sequence[int]) -> str:
    """ "rank 3", or "each of ranks 0 to 2 and 5"."""
    return "each of " * (len(ranks) > 1) + rank_list(ranks)
