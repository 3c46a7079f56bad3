"""Encryption between namespaces, as whoever sits on the wire sees it (AF_PACKET)."""

from __future__ import annotations

import socket
import threading
import zlib
from pathlib import Path
from types import TracebackType

from support.lab_ring import Ring
from support.labs import NEEDS_LAB, Lab

pytestmark = NEEDS_LAB

_ETH_P_ALL = 3
_SO_RCVBUFFORCE = 33  # asm-generic/socket.h
_ETHERNET_BYTES = 14
_MESSAGE_BYTES = (1 << 19) - 4
_BUFFER_BYTES = 4 * _MESSAGE_BYTES  # two ranks, two channels
_HEADERS_FIELD = _MESSAGE_BYTES.to_bytes(8, "little")
_HOST = (socket.gethostname().encode() + bytes(4))[:47]  # as the hello has it, with its end


class Capture:
    """Every packet over eth0 of a host."""

    def __init__(self, lab: Lab, host: int) -> None:
        with lab.inside(host):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        self._socket.bind(("eth0", 0))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 256 << 20)
        self._socket.settimeout(0.2)
        self._stopping = threading.Event()
        self._payloads: list[bytes] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Capture:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                packet = self._socket.recv(1 << 17)
            except TimeoutError:
                if self._stopping.is_set():
                    return
                continue
            payload = _tcp_payload(packet[_ETHERNET_BYTES:])
            if payload:
                self._payloads.append(payload)

    def seen(self) -> bytes:
        """What TCP carried, in the order of the packets."""
        return b"".join(self._payloads)


def _tcp_payload(packet: bytes) -> bytes:
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return b""
    header = 4 * (packet[0] & 15)
    total = int.from_bytes(packet[2:4], "big") or len(packet)
    return packet[header + 4 * (packet[header + 12] >> 4) : total]


def _exchanged(environment: dict[str, str]) -> tuple[bytes, list[bytes]]:
    """What was on the wire, and the handles that the ranks exchanged beside it."""
    with Lab(ip_versions=(4,)) as lab, Capture(lab, 0) as capture, Ring(lab, env=environment) as ring:
        handles = [bytes.fromhex(handle) for event in ring.listening for handle in event["handles"]]
        ring.connect()
        for _ in range(3):
            ring.verify(_BUFFER_BYTES)
        ring.quit()
    return capture.seen(), handles


def test_no_payload_header_or_token_is_on_the_wire(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    encrypted = {"BAGUA_NET_SECRET_FILE": str(secret), "BAGUA_NET_ENCRYPTION": "1"}
    for environment in ({}, encrypted):
        seen, handles = _exchanged(environment)
        assert len(seen) > 3 * _BUFFER_BYTES, "the capture missed packets"
        assert all(handle[36:52] not in seen for handle in handles), "a token"
        assert all(handle[64:80] in seen for handle in handles), "the ids of the listens are public"
        # What has a pattern can be compressed, and random bytes cannot.
        ratio = len(zlib.compress(seen, 1)) / len(seen)
        if environment:
            assert ratio > 0.99
            assert _HEADERS_FIELD not in seen
            assert _HOST not in seen
            assert bytes(range(16)) not in seen
        else:
            assert ratio < 0.9, "the test would see nothing"
            assert _HEADERS_FIELD in seen
            assert _HOST in seen
