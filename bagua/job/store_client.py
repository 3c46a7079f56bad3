"""A connection of its own to the job's store, for the threads that ask the store while others wait in theirs."""

from __future__ import annotations

import weakref

from bagua.job.torch_internals import Store


class StoreClient:
    """
    Of one process. Any thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = weakref.ref(store)  # a strong reference would keep the server's port after torch is shut down
        self._client: Store | None = None

    def is_of(self, store: Store) -> bool:
        return self._store() is store

    @property
    def is_shut_down(self) -> bool:
        """Whether torch has let go of the store, as destroy_process_group does."""
        return self._store() is None

    def get(self) -> Store:
        """Raises RuntimeError, or what the store raises: there is no connection, and none can be made any more."""
        if self._client is None:
            store = self._store()
            if store is None:
                raise RuntimeError("torch.distributed has been shut down")
            store.check(["bagua"])  # fails at once if the server is gone; connecting would try again for long
            if not hasattr(store, "clone"):  # torch before 2.8
                return store
            self._client = store.clone()
        return self._client
