"""All stores behave alike, within their limits, and whatever happens to what is below them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ports import free_port
from support.processes import exit_code_of, forked, in_child, wait_until
from support.redis_for_tests import needs_redis, redis_server
from support.sweeps import each_value_once, rest_is_deep

from bagua.contrib.caching.cache_loader import CacheLoader
from bagua.contrib.caching.lmdb_store import LmdbStore
from bagua.contrib.caching.redis_store import RedisStore, start_redis_server_cli
from bagua.contrib.caching.store import ClusterStore, MemoryStore, Retries, Store, StoreError, StoreFullError

MIB = 1 << 20
BACKENDS = ["memory", "lmdb", "cluster", pytest.param("redis", marks=needs_redis)]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with contextlib.ExitStack() as stack:
        made: Store
        if request.param == "memory":
            made = MemoryStore(8 * MIB)
        elif request.param == "lmdb":
            made = LmdbStore(tmp_path / "cache", 8 * MIB)
        elif request.param == "cluster":
            made = ClusterStore([MemoryStore(), LmdbStore(tmp_path / "cache", 8 * MIB), MemoryStore()])
        else:
            made = RedisStore([stack.enter_context(redis_server()).host])
        stack.callback(made.shutdown)
        yield made


@pytest.mark.parametrize("store", BACKENDS, indirect=True)
def test_values_come_back_in_the_order_of_the_keys(store: Store) -> None:
    values = {f"key{number}": os.urandom(number * 50) for number in range(102)}
    store.mset(values)
    store.set("text", "words")
    assert store.num_keys() == 103
    keys = [*reversed(values), "missing", "text", "key3"]
    assert store.mget(keys) == [*reversed(values.values()), None, b"words", values["key3"]]
    store.set("key3", b"new")
    assert (store.get("key3"), store.get("missing"), store.num_keys()) == (b"new", None, 103)
    long = ["long" * 300 + end for end in "ab"]
    store.mset(dict(zip(long, [b"a", b"b"], strict=True)))
    assert (store.mget(long), store.mget([])) == ([b"a", b"b"], [])
    assert store.status()
    store.clear()
    assert (store.num_keys(), store.get("key1")) == (0, None)


def test_a_hash_spreads_keys_evenly_and_as_in_every_process() -> None:
    cluster = ClusterStore([MemoryStore() for _ in range(3)])
    cluster.mset({f"key{number}": b"x" for number in range(3000)})
    counts = [store.num_keys() for store in cluster.stores]
    assert (sum(counts), min(counts) > 900) == (3000, True)
    found = [cluster.stores.index(cluster.route(f"key{number}")) for number in range(6)]
    assert found == [1, 0, 1, 0, 2, 2]  # as it always was: other processes and runs must agree
    with pytest.raises(ValueError, match="at least one store"):
        ClusterStore([])


# --- limits ----------------------------------------------------------------------------------------------------------


def limited(kind: str, folder: Path) -> Store:
    return MemoryStore(4 * MIB) if kind == "memory" else LmdbStore(folder / "cache", 4 * MIB)


@pytest.mark.parametrize(("kind", "size"), each_value_once(["memory", "lmdb"], [1500, 3000, 40_000]))
def test_the_oldest_are_evicted(kind: str, size: int, tmp_path: Path) -> None:
    store = limited(kind, tmp_path)
    count = 8 * MIB // (size * 50) * 50
    for number in range(0, count, 50):
        store.mset({f"key{number + step}": os.urandom(size) for step in range(50)})
    kept = [number for number in range(count) if store.get(f"key{number}") is not None]
    assert kept == list(range(count - len(kept), count))  # exactly the newest
    assert len(kept) == store.num_keys()
    assert 4 * MIB * 0.2 < len(kept) * size <= 4 * MIB
    if kind == "lmdb":
        assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "cache").iterdir()) <= 4 * MIB + 200_000


@pytest.mark.parametrize("size", rest_is_deep([300, 1000, 1700, 2100, 300_000], 1, 4))
def test_a_full_store_stores_values_of_every_size(size: int, tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "cache", MIB)
    batch = max(1, min(50, MIB // 4 // size))
    for number in range(0, max(4 * batch, 3 * MIB // 2 // size), batch):
        store.mset({f"key{number + step}": os.urandom(size) for step in range(batch)})
        assert store.get(f"key{number}") is not None
    store.clear()
    assert store.num_keys() == 0


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_a_group_evicts_others_and_not_itself(kind: str, tmp_path: Path) -> None:
    """A dataset that is larger than the cache keeps the samples that it has: each epoch finds them again."""
    store = limited(kind, tmp_path)
    for number in range(60):
        store.mset({f"old{number}": os.urandom(40_000)}, group="old")
    stored = 0
    with pytest.raises(StoreFullError, match="do not fit into the cache of 4194304 bytes"):  # noqa: PT012
        while stored < 200:
            store.mset({f"new{stored}": os.urandom(40_000)}, group="new")
            stored += 1
    assert stored > 60
    assert [store.get(f"old{number}") for number in range(60)] == [None] * 60
    assert all(store.get(f"new{number}") is not None for number in range(stored))
    store.mset({"new0": b"other"}, group="new")  # an entry that is there can be replaced all the same
    assert store.get("new0") == b"other"


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_a_value_larger_than_the_store_evicts_nothing(kind: str, tmp_path: Path) -> None:
    store = limited(kind, tmp_path)
    store.set("small", b"x")
    with pytest.raises(StoreFullError, match="1 of 2 values do not fit"):
        store.mset({"large": bytes(5 * MIB), "other": b"y"})
    assert store.mget(["small", "large", "other"]) == [b"x", None, b"y"]


def test_a_fork_is_not_kept_waiting_by_what_other_threads_held() -> None:
    store = MemoryStore(8 * MIB)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with store._guard:
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(60)
        in_child(store.set, "key", b"x")
    finally:
        release.set()
        thread.join()


def test_capacities_are_checked(tmp_path: Path) -> None:
    for wrong, told in (
        (100, "capacity_bytes=100: must be a whole number of bytes, at least 1048576"),
        ("1K", "capacity_bytes='1K': must be a whole number of bytes, at least 1048576"),
        ("5X", "capacity_bytes=5X: must be a number of bytes, .* suffix K, M or G"),
        (0.5, r"capacity_bytes=0\.5"),
        (float("inf"), "capacity_bytes=inf"),
    ):
        with pytest.raises(ValueError, match=told):
            LmdbStore(tmp_path / "none", wrong)  # type: ignore[arg-type]
    for wrong in (None, [1], True):
        with pytest.raises(TypeError, match=r"capacity_bytes=.*: must be a number of bytes, or a text such as '5G'"):
            MemoryStore(wrong)  # type: ignore[arg-type]
    assert MemoryStore("5G").capacity_bytes == MemoryStore("5 GiB").capacity_bytes == 5 << 30
    assert LmdbStore(tmp_path / "cache", "8M").capacity_bytes == 8 * MIB


@needs_redis
def test_a_redis_server_keeps_its_limit() -> None:
    with redis_server(4 * MIB) as server:
        store = RedisStore([server.host])
        for number in range(200):
            store.set(f"key{number}", os.urandom(40_000))
        assert 0 < store.num_keys() * 40_000 < 4 * MIB
        store.shutdown()


# --- stores of users -------------------------------------------------------------------------------------------------


class OfBagua09(Store):
    """`mset` takes the dictionary alone; nothing is inherited."""

    def __init__(self) -> None:
        self.values: dict[str, str | bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def num_keys(self) -> int:
        return len(self.values)

    def clear(self) -> None:
        self.values.clear()

    def mset(self, mapping: Any) -> None:  # type: ignore[override]
        self.values.update(mapping)

    def mget(self, keys: Any) -> Any:
        return [self.values.get(key) for key in keys]

    def status(self) -> bool:
        return True

    def shutdown(self) -> None:
        pass


class Smallest(Store):
    __init__, set, get = OfBagua09.__init__, OfBagua09.set, OfBagua09.get


class Keywords(OfBagua09):
    def mset(self, mapping: Any, **options: Any) -> None:
        assert options.keys() <= {"group"}
        self.values.update(mapping)


class Unrelated:
    """Not a Store, and not written for the cache."""

    __init__, mset, mget = OfBagua09.__init__, OfBagua09.mset, OfBagua09.mget


@pytest.mark.parametrize("keep_own", [False, True])
@pytest.mark.parametrize("is_cluster", [False, True])
@pytest.mark.parametrize("kind", [OfBagua09, Smallest, Keywords, Unrelated])
def test_stores_of_users(kind: Any, is_cluster: bool, keep_own: bool, caplog: pytest.LogCaptureFixture) -> None:
    loader = CacheLoader("memory", keep_own=keep_own)
    loader.store = ClusterStore([kind(), kind()]) if is_cluster else kind()
    for _ in range(2):
        assert [loader.get(number, str) for number in range(20)] == [str(number) for number in range(20)]
    assert loader.statistics()[:3] == (20, 20, 0)
    assert not caplog.records


def test_whatever_a_store_raises_is_a_miss_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Smallest):
        def get(self, key: str) -> Any:
            raise ConnectionResetError("gone")

        def set(self, key: str, value: Any) -> None:
            raise KeyError(key)

    for store, told in ((Broken(), "ConnectionResetError: gone"), (Store(), "Store has neither mget"), (None, "mget")):
        loader = CacheLoader("memory")
        loader.store = store  # type: ignore[assignment]
        caplog.clear()
        assert [loader.get(number % 3, str) for number in range(6)] == ["0", "1", "2"] * 2
        assert (loader.statistics().errors, len(caplog.records)) == (12, 1)
        assert told in caplog.records[0].getMessage()


def test_a_pause_ends() -> None:
    retries = Retries(0.0)
    retries.check()
    retries.failed("gone")
    retries.check()
    retries = Retries(1e9)
    retries.failed("gone")
    with pytest.raises(StoreError, match="gone"):
        retries.check()


# --- Redis: outages --------------------------------------------------------------------------------------------------


@needs_redis
def test_a_server_that_is_gone_is_a_miss_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server() as server, redis_server() as other:
        loader = CacheLoader("redis", hosts=[server.host, other.host])
        assert [loader.get(number, str) for number in range(40)] == [str(number) for number in range(40)]
        server.stop()
        assert [loader.get(number, str) for number in range(80)] == [str(number) for number in range(80)]
    found = loader.statistics()
    assert 0 < found.hits < 40  # of the server that is left
    assert found.errors > 0
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert warnings[0].startswith("The Redis server cannot be used")
    assert server.host["password"] not in warnings[0]


@needs_redis
def test_a_server_rejects_who_does_not_know_its_password() -> None:
    with redis_server() as server:
        store = RedisStore([{**server.host, "password": "guess"}])
        assert not store.status()
        with pytest.raises(StoreError, match=r"cannot be used \(.*\)\.\nIt is 127"):
            store.get("key")


def own_server(told: int, is_killed: bool) -> None:
    store = RedisStore()
    store.set("key", "value")
    os.write(told, f"{store.hosts[0]['port']}\n".encode())
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    store.shutdown()


@needs_redis
@pytest.mark.parametrize("is_killed", [False, True], ids=["exits", "killed"])
def test_a_server_ends_with_the_process_that_started_it(is_killed: bool) -> None:
    told, tells = os.pipe()
    owner = forked(own_server, tells, is_killed)
    os.close(tells)
    with os.fdopen(told) as opened:
        port = int(opened.readline())
    assert exit_code_of(owner) == (-signal.SIGKILL if is_killed else 0)

    def is_gone() -> bool:
        return f":{port:04X} 00000000:0000 0A" not in Path("/proc/net/tcp").read_text()

    wait_until(is_gone, "the server ends")


@needs_redis
def test_stores_of_a_process_share_the_server_that_it_starts() -> None:
    first, second, other = RedisStore(), RedisStore(), RedisStore(capacity_per_node=4 * MIB)
    assert first.hosts == second.hosts != other.hosts
    first.set("key", "value")
    first.shutdown()
    assert second.get("key") == b"value"
    second.shutdown()
    third = RedisStore()
    assert third.hosts != second.hosts
    third.shutdown()
    other.shutdown()


@needs_redis
def test_a_server_for_other_processes(caplog: pytest.LogCaptureFixture) -> None:
    """As tests of Bagua 0.9 start theirs: by a process that ends."""
    port = free_port()
    in_child(start_redis_server_cli, port, 4 * MIB, f"--cluster-config-file nodes{port}.conf", "--maxclients 50")
    store = RedisStore([{"host": "127.0.0.1", "port": port}])
    client = store.stores[0]._client  # type: ignore[attr-defined]
    try:
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert client.config_get("maxm*")["maxmemory-policy"] == "allkeys-random"
        with pytest.raises(RuntimeError, match=f"does not start: .*\nIt was to listen on 127.0.0.1:{port}"):
            start_redis_server_cli(port, 4 * MIB)
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        loader = CacheLoader("redis", hosts=store.hosts)
        assert [loader.get(number % 3, str) for number in range(6)] == ["0", "1", "2"] * 2
        assert len(caplog.records) == 1
        assert "The Redis server has no memory left (" in caplog.records[0].getMessage()
    finally:
        client.shutdown(nosave=True)


@needs_redis
def test_a_server_that_is_slow_to_start_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a busy machine: that it takes long is said, and proves nothing."""
    begun, program = tmp_path / "begun", tmp_path / "redis-server"
    program.write_text(f'#!/bin/sh\nread -r _ < {begun}\nexec {shutil.which("redis-server")} "$@"\n')
    program.chmod(0o755)
    os.mkfifo(begun)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("bagua.contrib.caching.redis_store._SLOW_START_S", 0.0)
    made: list[RedisStore] = []
    thread = threading.Thread(target=lambda: made.append(RedisStore(capacity_per_node=3 * MIB)))
    thread.start()
    wait_until(lambda: len(caplog.records) == 1, "the warning")
    begun.write_text("go\n")
    thread.join(60)
    assert made[0].status()
    assert "has not answered for 0 s" in caplog.records[0].getMessage()
    made[0].shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hosts": []}, "hosts has 0 servers"),
        ({"hosts": [{"host": "a"}, {"host": "b"}], "cluster_mode": False}, "hosts has 2 servers"),
        ({"hosts": ["localhost:6379"]}, "each must be a dict such as"),
        ({"hosts": [{"host": "a"}], "capacity_per_node": 5}, "capacity_per_node=5: must be a whole number of bytes"),
    ],
)
def test_arguments_of_redis_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RedisStore(**arguments)


def test_without_redis_server_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError, match=r"redis-server is not on the PATH.*\n.*apt-get install redis-server"):
        RedisStore()
