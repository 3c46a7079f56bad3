"""A cache of samples: what a function prepares for a key is prepared once. Its hits and misses are counted over a
process and those that it forks or spawns."""

from __future__ import annotations

import importlib
import inspect
import logging
import multiprocessing.util
import operator
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import torch

from bagua.contrib.caching.codec import codec_of, pack, unpack
from bagua.contrib.caching.store import (
    Store,
    StoreError,
    StoreFullError,
    size_of_values,
    store_values,
    to_bytes,
)
from bagua.misuse import nearest

__all__ = ["CacheLoader", "CacheStatistics"]

_logger = logging.getLogger("bagua")

_FIELDS = 5
# Each process counts in the row of its number, so that none waits for another. Two whose numbers share a row may lose
# counts to each other.
# Together below the 32 KiB from which torch copies with OpenMP's threads: a fork waits for them indefinitely.
_ROWS = 512


class CacheStatistics(NamedTuple):
    """What a cache did in this process and in its DataLoader workers.

    Attributes:
        hits: samples that came from the cache.
        misses: samples that were prepared.
        errors: operations of the store that failed, and stored samples that were damaged.
        bytes_read: size of the hits, as stored.
        bytes_written: size of the samples that were stored.
    """

    hits: int
    misses: int
    errors: int
    bytes_read: int
    bytes_written: int

    @property
    def hit_rate(self) -> float:
        """Hits as a part of all samples, 0 to 1; 0 if there were none."""
        return self.hits / max(1, self.hits + self.misses)


class SharedCounts:
    """The counts, in shared memory. Pickled for a spawned worker, it is the same memory."""

    def __init__(self) -> None:
        self._counts = torch.zeros(_ROWS, _FIELDS, dtype=torch.int64, device="cpu")
        self._warned = torch.zeros(8, dtype=torch.uint8, device="cpu")
        try:
            for tensor in (self._counts, self._warned):
                tensor.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            _logger.warning(
                "The counters of a cache cannot be in shared memory (%s).\n"
                "statistics() counts this process alone, and each process warns for itself.\n"
                "Free space in /dev/shm, or raise its size (Docker: --shm-size).",
                error,
            )

    def add(self, hits: int = 0, misses: int = 0, errors: int = 0, bytes_read: int = 0, bytes_written: int = 0) -> None:
        """Counts on. Called under the lock of the loader."""
        values = [hits, misses, errors, bytes_read, bytes_written]
        self._counts[os.getpid() % _ROWS] += torch.tensor(values, dtype=torch.int64, device="cpu")

    def read(self) -> CacheStatistics:
        """The sums over the processes."""
        return CacheStatistics(*self._counts.sum(0).tolist())

    def is_first(self, kind: int) -> bool:
        """Whether nobody has warned of this kind before, of this process and its workers."""
        if self._warned[kind]:
            return False
        self._warned[kind] = 1
        return True


# Pending writes are flushed after so many reads, too: what a slow dataset prepared is of use to others. Nothing is
# written to a full store until then.
_READS_PER_FLUSH = 1000
_KINDS = ("store", "damaged", "full")  # of warnings: each is given once


class CacheLoader:
    """Loads values through a cache that processes share and that outlives them.

    Args:
        backend: "redis", "lmdb" or "memory".
        dataset_name: part of each key, so that datasets can share a store.
        writer_buffer_size: how many new values are written to the store at a time. Values that wait are found by this
            process only. They are written too when the loader is dropped or the process exits, and by `flush`.
        fingerprint: part of each key; change it when `load_fn` changes. CachedDataset computes it.
        codec: "msgpack" or "pickle"; see [codecs](../../how-to/train/cache-samples.md#what-can-be-stored).
        keep_own: in a full store, values of this dataset and fingerprint are not evicted for each other, and new ones
            are not stored. False: the oldest are evicted.
        **kwargs: of the backend: for "redis" those of RedisStore, for "lmdb" those of LmdbStore, for "memory" those of
            MemoryStore.

    Raises:
        ValueError: unknown backend or codec, or writer_buffer_size below 1.
        TypeError: an argument that the backend does not have.
        ModuleNotFoundError: a package of the backend is not installed; the message names the extra.
        OSError: the folder of "lmdb" cannot be made, or this user cannot write to it.
    """

    def __init__(
        self,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        *,
        fingerprint: str = "",
        codec: str = "msgpack",
        keep_own: bool = False,
        **kwargs: Any,
    ) -> None:
        if writer_buffer_size < 1:
            raise ValueError(f"writer_buffer_size={writer_buffer_size}: must be at least 1")
        self.dataset_name = dataset_name
        self.fingerprint = fingerprint
        self.writer_buffer_size = writer_buffer_size
        # Quoted, so that no two pairs of name and fingerprint give the same text.
        self._prefix = f"{quote(dataset_name, safe='')}/{quote(fingerprint, safe='')}/{codec}/"
        self._group = self._prefix if keep_own else None
        self._codec_name = codec
        self._codec = codec_of(codec)
        self.store = _open_store(backend, kwargs)
        self._counts = SharedCounts()
        self._begin_process()

    def _begin_process(self) -> None:
        """What is this process's own. After a fork, the parent writes what waits, and its lock is not ours."""
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._pending: dict[str, bytes] = {}
        self._reads = 0
        self._is_full = False
        self._flushes_at_exit = False

    def _guard(self) -> threading.RLock:
        if self._pid != os.getpid():
            self._begin_process()
        return self._lock

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_pid", "_lock", "_pending", "_reads", "_is_full", "_flushes_at_exit", "_codec")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._codec = codec_of(self._codec_name)
        self._begin_process()

    def _bagua_fingerprint(self) -> str:
        """What it adds to the fingerprint of a dataset that holds it: not its store and counts."""
        return self._prefix

    def get(self, key: Hashable, load_fn: Callable[[Any], Any]) -> Any:
        """The value of `key`: from the cache, or else `load_fn(key)`, whose errors propagate.

        Args:
            key: int, str or bytes, or a tuple of these.

        Raises:
            TypeError: a key of another type, or a value that the codec cannot encode.
        """
        return self.get_many([key], load_fn)[0]

    def get_many(self, keys: Sequence[Hashable], load_fn: Callable[[Any], Any]) -> list[Any]:
        """`get` for several keys, with one request to the store."""
        texts = [self._text_of(key) for key in keys]
        with self._guard():
            frames = {text: self._pending[text] for text in texts if text in self._pending}
        missing = [text for text in dict.fromkeys(texts) if text not in frames]
        if missing:
            frames.update(
                (text, frame) for text, frame in zip(missing, self._read(missing), strict=True) if frame is not None
            )
        values: list[Any] = []
        hits = bytes_read = 0
        try:
            for key, text in zip(keys, texts, strict=True):
                found, value = self._decoded(text, frames.get(text))
                if found:
                    hits, bytes_read = hits + 1, bytes_read + len(frames[text])
                else:
                    value = load_fn(key)
                    frames[text] = pack(self._codec, text, value)
                    self._write(text, frames[text])
                values.append(value)
        finally:
            with self._guard():
                self._counts.add(hits=hits, bytes_read=bytes_read)
                self._reads += len(values)
                if self._reads >= _READS_PER_FLUSH:
                    self._is_full = False  # somebody may have made room
                    self.flush()
        return values

    def _text_of(self, key: Hashable) -> str:
        try:
            if not isinstance(key, bool):
                key = operator.index(key)  # type: ignore[arg-type]  # integers of numpy and torch too
        except TypeError:
            _check_key(key)
        return f"{self._prefix}{key!r}"

    def _decoded(self, text: str, frame: bytes | None) -> tuple[bool, Any]:
        if frame is None:
            return False, None
        try:
            return True, unpack(self._codec, text, frame)
        except ValueError as error:
            self._fail("damaged", f"Key {text!r} of the cache cannot be used: {error}.")
            return False, None

    def _read(self, texts: list[str]) -> list[bytes | None]:
        try:
            found = [None if one is None else to_bytes(one) for one in self.store.mget(texts)]
            if len(found) != len(texts):
                raise StoreError(
                    f"mget() of {type(self.store).__name__} gave {len(found)} values for {len(texts)} keys."
                )
        except Exception as error:  # a store of the user raises what it likes
            self._fail("store", _told(error))
            return getattr(error, "partial", None) or [None] * len(texts)
        return found

    def _write(self, text: str, frame: bytes) -> None:
        with self._guard():
            self._counts.add(misses=1)
            if self._is_full:
                return
            if not self._flushes_at_exit:
                # The process exits: atexit does not run in workers, these do. Not before the first write: those that
                # are registered while a worker unpickles its arguments are removed when it begins.
                multiprocessing.util.Finalize(None, _flush_at_exit, (weakref.ref(self),), exitpriority=10)
                self._flushes_at_exit = True
            self._pending[text] = frame
            if len(self._pending) >= self.writer_buffer_size:
                self.flush()

    def __del__(self) -> None:
        # A worker of a DataLoader drops its dataset before it ends, from torch 2.14 on.
        if getattr(self, "_pending", None):
            self.flush()

    def flush(self) -> None:
        """Write what waits to the store now. If the store fails, these values are not cached."""
        with self._guard():
            pending, self._pending = self._pending, {}
            self._reads = 0
            if not pending:
                return
            written = 0
            try:
                store_values(self.store, pending, self._group)
                written = size_of_values(pending)
            except StoreFullError as error:
                written = error.written
                self._is_full = True
                self._warn("full", str(error))
            except Exception as error:
                written = getattr(error, "written", 0)
                self._fail("store", _told(error))
            self._counts.add(bytes_written=written)

    def _fail(self, kind: str, message: str) -> None:
        with self._guard():
            self._counts.add(errors=1)
        advice = "Such samples are prepared again. This warning is given once; statistics().errors counts the failures."
        self._warn(kind, f"{message}\n{advice}")

    def _warn(self, kind: str, message: str) -> None:
        if self._counts.is_first(_KINDS.index(kind)):
            _logger.warning(message)

    def num_keys(self) -> int:
        """How many values the store has, of all datasets that share it.

        Raises:
            StoreError: the store cannot be used.
        """
        self.flush()
        return self.store.num_keys()

    def statistics(self) -> CacheStatistics:
        """Of this process and the DataLoader workers that it started."""
        return self._counts.read()


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, StoreError) else f"The store failed ({type(error).__name__}: {error})."


def _check_key(key: Hashable) -> None:
    for part in key if isinstance(key, tuple) else (key,):
        if not isinstance(part, int | str | bytes):
            raise TypeError(
                f"key={key!r}: a key of the cache must be int, str or bytes, or a tuple of these, not "
                f"{type(part).__name__}"
            )


_BACKENDS = {
    "lmdb": ("lmdb_store", "LmdbStore"),
    "memory": ("store", "MemoryStore"),
    "redis": ("redis_store", "RedisStore"),
}


def _open_store(backend: str, arguments: dict[str, Any]) -> Store:
    if backend not in _BACKENDS:
        near = nearest(backend, list(_BACKENDS))
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(map(repr, _BACKENDS))}.{near}")
    module, name = _BACKENDS[backend]
    kind = getattr(importlib.import_module(f"bagua.contrib.caching.{module}"), name)
    accepted = list(inspect.signature(kind).parameters)
    if unknown := sorted(set(arguments) - set(accepted)):
        raise TypeError(
            f"backend={backend!r} has no argument {', '.join(unknown)}.{nearest(unknown[0], accepted)}\n"
            f"It has {', '.join(accepted)}; hosts, cluster_mode and capacity_per_node are those of backend='redis'."
        )
    store: Store = kind(**arguments)
    return store


def _flush_at_exit(reference: weakref.ref[CacheLoader]) -> None:
    loader = reference()
    if loader is not None:
        loader.flush()
