"""All stores behave alike, within their limits, and whatever happens to what is below them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ports import free_port
from support.processes import wait_until
from support.redis_for_tests import needs_redis, redis_server

from bagua.torch_api.contrib.cache_loader import CacheLoader
from bagua.torch_api.contrib.caching.file_lock import locked_file
from bagua.torch_api.contrib.caching.lmdb_environment import SharedEnvironment
from bagua.torch_api.contrib.caching.lmdb_store import LmdbStore
from bagua.torch_api.contrib.caching.memory_store import MemoryStore
from bagua.torch_api.contrib.caching.redis_store import RedisStore
from bagua.torch_api.contrib.caching.store import ClusterStore, Retries, Store, StoreError, StoreFullError
from bagua.torch_api.contrib.utils.redis_store import start_redis_server_cli

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
    assert store.mget(long) == [b"a", b"b"]
    assert store.mget([]) == []
    assert store.status()
    store.clear()
    assert (store.num_keys(), store.get("key1")) == (0, None)


def test_a_hash_spreads_keys_evenly_and_as_in_every_process() -> None:
    cluster = ClusterStore([MemoryStore() for _ in range(3)])
    cluster.mset({f"key{number}": b"x" for number in range(3000)})
    counts = [store.num_keys() for store in cluster.stores]
    assert sum(counts) == 3000
    assert min(counts) > 900
    found = [cluster.stores.index(cluster.route(f"key{number}")) for number in range(6)]
    assert found == [1, 0, 1, 0, 2, 2]  # as it always was: other processes and runs must agree
    with pytest.raises(ValueError, match="at least one store"):
        ClusterStore([])


# --- limits ----------------------------------------------------------------------------------------------------------


def limited(kind: str, folder: Path) -> Store:
    return MemoryStore(4 * MIB) if kind == "memory" else LmdbStore(folder / "cache", 4 * MIB)


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
@pytest.mark.parametrize("size", [600, 3000, 40_000])
def test_the_oldest_are_evicted(kind: str, size: int, tmp_path: Path) -> None:
    store = limited(kind, tmp_path)
    number = 0
    for _ in range(8 * MIB // (size * 50)):
        store.mset({f"key{number + step}": os.urandom(size) for step in range(50)})
        number += 50
    kept = [position for position in range(number) if store.get(f"key{position}") is not None]
    assert kept == list(range(number - len(kept), number))  # exactly the newest
    assert len(kept) == store.num_keys()
    assert 4 * MIB * 0.2 < len(kept) * size <= 4 * MIB
    if kind == "lmdb":
        assert sum(file.stat().st_blocks * 512 for file in (tmp_path / "cache").iterdir()) <= 4 * MIB + 200_000


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
    # An entry that is there can be replaced all the same.
    store.mset({"new0": b"other"}, group="new")
    assert store.get("new0") == b"other"


@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_a_value_larger_than_the_store_evicts_nothing(kind: str, tmp_path: Path) -> None:
    store = limited(kind, tmp_path)
    store.set("small", b"x")
    with pytest.raises(StoreFullError, match="1 of 2 values do not fit"):
        store.mset({"large": bytes(5 * MIB), "other": b"y"})
    assert store.mget(["small", "large", "other"]) == [b"x", None, b"y"]


def test_capacities_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="capacity_bytes=100: must be a whole number of bytes, at least 1048576"):
        LmdbStore(tmp_path, 100)
    with pytest.raises(ValueError, match=r"capacity_bytes=0\.5"):
        MemoryStore(0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"capacity_bytes=5X: must be a number of bytes, .* suffix K, M or G"):
        MemoryStore("5X")
    with pytest.raises(ValueError, match="capacity_bytes='1K': must be a whole number of bytes, at least 1048576"):
        LmdbStore(tmp_path, "1K")
    for wrong in (None, [1], True):
        with pytest.raises(TypeError, match=r"capacity_bytes=.*: must be a number of bytes, or a text such as '5G'"):
            MemoryStore(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capacity_bytes=inf"):
        MemoryStore(float("inf"))  # type: ignore[arg-type]
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
    def __init__(self) -> None:
        self.values: dict[str, str | bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> Any:
        return self.values.get(key)


class Keywords(OfBagua09):
    def mset(self, mapping: Any, **options: Any) -> None:
        assert options.keys() <= {"group"}
        self.values.update(mapping)


class Unrelated:
    """Not a Store, and not written for the cache."""

    mset, mget = OfBagua09.mset, OfBagua09.mget

    def __init__(self) -> None:
        self.values: dict[str, str | bytes] = {}


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


# --- LMDB: full disks ------------------------------------------------------------------------------------------------


def use_without_space(path: Path) -> None:
    """Prepares samples; says so once; and stores again as soon as there is space."""
    records: list[str] = []
    logging.getLogger("bagua").handlers = [handler := logging.Handler()]
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    loader = CacheLoader("lmdb", path=path / "cache" / "deep", capacity_bytes=8 * MIB, writer_buffer_size=4)
    for _ in range(2):
        assert [loader.get(number, lambda key: [key] * 100) for number in range(40)] == [[n] * 100 for n in range(40)]
    assert loader.statistics()[:2] == (0, 80)
    assert len(records) == 1
    assert f"It is in {path}/cache/deep, where 0." in records[0] or "MiB are free" in records[0]
    assert "pass another path" in records[0]
    if (path / "fill").exists():
        (path / "fill").unlink()
        for _ in range(2):
            for number in range(40):
                loader.get(number, lambda key: [key] * 100)
        assert loader.statistics().hits == 40


def use_with_a_limit(path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    use_without_space(path)


def test_a_limit_of_the_size_of_files_is_a_miss(tmp_path: Path) -> None:
    in_child(use_with_a_limit, tmp_path)


def fill_up(path: Path) -> None:
    with (path / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def use_and_fill_up(path: Path) -> None:
    """The disk is full only after the cache is open."""
    store = LmdbStore(path / "cache" / "deep", 8 * MIB)
    store.set("key", b"x")
    fill_up(path)
    use_without_space(path)
    assert store.get("key") == b"x"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
@pytest.mark.parametrize("options", ["size=1m", "size=2m,nr_inodes=3", "size=2m,ro", "filled later"])
def test_a_full_disk_is_a_miss(options: str, tmp_path: Path) -> None:
    """In a process of its own, which SIGBUS would end."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m" if options == "filled later" else options, "none", tmp_path],
        capture_output=True,
    )
    if mount.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mount.stderr.decode()}")
    try:
        if options == "size=1m":
            fill_up(tmp_path)
        elif "inodes" in options:
            for number in range(2):
                (tmp_path / f"file{number}").touch()
        in_child(use_and_fill_up if options == "filled later" else use_without_space, tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# --- LMDB: damage and death ------------------------------------------------------------------------------------------


def forked(function: Callable[..., object], *arguments: Any) -> int:
    """A child that calls it. An exception is its exit status 1."""
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(60)  # ends it, should it hang
        try:
            function(*arguments)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(function: Callable[..., object], *arguments: Any) -> None:
    assert code_of(forked(function, *arguments)) == 0


def test_a_fork_may_make_a_loader() -> None:
    """Though it has none of the threads that torch computes with."""
    torch.ones(1 << 20).exp()  # starts them
    in_child(CacheLoader, "memory", "any")


def fill(store: Store, numbers: range = range(60)) -> None:
    store.mset({f"key{number}": f"{number}".encode() * 3000 for number in numbers})


def values_of(store: Store) -> list[bytes | None]:
    """Reads as CacheLoader does: an error is a miss."""
    found = []
    for number in range(60):
        try:
            found.append(store.get(f"key{number}"))
        except StoreError:
            found.append(None)
    return found


def test_it_survives_restarts(tmp_path: Path) -> None:
    in_child(lambda: LmdbStore(tmp_path, 8 * MIB).set("key", "value"))
    assert LmdbStore(tmp_path, 8 * MIB).get("key") == b"value"


def test_a_larger_capacity_keeps_what_is_there(tmp_path: Path) -> None:
    fill(LmdbStore(tmp_path / "cache", 8 * MIB))
    larger = LmdbStore(tmp_path / "cache", 32 * MIB)
    larger.mset({f"more{number}": os.urandom(100_000) for number in range(150)})
    assert all(values_of(larger))
    assert larger.num_keys() == 210


def write_forever(path: Path, progress: int) -> None:
    store = LmdbStore(path, 8 * MIB)
    for number in itertools.count(step=5):
        store.mset({f"key{(number + step) % 60}": f"{number + step}".encode() * 3000 for step in range(5)})
        os.write(progress, b".")


def test_a_writer_that_is_killed_leaves_whole_values(tmp_path: Path) -> None:
    """It is killed at a different time each time; the next one, and a concurrent reader, go on."""
    reader = LmdbStore(tmp_path, 8 * MIB)
    random.seed(3)
    for _ in range(12):
        progress, writes = os.pipe()
        writer = forked(write_forever, tmp_path, writes)
        os.close(writes)
        for _ in range(random.randrange(1, 40)):
            assert os.read(progress, 1) == b"."
        os.kill(writer, signal.SIGKILL)
        assert code_of(writer) == -signal.SIGKILL
        os.close(progress)
        for number, value in enumerate(reader.mget([f"key{number}" for number in range(60)])):
            if value is not None:
                text = value[: len(value) // 3000]
                assert value == text * 3000
                assert int(text) % 60 == number
        fill(reader)
        assert all(values_of(reader))


def damage(file: Path, how: str) -> None:
    size = 60 * 12 * 1024
    with file.open("r+b") as opened:
        if how == "cut":
            opened.truncate(size // 2)
        elif how == "emptied":
            opened.truncate(0)
        elif how == "zeros at the start":
            opened.write(bytes(3 * 4096))
        else:
            for page in range(2, size // 4096):
                opened.seek(page * 4096 + 16)
                opened.write(os.urandom(2000))


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("how", ["cut", "emptied", "zeros at the start", "noise", "removed", "replaced"])
def test_damage_is_a_miss(how: str, is_open: bool, tmp_path: Path) -> None:
    """In a process of its own, which would be gone if LMDB followed damaged pages."""
    path = tmp_path / "cache"
    fill(LmdbStore(path, 8 * MIB))
    in_child(use_damaged, path, how, is_open)


def use_damaged(path: Path, how: str, is_open: bool) -> None:
    loader = CacheLoader("lmdb", path=path, capacity_bytes=8 * MIB)
    records: list[str] = []
    logging.getLogger("bagua").handlers = [handler := logging.Handler()]
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    for number in range(60):
        loader.get(number, lambda key: [key] * 3000)
    if not is_open:
        loader.store.shutdown()
    if how == "removed":
        shutil.rmtree(path)
    elif how == "replaced":
        other = LmdbStore(path.with_name("other"), 8 * MIB)
        other.shutdown()
        shutil.rmtree(path)
        other.path.rename(path)
    else:
        damage(path / "data.mdb", how)
    for _ in range(2):
        for number in range(60):
            assert loader.get(number, lambda key: [key] * 3000) == [number] * 3000
    before = loader.statistics()
    for number in range(60):  # it has healed
        loader.get(number, lambda key: [key] * 3000)
    assert loader.statistics().hits == before.hits + 60
    assert len(records) <= 1, records


def test_it_is_used_by_several_threads_and_forks_meanwhile(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, 8 * MIB)
    stop = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            while not stop.is_set():
                fill(store, range(10))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(10):
        in_child(store.set, f"child{number}", b"x")
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
    assert failed == []
    assert store.mget([f"child{number}" for number in range(10)]) == [b"x"] * 10


def hold_lock(path: Path, held: int) -> None:
    with locked_file(path, 1):
        os.write(held, b".")
        signal.pause()


def test_a_writer_that_stops_does_not_stop_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LmdbStore(tmp_path, 8 * MIB)
    fill(store)
    monkeypatch.setattr("bagua.torch_api.contrib.caching.lmdb_environment._LOCK_TIMEOUT_S", 0.05)
    held, holds = os.pipe()
    holder = forked(hold_lock, tmp_path / "writer.lock", holds)
    assert os.read(held, 1) == b"."
    try:
        with pytest.raises(
            StoreError, match=r"cannot be written: another process has held .*writer\.lock.*\n.*\nAnother process may"
        ):
            store.set("key", b"x")
        monkeypatch.setattr("bagua.torch_api.contrib.caching.lmdb_environment.locked_file", None)
        with pytest.raises(StoreError, match="cannot be written"):
            store.set("key", b"x")  # at once: it is not asked for again
        assert all(values_of(store))
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(held)
        os.close(holds)


def test_a_pause_ends() -> None:
    retries = Retries(0.0)
    retries.check()
    retries.failed("gone")
    retries.check()
    retries = Retries(1e9)
    retries.failed("gone")
    with pytest.raises(StoreError, match="gone"):
        retries.check()


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match=r"path='.*file' cannot be the folder of a cache.*Pass another path"):
        LmdbStore(tmp_path / "file", 8 * MIB)
    with pytest.raises(NotADirectoryError, match=r"path='.*file/in' cannot be the folder of a cache"):
        LmdbStore(tmp_path / "file" / "in", 8 * MIB)
    with pytest.raises(ValueError, match="path='': must name a folder"):
        LmdbStore("")
    with pytest.raises(TypeError, match="path=5: must name a folder"):
        LmdbStore(5)  # type: ignore[arg-type]


def test_stores_of_a_path_share_what_is_open(tmp_path: Path) -> None:
    one, other = LmdbStore(tmp_path, 8 * MIB), LmdbStore(tmp_path / ".", 8 * MIB)
    one.set("key", b"x")
    assert other.get("key") == b"x"
    one.shutdown()
    assert other.get("key") == b"x"
    assert isinstance(one._environment, SharedEnvironment)
    assert one._environment is other._environment


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


def test_an_error_names_the_server_as_redis_connects_to_it() -> None:
    pytest.importorskip("redis")
    for host, named in (
        ({"host": "localhost"}, "It is localhost:6379."),
        ({"unix_socket_path": "/nowhere/redis"}, "It is /nowhere/redis."),
    ):
        store = RedisStore([host])
        store.stores[0]._client.mget = _unreachable  # type: ignore[attr-defined]
        with pytest.raises(StoreError) as caught:
            store.get("key")
        assert named in str(caught.value)


def _unreachable(*_: object) -> None:
    raise ConnectionRefusedError("refused")


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
    assert code_of(owner) == (-signal.SIGKILL if is_killed else 0)

    def is_gone() -> bool:
        return f":{port:04X} 00000000:0000 0A" not in Path("/proc/net/tcp").read_text()

    wait_until(is_gone, "the server ends", 30)


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
    monkeypatch.setattr("bagua.torch_api.contrib.caching.redis_server._SLOW_START_S", 0.0)
    made: list[RedisStore] = []
    thread = threading.Thread(target=lambda: made.append(RedisStore(capacity_per_node=3 * MIB)))
    thread.start()
    wait_until(lambda: len(caplog.records) == 1, "the warning", 60)
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
