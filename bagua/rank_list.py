"""Ranks in words, for messages. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_SHOWN = 16  # ranges, or single ranks


def rank_list(ranks: Sequence[int], hosts: Mapping[int, str] | None = None) -> str:
    """ "rank 3 (host b)", "ranks 0 to 2 and 5", "ranks 0, 2 and 13 more".

    Args:
        ranks: at least one, in the order in which they are named.
        hosts: of some of them.
    """
    hosts = hosts or {}
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1 and not {rank, ranges[-1][-1]} & hosts.keys():
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    words: list[str] = []
    for one in ranges[:MAX_SHOWN]:
        if len(one) > 2:
            words.append(f"{one[0]} to {one[-1]}")
        else:
            words += [f"{rank} (host {hosts[rank]})" if rank in hosts else str(rank) for rank in one]
    if (more := sum(map(len, ranges[MAX_SHOWN:]))) > 0:
        words.append(f"{more} more")
    listed = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
