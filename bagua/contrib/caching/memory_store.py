"""A store in the memory of one process."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping, Sequence

from bagua.contrib.caching.store import Store, StoreFullError, checked_capacity, to_bytes


class MemoryStore(Store):
    """Values in this process. A forked process goes on with a copy of its own; a spawned one starts empty.

    Args:
        capacity_bytes: limit of keys and values: a number of bytes, or a text such as "5G".

    Raises:
        ValueError: capacity_bytes is not a positive whole number.
    """

    def __init__(self, capacity_bytes: int | str = 1 << 30) -> None:
        self.capacity_bytes = checked_capacity("capacity_bytes", capacity_bytes, 1)
        self._clear()

    def _clear(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._used = 0
        self._numbers = itertools.count()
        self._groups: dict[str | None, dict[str, tuple[int, bytes]]] = {}  # oldest first
        self._group_of: dict[str, str | None] = {}

    def __getstate__(self) -> dict[str, object]:
        return {"capacity_bytes": self.capacity_bytes}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.capacity_bytes = state["capacity_bytes"]
        self._clear()

    @property
    def _guard(self) -> threading.RLock:
        """A lock that another thread held at a fork would never be released in the child."""
        if self._pid != os.getpid():
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock

    def mset(self, dictionary: Mapping[str, str | bytes], group: str | None = None) -> None:
        rejected = written = 0
        with self._guard:
            for key, given in dictionary.items():
                value = to_bytes(given)
                self._remove(key)
                size = len(key) + len(value)
                if size > self.capacity_bytes:
                    rejected += 1
                    continue
                while self._used + size > self.capacity_bytes and (oldest := self._oldest(group)) is not None:
                    self._remove(oldest)
                if self._used + size > self.capacity_bytes:
                    rejected += 1
                    continue
                self._groups.setdefault(group, {})[key] = (next(self._numbers), value)
                self._group_of[key] = group
                self._used += size
                written += len(value)
        if rejected:
            raise StoreFullError(
                f"{rejected} of {len(dictionary)} values do not fit into the cache of {self.capacity_bytes} bytes.\n"
                "The store is in the memory of this process.\n"
                "Raise capacity_bytes, or go on without these values in the cache.",
                written=written,
            )

    def _oldest(self, group: str | None) -> str | None:
        """The key to evict for a value of `group`."""
        first = [
            (number, key)
            for name, values in self._groups.items()
            if group is None or name != group
            for key, (number, _) in itertools.islice(values.items(), 1)
        ]
        return min(first)[1] if first else None

    def _remove(self, key: str) -> None:
        if key in self._group_of:
            group = self._group_of.pop(key)
            _, value = self._groups[group].pop(key)
            self._used -= len(key) + len(value)
            if not self._groups[group]:
                del self._groups[group]

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._guard:
            return [self._groups[self._group_of[key]][key][1] if key in self._group_of else None for key in keys]

    def num_keys(self) -> int:
        return len(self._group_of)

    def clear(self) -> None:
        with self._guard:
            self._groups.clear()
            self._group_of.clear()
            self._used = 0

    def shutdown(self) -> None:
        self.clear()
