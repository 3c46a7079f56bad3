"""A store in Redis servers: those that are given, or one per node that this job starts and ends."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from bagua import launch_environment as env
from bagua.collectives.object_collectives import all_gather_object
from bagua.collectives.process_group import is_initialized
from bagua.contrib.caching.store import (
    ClusterStore,
    Retries,
    Store,
    StoreError,
    StoreFullError,
    checked_capacity,
    to_bytes,
)
from bagua.misuse import import_optional

_logger = logging.getLogger("bagua")

# A server that has not answered for so long is waited for all the same, with a warning: it may be a busy machine. Only
# the end of its process proves that it does not start.
_SLOW_START_S = 20.0
# Nothing is lost if a server is killed that takes longer to end: it keeps no files.
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.02
_ATTEMPTS = 5

# Ends the server and removes its folder when standard input is closed, which the kernel does for a process that was
# killed, too. Descriptor 3, because background commands of sh have no standard input.
_WATCHED_SERVER = """
exec 3<&0
redis-server "$1/redis.conf" 3<&- &
server=$!
{ read -r _ <&3; kill "$server"; } &
watch=$!
wait "$server"
kill "$watch" 2>/dev/null
rm -rf "$1"
"""

_running: weakref.WeakValueDictionary[tuple[str, int], RedisServer] = weakref.WeakValueDictionary()


def start_servers(cluster_mode: bool, capacity_bytes: int) -> tuple[RedisServer | None, list[dict[str, Any]]]:
    """Collective, if there are several processes.

    Returns:
        the server that this process started, and where those are that it uses.

    Raises:
        RuntimeError: there is no process group, or a server cannot be started, on whichever rank.
    """
    if env.world_size() == 1:
        server = _shared_server("127.0.0.1", capacity_bytes)
        return server, [server.host]
    if not is_initialized():
        raise RuntimeError(
            f"backend='redis' without hosts was used on rank {env.rank()} of {env.world_size()} before the "
            "process group was there.\nThe ranks must tell each other where they start servers.\n"
            "Call bagua.torch_api.init_process_group() first, or pass hosts=[...]."
        )
    mine: RedisServer | None = None
    message = ""
    if env.local_rank() == 0:
        is_one_node = env.local_world_size() == env.world_size()
        try:
            mine = _shared_server("127.0.0.1" if is_one_node or not cluster_mode else _own_address(), capacity_bytes)
        except (RuntimeError, OSError) as error:
            message = str(error)  # the others wait for what this rank says
    rows = all_gather_object((env.node_rank(), mine.host if mine else None, message))
    if failed := next((f"On rank {rank}: {text}" for rank, (_, _, text) in enumerate(rows) if text), None):
        raise RuntimeError(failed)
    node = env.node_rank()
    hosts = [host for of_node, host, _ in rows if host is not None and (cluster_mode or of_node == node)]
    return mine, hosts


def _shared_server(address: str, capacity_bytes: int) -> RedisServer:
    """That of this process; it ends when nothing refers to it any more."""
    server = _running.get((address, capacity_bytes))
    if server is None or not server.is_running():
        server = _running[address, capacity_bytes] = RedisServer(address, capacity_bytes)
    return server


def start_redis_server_cli(port: int, capacity: int, *args: str) -> None:
    """Start a Redis server on 127.0.0.1 that runs on when this process ends, without a password.

    Args:
        port: to listen on.
        capacity: limit of its memory in bytes; then it evicts at random.
        *args: more options of redis-server with their values, e.g. "--bind 10.0.0.1" and "--requirepass secret" for a
            server that other nodes use.

    Raises:
        RuntimeError: redis-server is not installed, or does not start.
    """
    _check_installed()
    options = f"--port {port} --maxmemory {capacity} --maxmemory-policy allkeys-random --appendonly no --bind 127.0.0.1"
    given = [word for one in args for word in shlex.split(one)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["redis-server", *options.split(), "--save", "", *given, "--daemonize", "no"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        address = given[given.index("--bind") + 1].lstrip("-") if "--bind" in given else "127.0.0.1"
        if address.strip(":*") == "":  # all
            address = "localhost"
        # Another server may have the port. One that asks for a password, or rejects this address, does not say its
        # process.
        answers = (f"process_id:{process.pid}\r".encode(), b"-NOAUTH", b"-DENIED")
        if not _is_ready(process, address, port, "INFO server", answers):
            raise RuntimeError(_not_started(log, f"{address}:{port}"))
        process.returncode = 0  # nobody is to wait for it


def _check_installed() -> None:
    if shutil.which("redis-server") is None:
        raise RuntimeError(
            "redis-server is not on the PATH, and hosts=None asks for a server to be started.\n"
            "Install it (Debian: apt-get install redis-server), pass hosts=[...], or use backend='lmdb'."
        )


def _is_ready(
    process: subprocess.Popen[bytes], address: str, port: int, command: str, answers: tuple[bytes, ...]
) -> bool:
    """Wait until the server answers, or its process has ended."""
    begin, is_told = time.monotonic(), False
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1) as connection:
            connection.sendall(f"{command}\r\n".encode())
            reply = connection.recv(4096)
            if any(one in reply for one in answers) and process.poll() is None:
                return True
        if not is_told and time.monotonic() > begin + _SLOW_START_S:
            is_told = True
            _logger.warning(
                "redis-server has not answered for %.0f s.\nIt is process %d, and is to listen on %s:%d.\n"
                "This process goes on waiting; look for what keeps the server busy, or kill it to get an error.",
                _SLOW_START_S,
                process.pid,
                address,
                port,
            )
        time.sleep(_POLL_S)
    return False


def _not_started(log: IO[bytes], where: str) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines() or ["it wrote nothing"]
    return f"redis-server does not start: {lines[-1]}\nIt was to listen on {where}."


class RedisServer:
    """A server with a random password, without files that stay.

    Args:
        address: of this node, to listen on.
        capacity_bytes: limit of its memory.

    Attributes:
        host: what RedisStore needs to connect.

    Raises:
        RuntimeError: redis-server is not installed, or does not start.
    """

    def __init__(self, address: str, capacity_bytes: int) -> None:
        _check_installed()
        for attempt in range(1, _ATTEMPTS + 1):  # somebody may take the port
            password = secrets.token_hex(16)
            self.host: dict[str, Any] = {"host": address, "port": _free_port(address), "password": password}
            with tempfile.TemporaryFile() as log:
                self._process = self._start(capacity_bytes, log)
                self._end = weakref.finalize(self, _end, self._process, os.getpid())
                # With its password: another server may have taken the port.
                if _is_ready(self._process, address, self.host["port"], f"AUTH {password}", (b"+OK",)):
                    return
                self.stop()
                if attempt == _ATTEMPTS:
                    raise RuntimeError(_not_started(log, address))

    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self._process.poll() is None

    def _start(self, capacity_bytes: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
        folder = Path(tempfile.mkdtemp(prefix="bagua-redis-"))  # for this user alone: the password is in it
        lines = {
            "bind": self.host["host"],
            "port": self.host["port"],
            "requirepass": self.host["password"],
            "maxmemory": capacity_bytes,
            "maxmemory-policy": "allkeys-random",
            "dir": folder,
            "save": '""',
            "appendonly": "no",
        }
        (folder / "redis.conf").write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        return subprocess.Popen(
            ["sh", "-c", _WATCHED_SERVER, "sh", str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End the server and wait for it."""
        self._end()


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of it
        return
    try:
        # Not by closing it alone: DataLoader workers have inherited it.
        process.communicate(b"\n", timeout=_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _own_address() -> str:
    """The address of this node from which it reaches rank 0. Nothing is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(env.master_address(), 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
        return address


_TIMEOUT_S = 10.0
# A server that did not respond is not asked again for so long.
_PAUSE_S = 30.0
_LEAST_BYTES = 1 << 20
_PORT = 6379  # the default of redis.Redis


class RedisStore(ClusterStore):
    """Values in Redis servers. With several, the hash of a key chooses one.

    Args:
        hosts: one dict per server, in the same order on all ranks: "host" and "port", and what else redis.Redis takes,
            e.g. "username", "password", "ssl". None: local rank 0 of each node starts a server with a random password,
            which ends with this process; stores with the same arguments share it. It is a collective call then: after
            `init_process_group`, on all ranks.
        cluster_mode: the servers of all nodes are one store. False: each node uses its own.
        capacity_per_node: what a server started here may use: a number of bytes, or a text such as "50G"; then it
            evicts at random. The default is 100 GiB.

    Raises:
        ValueError: `hosts` is empty, a host is no dict with "host" or "unix_socket_path", several hosts without
            cluster_mode, or capacity_per_node is below 1 MiB.
        ModuleNotFoundError: the package redis is not installed.
        RuntimeError: a server cannot be started, or there are several processes and no process group.
    """

    def __init__(
        self,
        hosts: Sequence[Mapping[str, Any]] | None = None,
        cluster_mode: bool = True,
        capacity_per_node: int | str = 107374182400,
    ) -> None:
        import_optional("redis", "backend='redis'")
        capacity = checked_capacity("capacity_per_node", capacity_per_node, _LEAST_BYTES)
        self._server = None
        if hosts is None:
            self._server, hosts = start_servers(cluster_mode, capacity)
        self.hosts = [_checked_host(host) for host in hosts]
        if not self.hosts or (len(self.hosts) > 1 and not cluster_mode):
            raise ValueError(
                f"hosts has {len(self.hosts)} servers: must be at least 1, and exactly 1 with cluster_mode=False, that "
                "of this node"
            )
        super().__init__([RedisServerStore(host) for host in self.hosts])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_server": None}  # it belongs to the process that started it

    def shutdown(self) -> None:
        super().shutdown()
        self._server = None  # it ends with the last store that uses it


class RedisServerStore(Store):
    """One server.

    Args:
        host: arguments of redis.Redis.
    """

    def __init__(self, host: Mapping[str, Any]) -> None:
        self._redis = import_optional("redis", "backend='redis'")
        self._host = {
            "socket_timeout": _TIMEOUT_S,
            "socket_connect_timeout": _TIMEOUT_S,
            **host,
            "decode_responses": False,
        }
        self._retries = Retries(_PAUSE_S)
        # Connects at the first request; each process has connections of its own, also after a fork.
        # One more attempt is for connections that the server has closed meanwhile; its default takes seconds.
        retry = self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 1)
        self._client = self._redis.Redis(**{"retry": retry, **self._host})

    def __reduce__(self) -> tuple[Any, ...]:
        return RedisServerStore, (self._host,)

    def _request(self, name: str, *arguments: Any) -> Any:
        self._retries.check()
        address = self._host.get("unix_socket_path") or f"{self._host['host']}:{self._host.get('port', _PORT)}"
        try:
            return getattr(self._client, name)(*arguments)
        except self._redis.exceptions.OutOfMemoryError as error:
            raise StoreFullError(
                f"The Redis server has no memory left ({error}).\nIt is {address}.\n"
                "Raise its maxmemory, or set a maxmemory-policy that evicts, e.g. allkeys-random."
            ) from error
        except (self._redis.exceptions.RedisError, OSError) as error:
            raise self._retries.failed(
                f"The Redis server cannot be used ({error}).\nIt is {address}.\n"
                f"Check that it runs and that this node reaches it; it is asked again after {_PAUSE_S:.0f} s."
            ) from error

    def mset(self, dictionary: Mapping[str, str | bytes], group: str | None = None) -> None:
        if dictionary:
            self._request("mset", {_stored_key(key): to_bytes(value) for key, value in dictionary.items()})

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        found: list[bytes | None] = self._request("mget", [_stored_key(key) for key in keys])
        return found

    def num_keys(self) -> int:
        return int(self._request("dbsize"))

    def clear(self) -> None:
        self._request("flushdb")

    def status(self) -> bool:
        try:
            return bool(self._request("ping"))
        except StoreError:
            return False

    def shutdown(self) -> None:
        self._client.close()


def _stored_key(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def _checked_host(host: Any) -> dict[str, Any]:
    if not isinstance(host, Mapping) or not ("host" in host or "unix_socket_path" in host):
        raise ValueError(f"hosts contains {host!r}: each must be a dict such as {{'host': '10.0.0.1', 'port': 6379}}")
    return dict(host)
