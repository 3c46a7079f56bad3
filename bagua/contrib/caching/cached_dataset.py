"""A dataset whose samples are prepared once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from bagua.contrib.caching.cache_loader import CacheLoader, CacheStatistics
from bagua.contrib.caching.fingerprint import fingerprint_of
from bagua.progress import Progress

__all__ = ["CachedDataset"]


class CachedDataset(Dataset[Any]):
    """A dataset that prepares each sample once. Later epochs, other ranks and later runs take it from the cache.

    What the dataset draws at random is drawn once, too: put random augmentation behind the cache.

    Args:
        dataset: has `__getitem__`; `__len__` is passed on.
        backend: "lmdb": files of this node, which its ranks and workers share; "memory": each process for itself;
            "redis": servers, which several nodes can share.
        dataset_name: part of each key.
        writer_buffer_size: how many new samples are written to the cache at a time.
        fingerprint: part of each key; samples of another fingerprint are not used. None: computed from the code and
            the attributes of the dataset, but not from the contents of files; see
            [fingerprints](../../how-to/train/cache-samples.md#when-samples-are-prepared-again).
        codec: how samples are stored, "msgpack" or "pickle"; see
            [codecs](../../how-to/train/cache-samples.md#what-can-be-stored).
        **kwargs: of the backend: path, capacity_bytes (a number, or a text such as "50G"); hosts, cluster_mode,
            capacity_per_node for "redis".

    Attributes:
        dataset: as given.
        cache_loader: the CacheLoader that it reads through.

    Raises:
        ValueError: unknown backend or codec, or writer_buffer_size below 1.
        TypeError: an IterableDataset, an argument that the backend does not have, or no fingerprint can be computed.
        ModuleNotFoundError: a package of the backend is not installed; the message names the extra.
        OSError: the folder of "lmdb" cannot be made, or this user cannot write to it.
    """

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        backend: str = "lmdb",
        dataset_name: str = "",
        writer_buffer_size: int = 20,
        *,
        fingerprint: str | None = None,
        codec: str = "msgpack",
        **kwargs: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"dataset is a {type(dataset).__name__}, which has no samples by index.\n"
                "Use a dataset with __getitem__, or call CacheLoader.get where the samples are prepared."
            )
        self.dataset = dataset
        self.cache_loader = CacheLoader(
            backend,
            dataset_name,
            writer_buffer_size,
            fingerprint=fingerprint_of(dataset) if fingerprint is None else fingerprint,
            codec=codec,
            keep_own=True,
            **kwargs,
        )

    def __getitem__(self, item: Any) -> Any:
        """The sample, from the cache or from the dataset, whose errors propagate.

        Raises:
            TypeError: the codec cannot encode the sample; or `item` is no int, str, bytes or tuple of these.
        """
        return self.cache_loader.get(item, self.dataset.__getitem__)

    def __getitems__(self, items: Sequence[Any]) -> list[Any]:
        """What DataLoader calls for a batch: one request to the store."""
        return self.cache_loader.get_many(items, self.dataset.__getitem__)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def statistics(self) -> CacheStatistics:
        """Hits, misses, errors and bytes, of this process and the DataLoader workers that it started."""
        return self.cache_loader.statistics()

    def warm(self, items: Iterable[int] | None = None, num_workers: int = 0) -> CacheStatistics:
        """Fill the cache before training, with a progress bar on a terminal.

        Args:
            items: indices; None: all. Ranks that share a cache can take a part each, e.g. range(rank, len, world_size).
            num_workers: processes that prepare samples, as DataLoader has them.
        """
        indices = list(range(len(self)) if items is None else items)
        loader: DataLoader[Any] = DataLoader(
            _Touched(self), sampler=indices, batch_size=16, num_workers=num_workers, collate_fn=len
        )
        with Progress(len(indices)) as progress:
            for done in loader:
                progress.advance("prepare samples", done)
        self.cache_loader.flush()
        return self.statistics()


class _Touched(Dataset[None]):
    """Samples that stay in the worker."""

    def __init__(self, dataset: CachedDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, items: Sequence[int]) -> Sequence[int]:
        self._dataset.__getitems__(items)
        return items
