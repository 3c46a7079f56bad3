"""A store in Redis servers: those that are given, or one per node that this job starts and ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagua.contrib.caching.redis_server import start_servers
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
