"""`measure cache`: samples per second of a DataLoader over JPEG images: without a cache, while it fills, and from it.

A sample is an image of 500 x 375 pixels, decoded and resized to 3 x 224 x 224 bytes by Pillow. Rates are those of a
whole epoch, with the start of its workers, and without the first batch. Redis is measured where its server is
installed, LitData where litdata is; its "cold" is litdata.optimize.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from bagua.net.bench.api import Label, within
from bagua.torch_api.contrib import CachedDataset
from measure.runner import DAY_S, Case, Measure, Plan, Row, Sample, Tool

Epoch = Callable[[], float | None]  # returns the samples per second after the first batch


class Images(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, folder: Path, count: int) -> None:
        self.files = [str(folder / f"{number}.jpeg") for number in range(count)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self.files[index]) as image:
            pixels = np.asarray(image.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR))
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), index


def write_images(folder: Path, count: int) -> None:
    """Smooth noise: as hard to decode as photographs of 50 to 60 kB."""
    generator = np.random.default_rng(1)
    for number in range(count):
        coarse = Image.fromarray(generator.integers(0, 256, (94, 125, 3), dtype=np.uint8))
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{number}.jpeg", quality=90)


def drain(loader: DataLoader[tuple[torch.Tensor, int]]) -> float:
    batches = iter(loader)
    next(batches)
    began = time.perf_counter()
    return sum(len(labels) for _, labels in batches) / (time.perf_counter() - began)


def epoch_of(data: Dataset[tuple[torch.Tensor, int]], workers: int) -> float:
    return drain(DataLoader(data, batch_size=32, shuffle=True, num_workers=workers))


@contextlib.contextmanager
def cached(images: Images, backend: str, workers: int) -> Iterator[list[tuple[str, Epoch]]]:
    with tempfile.TemporaryDirectory(prefix="bagua-cache-") as folder:
        options = {"path": folder} if backend == "lmdb" else {"capacity_per_node": 4 << 30}
        data = CachedDataset(images, backend, **options)
        try:
            yield [("cold", lambda: epoch_of(data, workers)), ("warm", lambda: epoch_of(data, workers))]
            if data.statistics().hits != len(images):
                raise RuntimeError(f"{backend}: the cache did not hold all {len(images)} samples: {data.statistics()}")
        finally:
            data.cache_loader.store.shutdown()


@contextlib.contextmanager
def litdata(images: Images, workers: int) -> Iterator[list[tuple[str, Epoch]]]:
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    start_method = multiprocessing.get_start_method(allow_none=True)
    with tempfile.TemporaryDirectory(prefix="bagua-litdata-") as folder:

        def prepare() -> None:
            options = {"chunk_bytes": "64MB", "num_workers": workers}
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
                optimize(fn=images.__getitem__, inputs=list(range(len(images))), output_dir=folder, **options)

        def stream() -> float:
            data = StreamingDataset(folder, shuffle=True)
            return drain(StreamingDataLoader(data, batch_size=32, num_workers=workers))

        try:
            yield [("cold", prepare), ("warm", stream)]
        finally:
            # LitData changes it for the whole process: workers of the others would take seconds to start, too.
            multiprocessing.set_start_method(start_method, force=True)


@dataclass(frozen=True)
class EpochRow(Row):
    """A kind of epoch of a backend. Rates in samples per second: of the whole epoch, and after the first batch."""

    epoch: str = ""

    def rates(self, position: int) -> list[float | None]:
        return [rates[position] for rates in self.values(self.epoch)]

    def speedups(self) -> list[float]:
        """Over the same round without a cache, after the start."""
        pairs = self.turns.pairs(self.case, self.variant, "none")
        rates = [(mine[self.epoch][1], base["plain"][1]) for mine, base in pairs]
        return [mine / base for mine, base in rates if mine is not None and base]


class Cache(Tool):
    name = "cache"
    title = "Samples per second, JPEG images"
    ranks = None
    options = (
        ("images", within(int, 32, 1_000_000), 1000, "in an epoch"),
        ("workers", within(int, 0, 256), 2, "of the DataLoader"),
    )
    length = (5, DAY_S, None)
    same = ("images", "workers")
    metrics = (
        ("rate", "samples/s", lambda row: row.rates(0)),
        ("speedup", "x", lambda row: row.speedups()),
        ("rate_after_start", "samples/s", lambda row: row.rates(1)),
    )

    def cases(self) -> Plan:
        redis = ["redis"] if shutil.which("redis-server") else []
        lit = ["litdata"] if importlib.util.find_spec("litdata") else []
        return {Case(): ["none", "lmdb", *redis, *lit]}

    @contextlib.contextmanager
    def session(self, group: str, plan: Plan) -> Iterator[Measure]:
        given = self.given
        with tempfile.TemporaryDirectory(prefix="bagua-images-") as folder:
            write_images(Path(folder), given.images)
            images = Images(Path(folder), given.images)

            def epochs(backend: str) -> contextlib.AbstractContextManager[list[tuple[str, Epoch]]]:
                if backend == "none":
                    return contextlib.nullcontext([("plain", lambda: epoch_of(images, given.workers))])
                return (
                    litdata(images, given.workers) if backend == "litdata" else cached(images, backend, given.workers)
                )

            def measure(_: Case, backend: str, _round: int) -> Sample:
                rates = {}
                with epochs(backend) as runs:
                    for kind, run in runs:
                        began = time.perf_counter()
                        steady = run()
                        rates[kind] = given.images / (time.perf_counter() - began), steady
                return rates

            yield measure

    def rows(self) -> list[EpochRow]:
        return [
            EpochRow(self.turns, case, backend, kind)
            for case, backend in self.turns.samples
            for kind in self.turns.of(case, backend)[0]
        ]

    def labels(self, row: EpochRow) -> dict[str, Label]:
        return {"backend": row.variant, "epoch": row.epoch}

    def heading(self) -> str:
        return f"{self.given.workers} workers"


main = Cache.main
