"""`bagua-net compare`: the bytes of a command's own TCP connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import pytest

from bagua.net.compare import job_traffic
from bagua.net.compare.job_traffic import JobTraffic, bytes_of_connections, sockets_of


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_kernel_counts_the_bytes_of_a_connection(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.create_server((address, 0), family=family) as server,
        socket.create_connection(server.getsockname()[:2]) as one,
        server.accept()[0] as other,
    ):
        one.sendall(bytes(1000))
        other.recv(1000, socket.MSG_WAITALL)
        other.sendall(bytes(50))
        one.recv(50, socket.MSG_WAITALL)
        inodes = {os.fstat(end.fileno()).st_ino for end in (one, other)}
        assert inodes <= sockets_of([os.getpid()])
        counted = bytes_of_connections()
    # The last bytes may not be acknowledged yet.
    assert [counted[inode] >= 1000 for inode in inodes] == [True, True]


@pytest.fixture
def own_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_traffic, "sockets_of", lambda _: {7, 8})
    monkeypatch.setattr(job_traffic, "descendants", lambda _: [])


def middle_of(start_up_s: float, seconds: float, rate: int = 10 << 20) -> float | None:
    now = [0.0]

    def connections() -> Mapping[int, int]:
        """7 is replaced by 8 on the way, and that by another one of this number; each begins at 0. 9 is another
        command's."""
        carried = int(rate * min(max(now[0] - start_up_s, 0.0), seconds))
        number, carried = divmod(carried, int(rate * seconds / 3) + 1)
        return {7 if number == 0 else 8: carried, 9: int(now[0] * (1 << 30))} if now[0] < start_up_s + seconds else {}

    job = JobTraffic(1, 0.0, connections)
    while now[0] < start_up_s + seconds + 5:
        now[0] += 0.1
        job.sample(now[0])
    return job.middle_s()


@pytest.mark.usefixtures("own_sockets")
def test_the_middle_of_the_traffic_has_no_start_up_in_it() -> None:
    assert middle_of(3, 20) == pytest.approx(16.0, rel=0.05)
    assert middle_of(30, 20) == pytest.approx(16.0, rel=0.05)
    assert middle_of(100, 3000) == pytest.approx(2400.0, rel=0.01), "samples are thinned out"
    assert middle_of(3, 2) is None, "too short"
    assert middle_of(3, 20, rate=1 << 10) is None, "too little: it is not of training"
