"""A store in files of this node, without a server: LMDB. All processes of the node that name its folder share it.

Two tables. `entries`: key to place (16) and value. `order`: place, which is group (8 bytes) and number (8, big-endian),
to key; it says what to evict. The main table has the last number. LMDB's transactions keep them consistent, also when a
writer is killed.

LMDB itself says how much is in use: the pages of both tables. A transaction writes what it changes to free pages; the
pages that it frees can be used in the second transaction after it. Therefore a reserve of pages is never used for
values, and a transaction changes at most a third of it: one third is for the transaction, one for what the one before
it has freed, and one for pages that small values split. Larger work is done in several transactions.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua.contrib.caching.lmdb_environment import DamagedError, shared_environment
from bagua.contrib.caching.store import Store, StoreError, StoreFullError, checked_capacity, to_bytes

_PAGE_BYTES = mmap.PAGESIZE  # LMDB's pages are the system's
_LEAST_BYTES = 256 * _PAGE_BYTES
_MAX_KEY_BYTES = 500  # LMDB's limit is 511
_ACCOUNT = b"account"
_GROUP_BYTES = _NUMBER_BYTES = 8
_PLACE_BYTES = 16
_NO_GROUP = bytes(_GROUP_BYTES)
# Of the pages, and at least this many.
_RESERVE = 0.1
_LEAST_RESERVE = 64
# What storing or evicting an entry changes, except for a long value's own pages: in both tables the path to a leaf, and
# on each level a page that is split or joined.
_PAGES_OF_AN_ENTRY = 16
# When free pages are not in a row that is long enough for a value, so much of the capacity is evicted: in a first
# attempt nothing, so that what is free already can be used.
_EVICTED_FOR_ROWS = (0.0, 0.125, 0.25, 0.5, 1.0)


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
        capacity_bytes: what the files may take, at least 256 pages of memory, which are 1 MiB where a page has 4 KiB:
            a number of bytes, or a text such as "50G". `ls` shows this size from the beginning; `du` shows what is in
            use.

    Raises:
        TypeError: an argument of another type.
        ValueError: capacity_bytes is too small, or path is empty.
        ModuleNotFoundError: lmdb is not installed.
        OSError: the folder cannot be made, or this user cannot write to it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, capacity_bytes: int | str = 16 << 30) -> None:
        self.capacity_bytes = checked_capacity("capacity_bytes", capacity_bytes, _LEAST_BYTES)
        self.path = default_path() if path is None else _checked_path(path)
        self._pages = -(-self.capacity_bytes // _PAGE_BYTES)
        reserve = max(int(self._pages * _RESERVE), _LEAST_RESERVE)
        self._limit = self._pages - reserve
        self._most_changed = reserve // 3
        self._environment = shared_environment(self.path, self._pages * _PAGE_BYTES)

    def __reduce__(self) -> tuple[Any, ...]:
        return LmdbStore, (self.path, self.capacity_bytes)

    def mset(self, dictionary: Mapping[str, str | bytes], group: str | None = None) -> None:
        own = _NO_GROUP if group is None else hashlib.blake2b(group.encode(), digest_size=_GROUP_BYTES).digest()
        values = {_stored_key(key): to_bytes(value) for key, value in dictionary.items()}
        fitting = {key: value for key, value in values.items() if _own_pages(key, value) <= self._limit}
        written, rejected = 0, len(values) - len(fitting)
        for batch in self._batches(fitting):
            size, count = self._store(batch, own)
            written += size
            rejected += len(batch) - count
        if rejected:
            raise StoreFullError(
                f"{rejected} of {len(values)} values do not fit into the cache of {self.capacity_bytes} bytes.\n"
                f"It is in {self.path}.\n"
                "Raise capacity_bytes, or go on without these values in the cache.",
                written=written,
            )

    def _batches(self, values: dict[bytes, bytes]) -> Iterator[dict[bytes, bytes]]:
        """What one transaction stores: as much as it may change, or one value."""
        batch: dict[bytes, bytes] = {}
        changed = 0
        for key, value in values.items():
            changes = _PAGES_OF_AN_ENTRY + _own_pages(key, value)
            if batch and changed + changes > self._most_changed:
                yield batch
                batch, changed = {}, 0
            batch[key] = value
            changed += changes
        if batch:
            yield batch

    def _store(self, batch: dict[bytes, bytes], own: bytes) -> tuple[int, int]:
        """Returns the bytes and the number of the values that fit."""
        needed = sum(_own_pages(key, value) for key, value in batch.items())
        has_room = self._has_room(needed)
        for share in _EVICTED_FOR_ROWS:
            try:
                if not has_room:
                    has_room = self._make_room(needed + int(share * self._pages), own)
                return self._put(batch, own, has_room)
            except self._environment.lmdb.MapFullError:
                self._environment.forget_killed_readers()
                has_room = False
        return 0, 0

    def _has_room(self, needed: int) -> bool:
        with self._environment.reading() as (transaction, databases):
            return _Account(transaction, databases).used() + needed <= self._limit

    def _make_room(self, needed: int, own: bytes) -> bool:
        """Evict the oldest entries that may be evicted, until so many pages are free or there is none."""
        while True:
            with self._environment.writing() as (transaction, databases):
                account = _Account(transaction, databases)
                for _ in range(max(1, self._most_changed // _PAGES_OF_AN_ENTRY)):
                    has_room = account.used() + needed <= self._limit
                    is_done = has_room or not account.evict_oldest(own)
                    if is_done:
                        break
                account.save()
            if is_done:
                return has_room

    def _put(self, batch: dict[bytes, bytes], own: bytes, has_room: bool) -> tuple[int, int]:
        """As `_store`.

        Args:
            has_room: for all. Else those that fit are stored.
        """
        size = count = 0
        with self._environment.writing() as (transaction, databases):
            account = _Account(transaction, databases)
            for key, value in batch.items():
                if account.holds(key, value):  # another rank was faster
                    pass
                elif has_room or account.used() + _own_pages(key, value) <= self._limit:
                    account.add(key, value, own)
                else:
                    continue
                size += len(value)
                count += 1
            account.save()
        return size, count

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
        self._make_room(self._pages, _NO_GROUP)  # in small steps; what is left is what damage has made unreachable
        with self._environment.writing() as (transaction, databases):
            for database in databases.values():
                transaction.drop(database, delete=False)

    def status(self) -> bool:
        try:
            self.num_keys()
        except StoreError:
            return False
        return True

    def shutdown(self) -> None:
        self._environment.close()


class _Account:
    """What is in use and in which order it came, within one transaction."""

    def __init__(self, transaction: Any, databases: dict[bytes, Any]) -> None:
        self._transaction = transaction
        self._entries, self._order = databases[b"entries"], databases[b"order"]
        number = transaction.get(_ACCOUNT, bytes(_NUMBER_BYTES))
        if len(number) != _NUMBER_BYTES:
            raise DamagedError(f"its last number has {len(number)} bytes instead of {_NUMBER_BYTES}")
        self._number = int.from_bytes(number)

    def used(self) -> int:
        """In pages."""
        found = [self._transaction.stat(database) for database in (self._entries, self._order)]
        return sum(one[f"{kind}_pages"] for one in found for kind in ("branch", "leaf", "overflow"))

    def holds(self, key: bytes, value: bytes) -> bool:
        """Whether the entry is there. Another value of the key is removed."""
        old = self._transaction.get(key, db=self._entries)
        if old is None:
            return False
        if old[_PLACE_BYTES:] == value:
            return True
        place = bytes(old[:_PLACE_BYTES])
        self._transaction.delete(key, db=self._entries)
        if self._transaction.get(place, db=self._order) == key:  # else its bytes are damaged: its place ages out
            self._transaction.delete(place, db=self._order)
        return False

    def add(self, key: bytes, value: bytes, own: bytes) -> None:
        self._number += 1
        place = own + self._number.to_bytes(_NUMBER_BYTES)
        self._transaction.put(place, key, db=self._order)
        self._transaction.put(key, place + value, db=self._entries)

    def evict_oldest(self, own: bytes) -> bool:
        """False: there is no entry that may be evicted."""
        place = self._oldest(own)
        if place is None:
            return False
        key = bytes(self._transaction.get(place, db=self._order))
        self._transaction.delete(place, db=self._order)
        self._transaction.delete(key, db=self._entries)
        return True

    def _oldest(self, own: bytes) -> bytes | None:
        """Groups are few: look at the first entry of each."""
        found: bytes | None = None
        cursor = self._transaction.cursor(db=self._order)
        more = cursor.first()
        while more:
            place = bytes(cursor.key())
            group = place[:_GROUP_BYTES]
            if (group != own or own == _NO_GROUP) and (found is None or place[_GROUP_BYTES:] < found[_GROUP_BYTES:]):
                found = place
            more = cursor.set_range(group + b"\xff" * 9)
        return found

    def save(self) -> None:
        self._transaction.put(_ACCOUNT, self._number.to_bytes(_NUMBER_BYTES))


def _stored_key(key: str) -> bytes:
    stored = key.encode("utf-8", "surrogatepass")
    if len(stored) <= _MAX_KEY_BYTES:
        return stored
    return b"\0" + hashlib.blake2b(stored).digest()


def _own_pages(key: bytes, value: bytes) -> int:
    """Of a long value. Several short ones share a page."""
    size = _PLACE_BYTES + len(value)
    return 0 if len(key) + size < _PAGE_BYTES // 2 - 32 else -(-(size + 16) // _PAGE_BYTES)
