"""The rtnetlink requests that netlab makes, through pyroute2, each with an error that names the lacking feature.

A `Netlink` works in the network namespace in which the calling thread was when it was opened.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import Any

from .errors import NetlabError, translated
from .flow_filter import FLOW_CLASSES, flow_filter, loss_filter, neighbour_rank
from .flow_usage import FlowUsage
from .link_plan import MAX_RATE_MBIT, LinkPlan

_IFA_F_NODAD = 0x02
_ETH_P_ALL = 0x0003
_RTM_NEWQDISC = 36
_RTM_NEWTFILTER = 44
_TCA_BPF_OPS_LEN = 4
_TCA_BPF_OPS = 5
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_EXCL, _NLM_F_CREATE = 0x1, 0x4, 0x200, 0x400
_NLMSG_ERROR = 2
_TCA_KIND = 1
_TCA_OPTIONS = 2
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_TCMSG = struct.Struct("=BxxxiIII")  # tcmsg: family, interface, handle, parent, info
_ANSWER_SECONDS = 5.0

_MAJOR = 1
_ROOT_QDISC = _MAJOR << 16
_LINK_MINOR = 1
_OTHER_MINOR = 2
_LOST_MINOR = 3
_FIRST_FLOW_MINOR = 16

# A segmentation-offload packet has up to 64 KiB; a smaller bucket would let one go only after waiting for tokens.
_LEAST_BURST_BYTES = 128 * 1024
# Tokens of this time may be saved up: a virtual machine's timer can be late by most of it, and what is not saved up
# then is lost to the rate.
_BURST_SECONDS = 1e-3
# What one class sends in its turn; above one offload packet, below the 200000 at which HTB warns.
_QUANTUM_BYTES = 96 * 1024
# Buffer of a switch port. Some 2.5 ms is what data-centre switches have for a port; several offload packets at least.
_PORT_BUFFER_SECONDS = 2.5e-3
_LEAST_PORT_BUFFER_BYTES = 512 * 1024
_LINK_UP_SECONDS = 10.0


def _bytes_per_second(rate_mbit: float) -> int:
    return round(rate_mbit * 1e6 / 8)


def _flow_cap_mbit(per_flow_mbit: float, plan: LinkPlan, number: int) -> float:
    is_slow = plan.slow_flows is not None and neighbour_rank(number) % plan.slow_flows.every == 0
    cap = plan.slow_flows.rate_mbit if plan.slow_flows is not None and is_slow else per_flow_mbit
    return cap if plan.rate_mbit is None else min(cap, plan.rate_mbit)


class Netlink:
    def __init__(self) -> None:
        from pyroute2 import IPRoute  # which a lab says that it needs

        with translated("opening rtnetlink"):
            self._route: Any = IPRoute()

    def __enter__(self) -> Netlink:
        return self

    def __exit__(self, *_: object) -> None:
        self._route.close()

    def interface_index(self, name: str) -> int:
        found = self._route.link_lookup(ifname=name)
        if not found:
            raise NetlabError(f"netlab: there is no interface {name!r} in this network namespace")
        return int(found[0])

    def change(self, name: str, **settings: Any) -> None:
        """`state`, `mtu`, `txqlen`, or `master`, a bridge."""
        with translated(f"setting {', '.join(f'{key} of {name} to {value}' for key, value in settings.items())}"):
            if "master" in settings:
                settings["master"] = self.interface_index(settings["master"])
            self._route.link("set", index=self.interface_index(name), **settings)

    def wait_until_up(self, name: str) -> None:
        """Setting an interface up is answered before it carries traffic: the kernel batches carrier changes, up to a
        second, and until then there is no IPv6 route and programs see an interface that is not running."""
        deadline = time.monotonic() + _LINK_UP_SECONDS
        index = self.interface_index(name)
        while (state := self._route.get_links(index)[0].get_attr("IFLA_OPERSTATE")) != "UP":
            if time.monotonic() > deadline:
                raise NetlabError(
                    f"netlab: interface {name} is {state}, not UP, {_LINK_UP_SECONDS:g} s after its start"
                )
            time.sleep(0.01)

    def sent_bytes(self, name: str) -> int:
        return int(self._route.get_links(self.interface_index(name))[0].get_attr("IFLA_STATS64")["tx_bytes"])

    def add_veth(self, name: str, mtu: int, peer_name: str, peer_namespace_fd: int) -> None:
        """A pair of interfaces; the peer is born in the other namespace, so no name is ever taken outside the lab."""
        peer = {"ifname": peer_name, "mtu": mtu, "net_ns_fd": peer_namespace_fd}
        with translated(f"making veth pair {name}/{peer_name}", "CONFIG_VETH"):
            self._route.link("add", ifname=name, kind="veth", mtu=mtu, peer=peer)

    def add_bridge(self, name: str, mtu: int) -> None:
        with translated(f"making bridge {name}", "CONFIG_BRIDGE"):
            # Without a querier, multicast snooping would only add a way for neighbour discovery to be lost.
            self._route.link("add", ifname=name, kind="bridge", mtu=mtu, br_mcast_snooping=0)
        self.change(name, state="up")

    def add_address(self, name: str, address: str, prefix_length: int) -> None:
        # Duplicate address detection would keep an IPv6 address unusable for a second; here nobody can duplicate it.
        extra = {"flags": _IFA_F_NODAD} if ":" in address else {}
        with translated(f"giving {name} the address {address}/{prefix_length}"):
            index = self.interface_index(name)
            # "replace": it may be there already.
            self._route.addr("replace", index=index, address=address, prefixlen=prefix_length, **extra)

    def remove_address(self, name: str, address: str, prefix_length: int) -> None:
        with translated(f"taking the address {address}/{prefix_length} from {name}"):
            self._route.addr("del", index=self.interface_index(name), address=address, prefixlen=prefix_length)

    def set_neighbour(self, name: str, address: str, hardware_address: str | None) -> None:
        """Where packets to `address` go, whoever has it; None: found out anew."""
        with translated(f"setting the neighbour {address} of {name}"):
            index = self.interface_index(name)
            if hardware_address is None:
                self._route.neigh("del", ifindex=index, dst=address)
            else:
                self._route.neigh("replace", ifindex=index, dst=address, lladdr=hardware_address, state="permanent")

    def limit_host_side(self, name: str, plan: LinkPlan) -> None:
        """Limits what a host sends through its NIC: the link's rate, and within it each flow's."""
        if not plan.is_limited:
            return
        index = self.interface_index(name)
        link_mbit = plan.rate_mbit if plan.rate_mbit is not None else MAX_RATE_MBIT
        self._add_htb(index, link_mbit)
        if plan.per_flow_mbit is None:
            return
        # HTB grants a class its own rate even where the sum exceeds the link's, and lends up to its ceiling only what
        # the link has left: so the classes share the link's rate, and the ceiling is the cap.
        for number in range(FLOW_CLASSES):
            cap = _flow_cap_mbit(plan.per_flow_mbit, plan, number)
            share = min(cap, link_mbit / (FLOW_CLASSES + 1))
            self._add_class(index, _FIRST_FLOW_MINOR + number, share, cap)
        self._add_filter(index, flow_filter(_MAJOR, _FIRST_FLOW_MINOR, _OTHER_MINOR))

    def flow_usage(self, name: str, plan: LinkPlan) -> list[FlowUsage]:
        """What each class of flows has sent; empty where flows are not capped."""
        if plan.per_flow_mbit is None:
            return []
        usages = []
        with translated(f"reading the traffic classes of {name}"):
            for entry in self._route.get_classes(self.interface_index(name)):
                number = (entry["handle"] & 0xFFFF) - _FIRST_FLOW_MINOR
                if 0 <= number < FLOW_CLASSES:
                    sent = entry.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")["bytes"]
                    usages.append(FlowUsage(_flow_cap_mbit(plan.per_flow_mbit, plan, number), sent))
        return usages

    def limit_port_side(self, name: str, plan: LinkPlan) -> None:
        """Limits what a switch port sends to its host: when several hosts send to one, it is here that they queue,
        and that what exceeds the buffer is dropped."""
        if plan.rate_mbit is None and not plan.loss:
            return
        index = self.interface_index(name)
        self._add_htb(index, plan.rate_mbit if plan.rate_mbit is not None else MAX_RATE_MBIT)
        if plan.rate_mbit is not None:
            buffer = int(_bytes_per_second(plan.rate_mbit) * _PORT_BUFFER_SECONDS)
            self._add_buffer(index, _OTHER_MINOR, max(_LEAST_PORT_BUFFER_BYTES, buffer))
        if plan.loss:
            # At a switch: a packet that its own host drops counts for TCP as not sent yet, not as lost.
            self._add_class(index, _LOST_MINOR, 1, 1)
            self._add_buffer(index, _LOST_MINOR, 1)
            self._add_filter(index, loss_filter(_MAJOR, _OTHER_MINOR, _LOST_MINOR, plan.loss))

    def _add_buffer(self, index: int, minor: int, size: int) -> None:
        with translated(f"giving a switch port a buffer of {size} bytes", "CONFIG_NET_SCH_FIFO"):
            _send_tc_request(
                _RTM_NEWQDISC,
                index=index,
                handle=minor << 16,
                parent=_ROOT_QDISC | minor,
                kind="bfifo",
                options=struct.pack("=I", size),
            )

    def _add_htb(self, index: int, link_mbit: float) -> None:
        with translated("limiting a link's rate", "CONFIG_NET_SCH_HTB"):
            self._route.tc("add", "htb", index, handle=_ROOT_QDISC, default=_OTHER_MINOR)
        self._add_class(index, _LINK_MINOR, link_mbit, link_mbit, parent=_ROOT_QDISC)
        # Whatever is in no other class: all traffic where flows are not capped, else ARP and the like.
        share = link_mbit / (FLOW_CLASSES + 1)
        self._add_class(index, _OTHER_MINOR, share, link_mbit)

    def _add_class(
        self, index: int, minor: int, rate_mbit: float, ceiling_mbit: float, parent: int = _ROOT_QDISC | _LINK_MINOR
    ) -> None:
        rate, ceiling = _bytes_per_second(rate_mbit), _bytes_per_second(ceiling_mbit)
        with translated("adding a traffic class", "CONFIG_NET_SCH_HTB"):
            self._route.tc(
                "add-class",
                "htb",
                index,
                handle=_ROOT_QDISC | minor,
                parent=parent,
                rate=rate,
                ceil=ceiling,
                burst=max(_LEAST_BURST_BYTES, int(rate * _BURST_SECONDS)),
                cburst=max(_LEAST_BURST_BYTES, int(ceiling * _BURST_SECONDS)),
                quantum=_QUANTUM_BYTES,
            )

    def _add_filter(self, index: int, program: tuple[int, bytes]) -> None:
        count, instructions = program
        options = _attribute(_TCA_BPF_OPS_LEN, struct.pack("=H", count)) + _attribute(_TCA_BPF_OPS, instructions)
        with translated("sorting packets into classes", "CONFIG_NET_CLS_BPF"):
            _send_tc_request(
                _RTM_NEWTFILTER,
                index=index,
                handle=1,
                parent=_ROOT_QDISC,
                info=1 << 16 | socket.htons(_ETH_P_ALL),
                kind="bpf",
                options=options,
            )


def _attribute(number: int, payload: bytes) -> bytes:
    """One netlink attribute: length, number, payload, padding to four bytes."""
    length = 4 + len(payload)
    return struct.pack("=HH", length, number) + payload + b"\0" * (-length % 4)


def _send_tc_request(
    message_type: int, *, index: int, handle: int, parent: int, kind: str, options: bytes, info: int = 0
) -> None:
    """Creates a qdisc or filter, of the two kinds whose options pyroute2 cannot encode: bfifo and a classifier with a
    classic BPF program. Waits for the kernel's answer; OSError with the errno that it gave."""
    body = _TCMSG.pack(socket.AF_UNSPEC, index, handle, parent, info)
    body += _attribute(_TCA_KIND, kind.encode() + b"\0") + _attribute(_TCA_OPTIONS, options)
    flags = _NLM_F_REQUEST | _NLM_F_ACK | _NLM_F_EXCL | _NLM_F_CREATE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as route:
        route.settimeout(_ANSWER_SECONDS)
        route.send(_HEADER.pack(_HEADER.size + len(body), message_type, flags, 1, 0) + body)
        answer = route.recv(65536)
    _, answer_type, _, _, _ = _HEADER.unpack_from(answer)
    (number,) = struct.unpack_from("=i", answer, _HEADER.size)
    if answer_type != _NLMSG_ERROR:
        raise RuntimeError(f"rtnetlink answered a {kind} request with message type {answer_type}, not with an ACK")
    if number != 0:
        raise OSError(-number, os.strerror(-number))
