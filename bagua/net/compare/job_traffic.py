"""What the TCP connections of a command's processes on this host have carried, as the kernel counts it: of its ranks
alone, whatever else uses the network, and whichever library opened them. See sock_diag(7) and linux/inet_diag.h."""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

from bagua.net.bench.process_tree import descendants

_INTERVAL_S = 0.5
# Of a run; with more, every other one is dropped.
_MAX_SAMPLES = 2000
# With less, it is not training, or a step more or less at either end would count.
_MIN_BYTES = 16 << 20
_MIN_MIDDLE_S = 3.0
# Of a run's bytes. Start-up moves few, and the first steps, which are slow, are in the first part.
_MIDDLE = (0.1, 0.9)

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_INET_DIAG_INFO = 2
_STATES = 0xFFF & ~(1 << 10)  # all but listening
_HEADER = struct.Struct("=IHHII")
_MESSAGE_BYTES = 72  # struct inet_diag_msg
_INODE_AT = 68
_ATTRIBUTE = struct.Struct("=HH")
_ACKED_AND_RECEIVED_AT = 120  # in struct tcp_info
_COUNTS = struct.Struct("=QQ")
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def bytes_of_connections() -> dict[int, int]:
    """Bytes sent and received by every TCP connection of this network namespace, by inode; {} where the kernel does not
    tell."""
    found: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(1.0)
            for family in (socket.AF_INET, socket.AF_INET6):
                request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), _STATES)
                size = _HEADER.size + len(request)
                link.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 0, 0) + request)
                while _take(link.recv(1 << 18), found):
                    pass
    except OSError:
        return {}
    return found


def _take(answer: bytes, found: dict[int, int]) -> bool:
    """Whether more follows."""
    at = 0
    while at + _HEADER.size <= len(answer):
        size, kind, *_ = _HEADER.unpack_from(answer, at)
        if kind != _SOCK_DIAG_BY_FAMILY or size < _HEADER.size:
            return False
        message = answer[at + _HEADER.size : at + size]
        (inode,) = struct.unpack_from("=I", message, _INODE_AT)
        attribute = _MESSAGE_BYTES
        while attribute + _ATTRIBUTE.size <= len(message):
            length, name = _ATTRIBUTE.unpack_from(message, attribute)
            if name == _INET_DIAG_INFO and length >= _ATTRIBUTE.size + _ACKED_AND_RECEIVED_AT + _COUNTS.size:
                found[inode] = sum(_COUNTS.unpack_from(message, attribute + _ATTRIBUTE.size + _ACKED_AND_RECEIVED_AT))
            attribute += max(_ATTRIBUTE.size, (length + 3) & ~3)
        at += (size + 3) & ~3
    return bool(answer)


def sockets_of(pids: Iterable[int]) -> set[int]:
    """Inodes of the sockets that these processes have open."""
    found = set()
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - every half second, of all ranks
        except OSError:
            continue
        for name in names:
            try:
                match = _SOCKET.fullmatch(os.readlink(f"/proc/{pid}/fd/{name}"))  # noqa: PTH115
            except OSError:
                continue
            if match:
                found.add(int(match[1]))
    return found


class JobTraffic:
    """Of one run of a command. `sample` is called several times a second."""

    def __init__(
        self, pid: int, now: float, connections: Callable[[], Mapping[int, int]] = bytes_of_connections
    ) -> None:
        self._pid = pid
        self._connections = connections
        self._open: dict[int, int] = {}  # by inode, when they were seen last
        self._ended = 0  # bytes of those whose inode another connection has
        self._samples = [(now, 0)]
        self._interval_s = _INTERVAL_S

    def sample(self, now: float) -> None:
        if now - self._samples[-1][0] < self._interval_s:
            return
        owned = sockets_of([self._pid, *descendants(self._pid)])
        for inode, nbytes in self._connections().items() if owned else ():
            if inode in owned:
                before = self._open.get(inode, 0)
                self._ended += before if nbytes < before else 0
                self._open[inode] = nbytes
        self._samples.append((now, self._ended + sum(self._open.values())))
        if len(self._samples) > _MAX_SAMPLES:
            del self._samples[1:-1:2]
            self._interval_s *= 2

    @property
    def nbytes(self) -> int:
        """Those within this host count twice: they are sent and received."""
        return self._samples[-1][1]

    def middle_s(self) -> float | None:
        """How long it took to carry the middle 80 % of the bytes; None: too few, or too short to tell."""
        if self.nbytes < _MIN_BYTES:
            return None
        begin, end = (_reached(self._samples, share * self.nbytes) for share in _MIDDLE)
        return end - begin if end - begin >= _MIN_MIDDLE_S else None


def _reached(curve: Sequence[tuple[float, int]], nbytes: float) -> float:
    """When so many bytes were carried; between two samples the rate is taken to be even."""
    number = next(number for number, (_, carried) in enumerate(curve) if carried >= nbytes)
    (before, low), (after, high) = curve[number - 1], curve[number]
    return before + (after - before) * (nbytes - low) / (high - low)
