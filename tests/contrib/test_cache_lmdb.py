"""The LMDB store of samples: full disks, damage, processes that are killed, stopped or forked."""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.processes import exit_code_of, forked, in_child

from bagua.contrib.caching.cache_loader import CacheLoader
from bagua.contrib.caching.lmdb_environment import locked_file
from bagua.contrib.caching.lmdb_store import LmdbStore
from bagua.contrib.caching.store import Store, StoreError

MIB = 1 << 20


def log_of_this_process() -> list[str]:
    records: list[str] = []
    logging.getLogger("bagua").handlers = [handler := logging.Handler()]
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    return records


def use_without_space(path: Path) -> None:
    """Prepares samples; says so once; and stores again as soon as there is space."""
    records = log_of_this_process()
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


def refuse_at_once(path: Path) -> None:
    """It will not become better by itself."""
    for folder in (path, path / "cache" / "deep"):
        with pytest.raises(OSError, match="cannot be the folder of a cache: Read-only file system"):
            CacheLoader("lmdb", path=folder)


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
        uses = {"filled later": use_and_fill_up, "size=2m,ro": refuse_at_once}
        in_child(uses.get(options, use_without_space), tmp_path)
    finally:
        subprocess.run(["umount", tmp_path], check=True)


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


def test_restarts_and_a_larger_capacity_keep_what_is_there(tmp_path: Path) -> None:
    in_child(lambda: fill(LmdbStore(tmp_path / "cache", 8 * MIB)))
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
        assert exit_code_of(writer) == -signal.SIGKILL
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
    records = log_of_this_process()
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


def write_into_damaged(path: Path) -> None:
    store = LmdbStore(path, 8 * MIB)
    fill(store)
    with (path / "data.mdb").open("r+b") as opened:
        for page in range(2, 180):
            opened.seek(page * 4096 + 2200)
            opened.write(os.urandom(200))
    with pytest.raises(StoreError, match="The cache was damaged"):
        store.set("key", b"x")
    store.set("key", b"x")
    assert store.get("key") == b"x"


def test_damage_is_noticed_before_a_write(tmp_path: Path) -> None:
    in_child(write_into_damaged, tmp_path)


def test_a_cache_of_another_format_is_replaced(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, 8 * MIB)
    store.set("key", b"x")
    with store._environment.writing() as (transaction, _):
        transaction.put(b"account", bytes(16))
    with pytest.raises(StoreError, match="number has 16 bytes instead of 8"):
        store.set("other", b"y")
    store.set("other", b"y")
    assert store.mget(["key", "other"]) == [None, b"y"]


def test_it_is_used_by_several_threads_and_forks_meanwhile(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, 8 * MIB)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            fill(store, range(10))

    with ThreadPoolExecutor(2) as threads:
        writing = [threads.submit(write) for _ in range(2)]
        for number in range(10):
            in_child(store.set, f"child{number}", b"x")
        stop.set()
    for one in writing:
        one.result()
    assert store.mget([f"child{number}" for number in range(10)]) == [b"x"] * 10


def hold_lock(path: Path, held: int) -> None:
    with locked_file(path, 1):
        os.write(held, b".")
        signal.pause()


def test_a_writer_that_stops_does_not_stop_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LmdbStore(tmp_path, 8 * MIB)
    fill(store)
    monkeypatch.setattr("bagua.contrib.caching.lmdb_environment._LOCK_TIMEOUT_S", 0.05)
    held, holds = os.pipe()
    holder = forked(hold_lock, tmp_path / "writer.lock", holds)
    assert os.read(held, 1) == b"."
    try:
        with pytest.raises(
            StoreError, match=r"cannot be written: another process has held .*writer\.lock.*\n.*\nAnother process may"
        ):
            store.set("key", b"x")
        monkeypatch.setattr("bagua.contrib.caching.lmdb_environment.locked_file", None)
        with pytest.raises(StoreError, match="cannot be written"):
            store.set("key", b"x")  # at once: it is not asked for again
        assert all(values_of(store))
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(held)
        os.close(holds)


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
    assert one._environment is other._environment, "LMDB must not open a file twice in a process"
