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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from bagua.net.bench.api import Column, Figure, Progress, Turns, figures, render_rows, within
from bagua.torch_api.contrib import CachedDataset
from measure.options import add_length, add_results, check_results, parser_of
from measure.report import Report

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


# By backend, and by epoch of it: samples per second of the whole epoch, and after the first batch.
Rates = dict[str, tuple[float, float | None]]

COLUMNS: tuple[Column[Figure], ...] = (
    Column("backend", "", lambda row: str(row.case["backend"]), left=True),
    Column("epoch", "", lambda row: str(row.case["epoch"]), left=True),
    Column("", "", lambda row: row.metric, left=True),
    Column("median", "", lambda row: f"{row.median:.1f}"),
    Column("least..most", "", lambda row: "" if row.low is None else f"{row.low:.1f}..{row.high:.1f}", optional=True),
    Column("", "", lambda row: row.unit, left=True),
)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("cache", "Samples per second with and without a cache.")
    parser.add_argument("--images", type=within(int, 32, 1_000_000), default=1000, help="in an epoch (default 1000)")
    parser.add_argument("--workers", type=within(int, 0, 256), default=2, help="of the DataLoader (default 2)")
    add_length(parser, rounds=5)
    add_results(parser)
    given = parser.parse_args(words)
    check_results(parser, given)
    with tempfile.TemporaryDirectory(prefix="bagua-images-") as folder:
        write_images(Path(folder), given.images)
        images = Images(Path(folder), given.images)
        plain = contextlib.nullcontext([("plain", lambda: epoch_of(images, given.workers))])
        backends = {"none": lambda: plain, "lmdb": lambda: cached(images, "lmdb", given.workers)}
        if shutil.which("redis-server"):
            backends["redis"] = lambda: cached(images, "redis", given.workers)
        if importlib.util.find_spec("litdata"):
            backends["litdata"] = lambda: litdata(images, given.workers)

        def measure(_: str, backend: str, _round: int) -> Rates:
            rates: Rates = {}
            with backends[backend]() as epochs:
                for kind, run in epochs:
                    began = time.perf_counter()
                    steady = run()
                    rates[kind] = given.images / (time.perf_counter() - began), steady
            return rates

        turns: Turns[Rates] = Turns()
        with Progress(given.rounds * len(backends)) as progress:
            turns.take({"": list(backends)}, given.rounds, measure, failures=(), progress=progress)
    found: list[Figure] = []
    for backend in backends:
        pairs = turns.pairs("", backend, "none")
        for kind in pairs[0][0]:
            whole, steady = zip(*(mine[kind] for mine, _ in pairs), strict=True)
            bases = [base["plain"][1] for _, base in pairs]
            ratios = [None if rate is None else rate / base for rate, base in zip(steady, bases, strict=True) if base]
            metrics = {
                ("rate", "samples/s"): whole,
                ("speedup", "x"): ratios,
                ("rate_after_start", "samples/s"): steady,
            }
            found += figures({"backend": backend, "epoch": kind}, metrics)
    return Report(
        title="Samples per second, JPEG images",
        heading=f"{given.workers} workers; rates of a whole epoch and after its start, speedup after the start",
        table=render_rows(found, COLUMNS),
        figures=found,
        rows=found,
    ).publish(given)
