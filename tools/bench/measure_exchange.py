"""How long two ranks take to exchange tensors point to point, both ways at once, beside an all-reduce of as many bytes.

    python -m tools.netlab run --rate 100G --gpu-each --env ENABLE_BAGUA_NET=1 -- \\
        python tools/bench/measure_exchange.py --sizes 64K,1M,64M
    torchrun --nproc-per-node 2 tools/bench/measure_exchange.py

A launcher starts both ranks. With GPUs they use NCCL, the first GPU that a rank sees or LOCAL_RANK's; without, gloo.
Exchanges and all-reduces of all sizes take turns; rank 0 prints the median of the turns' means.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bagua.net.bench.argument_types import byte_size, within
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.sizes import format_size
from bagua.net.bench.table import Column, render_rows

# An all-reduce is of buckets, as a training's is.
_BUCKET_BYTES = 25 << 20
# Up to this size a turn has ten exchanges, above it three.
_SMALL_BYTES = 8 << 20


@dataclass(frozen=True)
class Row:
    size: int
    exchange_us: float
    all_reduce_us: float


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="measure_exchange.py",
        description="How long two ranks take to exchange tensors, beside an all-reduce of as many bytes.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=_sizes("64K,256K,1M,4M,16M,64M"),
        help="with commas, multiples of 4 bytes (default 64K,256K,1M,4M,16M,64M)",
    )
    parser.add_argument("--turns", type=within(int, 1, 10_000), default=7, help="of each, after two more (default 7)")
    given = parser.parse_args(words)
    if os.environ.get("WORLD_SIZE") != "2":
        parser.error(
            f"WORLD_SIZE={os.environ.get('WORLD_SIZE', '')}: this is between two ranks; let torchrun start two"
        )
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("nccl" if has_gpu else "gloo")
    try:
        rows = _measure(given.sizes, given.turns, "cuda" if has_gpu else "cpu")
        if dist.get_rank() == 0:
            columns = [
                Column[Row]("size", "", lambda row: format_size(row.size)),
                Column[Row]("exchange", "us", lambda row: f"{row.exchange_us:.0f}"),
                Column[Row]("all-reduce", "us", lambda row: f"{row.all_reduce_us:.0f}"),
            ]
            print(f"two ranks, {'NCCL' if has_gpu else 'gloo'}; {describe_machine().caption()}")
            print(render_rows(rows, columns), end="", flush=True)
    finally:
        dist.destroy_process_group()
    return 0


def _sizes(text: str) -> list[int]:
    sizes = [byte_size(one) for one in text.split(",")]
    for size in sizes:
        if size < 4 or size % 4:
            raise argparse.ArgumentTypeError(f"{size} bytes are no number of floats; give multiples of 4")
    return sizes


def _measure(sizes: Sequence[int], turns: int, device: str) -> list[Row]:
    peer = 1 - dist.get_rank()
    mine = torch.zeros(max(sizes) // 4, device=device)
    theirs = torch.empty_like(mine)

    def exchange(elements: int) -> None:
        received = dist.P2POp(dist.irecv, theirs[:elements], peer)
        sent = dist.P2POp(dist.isend, mine[:elements], peer)
        for work in dist.batch_isend_irecv([received, sent]):
            work.wait()

    def all_reduce(elements: int) -> None:
        for bucket in mine[:elements].split(_BUCKET_BYTES // 4):
            dist.all_reduce(bucket)

    found: dict[tuple[Callable[[int], None], int], list[float]] = {}
    for turn in range(turns + 2):
        for size in sizes:
            for operation in (exchange, all_reduce):
                microseconds = _turn(operation, size // 4, 10 if size <= _SMALL_BYTES else 3)
                if turn >= 2:
                    found.setdefault((operation, size), []).append(microseconds)
    return [
        Row(size, statistics.median(found[exchange, size]), statistics.median(found[all_reduce, size]))
        for size in sizes
    ]


def _turn(operation: Callable[[int], None], elements: int, times: int) -> float:
    """Microseconds of one, on this rank, once both are ready."""
    operation(elements)
    _finish()
    dist.barrier()
    _finish()
    start = time.perf_counter()
    for _ in range(times):
        operation(elements)
    _finish()
    return (time.perf_counter() - start) / times * 1e6


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
