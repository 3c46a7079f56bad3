"""Measure MinMaxUInt8 compared with a copy of the same number of bytes: what share of the memory's rate is reached?

    python tools/kernels/compare_minmax_uint8.py                       # on the GPU if there is one
    python tools/kernels/compare_minmax_uint8.py --device cpu --threads 1,2,4
    python tools/kernels/compare_minmax_uint8.py --tune                # Triton: tiles and warps
    python tools/kernels/compare_minmax_uint8.py --single-calls        # what a call costs with its launch

The bytes of an operation are those that it must read and write once. The copy is torch's copy_ of half as many bytes,
which it reads and writes, by the same number of threads; it takes turns with the operations, and times are medians.
Buffers rotate, so that small ones are not in a cache either. On a GPU, `kernel` is the time in a CUDA graph, and `call`
that of calls from Python one after the other, where the launches may take longer than the work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Threads of OpenMP, which torch copies with, otherwise spin for a while after a copy, on the CPUs that the
# operations are then measured on. The variable is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from bagua.kernels import minmax_uint8
from bagua.net.bench.argument_types import byte_size, within
from bagua.net.bench.export import check_writable
from bagua.net.bench.machine import describe_machine

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_ROTATING_BYTES = 256 << 20  # more than caches hold
_TILES = [256, 512, 1024, 2048, 4096, 8192]
_WARPS = [1, 2, 4, 8]

# Makes call number i; buffers rotate with it.
Call = Callable[[int], object]


@dataclass(frozen=True)
class Operation:
    name: str
    moved_bytes: int
    call: Call


@dataclass(frozen=True)
class Row:
    operation: str
    elements: int
    dtype: str
    block: str
    threads: int  # 0 on a GPU
    tiling: str  # "" unless tuning
    moved_bytes: int
    kernel_us: float
    kernel_copy_us: float
    call_us: float
    call_copy_us: float

    @property
    def gigabytes_per_s(self) -> float:
        return self.moved_bytes / self.kernel_us / 1e3

    @property
    def kernel_percent(self) -> float:
        return 100 * self.kernel_copy_us / self.kernel_us

    @property
    def call_percent(self) -> float:
        return 100 * self.call_copy_us / self.call_us


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare_minmax_uint8.py",
        description="MinMaxUInt8 compared with a copy of the same number of bytes.",
        allow_abbrev=False,
    )

    def names(text: str) -> list[str]:
        return text.split(",")

    def counts(text: str) -> list[int]:
        found = [byte_size(one) for one in names(text)]
        if 0 in found:
            raise argparse.ArgumentTypeError(f"{text!r} has a 0; give 1 or more")
        return found

    def blocks(text: str) -> list[str]:
        for one in names(text):
            if one != "none":
                within(int, 1, 1 << 30)(one)
        return names(text)

    add = parser.add_argument
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: the GPU if any",
    )
    add("--elements", type=counts, default=counts("64K,1M,16M,64M"), help="sizes (default: 64K,1M,16M,64M)")
    add("--dtypes", type=names, default=list(_DTYPES), help="of f32, f16 and bf16 (default: all)")
    add("--blocks", type=blocks, default=[str(minmax_uint8.BLOCK_ELEMENTS)], help="elements of a range, or none")
    add("--versions", type=counts, default=[2, 4, 8], help="of the step that reduces (default: 2,4,8)")
    add("--threads", type=counts, default=[1, os.cpu_count() or 1], help="on CPUs (default: 1 and all)")
    add("--rounds", type=within(int, 3, 1000), default=15, help="turns of which the median counts (default: 15)")
    add("--fastest", action="store_true", help="the shortest time, not the median: for machines that others use, too")
    add("--tune", action="store_true", help="CUDA: try tiles and warps, print the best three")
    add("--single-calls", action="store_true", help="CUDA: calls one at a time, launched directly and through Triton")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON, too")
    return parser


# --- operations -------------------------------------------------------------------------------------------------------


def _rotation(bytes_of_one: int) -> int:
    """So many buffers in turn."""
    return max(1, min(256, _ROTATING_BYTES // bytes_of_one))


def operations(device: str, elements: int, dtype: torch.dtype, block: int | None) -> list[Operation]:
    size = minmax_uint8.compressed_bytes(elements, block)
    moved = elements * dtype.itemsize + size
    rotation = _rotation(moved)
    sources = [torch.randn(elements, device=device).to(dtype) for _ in range(rotation)]
    packed = [minmax_uint8.compress(source, block_elements=block) for source in sources]
    targets = [torch.empty_like(source) for source in sources]

    def compress(i: int) -> object:
        return minmax_uint8.compress(sources[i % rotation], out=packed[i % rotation], block_elements=block)

    def decompress(i: int) -> object:
        return minmax_uint8.decompress(packed[i % rotation], targets[i % rotation], block_elements=block)

    return [Operation("compress", moved, compress), Operation("decompress", moved, decompress)]


def reduction(device: str, elements: int, versions: int, block: int | None) -> Operation:
    """Of `elements` elements in all, as a rank of `versions` has it."""
    chunk = elements // versions
    size = minmax_uint8.compressed_bytes(chunk, block)
    moved = (versions + 1) * size
    rotation = _rotation(moved)
    received = [
        minmax_uint8.compress(torch.randn(versions * chunk, device=device), versions, block_elements=block)
        for _ in range(rotation)
    ]
    out = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(rotation)]

    def reduce(i: int) -> object:
        at = i % rotation
        return minmax_uint8.decompress_reduce_compress(received[at], chunk, True, out[at], block_elements=block)

    return Operation(f"reduce {versions}", moved, reduce)


def copy(device: str, moved_bytes: int) -> Call:
    rotation = _rotation(moved_bytes)
    half = moved_bytes // 2
    sources = [torch.ones(half, dtype=torch.uint8, device=device) for _ in range(rotation)]
    targets = [torch.empty_like(source) for source in sources]
    return lambda i: targets[i % rotation].copy_(sources[i % rotation])


# --- times ------------------------------------------------------------------------------------------------------------


def _calls_of_turn(moved_bytes: int) -> int:
    """So many that a turn takes long compared with what its measurement costs, and not very long."""
    return max(4, min(256, (1 << 30) // moved_bytes))


def _cuda_turn(call: Call, calls: int, graph: bool) -> Callable[[], float]:
    """A function that makes `calls` calls and returns the microseconds of one."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(calls):
        call(i)  # compiled, and every buffer touched
    torch.cuda.synchronize()
    replayed: torch.cuda.CUDAGraph | None = None
    if graph:
        replayed = torch.cuda.CUDAGraph()
        with torch.cuda.graph(replayed):
            for i in range(calls):
                call(i)

    def turn() -> float:
        start.record()
        if replayed is not None:
            replayed.replay()
        else:
            for i in range(calls):
                call(i)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls * 1e3

    return turn


def _cpu_turn(call: Call, calls: int) -> Callable[[], float]:
    for i in range(calls):
        call(i)

    def turn() -> float:
        begin = time.perf_counter()
        for i in range(calls):
            call(i)
        return (time.perf_counter() - begin) / calls * 1e6

    return turn


def typical(turns: Sequence[Callable[[], float]], rounds: int, fastest: bool) -> list[float]:
    """Of each turn: the median of its times, or the shortest."""
    times = [[turn() for turn in turns] for _ in range(rounds)]
    return [(min if fastest else statistics.median)(column) for column in zip(*times, strict=True)]


def measure(device: str, operation: Operation, rounds: int, fastest: bool) -> tuple[float, float, float, float]:
    """Microseconds: kernel and its copy, call and its copy."""
    the_copy = copy(device, operation.moved_bytes)
    if device == "cpu":
        calls = _rotation(operation.moved_bytes)
        own, copied = typical([_cpu_turn(operation.call, calls), _cpu_turn(the_copy, calls)], rounds, fastest)
        return own, copied, own, copied
    calls = _calls_of_turn(operation.moved_bytes)
    pairs = [(one, graph) for graph in (True, False) for one in (operation.call, the_copy)]
    turns = [_cuda_turn(one, calls, graph) for one, graph in pairs]
    kernel, kernel_copy, call, call_copy = typical(turns, rounds, fastest)
    return kernel, kernel_copy, call, call_copy


def rows_of(given: argparse.Namespace) -> Iterator[Row]:
    blocks = {one: None if one == "none" else int(one) for one in given.blocks}
    for threads in given.threads if given.device == "cpu" else [0]:
        if threads:
            torch.set_num_threads(threads)
        for elements in given.elements:
            for name, block in blocks.items():
                todo = [
                    (dtype, one)
                    for dtype in given.dtypes
                    for one in operations(given.device, elements, _DTYPES[dtype], block)
                ]
                todo += [("", reduction(given.device, elements, versions, block)) for versions in given.versions]
                while todo:
                    dtype, operation = todo.pop(0)
                    times = measure(given.device, operation, given.rounds, given.fastest)
                    yield Row(operation.name, elements, dtype, name, threads, "", operation.moved_bytes, *times)


def tuned_rows_of(given: argparse.Namespace) -> Iterator[Row]:
    """Every tiling that is sensible, for every operation."""
    from bagua.kernels import minmax_uint8_triton as launcher

    for elements in given.elements:
        for name in given.blocks:
            block = int(name)
            for dtype in [*given.dtypes, ""]:
                if dtype:
                    todo = operations("cuda", elements, _DTYPES[dtype], block)
                else:
                    todo = [reduction("cuda", elements, versions, block) for versions in given.versions]
                for operation in todo:
                    for tile in _TILES:
                        for warps in _WARPS:
                            if tile < block or not 8 <= tile // (32 * warps) <= 64:
                                continue
                            launcher.TILE_ELEMENTS = tile
                            launcher.WARPS = warps
                            launcher._steps.cache_clear()
                            times = measure("cuda", operation, max(3, given.rounds // 3), given.fastest)
                            tiling = f"{tile}/{warps}"
                            yield Row(operation.name, elements, dtype, name, 0, tiling, operation.moved_bytes, *times)


def single_calls_of(given: argparse.Namespace) -> Iterator[tuple[str, Call, Call]]:
    """(description, operation, copy of the same bytes)."""
    for elements in given.elements:
        for dtype in given.dtypes:
            for one in operations("cuda", elements, _DTYPES[dtype], minmax_uint8.BLOCK_ELEMENTS):
                yield f"{one.name} {dtype} {elements}", one.call, copy("cuda", one.moved_bytes)


# --- the table --------------------------------------------------------------------------------------------------------


def _cells(row: Row) -> list[str]:
    threads = [str(row.threads)] if row.threads else []
    tiling = [row.tiling] if row.tiling else []
    times = [f"{row.kernel_us:.1f}", f"{row.gigabytes_per_s:.1f}", f"{row.kernel_percent:.0f} %"]
    if not row.threads:
        times += [f"{row.call_us:.1f}", f"{row.call_percent:.0f} %"]
    return [*threads, row.operation, f"{row.elements}", row.dtype or "-", row.block, *tiling, *times]


def _head(row: Row) -> list[str]:
    threads = ["threads"] if row.threads else []
    tiling = ["tile/warps"] if row.tiling else []
    times = ["us", "GB/s", "of copy"] if row.threads else ["kernel us", "GB/s", "of copy", "call us", "of copy"]
    return [*threads, "operation", "elements", "dtype", "range", *tiling, *times]


def render(rows: Sequence[Row]) -> str:
    lines = [_head(rows[0]), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def best(rows: Sequence[Row]) -> list[Row]:
    """The three fastest tilings of every operation."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.elements, row.block, row.operation, row.dtype), []).append(row)
    return [row for group in groups.values() for row in sorted(group, key=lambda one: one.kernel_us)[:3]]


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser()
    given = parser.parse_args(words)
    if unknown := set(given.dtypes) - set(_DTYPES):
        parser.error(f"--dtypes names {sorted(unknown)}; there are {list(_DTYPES)}")
    for option in ("tune", "single_calls"):
        if getattr(given, option) and given.device != "cuda":
            name = "--" + option.replace("_", "-")
            parser.error(f"{name} is about kernels on CUDA devices, and this is --device cpu")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and torch sees none; look at nvidia-smi, or use --device cpu")
    if given.json:
        try:
            check_writable("--json", given.json)
        except ValueError as error:
            parser.error(str(error))
    return given


def main(words: Sequence[str] | None = None) -> int:
    given = _parse(words)
    where = describe_machine().caption() if given.device == "cpu" else torch.cuda.get_device_name()
    print(f"MinMaxUInt8 compared with a copy of the same bytes; {where}, torch {torch.__version__}", flush=True)
    if given.single_calls:
        import minmax_uint8_single_calls

        for line in minmax_uint8_single_calls.table(single_calls_of(given), max(given.rounds, 200)):
            print(line, flush=True)
        return 0
    rows = []
    for row in tuned_rows_of(given) if given.tune else rows_of(given):
        rows.append(row)
        if not given.tune:
            # The table, which is aligned, follows when all widths are known.
            print("  " + "  ".join(_cells(row)), file=sys.stderr, flush=True)
    print(render(best(rows) if given.tune else rows))
    if given.json:
        shares = {"kernel_percent": Row.kernel_percent, "call_percent": Row.call_percent}
        content = [{**asdict(row), **{name: share.fget(row) for name, share in shares.items()}} for row in rows]  # type: ignore[misc]
        document = {"machine": {**describe_machine().as_dict(), "device": where}, "rows": content}
        given.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"written: {given.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
