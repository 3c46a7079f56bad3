"""CachedDataset and CacheLoader: each sample is prepared once, whoever asks for it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import in_child
from support.rank_tests import on_ranks
from support.ranks import run_ranks
from support.redis_for_tests import needs_redis, redis_server
from support.squares import Squares, check, prepared
from support.training import begin
from torch.utils.data import DataLoader, IterableDataset

import bagua.torch_api as bagua
from bagua.contrib.caching.cache_loader import CacheLoader
from bagua.contrib.caching.cached_dataset import CachedDataset
from bagua.contrib.caching.redis_store import RedisStore
from bagua.contrib.caching.store import ClusterStore, Store, StoreError, StoreFullError

MIB = 1 << 20


ALL = list(range(102))


@pytest.fixture
def arguments(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    if request.param == "redis":
        with redis_server() as server:
            yield {"backend": "redis", "hosts": [server.host]}
    else:
        yield {"backend": "lmdb", "path": tmp_path / "cache", "capacity_bytes": 8 * MIB}


@pytest.mark.parametrize("arguments", ["lmdb", pytest.param("redis", marks=needs_redis)], indirect=True)
def test_two_datasets_share_a_store(arguments: dict[str, Any], tmp_path: Path) -> None:
    one = CachedDataset(Squares(tmp_path / "log"), dataset_name="one", **arguments)
    two = CachedDataset(Squares(tmp_path / "log"), dataset_name="two", **arguments)
    for keys, data in ((102, one), (204, two)):
        for expected in (ALL, []):
            for index in range(len(data)):
                check(data[index], index)
            assert prepared(data) == expected
        assert data.cache_loader.num_keys() == keys
        assert (data.statistics().hits, data.statistics().misses, data.statistics().errors) == (102, 102, 0)
    assert one.statistics().bytes_read == one.statistics().bytes_written > 102 * 96
    assert one.statistics().hit_rate == 0.5


def batches(data: CachedDataset, **options: Any) -> None:
    loader = DataLoader(data, batch_size=8, collate_fn=list, shuffle=True, **options)
    seen = sorted(sample[1]["label"] for batch in loader for sample in batch)
    assert seen == ALL


@pytest.mark.parametrize("arguments", ["lmdb", pytest.param("redis", marks=needs_redis)], indirect=True)
def test_workers_share_it(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Forked after this process has used it. What a worker has not written yet, it writes when it ends."""
    data = CachedDataset(Squares(tmp_path / "log"), **arguments)
    check(data[0], 0)
    batches(data, num_workers=2, multiprocessing_context="fork")
    assert prepared(data) == [0, *range(1, 102)] or prepared(data) == []
    batches(data, num_workers=2, multiprocessing_context="fork")
    check(data[5], 5)
    assert prepared(data) == []
    found = data.statistics()
    assert (found.hits + found.misses, found.errors) == (1 + 102 + 102 + 1, 0)
    if arguments["backend"] == "lmdb":
        other = CachedDataset(data.dataset, dataset_name="pickled", writer_buffer_size=1000, **arguments)
        batches(other, num_workers=1, multiprocessing_context="spawn")
        assert prepared(other) == ALL
        batches(other, num_workers=1, multiprocessing_context="fork")
        assert prepared(other) == []
        assert other.statistics()[:3] == (102, 102, 0)


def test_an_unwritten_value_is_found() -> None:
    loader = CacheLoader("memory", writer_buffer_size=100)
    loaded: list[Any] = []
    for key in ("a", 1, "1", b"1", (1, "a"), True, np.int64(1), torch.tensor(1)):
        loader.get(key, lambda key: loaded.append(key) or len(loaded))  # type: ignore[func-returns-value]
    assert loaded == ["a", 1, "1", b"1", (1, "a"), True]
    assert loader.get("1", len) == 3
    assert loader.store.num_keys() == 0
    assert loader.num_keys() == 6


def test_what_waits_is_written_when_the_loader_is_dropped(tmp_path: Path) -> None:
    loader = CacheLoader("lmdb", path=tmp_path / "cache", capacity_bytes=8 << 20, writer_buffer_size=100)
    loader.get(0, str)
    store = loader.store
    # What waits here, a child that drops the loader does not write.
    in_child(loader.__del__)
    assert store.num_keys() == 0
    del loader
    assert store.num_keys() == 1


def test_writes_are_buffered_and_flushed_by_reads() -> None:
    loader = CacheLoader("memory", writer_buffer_size=3)
    counts = []
    for key in range(7):
        loader.get(key, str)
        counts.append(loader.store.num_keys())
    assert counts == [0, 0, 3, 3, 3, 6, 6]
    for _ in range(1000):
        loader.get(0, str)
    assert loader.store.num_keys() == 7


def test_errors_of_the_dataset_propagate_and_are_not_cached(tmp_path: Path) -> None:
    data = CachedDataset(Squares(tmp_path / "log"), "memory")
    with pytest.raises(IndexError, match="102"):
        data[102]
    with pytest.raises(IndexError):
        data[102]
    assert data.cache_loader.num_keys() == 0
    assert len(list(data)) == 102  # by index until IndexError, as with any sequence


def test_a_batch_with_the_same_index_twice_prepares_it_once(tmp_path: Path) -> None:
    data = CachedDataset(Squares(tmp_path / "log"), "memory")
    first, second, third = data.__getitems__([4, 4, 5])
    check(third, 5)
    assert prepared(data) == [4, 5]
    assert first[0] is not second[0]


def test_what_another_preprocessing_made_is_not_used(tmp_path: Path) -> None:
    options = {"path": tmp_path / "cache", "capacity_bytes": 8 * MIB}
    for length, expected in ((50, 50), (40, 40), (50, 0)):
        data = CachedDataset(Squares(tmp_path / "log", length), **options)
        for index in range(length):
            check(data[index], index)
        assert len(prepared(data)) == expected
        data.cache_loader.flush()
    for length, fingerprint, expected in ((50, "v1", 50), (40, "v1", 0), (40, "v2", 40)):
        data = CachedDataset(Squares(tmp_path / "log", length), fingerprint=fingerprint, **options)
        for index in range(length):
            check(data[index], index)
        assert len(prepared(data)) == expected
        data.cache_loader.flush()


def test_names_and_fingerprints_are_not_confused() -> None:
    pairs = [("a", "b"), ("a/b", ""), ("", "a/b"), ("a%2Fb", ""), ("", "a")]
    loaders = [CacheLoader("memory", name, fingerprint=fingerprint) for name, fingerprint in pairs]
    for loader in loaders:
        loader.store = loaders[0].store
    assert [loader.get(1, lambda _, n=n: n) for n, loader in enumerate(loaders)] == list(range(5))


def test_a_full_cache_keeps_what_it_has_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    data = CachedDataset([bytes(10_000) for _ in range(50)], "memory", writer_buffer_size=1, capacity_bytes=200_000)
    for _ in range(3):
        assert len(list(data)) == 50
    assert data.statistics().hits == 2 * data.cache_loader.num_keys() == 2 * 19
    assert data.statistics().errors == 0
    assert data.statistics().bytes_written == sum(map(len, _stored(data))) < 200_000
    assert len(caplog.records) == 1
    assert "do not fit" in caplog.records[0].getMessage()


def _stored(data: CachedDataset) -> list[bytes]:
    """The values in its store, as they are there."""
    keys = [data.cache_loader._text_of(index) for index in range(len(data))]
    return [value for value in data.cache_loader.store.mget(keys) if value is not None]


class Broken(Store):
    """The first value of each write is stored, then the server is gone."""

    def __init__(self, is_full: bool) -> None:
        self.kept: dict[str, Any] = {}
        self.is_full = is_full

    def mset(self, dictionary: Any, group: str | None = None) -> None:
        key, value = next(iter(dictionary.items()))
        self.kept[key] = value
        raise (StoreFullError if self.is_full else StoreError)("broken", written=len(value))

    def mget(self, keys: Any) -> list[bytes | None]:
        return [self.kept.get(key) for key in keys]


@pytest.mark.parametrize("kind", ["memory", "lmdb", "full", "gone", "cluster", "raises"])
def test_what_was_not_written_is_not_counted(kind: str, tmp_path: Path) -> None:
    arguments = {"path": tmp_path / "cache", "capacity_bytes": "1M"} if kind == "lmdb" else {"capacity_bytes": "100K"}
    data = CachedDataset(
        [bytes(10_000) for _ in range(200)], "lmdb" if kind == "lmdb" else "memory", writer_buffer_size=7, **arguments
    )
    store: Any = data.cache_loader.store
    if kind in ("full", "gone"):
        data.cache_loader.store = store = Broken(kind == "full")
    elif kind == "cluster":
        data.cache_loader.store = store = ClusterStore([store, Broken(False), Broken(True)])
    elif kind == "raises":
        data.cache_loader.store = store = Raises()
    list(data)
    data.cache_loader.flush()
    stored = _stored(data)
    assert data.statistics().bytes_written == sum(map(len, stored))
    assert len(stored) < 200
    assert bool(stored) == (kind != "raises")


class Raises(Store):
    def mset(self, dictionary: Any, group: str | None = None) -> None:
        raise ValueError("no")

    def mget(self, keys: Any) -> list[bytes | None]:
        return [None] * len(keys)


def test_damaged_values_are_prepared_again_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = CachedDataset(Squares(tmp_path / "log"), "memory", writer_buffer_size=1)
    list(data)
    store = data.cache_loader.store
    keys = [data.cache_loader._text_of(index) for index in range(20)]
    frames = store.mget(keys)
    store.mset({key: frame[:-1] + b"?" for key, frame in zip(keys, frames, strict=True) if frame})
    prepared(data)
    for index in range(20):
        check(data[index], index)
    assert prepared(data) == list(range(20))
    assert (data.statistics().errors, len(caplog.records)) == (20, 1)
    assert "checksum does not match" in caplog.records[0].getMessage()
    for index in range(20):
        check(data[index], index)
    assert prepared(data) == []


def test_a_sample_that_cannot_be_stored_names_its_type() -> None:
    data = CachedDataset([{1, 2}], "memory")
    with pytest.raises(TypeError, match=r"type builtins\.set\.\n.*codec='pickle'"):
        data[0]
    chosen = CachedDataset([{1, 2}], "memory", codec="pickle")
    assert [chosen[0], chosen[0]] == [{1, 2}, {1, 2}]
    assert chosen.statistics().hits == 1


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="backend='disk': must be one of 'lmdb', 'memory', 'redis'"):
        CacheLoader("disk")
    with pytest.raises(ValueError, match="writer_buffer_size=0"):
        CacheLoader("memory", writer_buffer_size=0)
    with pytest.raises(TypeError, match=r"backend='lmdb' has no argument hosts.*\n.*backend='redis'"):
        CachedDataset([1], hosts=[])
    with pytest.raises(TypeError, match="Stream, which has no samples by index"):
        CachedDataset(Stream())
    with pytest.raises(TypeError, match=r"key=1\.5: a key of the cache must be"):
        CacheLoader("memory").get(1.5, str)
    for package, backend in (("lmdb", "lmdb"), ("msgpack", "memory"), ("redis", "redis")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=rf"{package}, which is not installed.*\n.*pip install {package}"):
            CachedDataset([1], backend)
        monkeypatch.undo()


def test_warm_fills_the_cache(tmp_path: Path) -> None:
    data = CachedDataset(Squares(tmp_path / "log"), path=tmp_path / "cache", capacity_bytes=8 * MIB)
    assert data.warm(range(50)).misses == 50
    data.warm(num_workers=1)
    assert prepared(data) == ALL
    assert data.statistics().misses == 102
    list(data)
    assert prepared(data) == []


def test_a_pickled_dataset_reads_the_same_cache(tmp_path: Path) -> None:
    data = CachedDataset(Squares(tmp_path / "log"), path=tmp_path / "cache", capacity_bytes=8 * MIB)
    data[1]
    data.cache_loader.flush()
    prepared(data)
    check(pickle.loads(pickle.dumps(data))[1], 1)
    assert prepared(data) == []


def test_a_cache_of_a_cached_dataset_has_the_same_fingerprint_after_use() -> None:
    inner = CachedDataset([1, 2], "memory")
    first = CachedDataset(inner, "memory").cache_loader.fingerprint
    inner[0], inner[0]
    assert CachedDataset(inner, "memory").cache_loader.fingerprint == first
    assert CachedDataset(CachedDataset([1, 3], "memory"), "memory").cache_loader.fingerprint != first


def test_a_default_device_moves_nothing(tmp_path: Path) -> None:
    sample = torch.arange(3)
    with torch.device("meta"):
        data = CachedDataset([sample], path=tmp_path / "cache", capacity_bytes=8 * MIB)
        for _ in range(2):
            assert torch.equal(data[0], sample)
        data.cache_loader.flush()
    assert data.statistics()[:3] == (1, 1, 0)


def exit_after(data: CachedDataset) -> None:
    data[1], data[2]


def test_a_process_that_ends_writes_what_waits(tmp_path: Path) -> None:
    data = CachedDataset(Squares(tmp_path / "log"), path=tmp_path / "cache", capacity_bytes=8 * MIB)
    process = multiprocessing.get_context("fork").Process(target=exit_after, args=(data,))
    process.start()
    process.join(60)
    assert data.cache_loader.num_keys() == 2


# --- ranks -----------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_ranks_of_a_node_share_a_cache(tmp_path: Path) -> None:
    folder = str(tmp_path)
    data = CachedDataset(Squares(Path(folder) / "log"), path=Path(folder) / "cache", capacity_bytes=8 * MIB)
    for index in range(bagua.get_rank(), 102, bagua.get_world_size()):
        check(data[index], index)
    data.cache_loader.flush()
    bagua.barrier()
    before = data.statistics().misses
    for index in ALL:
        check(data[index], index)
    assert (before, data.statistics().misses) == (34, 34)


def start_on_nodes(cluster_mode: bool) -> tuple[int, int, bool]:
    begin()
    store = RedisStore(cluster_mode=cluster_mode, capacity_per_node=16 * MIB)
    rank = bagua.get_rank()
    store.mset({f"{rank} {number}": f"{number}" for number in range(30)})
    bagua.barrier()
    keys = [f"{other} {number}" for other in range(3) for number in range(30)]
    found = sum(value is not None for value in store.mget(keys))
    bagua.barrier()
    result = store.num_stores, found, store._server is not None
    store.shutdown()
    return result


NODES = [
    {"GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    {"GROUP_RANK": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    {"GROUP_RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
]


@needs_redis
def test_servers_are_started_one_per_node() -> None:
    """Two nodes, one of two ranks, both on this machine."""
    assert run_ranks(3, start_on_nodes, True, env=NODES, reuse=True) == [(2, 90, True), (2, 90, False), (2, 90, True)]
    found = run_ranks(3, start_on_nodes, False, env=NODES, reuse=True)
    assert found == [(1, 60, True), (1, 60, False), (1, 30, True)]


def fail_to_start() -> str:
    begin()
    if bagua.get_rank() == 2:
        os.environ["PATH"] = "/nowhere"
    with pytest.raises(RuntimeError) as told:
        RedisStore(capacity_per_node=16 * MIB)
    return str(told.value)


@needs_redis
def test_a_server_that_does_not_start_is_an_error_on_all_ranks() -> None:
    found = run_ranks(3, fail_to_start, env=NODES)
    assert [text.splitlines()[0] for text in found] == [
        "On rank 2: redis-server is not on the PATH, and hosts=None asks for a server to be started."
    ] * 3


def test_without_a_process_group_ranks_cannot_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"before the process group was there.*\n.*\n.*init_process_group"):
        RedisStore()
