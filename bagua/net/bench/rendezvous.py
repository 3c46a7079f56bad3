"""How the ranks of a run across hosts meet, and the connection that carries rank 0's orders.

JSON lines over TCP, never pickle: what arrives is data, whoever sent it. Rank 0 listens; every other rank connects,
proves that it belongs to the job (an HMAC over rank 0's nonce) and is told which rank it is answered as.

| step | sender | line |
|---|---|---|
| 1 | rank 0 | {"magic": "bagua-net-bench/1", "nonce": hex} |
| 2 | rank r | {"rank", "ranks", "host", "identity", "network", "facts", "version", "proof": HMAC-SHA256(job, nonce+r)}|
| 3 | rank 0 | {"welcome": true, "local_ranks": n} once all are here, or {"error": why} |
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagua.net.bench.errors import BenchError, ConnectionLostError
from bagua.net.bench.launch_environment import LaunchEnvironment
from bagua.net.bench.machine import package_version
from bagua.rank_list import rank_list

MAGIC = "bagua-net-bench/1"
# A stranger (a port scanner) may hold a place in the queue for this long at most.
_HELLO_S = 3.0
_RETRY_S = 0.2
_MAX_LINE_BYTES = 16 << 20
_OTHER_JOB = "give all ranks one BAGUA_BENCH_SECRET, or none, and start them from one launcher"

Message = dict[str, Any]


class LineConnection:
    """JSON lines over one socket, read without blocking. Owns the socket."""

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_s)
        self._socket = connection
        self._received = bytearray()
        self.peer = peer

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def local_address(self) -> str:
        """Ours, on the path to the peer; an IPv4 peer of a dual-stack socket shows as ::ffff:a.b.c.d."""
        return str(self._socket.getsockname()[0]).removeprefix("::ffff:")

    def send(self, message: Message) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError as error:
            raise BenchError(
                f"{self.peer} has taken nothing for {self._socket.gettimeout():g} s; check that its process runs, and"
                " that the network between the hosts lets large packets pass"
            ) from error
        except OSError as error:
            raise ConnectionLostError(self._lost(str(error), error.errno)) from error

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None when none came in time; 0 looks only at what is here."""
        deadline = time.monotonic() + timeout_s
        while (end := self._received.find(b"\n")) < 0:
            # select and not settimeout(0): the socket keeps its deadline for sends.
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                raise ConnectionLostError(self._lost(str(error), error.errno)) from error
            if not data:
                raise ConnectionLostError(self._lost("closed by the peer"))
            self._received += data
            if len(self._received) > _MAX_LINE_BYTES:
                raise BenchError(
                    f"{self.peer} sent a line above {_MAX_LINE_BYTES} bytes; it is not a rank of this benchmark"
                )
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise BenchError(
                f"{self.peer} sent {line[:60]!r}, which is no message of this bench; choose another --port"
            )
        return message

    def _lost(self, why: str, number: int | None = None) -> str:
        if number in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH):
            return (
                f"the connection to {self.peer} is lost ({why}); check that its host runs, and the network between the"
                " hosts"
            )
        return f"the connection to {self.peer} is lost ({why}); its own output says why it ended"

    def close(self) -> None:
        self._socket.close()


def keep_alive(connection: socket.socket, within_s: float) -> None:
    """A host that is gone is noticed within about this time, also by an end that only waits for orders."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(within_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(within_s / 6)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    # While data is on its way there are no probes.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(within_s * 1000)))


def host_identity() -> str:
    """The same for all ranks of one running kernel, also in containers with host names of their own."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def network_identity() -> str:
    """The same for all ranks that reach each other over one loopback interface: a kernel and a network namespace."""
    try:
        namespace = str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:
        namespace = ""
    return f"{host_identity()}/{namespace}"


def proof(job: str, nonce: str, rank: int) -> str:
    return hmac.new(job.encode(), f"{nonce}|{rank}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Member:
    """A rank as rank 0 knows it; rank 0's own has no connection."""

    rank: int
    host: str
    identity: str  # of the kernel: who shares the CPUs
    network: str  # who shares the loopback interface
    connection: LineConnection | None
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the kind of run asks of each rank


def listen_everywhere(port: int, backlog: int) -> socket.socket:
    """On all addresses, of IPv4 and IPv6. Raises OSError."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=backlog)


def listen(launch: LaunchEnvironment) -> socket.socket:
    """Rank 0's socket, on all addresses: which of them the others use is theirs to say."""
    try:
        return listen_everywhere(launch.port, max(launch.world_size, 16))
    except OSError as error:
        raise BenchError(
            f"port {launch.port} on {socket.gethostname()}, where the ranks meet, cannot be listened on"
            f" ({error.strerror or error}); another program holds it: give every rank the same free one with"
            f" {launch.port_setting}"
        ) from error


def meet(
    launch: LaunchEnvironment,
    timeout_s: float,
    say: Callable[[str], None],
    listener: socket.socket | None = None,
    facts: Mapping[str, Any] | None = None,
) -> list[Member]:
    """Rank 0: wait for every other rank; members by rank. A listener that is passed in is closed."""
    if listener is None:
        listener = listen(launch)
    own = Member(0, socket.gethostname(), host_identity(), network_identity(), None, facts or {})
    members: dict[int, Member] = {0: own}
    try:
        _await_members(launch, listener, members, timeout_s, say)
    except BaseException as error:
        # Those who are here wait for a welcome, and learn why there is none.
        for member in members.values():
            if member.connection is not None:
                _turn_away(member.connection, str(error))
        raise
    ranks_of_host = Counter(member.identity for member in members.values())
    for member in members.values():
        if member.connection is not None:
            member.connection.send({"welcome": True, "local_ranks": ranks_of_host[member.identity]})
    return [members[rank] for rank in range(launch.world_size)]


def _await_members(
    launch: LaunchEnvironment,
    listener: socket.socket,
    members: dict[int, Member],
    timeout_s: float,
    say: Callable[[str], None],
) -> None:
    deadline = time.monotonic() + timeout_s
    announced = False
    with listener:
        while len(members) < launch.world_size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise BenchError(_absent_ranks(launch, members, timeout_s))
            listener.settimeout(min(remaining, 1.0))
            try:
                accepted, address = listener.accept()
            except TimeoutError:
                if not announced:
                    announced = True
                    say(f"waiting on port {launch.port} for {launch.world_size - len(members)} more ranks")
                continue
            member = _admit(
                launch, accepted, f"{address[0]}:{address[1]}", members, min(_HELLO_S, remaining), timeout_s, say
            )
            if member is not None:
                members[member.rank] = member


def _turn_away(connection: LineConnection, reason: str) -> None:
    with contextlib.suppress(BenchError):  # it may be gone already
        connection.send({"error": reason})
    connection.close()


def _absent_ranks(launch: LaunchEnvironment, members: dict[int, Member], timeout_s: float) -> str:
    absent = [rank for rank in range(launch.world_size) if rank not in members]
    hint = "; in a batch script start it with srun, or give --local to run on this machine alone"
    return (
        f"{len(absent)} of {launch.world_size} ranks ({rank_list(absent)}) did not reach port {launch.port} of"
        f" {launch.master_address} within {timeout_s:g} s; see that {launch.launcher} started them all, that the port"
        f" is open between the hosts, or choose another with {launch.port_setting}"
        f"{hint if launch.launcher == 'Slurm' else ''}"
    )


def _admit(
    launch: LaunchEnvironment,
    accepted: socket.socket,
    peer: str,
    members: dict[int, Member],
    timeout_s: float,
    run_timeout_s: float,
    say: Callable[[str], None],
) -> Member | None:
    """None for a stranger, who is closed and never disturbs the run. A wrong rank of our own ends the run."""
    connection = LineConnection(accepted, peer, timeout_s)
    nonce = secrets.token_hex(16)
    try:
        connection.send({"magic": MAGIC, "nonce": nonce})
        hello = connection.receive(timeout_s)
    except BenchError:
        hello = None
    rank = hello.get("rank") if hello else None
    genuine = (
        hello is not None
        and isinstance(rank, int)
        and hmac.compare_digest(str(hello.get("proof")), proof(launch.job, nonce, rank))
    )
    if hello is None or not genuine or not isinstance(rank, int):
        say(f"turned away {peer}, which is not a rank of this run")
        if isinstance(rank, int) and 0 < rank < launch.world_size:
            say(f"it calls itself rank {rank}; {_OTHER_JOB}")
            _turn_away(connection, f"it is of another job; {_OTHER_JOB}")
        connection.close()
        return None
    complaint = None
    if hello.get("ranks") != launch.world_size or not 0 < rank < launch.world_size:
        complaint = f"rank {rank} of {hello.get('ranks')} came to a run of {launch.world_size} ranks"
    elif rank in members:
        complaint = f"a second rank {rank} ({peer}) came; the first is {members[rank].host}"
    elif hello.get("version") != package_version():
        complaint = f"rank {rank} has bagua {hello.get('version')} and rank 0 has {package_version()}"
    if complaint is not None:
        complaint += "; start all ranks from one launcher, with one version of bagua"
        _turn_away(connection, complaint)
        raise BenchError(complaint)
    keep_alive(accepted, run_timeout_s)
    connection.peer = f"rank {rank} ({hello.get('host')})"
    host, identity, network = (str(hello.get(name)) for name in ("host", "identity", "network"))
    facts = hello.get("facts")
    return Member(rank, host, identity, network, connection, facts if isinstance(facts, dict) else {})


def join(
    launch: LaunchEnvironment, timeout_s: float, facts: Mapping[str, Any] | None = None
) -> tuple[LineConnection, int]:
    """Every other rank: the connection to rank 0, and how many ranks share this host."""
    deadline = time.monotonic() + timeout_s
    target = f"rank 0 at {launch.master_address}:{launch.port}"
    while True:
        try:
            connected = socket.create_connection((launch.master_address, launch.port), timeout=min(timeout_s, 5.0))
            break
        except OSError as error:
            # Rank 0 may start later than this one.
            if time.monotonic() + _RETRY_S > deadline:
                raise BenchError(
                    f"{target} cannot be reached within {timeout_s:g} s ({error.strerror or error}); see that rank 0"
                    " runs, that MASTER_ADDR names its host, and that the port is open, or choose another with"
                    f" {launch.port_setting}"
                ) from error
            time.sleep(_RETRY_S)
    keep_alive(connected, timeout_s)
    connection = LineConnection(connected, target, timeout_s)
    try:
        return connection, _introduce(launch, connection, target, deadline, facts or {})
    except BaseException:
        connection.close()
        raise


def _introduce(
    launch: LaunchEnvironment, connection: LineConnection, target: str, deadline: float, facts: Mapping[str, Any]
) -> int:
    """The handshake of rank r; how many ranks share this host."""
    greeting = connection.receive(max(0.0, deadline - time.monotonic()))
    if greeting is None or greeting.get("magic") != MAGIC:
        raise BenchError(
            f"what listens at {launch.master_address}:{launch.port} is no bagua-net-bench; give {launch.port_setting}"
        )
    connection.send(
        {
            "rank": launch.rank,
            "ranks": launch.world_size,
            "host": socket.gethostname(),
            "identity": host_identity(),
            "network": network_identity(),
            "facts": facts,
            "proof": proof(launch.job, str(greeting.get("nonce")), launch.rank),
            "version": package_version(),
        }
    )
    welcome = connection.receive(max(0.0, deadline - time.monotonic()))
    if welcome is None:
        raise BenchError(f"{target} did not go on in time; another rank is missing, see rank 0's output")
    if "error" in welcome:
        raise BenchError(f"{target} turned this rank away: {welcome['error']}")
    return int(welcome["local_ranks"])
