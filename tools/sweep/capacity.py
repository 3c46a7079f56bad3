"""What this machine moves through a lab without a limit: plain TCP from one host to another, for half a second."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

from netlab import Lab

_SETTLE_SECONDS = 0.4  # TCP starts slowly
_SECONDS = 0.5
_CHUNK_BYTES = 1 << 20
_PATIENCE_SECONDS = 10.0
# With a delay, small enough for TCP to reach full speed within the above.
PROBE_DELAY_MS = 1.0
_BUFFER_BYTES = 256 << 20


def measure_capacity_gbit(delay_ms: float, flows: int) -> float:
    """Payload, of all flows together.

    Raises:
        NetlabError: no such lab can be built here.
    """
    buffers = _BUFFER_BYTES if delay_ms else None
    with Lab(delay_ms=delay_ms, tcp_buffer_bytes=buffers) as lab, ExitStack() as stack:
        with lab.inside(1):
            listener = stack.enter_context(socket.create_server((lab.hosts[1].address(), 0)))
        listener.settimeout(_PATIENCE_SECONDS)
        stop = threading.Event()
        received = [0] * flows
        threads = []
        for flow in range(flows):
            with lab.inside(0):
                sender = stack.enter_context(socket.socket())
            sender.settimeout(_PATIENCE_SECONDS)
            sender.connect(listener.getsockname())
            receiver = stack.enter_context(listener.accept()[0])
            receiver.settimeout(_PATIENCE_SECONDS)
            threads.append(threading.Thread(target=_send, args=(sender, stop), name=f"send-{flow}"))
            threads.append(threading.Thread(target=_receive, args=(receiver, received, flow), name=f"receive-{flow}"))
        for thread in threads:
            thread.start()
        stop.wait(_SETTLE_SECONDS)
        began, before = time.monotonic(), sum(received)
        stop.wait(_SECONDS)
        moved, seconds = sum(received) - before, time.monotonic() - began
        stop.set()
        for thread in threads:
            thread.join(_PATIENCE_SECONDS)
    return moved * 8e-9 / seconds


def _send(sender: socket.socket, stop: threading.Event) -> None:
    chunk = bytes(_CHUNK_BYTES)
    while not stop.is_set():
        sender.send(chunk)
    sender.shutdown(socket.SHUT_WR)


def _receive(receiver: socket.socket, received: list[int], flow: int) -> None:
    buffer = bytearray(_CHUNK_BYTES)
    while count := receiver.recv_into(buffer):
        received[flow] += count
