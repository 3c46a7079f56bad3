"""A store in files of this node, without a server: LMDB. All processes of the node that name its folder share it.

Three tables. `order`: place, which is group (8 bytes) and number (8, big-endian), to size (8) and key; it says what to
evict. `entries`: key to place (16) and value. The main table: the last number and the bytes in use. LMDB's transactions
keep them consistent, also when a writer is killed.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua.torch_api.contrib.caching.lmdb_environment import shared_environment
from bagua.torch_api.contrib.caching.store import Store, StoreError, StoreFullError, checked_capacity, to_bytes

_LEAST_BYTES = 1 << 20
_MAX_KEY_BYTES = 500  # LMDB's limit is 511
_PAGE_BYTES = 4096
_ACCOUNT = b"account"
_GROUP_BYTES = 8
_PLACE_BYTES = 16
_NO_GROUP = bytes(_GROUP_BYTES)
_PAIR = struct.Struct("<QQ")
# Of the capacity, for values. The rest is for LMDB's tables, and for pages that are free but in no row.
_FOR_VALUES = 0.9


def default_path() -> Path:
    """$XDG_CACHE_HOME/bagua/samples, or ~/.cache/bagua/samples."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bagua" / "samples"


def _checked_path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path={path!r}: must name a folder, as a text or a Path")
    if not os.fspath(path):  # which would be the folder that the program was started in
        raise ValueError(f"path={path!r}: must name a folder; None, the default, is {default_path()}")
    return Path(path).expanduser().absolute()


class LmdbStore(Store):
    """Values in a folder on a local disk, or in /dev/shm.

    Args:
        path: the folder; it is made if missing, for this user alone. None: `default_path()`. LMDB does not work on
            network file systems.
        capacity_bytes: what the files may take, at least 1 MiB: a number of bytes, or a text such as "50G". `ls` shows
            this size from the beginning; `du` shows what is in use.

    Raises:
        TypeError: an argument of another type.
        ValueError: capacity_bytes is too small, or path is empty.
        ModuleNotFoundError: lmdb is not installed.
        OSError: the folder cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, capacity_bytes: int | str = 16 << 30) -> None:
        self.capacity_bytes = checked_capacity("capacity_bytes", capacity_bytes, _LEAST_BYTES)
        self.path = default_path() if path is None else _checked_path(path)
        self._limit = int(self.capacity_bytes * _FOR_VALUES)
        self._environment = shared_environment(self.path, -(-self.capacity_bytes // _PAGE_BYTES) * _PAGE_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        return LmdbStore, (self.path, self.capacity_bytes)

    def mset(self, dictionary: Mapping[str, str | bytes], group: str | None = None) -> None:
        own = _NO_GROUP if group is None else hashlib.blake2b(group.encode(), digest_size=_GROUP_BYTES).digest()
        values = {_stored_key(key): to_bytes(value) for key, value in dictionary.items()}
        full = self._environment.lmdb.MapFullError
        try:
            rejected, written = self._put(values, own)
        except full:  # no row of free pages is long enough
            try:
                self._evict(sum(_size(key, value) for key, value in values.items()) + self._limit // 8, own)
                rejected, written = self._put(values, own)
            except full:
                rejected, written = len(values), 0
        if rejected:
            raise StoreFullError(
                f"{rejected} of {len(values)} values do not fit into the cache of {self.capacity_bytes} bytes.\n"
                f"It is in {self.path}.\n"
                "Raise capacity_bytes, or go on without these values in the cache.",
                written=written,
            )

    def _evict(self, needed: int, own: bytes) -> None:
        self._environment.forget_killed_readers()
        for size in (needed, 0):  # LMDB uses free pages again in the second transaction after
            with self._environment.writing() as (transaction, databases):
                account = _Account(transaction, databases, own, self._limit)
                account.evict(size)
                account.save()

    def _put(self, values: dict[bytes, bytes], own: bytes) -> tuple[int, int]:
        """Returns how many did not fit, and how many bytes the others have."""
        rejected = written = 0
        with self._environment.writing() as (transaction, databases):
            account = _Account(transaction, databases, own, self._limit)
            entries = databases[b"entries"]
            for key, value in values.items():
                old = transaction.get(key, db=entries)
                written += len(value)
                if old is not None:
                    if old[_PLACE_BYTES:] == value:
                        continue  # another rank was faster
                    account.remove(bytes(old[:_PLACE_BYTES]), key)
                if (place := account.add(key, _size(key, value))) is None:
                    rejected += 1
                    written -= len(value)
                else:
                    transaction.put(key, place + value, db=entries)
            account.save()
        return rejected, written

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._environment.reading() as (transaction, databases):
            entries = databases[b"entries"]
            found = [transaction.get(_stored_key(key), db=entries) for key in keys]
            # A damaged length would be copied from behind the map.
            return [
                None if one is None or len(one) > self.capacity_bytes else bytes(one[_PLACE_BYTES:]) for one in found
            ]

    def num_keys(self) -> int:
        with self._environment.reading() as (transaction, databases):
            return int(transaction.stat(databases[b"entries"])["entries"])

    def clear(self) -> None:
        with self._environment.writing() as (transaction, databases):
            for database in databases.values():
                transaction.drop(database, delete=False)
            transaction.delete(_ACCOUNT)

    def status(self) -> bool:
        try:
            self.num_keys()
        except StoreError:
            return False
        return True

    def shutdown(self) -> None:
        self._environment.close()


class _Account:
    """What is in use and in which order it came, within one write transaction."""

    def __init__(self, transaction: Any, databases: dict[bytes, Any], own: bytes, limit: int) -> None:
        self._transaction = transaction
        self._entries, self._order = databases[b"entries"], databases[b"order"]
        self._own = own
        self._limit = limit
        stored = transaction.get(_ACCOUNT)
        self._number, self._used = _PAIR.unpack(stored) if stored is not None else (0, 0)

    def add(self, key: bytes, size: int) -> bytes | None:
        """Make room for a new entry and note it. Returns its place, or None if it does not fit."""
        if size > self._limit:
            return None
        self.evict(self._used + size - self._limit)
        if self._used + size > self._limit:
            return None
        self._number += 1
        self._used += size
        place = self._own + struct.pack(">Q", self._number)
        self._transaction.put(place, struct.pack("<Q", size) + key, db=self._order)
        return place

    def evict(self, needed: int) -> None:
        """Remove the oldest entries that may be removed, until so many bytes are free or there is none."""
        until = self._used - needed
        while self._used > until and (place := self._oldest()) is not None:
            self._remove_place(place)

    def _oldest(self) -> bytes | None:
        """Groups are few: look at the first entry of each."""
        found: bytes | None = None
        cursor = self._transaction.cursor(db=self._order)
        more = cursor.first()
        while more:
            place = bytes(cursor.key())
            group = place[:_GROUP_BYTES]
            if (group != self._own or self._own == _NO_GROUP) and (
                found is None or place[_GROUP_BYTES:] < found[_GROUP_BYTES:]
            ):
                found = place
            more = cursor.set_range(group + b"\xff" * 9)
        return found

    def remove(self, place: bytes, key: bytes) -> None:
        """An entry that is replaced. If its bytes are damaged, its place is not to be found, and ages out."""
        self._transaction.delete(key, db=self._entries)
        row = self._transaction.get(place, db=self._order)
        if row is not None and row[8:] == key:
            self._remove_place(place)

    def _remove_place(self, place: bytes) -> None:
        row = bytes(self._transaction.get(place, db=self._order))
        self._transaction.delete(place, db=self._order)
        self._transaction.delete(row[8:], db=self._entries)
        self._used = max(0, self._used - int.from_bytes(row[:8], "little"))

    def save(self) -> None:
        self._transaction.put(_ACCOUNT, _PAIR.pack(self._number, self._used))


def _stored_key(key: str) -> bytes:
    stored = key.encode("utf-8", "surrogatepass")
    if len(stored) <= _MAX_KEY_BYTES:
        return stored
    return b"\0" + hashlib.blake2b(stored).digest()


def _size(key: bytes, value: bytes) -> int:
    """What an entry takes, in both tables: a long value has pages of its own, and pages of short ones are half full."""
    if len(key) + len(value) < _PAGE_BYTES // 2 - 64:
        return 2 * (len(value) + 2 * len(key) + 64)
    return -(-(len(value) + 16) // _PAGE_BYTES) * _PAGE_BYTES + 4 * (len(key) + 64)
