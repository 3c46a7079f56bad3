"""Which flows carried a job, and what they could carry together: the yardstick for whoever spreads data over flows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Less of a host's bytes than this is not a flow that carries data: acknowledgements, handshakes, a short trial.
_LEAST_SHARE = 0.01


@dataclass(frozen=True)
class FlowUsage:
    """One traffic class of a NIC, which is one flow unless two share it."""

    cap_mbit: float
    bytes_sent: int


def data_flows(usages: Sequence[FlowUsage]) -> list[FlowUsage]:
    """Those that carried at least a hundredth of all bytes, the fastest first."""
    total = sum(usage.bytes_sent for usage in usages)
    used = [usage for usage in usages if usage.bytes_sent > _LEAST_SHARE * total]
    return sorted(used, key=lambda usage: (-usage.cap_mbit, -usage.bytes_sent))


def describe_flows(usages: Sequence[FlowUsage]) -> str:
    """`8 flows: 7 of up to 200 Mbit/s, 1 of up to 20 Mbit/s; together 1420 Mbit/s`"""
    used = data_flows(usages)
    if not used:
        return "no data"
    kinds = Counter(usage.cap_mbit for usage in used)
    parts = ", ".join(f"{count} of up to {cap:g} Mbit/s" for cap, count in sorted(kinds.items(), reverse=True))
    noun = "flow" if len(used) == 1 else "flows"
    return f"{len(used)} {noun}: {parts}; together {sum(usage.cap_mbit for usage in used):g} Mbit/s"
