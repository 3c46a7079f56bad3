"""`measure compression`: codecs compared with a copy of the same number of bytes: what share of the memory's rate is
reached?

The bytes of an operation are those that it must read and write once. The copy is torch's copy_ of half as many bytes,
which it reads and writes, by the same number of threads; it takes turns with the operation. Buffers rotate, so that
small ones are not in a cache either. On a GPU, `kernel` is the time in a CUDA graph, and `call` that of calls from
Python one after the other, where the launches may take longer than the work.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

# Threads of OpenMP, which torch copies with, otherwise spin for a while after a copy, on the CPUs that the
# operations are then measured on. The variable is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from bagua.codecs import Codec, codec_names, fused, get_codec
from bagua.net.bench.api import Column, Figure, byte_size, describe_machine, figures, names_of
from measure.runner import Length, Measure, Plan, Row, Tool, one_of, several

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_ROTATING_BYTES = 256 << 20  # more than caches hold
KERNEL, CALL, COPY = "kernel", "call", " of the copy"

# Makes call number i; buffers rotate with it.
Call = Callable[[int], object]


@dataclass(frozen=True)
class Operation:
    name: str
    moved_bytes: int
    call: Call


# --- operations -------------------------------------------------------------------------------------------------------


def _rotation(bytes_of_one: int) -> int:
    """So many buffers in turn."""
    return max(1, min(256, _ROTATING_BYTES // bytes_of_one))


FUSED = ("sum 2", "rest", "differences")
OPERATIONS = ("compress", "decompress", *FUSED)


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


def fused_operations(device: str, elements: int, dtype: torch.dtype, codec: Codec) -> list[Operation]:
    """Of FSDP2, as a rank of two has them: `elements` of the shard that is summed, otherwise of both shards."""
    half = elements // 2
    own, sent = elements * dtype.itemsize, codec.compressed_bytes(half)
    rest = get_codec(fused.REST_CODEC).compressed_bytes(half)
    rotation = _rotation(3 * own)
    values = [torch.randn(elements, device=device).to(dtype) for _ in range(rotation)]
    targets = [torch.empty_like(one) for one in values]
    packed = [codec.compress(one, 2) for one in values]
    received = [codec.compress(torch.randn(2 * elements, device=device), 2) for _ in range(rotation)]
    rests = [torch.empty((2, rest), dtype=torch.uint8, device=device) for _ in range(rotation)]

    def reduce(i: int) -> object:
        at = i % rotation
        return fused.decompress_reduce(codec, received[at], values[at], 0, 0.5, targets[at])

    def keep(i: int) -> object:
        at = i % rotation
        return fused.compress_rest(codec, values[at], packed[at], 0, rests[at])

    def move(i: int) -> object:
        at = i % rotation
        return fused.add_differences(codec, packed[at], values[at], targets[at])

    return [
        Operation("sum 2", codec.compressed_bytes(elements) + 2 * own, reduce),
        Operation("rest", own // 2 + sent + 2 * rest, keep),
        Operation("differences", 3 * own + 2 * sent, move),
    ]


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


# --- the tool --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    codec: str
    operation: str
    elements: int
    dtype: str = ""  # of compress and decompress
    threads: int = 0  # on CPUs

    def __str__(self) -> str:
        return " ".join(str(value) for value in asdict(self).values() if value)


def of_copy(row: Row, way: str) -> list[float]:
    """Per cent, by round."""
    return [100 * copied["us"] / own["us"] for copied, own in row.turns.pairs(row.case, way + COPY, way)]


def _cell(row: Row, way: str) -> str:
    us, share = row.median("us", way), of_copy(row, way)
    return "" if us is None else f"{us:.1f} ({statistics.median(share):.0f} %)"


def _count(text: str) -> int:
    if not (found := byte_size(text)):
        raise ValueError(f"{text!r} is 0; give 1 or more")
    return found


class Compression(Tool):
    name = "compression"
    about = "Codecs compared with a copy of the same number of bytes"
    title = "Compression, {device}"
    case_type = Case
    ranks = None
    length = Length(15)
    options = (
        ("device", one_of("device", ("cpu", "cuda")), "cuda" if torch.cuda.is_available() else "cpu", "the GPU if any"),
        ("codecs", names_of("codec", codec_names()), tuple(codec_names()), "to measure"),
        ("elements", several(_count), "64K,1M,16M,64M", "sizes"),
        ("dtypes", names_of("dtype", list(_DTYPES)), tuple(_DTYPES), "of what is compressed"),
        ("versions", several(_count), "2,4,8", "of the step that reduces"),
        ("threads", several(_count), f"1,{os.cpu_count() or 1}", "on CPUs"),
        ("single_calls", None, False, "CUDA: calls one at a time, launched directly and by Triton"),
    )
    columns = (
        *(
            Column(one, "", lambda row, one=one: str(asdict(row.case)[one] or ""), optional=True)
            for one in ("threads", "codec", "operation", "elements", "dtype")
        ),
        Column("GB/s", "", lambda row: f"{row.values('bytes', CALL)[0] / _us(row) / 1e3:.1f}"),
        Column(KERNEL, "us (of copy)", lambda row: _cell(row, KERNEL), optional=True),
        Column(CALL, "us (of copy)", lambda row: _cell(row, CALL)),
    )

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        if given.single_calls and given.device != "cuda":
            parser.error("--single-calls is about kernels on CUDA devices, and this is --device cpu")
        if given.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device cuda needs a GPU, and torch sees none; look at nvidia-smi, or use --device cpu")

    def plan(self) -> Mapping[Case, Plan]:
        """Each operation is made when the one before has been measured: all together may not fit into memory."""
        given, cases = self.given, []
        for threads in given.threads if given.device == "cpu" else [0]:
            for codec, elements in itertools.product(given.codecs, given.elements):
                for dtype, operation in itertools.product(given.dtypes, OPERATIONS):
                    cases.append(Case(codec, operation, elements, dtype, threads))
                cases += [Case(codec, f"reduce {number}", elements, "", threads) for number in given.versions]
        ways = (CALL,) if given.device == "cpu" else (KERNEL, CALL)
        return {case: {case: [way + suffix for way in ways for suffix in ("", COPY)]} for case in cases}

    @contextlib.contextmanager
    def session(self, group: Case, plan: Plan) -> Iterator[Measure]:
        device = self.given.device
        self.learn({"torch": torch.__version__, "device": "cpu" if device == "cpu" else torch.cuda.get_device_name()})
        if group.threads:
            torch.set_num_threads(group.threads)
        one = operation_of(device, group)
        calls = {"": one.call, COPY: copy(device, one.moved_bytes)}
        if device == "cpu":
            turns = {CALL + name: _cpu_turn(call, _rotation(one.moved_bytes)) for name, call in calls.items()}
        else:
            count = _calls_of_turn(one.moved_bytes)
            turns = {
                way + name: _cuda_turn(call, count, way == KERNEL)
                for way in (KERNEL, CALL)
                for name, call in calls.items()
            }
        yield lambda _case, way, _round: {"us": turns[way](), "bytes": one.moved_bytes}

    def rows(self) -> list[Row]:
        return [Row(self.turns, case) for case in dict.fromkeys(case for case, _ in self.turns.samples)]

    def figures(self, row: Row) -> list[Figure]:
        case = {name: value for name, value in asdict(row.case).items() if value}
        metrics = {}
        has_kernel = bool(row.values("us", KERNEL))
        for way, prefix in ((KERNEL, ""), (CALL, "call_")) if has_kernel else ((CALL, ""),):
            metrics[f"{prefix}time", "us"] = row.values("us", way)
            metrics[f"{prefix}of_copy", "%"] = of_copy(row, way)
        return figures(case, metrics)

    def run(self) -> int:
        if not self.given.single_calls:
            return super().run()
        print(self.heading(), *_call_table(single_calls_of(self.given), max(self.given.rounds, 200)), sep="\n")
        return 0

    def heading(self) -> str:
        where = describe_machine().caption() if self.given.device == "cpu" else torch.cuda.get_device_name()
        return f"Codecs compared with a copy of the same bytes; {where}, torch {torch.__version__}"


def _us(row: Row) -> float:
    return row.median("us", KERNEL) or row.median("us", CALL)


def operation_of(device: str, case: Case) -> Operation:
    codec = get_codec(case.codec)
    if case.operation.startswith("reduce"):
        return reduction(device, case.elements, int(case.operation.split()[1]), codec)
    made = fused_operations if case.operation in FUSED else operations
    return next(one for one in made(device, case.elements, _DTYPES[case.dtype], codec) if one.name == case.operation)


def single_calls_of(given: argparse.Namespace) -> Iterator[tuple[str, Call, Call]]:
    """(description, operation, copy of the same bytes)."""
    for name, elements, dtype in itertools.product(given.codecs, given.elements, given.dtypes):
        for one in operations("cuda", elements, _DTYPES[dtype], get_codec(name)):
            yield f"{name} {one.name} {dtype} {elements}", one.call, copy("cuda", one.moved_bytes)


main = Compression.main


def _call_table(operations: Iterable[tuple[str, Call, Call]], rounds: int) -> Iterator[str]:
    """
    What one call costs from Python, its launch included: launched directly, and through Triton. The device is idle when
    a call begins, as before the first bucket of a step. A time is that between two CUDA events around the call, and in
    brackets how long the call kept the host.

    Returns:
        lines: of each (description, operation, copy of the same bytes) the medians of `rounds` calls.
    """
    from bagua.kernels.minmax_uint8_triton_launch import KernelLaunch

    direct = KernelLaunch.__call__
    ways = ("copy", "direct", "triton")
    yield f"{'us: device (host)':>36}" + "".join(f"{way:>24}" for way in ways)
    for description, operation, copy in operations:
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(rounds + 10):
            for way in ways:
                KernelLaunch.__call__ = KernelLaunch.through_triton if way == "triton" else direct  # type: ignore[method-assign]
                measured = _measure_call(copy if way == "copy" else operation, turn)
                if turn >= 10:  # compiled, and buffers touched
                    times[way].append(measured)
        KernelLaunch.__call__ = direct  # type: ignore[method-assign]
        device = {way: statistics.median(one for one, _ in times[way]) for way in ways}
        host = {way: statistics.median(one for _, one in times[way]) for way in ways}
        cells = [f"{device[way]:.1f} ({host[way]:.1f}) {device[way] / device['copy']:.2f} x" for way in ways]
        yield f"{description:>36}" + "".join(f"{cell:>24}" for cell in cells)


def _measure_call(call: Call, turn: int) -> tuple[float, float]:
    """Microseconds between events, and of the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    begin = time.perf_counter()
    call(turn)
    host = time.perf_counter() - begin
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3, host * 1e6
