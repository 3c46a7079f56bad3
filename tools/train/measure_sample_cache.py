"""Samples per second of a DataLoader over JPEG images: without a cache, while it is filled, and from it.

    python tools/train/measure_sample_cache.py --images 1000 --json cache.json

A sample is an image of 500 x 375 pixels, decoded and resized to 3 x 224 x 224 bytes by Pillow. In each repetition all
cases run in turn. Rates are those of a whole epoch, with the start of its workers, and without the first batch. Redis
is measured where its server is installed, LitData where litdata is; its "cold" is litdata.optimize.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from bagua.net.bench.argument_types import within
from bagua.net.bench.figures import figures, result_of
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.progress import Progress
from bagua.net.bench.result_file import write_result
from bagua.torch_api.contrib import CachedDataset

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


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="measure_sample_cache.py", description="Samples per second with a cache.")
    parser.add_argument("--images", type=within(int, 32, 1_000_000), default=1000, help="in an epoch (default 1000)")
    parser.add_argument("--workers", type=within(int, 0, 256), default=2, help="of the DataLoader (default 2)")
    parser.add_argument("--repetitions", type=within(int, 1, 100), default=5, help="default 5")
    parser.add_argument("--json", type=Path, metavar="PATH", help="result file")
    given = parser.parse_args(words)
    if given.json is not None and not given.json.parent.is_dir():
        parser.error(f"--json: the folder {given.json.parent} does not exist")
    rates: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
    with tempfile.TemporaryDirectory(prefix="bagua-images-") as folder:
        write_images(Path(folder), given.images)
        images = Images(Path(folder), given.images)
        plain = contextlib.nullcontext([("plain", lambda: epoch_of(images, given.workers))])
        cases = {"none": lambda: plain, "lmdb": lambda: cached(images, "lmdb", given.workers)}
        if shutil.which("redis-server"):
            cases["redis"] = lambda: cached(images, "redis", given.workers)
        if importlib.util.find_spec("litdata"):
            cases["litdata"] = lambda: litdata(images, given.workers)
        with Progress(given.repetitions * len(cases)) as progress:
            for repetition in range(given.repetitions):
                names = list(cases)
                for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                    progress.advance(f"repetition {repetition + 1}: {name}", 0)
                    with cases[name]() as epochs:
                        for kind, run in epochs:
                            began = time.perf_counter()
                            steady = run()
                            rate = given.images / (time.perf_counter() - began)
                            rates.setdefault((name, kind), []).append((rate, steady))
                    progress.advance(f"repetition {repetition + 1}: {name}")
    found = []
    for (name, kind), values in rates.items():
        whole, steady = zip(*values, strict=True)
        plain = [rate for _, rate in rates["none", "plain"]]
        ratios = [None if rate is None else rate / base for rate, base in zip(steady, plain, strict=True)]
        metrics = {("rate", "samples/s"): whole, ("speedup", "x"): ratios, ("rate_after_start", "samples/s"): steady}
        found += figures({"backend": name, "epoch": kind}, metrics)
    print(f"{given.workers} workers, median (lowest..highest) of {given.repetitions}; speedup after the start")
    for one in found:
        spread = "" if one.low is None else f"  ({one.low:.1f}..{one.high:.1f})"
        print(f"{one.case['backend']:8} {one.case['epoch']:6} {one.metric:23} {one.median:8.1f}{spread}")
    if given.json is not None:
        parameters = {"images": given.images, "workers": given.workers, "repetitions": given.repetitions}
        result = result_of("Samples per second, JPEG images", found, machine=describe_machine(), parameters=parameters)
        write_result(given.json, result)
        print(f"written: {given.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
