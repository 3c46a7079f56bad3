"""What every store of samples can do, one that spreads keys over several others, and one in the memory of a process."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence

from bagua.env import size_of


class StoreError(RuntimeError):
    """A store did not do what it was asked for. Callers treat it as a miss.

    Args:
        message: what happened, where, and what to do.
        partial: of a read, the values that were found all the same, in the order of the keys.
        written: of a write, the bytes of the values that were stored all the same.
    """

    def __init__(self, message: str, partial: list[bytes | None] | None = None, written: int = 0) -> None:
        super().__init__(message)
        self.partial = partial
        self.written = written


class StoreFullError(StoreError):
    """There is no room, and nothing that may be evicted. The store goes on answering reads."""


class Store:
    """Values of bytes under keys of text. Methods raise StoreError if the store cannot be used.

    A store may be used by several threads and, after a fork, by parent and child. A pickled store opens the same data.
    One of your own needs `mset` or `set`, and `mget` or `get`; `mset` may take the dictionary alone. What its methods
    raise counts as a miss.
    """

    def set(self, key: str, value: str | bytes) -> None:
        """Store one value. See `mset`."""
        self._check_has("mset")
        self.mset({key: value})

    def get(self, key: str) -> bytes | None:
        """The value, or None if there is none."""
        self._check_has("mget")
        return self.mget([key])[0]

    def _check_has(self, name: str) -> None:
        if getattr(type(self), name) is getattr(Store, name):
            raise NotImplementedError(f"{type(self).__name__} has neither {name}() nor {name[1:]}()")

    def mset(self, dictionary: Mapping[str, str | bytes], group: str | None = None) -> None:
        """Store values; text is stored as UTF-8.

        Args:
            group: in a full store, values of the same group are not evicted for each other: with samples that each
                epoch reads once, that would only replace one hit by another. None: the oldest values are evicted.

        Raises:
            StoreFullError: some of the values did not fit. The others are stored.
        """
        for key, value in dictionary.items():
            self.set(key, value)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values in the order of the keys, None where there is none.

        Raises:
            StoreError: the store cannot be used; `partial` has what was found all the same.
        """
        return [self.get(key) for key in keys]

    def num_keys(self) -> int:
        """How many values are stored, by whomever.

        Raises:
            NotImplementedError: a store of a user does not tell.
        """
        raise NotImplementedError(f"{type(self).__name__} has no num_keys()")

    def clear(self) -> None:
        """Remove all values, of all datasets.

        Raises:
            NotImplementedError: a store of a user cannot.
        """
        raise NotImplementedError(f"{type(self).__name__} has no clear()")

    def status(self) -> bool:
        """Whether the store can be used now."""
        return True

    def shutdown(self) -> None:
        """Release what this process holds: files, connections, and servers that it started."""


def store_values(store: Store, values: Mapping[str, str | bytes], group: str | None) -> None:
    """`store.mset`, with the group if it takes one: those of Bagua 0.9 take the dictionary alone."""
    if group is not None:
        parameters = inspect.signature(store.mset).parameters
        if "group" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            store.mset(values, group=group)
            return
    store.mset(values)


class ClusterStore(Store):
    """Several stores as one. The hash of a key chooses the store, the same in every process.

    Args:
        stores: at least one, in the same order on all ranks.

    Raises:
        ValueError: no stores.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ValueError("stores=[]: a ClusterStore needs at least one store")
        self.stores = list(stores)
        self.num_stores = len(self.stores)

    def route(self, key: str) -> Store:
        """The store that holds `key`."""
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return self.stores[int.from_bytes(digest, "little") % self.num_stores]

    def mset(self, dictionary: Mapping[str, str | bytes], group: str | None = None) -> None:
        parts: dict[int, tuple[Store, dict[str, str | bytes]]] = {}
        for key, value in dictionary.items():
            store = self.route(key)
            parts.setdefault(id(store), (store, {}))[1][key] = value
        failed: StoreError | None = None
        written = 0
        for store, part in parts.values():
            try:
                store_values(store, part, group)
                written += size_of_values(part)
            except StoreError as error:
                written += error.written
                # A server that is gone matters more than one that is full.
                failed = error if failed is None or isinstance(failed, StoreFullError) else failed
        if failed is not None:
            failed.written = written
            raise failed

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        parts: dict[int, tuple[Store, list[int]]] = {}
        for position, key in enumerate(keys):
            store = self.route(key)
            parts.setdefault(id(store), (store, []))[1].append(position)
        found: list[bytes | None] = [None] * len(keys)
        failed: StoreError | None = None
        for store, positions in parts.values():
            try:
                values = store.mget([keys[position] for position in positions])
            except StoreError as error:
                failed = error
                values = error.partial or [None] * len(positions)
            for position, value in zip(positions, values, strict=True):
                found[position] = value
        if failed is not None:
            raise StoreError(str(failed), partial=found) from failed
        return found

    def num_keys(self) -> int:
        return sum(store.num_keys() for store in self.stores)

    def clear(self) -> None:
        for store in self.stores:
            store.clear()

    def status(self) -> bool:
        return all(store.status() for store in self.stores)

    def shutdown(self) -> None:
        for store in self.stores:
            store.shutdown()


class Retries:
    """Keeps a store that does not respond from delaying every sample: after a failure it is left alone for a while.

    Args:
        pause_s: seconds.
    """

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s
        self._until = 0.0
        self._failure = ""

    def check(self) -> None:
        """
        Raises:
            StoreError: the pause is not over; the message is that of the failure.
        """
        if time.monotonic() < self._until:
            raise StoreError(self._failure)

    def failed(self, message: str) -> StoreError:
        """Begins a pause. Returns the error to raise."""
        self._failure = message
        self._until = time.monotonic() + self.pause_s
        return StoreError(message)


def to_bytes(value: str | bytes) -> bytes:
    """Text as UTF-8."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)


def size_of_values(values: Mapping[str, str | bytes]) -> int:
    """In bytes, as they are stored."""
    return sum(len(to_bytes(value)) for value in values.values())


def checked_capacity(name: str, given: int | str, least: int) -> int:
    """In bytes.

    Args:
        name: The argument, for errors.
        given: A number, or a text such as "5G".

    Raises:
        TypeError: Something else.
        ValueError: Not a whole number of at least `least` bytes.
    """
    capacity = size_of(name, given) if isinstance(given, str) else given
    if isinstance(capacity, bool) or not isinstance(capacity, int | float):
        raise TypeError(f"{name}={given!r}: must be a number of bytes, or a text such as '5G'")
    if capacity < least or not float(capacity).is_integer():
        raise ValueError(f"{name}={given!r}: must be a whole number of bytes, at least {least}, or a text such as '5G'")
    return int(capacity)


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
