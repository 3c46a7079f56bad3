"""`measure compression`: codecs compared with a copy of the same number of bytes: what share of the memory's rate is
reached?

The bytes of an operation are those that it must read and write once. The copy is torch's copy_ of half as many bytes,
which it reads and writes, by the same number of threads; it takes turns with the operation. Buffers rotate, so that
small ones are not in a cache either. On a GPU, `kernel` is the time in a CUDA graph, and `call` that of calls from
Python one after the other, where the launches may take longer than the work.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# Threads of OpenMP, which torch copies with, otherwise spin for a while after a copy, on the CPUs that the
# operations are then measured on. The variable is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from bagua.codecs import Codec, codec_names, get_codec
from bagua.net.bench.api import (
    Column,
    Figure,
    Label,
    Progress,
    Turns,
    byte_size,
    describe_machine,
    figures,
    names_of,
    render_rows,
)
from measure.options import add_length, add_results, check_results, parser_of
from measure.report import Report

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_ROTATING_BYTES = 256 << 20  # more than caches hold
_TILES = [256, 512, 1024, 2048, 4096, 8192]
_WARPS = [1, 2, 4, 8]
KERNEL, CALL, COPY = "kernel", "call", " of the copy"
# The three fastest tilings of an operation are shown.
_SHOWN_TILINGS = 3

# Makes call number i; buffers rotate with it.
Call = Callable[[int], object]


@dataclass(frozen=True)
class Operation:
    name: str
    moved_bytes: int
    call: Call


@dataclass(frozen=True)
class Row:
    """Microseconds by round: of the kernel (on a GPU), of the call, and of copies of as many bytes."""

    case: dict[str, Label]
    moved_bytes: int
    times: dict[str, list[float]]
    fastest: bool

    def us(self, way: str) -> float | None:
        found = self.times.get(way)
        return None if not found else min(found) if self.fastest else statistics.median(found)

    def of_copy(self, way: str) -> list[float]:
        """Per cent, by round; of the fastest turns, one."""
        own, copies = self.times.get(way, []), self.times.get(way + COPY, [])
        if self.fastest and own:
            return [100 * min(copies) / min(own)]
        return [100 * other / one for one, other in zip(own, copies, strict=True)]

    def text(self, way: str) -> str:
        share = self.of_copy(way)
        return f"{self.us(way):.1f}" + f" ({statistics.median(share):.0f} %)" if share else ""

    @property
    def best_us(self) -> float:
        return self.us(KERNEL) or self.us(CALL) or 0.0

    def figures(self) -> list[Figure]:
        metrics: dict[tuple[str, str], Sequence[float | None]] = {}
        for way, name in ((KERNEL, "time"), (CALL, "call_time")) if KERNEL in self.times else ((CALL, "time"),):
            metrics[name, "us"] = self.times[way]
            metrics["of_copy" if name == "time" else "call_of_copy", "%"] = self.of_copy(way)
        return figures(self.case, metrics)


def _label(name: str) -> Column[Row]:
    return Column(name, "", lambda row: str(row.case.get(name, "")), optional=True)


COLUMNS: tuple[Column[Row], ...] = (
    *map(_label, ("threads", "codec", "operation", "elements", "dtype", "tiling")),
    Column("GB/s", "", lambda row: f"{row.moved_bytes / row.best_us / 1e3:.1f}"),
    Column(KERNEL, "us (of copy)", lambda row: row.text(KERNEL), optional=True),
    Column(CALL, "us (of copy)", lambda row: row.text(CALL)),
)


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("compression", "Codecs compared with a copy of the same number of bytes.")

    def counts(text: str) -> list[int]:
        found = [byte_size(one) for one in text.split(",")]
        if 0 in found:
            raise argparse.ArgumentTypeError(f"{text!r} has a 0; give 1 or more")
        return found

    default = "cuda" if torch.cuda.is_available() else "cpu"
    codecs = codec_names()
    parser.add_argument(
        "--codecs", type=names_of("codec", codecs), default=tuple(codecs), help=f"default: {','.join(codecs)}"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="default: the GPU if any")
    parser.add_argument(
        "--elements", type=counts, default=counts("64K,1M,16M,64M"), help="sizes (default: 64K,1M,16M,64M)"
    )
    parser.add_argument(
        "--dtypes", type=names_of("dtype", list(_DTYPES)), default=tuple(_DTYPES), help="default f32,f16,bf16"
    )
    parser.add_argument("--versions", type=counts, default=[2, 4, 8], help="of the step that reduces (default: 2,4,8)")
    parser.add_argument("--threads", type=counts, default=[1, os.cpu_count() or 1], help="on CPUs (default: 1 and all)")
    add_length(parser, rounds=15)
    parser.add_argument(
        "--fastest", action="store_true", help="the shortest time, not the median: for machines that others use, too"
    )
    parser.add_argument("--tune", action="store_true", help="CUDA: try tiles and warps of int8, print the best three")
    parser.add_argument(
        "--single-calls", action="store_true", help="CUDA: calls one at a time, launched directly and through Triton"
    )
    add_results(parser)
    given = parser.parse_args(words)
    for option in ("tune", "single_calls"):
        if getattr(given, option) and given.device != "cuda":
            name = "--" + option.replace("_", "-")
            parser.error(f"{name} is about kernels on CUDA devices, and this is --device cpu")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and torch sees none; look at nvidia-smi, or use --device cpu")
    check_results(parser, given)
    return given


# --- operations -------------------------------------------------------------------------------------------------------


def _rotation(bytes_of_one: int) -> int:
    """So many buffers in turn."""
    return max(1, min(256, _ROTATING_BYTES // bytes_of_one))


def operations(device: str, elements: int, dtype: torch.dtype, codec: Codec) -> list[Operation]:
    moved = elements * dtype.itemsize + codec.compressed_bytes(elements)
    rotation = _rotation(moved)
    sources = [torch.randn(elements, device=device).to(dtype) for _ in range(rotation)]
    packed = [codec.compress(source) for source in sources]
    targets = [torch.empty_like(source) for source in sources]

    def compress(i: int) -> object:
        return codec.compress(sources[i % rotation], out=packed[i % rotation])

    def decompress(i: int) -> object:
        return codec.decompress(packed[i % rotation], targets[i % rotation])

    return [Operation("compress", moved, compress), Operation("decompress", moved, decompress)]


def reduction(device: str, elements: int, versions: int, codec: Codec) -> Operation:
    """Of `elements` elements in all, as a rank of `versions` has it."""
    chunk = elements // versions
    size = codec.compressed_bytes(chunk)
    moved = (versions + 1) * size
    rotation = _rotation(moved)
    received = [codec.compress(torch.randn(versions * chunk, device=device), versions) for _ in range(rotation)]
    out = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(rotation)]

    def reduce(i: int) -> object:
        at = i % rotation
        return codec.decompress_reduce_compress(received[at], chunk, True, out[at])

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


def measured(case: dict[str, Label], operation: Operation, given: argparse.Namespace, progress: Progress) -> Row:
    the_copy = copy(given.device, operation.moved_bytes)
    if given.device == "cpu":
        calls = _rotation(operation.moved_bytes)
        ways = {CALL: _cpu_turn(operation.call, calls), CALL + COPY: _cpu_turn(the_copy, calls)}
    else:
        calls = _calls_of_turn(operation.moved_bytes)
        ways = {
            way + suffix: _cuda_turn(one, calls, way == KERNEL)
            for way in (KERNEL, CALL)
            for suffix, one in (("", operation.call), (COPY, the_copy))
        }
    turns: Turns[float] = Turns()
    name = " ".join(map(str, case.values()))
    turns.take({name: list(ways)}, given.rounds, lambda _case, way, _round: ways[way](), progress=progress)
    return Row(case, operation.moved_bytes, {way: turns.of(name, way) for way in ways}, given.fastest)


def operations_of(given: argparse.Namespace) -> Iterator[tuple[dict[str, Label], Operation]]:
    """Each is made when the one before has been measured: all together may not fit into memory."""
    for name, elements in itertools.product(given.codecs, given.elements):
        codec = get_codec(name)
        for dtype in given.dtypes:
            for one in operations(given.device, elements, _DTYPES[dtype], codec):
                yield {"codec": name, "operation": one.name, "elements": elements, "dtype": dtype}, one
        for versions in given.versions:
            one = reduction(given.device, elements, versions, codec)
            yield {"codec": name, "operation": one.name, "elements": elements}, one


def tilings_of(given: argparse.Namespace, codec: Label) -> Iterator[str]:
    """Sets every tiling that is sensible, and names it."""
    if not given.tune or codec != "int8":
        yield ""
        return
    from bagua.kernels import minmax_uint8_triton as launcher
    from bagua.kernels.minmax_uint8 import BLOCK_ELEMENTS

    for tile in _TILES:
        for warps in _WARPS:
            if tile >= BLOCK_ELEMENTS and 8 <= tile // (32 * warps) <= 64:
                launcher.TILE_ELEMENTS = tile
                launcher.WARPS = warps
                launcher._steps.cache_clear()
                yield f"{tile}/{warps}"


def rows_of(given: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    for threads in given.threads if given.device == "cpu" else [0]:
        if threads:
            torch.set_num_threads(threads)
        for case, operation in operations_of(given):
            more: dict[str, Label] = {"threads": threads} if threads else {}
            found = [
                measured({**case, **more, **({"tiling": tiling} if tiling else {})}, operation, given, progress)
                for tiling in tilings_of(given, case["codec"])
            ]
            yield from sorted(found, key=lambda row: row.best_us)[: _SHOWN_TILINGS if given.tune else None]


def single_calls_of(given: argparse.Namespace) -> Iterator[tuple[str, Call, Call]]:
    """(description, operation, copy of the same bytes)."""
    for name, elements, dtype in itertools.product(given.codecs, given.elements, given.dtypes):
        for one in operations("cuda", elements, _DTYPES[dtype], get_codec(name)):
            yield f"{name} {one.name} {dtype} {elements}", one.call, copy("cuda", one.moved_bytes)


def main(words: Sequence[str] | None = None) -> int:
    given = parse_options(words)
    where = describe_machine().caption() if given.device == "cpu" else torch.cuda.get_device_name()
    heading = f"Codecs compared with a copy of the same bytes; {where}, torch {torch.__version__}"
    if given.single_calls:
        from measure.compression_calls import table

        print(heading, *table(single_calls_of(given), max(given.rounds, 200)), sep="\n")
        return 0
    with Progress(0, quiet=not sys.stderr.isatty()) as progress:
        rows = list(rows_of(given, progress))
    return Report(
        title=f"Compression, {given.device}",
        heading=heading,
        table=render_rows(rows, COLUMNS),
        figures=[figure for row in rows for figure in row.figures()],
        facts={"torch": torch.__version__, "device": "cpu" if given.device == "cpu" else where},
        rows=rows,
    ).publish(given)
