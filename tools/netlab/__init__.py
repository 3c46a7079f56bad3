"""Real, limited networks on one machine: network namespaces joined by veth links with rates, per-flow caps and an MTU.

Loopback has no MTU to speak of, no rate and no second interface, so a result measured there says little about a
network. A `Lab` gives each "host" a network namespace of its own (own interfaces, addresses, routes, ports, TCP
settings), limits the links between them and delays what they carry. See docs/how-to/emulate-networks.md.
"""

from __future__ import annotations

from .delayed_wires import DelayUsage, describe_delays, parse_delay_ms
from .errors import NetlabError
from .flow_usage import FlowUsage, data_flows, describe_flows
from .lab import Host, Lab
from .link_plan import SPEEDS, TOLD, LinkPlan, SlowFlows, parse_rate_mbit, parse_slow_flows
from .namespace import NetworkNamespace
from .nic_cuts import NIC_CUTS, cut_nic
from .requirements import missing_privilege, missing_requirement
from .tap import missing_tap_device
