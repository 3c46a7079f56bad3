"""Classic BPF programs that give each TCP flow one of N traffic classes, or random packets a class of their own.

The kernels at hand have no cls_flow, and a u32 hash sees one port only and no IPv4 options. cls_bpf with a classic
program is in every distribution's kernel, needs no compiler, and takes the class from the program's return value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

# Odd on purpose: Linux gives connecting sockets even ports, and with an odd modulus twice as many neighbouring ones
# fall in different classes. Prime, so that no stride of ports repeats early.
FLOW_CLASSES = 509
# Spreads flows with equal ports to different hosts; a prime with no small multiple near FLOW_CLASSES.
_HOST_STRIDE = 7919

_ETHERTYPE_IPV4 = 0x0800
_ETHERTYPE_IPV6 = 0x86DD
_PROTOCOL_TCP = 6
_ETHERNET = 14  # the program sees the packet from its Ethernet header on

# Opcodes of classic BPF (linux/bpf_common.h, linux/filter.h).
_LD_WORD, _LD_HALF, _LD_BYTE, _LD_HALF_AT_X = 0x20, 0x28, 0x30, 0x48
_LDX_IPV4_HEADER_LENGTH, _LDX_VALUE, _LDX_MEMORY = 0xB1, 0x01, 0x61
_STORE = 0x02
_ADD_VALUE, _ADD_X, _MULTIPLY, _MODULO = 0x04, 0x0C, 0x24, 0x94
_JUMP, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_BITS = 0x05, 0x15, 0x35, 0x45
_RETURN_VALUE, _RETURN_A = 0x06, 0x16
_RANDOM_WORD = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM: a load from there gives a random number


@dataclass(frozen=True)
class _Step:
    code: int
    value: int = 0
    on_true: str = ""  # label; empty: the next step
    on_false: str = ""
    label: str = ""


def _program(first_minor: int, classes: int, other_minor: int) -> list[_Step]:
    """(destination host, source port + destination port) modulo `classes`: consecutive source ports, as one program
    opening several connections gets, fall in different classes."""
    return [
        _Step(_LD_HALF, 12),
        _Step(_JUMP_IF_EQUAL, _ETHERTYPE_IPV6, on_true="ipv6"),
        _Step(_JUMP_IF_EQUAL, _ETHERTYPE_IPV4, on_false="other"),
        _Step(_LD_BYTE, _ETHERNET + 9),
        _Step(_JUMP_IF_EQUAL, _PROTOCOL_TCP, on_false="other"),
        _Step(_LD_HALF, _ETHERNET + 6),
        _Step(_JUMP_IF_BITS, 0x1FFF, on_true="other"),  # a later fragment has no ports
        _Step(_LD_HALF, _ETHERNET + 18),
        _Step(_MULTIPLY, _HOST_STRIDE),
        _Step(_STORE, 0),
        _Step(_LDX_IPV4_HEADER_LENGTH, _ETHERNET),
        _Step(_JUMP, on_true="ports"),
        _Step(_LD_BYTE, _ETHERNET + 6, label="ipv6"),
        _Step(_JUMP_IF_EQUAL, _PROTOCOL_TCP, on_false="other"),
        _Step(_LD_HALF, _ETHERNET + 38),
        _Step(_MULTIPLY, _HOST_STRIDE),
        _Step(_STORE, 0),
        _Step(_LDX_VALUE, 40),
        _Step(_LD_HALF_AT_X, _ETHERNET, label="ports"),
        _Step(_STORE, 1),
        _Step(_LD_HALF_AT_X, _ETHERNET + 2),
        _Step(_LDX_MEMORY, 1),
        _Step(_ADD_X),
        _Step(_LDX_MEMORY, 0),
        _Step(_ADD_X),
        _Step(_MODULO, classes),
        _Step(_ADD_VALUE, first_minor),
        _Step(_RETURN_A),
        _Step(_RETURN_VALUE, other_minor, label="other"),
    ]


def neighbour_rank(flow_class: int) -> int:
    """Numbers the classes so that source ports 2 apart have ranks in a row: connecting sockets get even ports."""
    return flow_class * pow(2, -1, FLOW_CLASSES) % FLOW_CLASSES


def _pack(steps: Sequence[_Step]) -> bytes:
    position = {step.label: index for index, step in enumerate(steps) if step.label}
    packed = b""
    for index, step in enumerate(steps):
        distance = {label: position[label] - index - 1 if label else 0 for label in (step.on_true, step.on_false)}
        if step.code == _JUMP:
            packed += struct.pack("=HBBI", step.code, 0, 0, distance[step.on_true])
        else:
            packed += struct.pack("=HBBI", step.code, distance[step.on_true], distance[step.on_false], step.value)
    return packed


def flow_filter(major: int, first_minor: int, other_minor: int, classes: int = FLOW_CLASSES) -> tuple[int, bytes]:
    """Number of instructions and packed `struct sock_filter`s; the class ids returned have the given major number."""
    steps = _program(major << 16 | first_minor, classes, major << 16 | other_minor)
    return len(steps), _pack(steps)


def loss_filter(major: int, kept_minor: int, lost_minor: int, share: float) -> tuple[int, bytes]:
    """As `flow_filter`: gives this share of all packets, from 0 to 1, the class `lost_minor`."""
    steps = [
        _Step(_LD_WORD, _RANDOM_WORD),
        _Step(_JUMP_IF_AT_LEAST, min(round(share * 2**32), 2**32 - 1), on_true="kept"),
        _Step(_RETURN_VALUE, major << 16 | lost_minor),
        _Step(_RETURN_VALUE, major << 16 | kept_minor, label="kept"),
    ]
    return len(steps), _pack(steps)
