"""How ranks are gone, in the words of messages, and what to check then. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

EXITED = "exited"
LEFT = "ended (end of script or sys.exit), after fewer collectives than others"
NO_RESPONSE = "did not respond"
_EQUAL = "give all ranks equal numbers of batches"
_OR_EXCHANGES = "(with shares of local steps: of exchanges)"
_JOIN = "or use join() of bagua.torch_api.data_parallel.DistributedDataParallel"


class Gone(NamedTuple):
    """A rank of which it is proven that it takes part in nothing any more."""

    rank: int
    host: str
    how: str  # EXITED, LEFT or what `silent_for` says


def no_response_within(seconds: float) -> str:
    """Of a rank of which nothing is known. Begins with NO_RESPONSE."""
    return f"did not respond within {seconds:g} s"


def silent_for(seconds: float) -> str:
    """Of a rank whose machine does not answer."""
    return f"has answered no TCP packet for {seconds:g} s"


def of_fewer_batches(join_helps: bool) -> str:
    """What to do if a rank had fewer batches. With `join_helps`, names `join` as well."""
    return f"{_EQUAL}, {_JOIN}" if join_helps else f"{_EQUAL} {_OR_EXCHANGES}"


def advice(how: str, rank: int, join_helps: bool) -> str:
    """What to check if ranks are gone in this way, the first of them this one."""
    if how == LEFT:
        remedy = of_fewer_batches(join_helps)
        return f"If it had fewer batches, {remedy}. If it called sys.exit() after an error, see rank {rank}'s log."
    if how == EXITED or how.startswith(NO_RESPONSE):
        return f"Check the end of rank {rank}'s log; if it shows no error, look for the OOM killer in dmesg."
    return "Check whether its machine runs, and the network."
