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
import time
from collections.abc import Callable, Iterator, Mapping

# Threads of OpenMP, which torch copies with, otherwise spin for a while after a copy, on the CPUs that the
# operations are then measured on. The variable is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from bagua.codecs import codec_names, fused, get_codec
from bagua.net.bench.api import Label, byte_size, describe_machine, names_of
from measure.runner import DAY_S, Case, Measure, Plan, Row, Tool, several

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_ROTATING_BYTES = 256 << 20  # more than caches hold
KERNEL, CALL, COPY = "kernel", "call", " of the copy"

# Makes call number i; buffers rotate with it.
Call = Callable[[int], object]
FUSED = ("sum 2", "rest", "differences")
OPERATIONS = ("compress", "decompress", *FUSED)


def _rotation(bytes_of_one: int) -> int:
    """So many buffers in turn."""
    return max(1, min(256, _ROTATING_BYTES // bytes_of_one))


def operation_of(device: str, case: Case) -> tuple[int, Call]:
    """The bytes that it moves, and its call. `sum 2`, `rest` and `differences` are those of FSDP2, as a rank of two has
    them: `elements` of the shard that is summed, otherwise of both shards. `reduce N` is of `elements` in all, as one
    of N ranks has it."""
    codec, elements = get_codec(case.codec), case.elements
    dtype = _DTYPES[getattr(case, "dtype", "f32")]
    versions = int(case.operation.split()[1]) if case.operation.startswith("reduce") else 2
    part = elements // versions
    own, sent = elements * dtype.itemsize, codec.compressed_bytes(part)
    rest = get_codec(fused.REST_CODEC).compressed_bytes(part)
    moved = {
        "compress": own + codec.compressed_bytes(elements),
        "decompress": own + codec.compressed_bytes(elements),
        "sum 2": codec.compressed_bytes(elements) + 2 * own,
        "rest": own // 2 + sent + 2 * rest,
        "differences": 3 * own + 2 * sent,
    }.get(case.operation, (versions + 1) * sent)
    count = _rotation(3 * own if case.operation in FUSED else moved)

    def made(make: Callable[[], Tensor]) -> list[Tensor]:
        return [make() for _ in range(count)]

    def compressed(elements: int, versions: int) -> Tensor:
        return codec.compress(torch.randn(elements, device=device), versions)

    if case.operation.startswith("reduce"):
        received = made(lambda: compressed(part * versions, versions))
        out = made(lambda: _bytes(device, sent))
        return moved, lambda i: codec.decompress_reduce_compress(received[i % count], part, True, out[i % count])
    values = made(lambda: torch.randn(elements, device=device).to(dtype))
    targets = made(lambda: torch.empty(elements, dtype=dtype, device=device))
    if case.operation in ("compress", "decompress"):
        packed = [codec.compress(one) for one in values]
        if case.operation == "compress":
            return moved, lambda i: codec.compress(values[i % count], out=packed[i % count])
        return moved, lambda i: codec.decompress(packed[i % count], targets[i % count])
    if case.operation == "sum 2":
        received = made(lambda: compressed(2 * elements, 2))
        return moved, lambda i: fused.decompress_reduce(
            codec, received[i % count], values[i % count], 0, 0.5, targets[i % count]
        )
    packed = [codec.compress(one, 2) for one in values]
    if case.operation == "rest":
        rests = made(lambda: torch.empty((2, rest), dtype=torch.uint8, device=device))
        return moved, lambda i: fused.compress_rest(codec, values[i % count], packed[i % count], 0, rests[i % count])
    return moved, lambda i: fused.add_differences(codec, packed[i % count], values[i % count], targets[i % count])


def _bytes(device: str, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def copy(device: str, moved_bytes: int) -> Call:
    half, count = moved_bytes // 2, _rotation(moved_bytes)
    pairs = [(_bytes(device, half).fill_(1), _bytes(device, half)) for _ in range(count)]
    return lambda i: pairs[i % count][1].copy_(pairs[i % count][0])


def _turn(call: Call, moved_bytes: int, device: str, graph: bool) -> Callable[[], float]:
    """A function that makes several calls and returns the microseconds of one."""
    # So many that a turn on a GPU takes long compared with what its measurement costs, and not very long.
    calls = _rotation(moved_bytes) if device == "cpu" else max(4, min(256, (1 << 30) // moved_bytes))

    def run() -> None:
        for i in range(calls):
            call(i)

    run()  # compiled, and every buffer touched
    if device == "cpu":

        def timed() -> float:
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) / calls * 1e6

        return timed
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replayed = torch.cuda.CUDAGraph()
    if graph:
        with torch.cuda.graph(replayed):
            run()

    def timed_on_gpu() -> float:
        start.record()
        replayed.replay() if graph else run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls * 1e3

    return timed_on_gpu


# --- the tool --------------------------------------------------------------------------------------------------------


def _us(row: Row, *, call: bool = False) -> list[float]:
    """By round: in a graph, where there are GPUs. `call`: what calls take besides, if those are not all there is."""
    graph = row.values("us", KERNEL)
    return row.values("us", CALL) if call == bool(graph) else [] if call else graph


def _of_copy(row: Row, *, call: bool = False) -> list[float]:
    """Per cent, by round."""
    way = KERNEL if row.values("us", KERNEL) and not call else CALL
    pairs = row.turns.pairs(row.case, way + COPY, way) if _us(row, call=call) else ()
    return [100 * copied["us"] / own["us"] for copied, own in pairs]


def _count(text: str) -> int:
    if not (found := byte_size(text)):
        raise ValueError(f"{text!r} is 0; give 1 or more")
    return found


class Compression(Tool):
    name = "compression"
    title = "Compression, {device}"
    ranks = None
    length = (15, DAY_S, None)
    options = (
        ("device", ("cpu", "cuda"), "cuda" if torch.cuda.is_available() else "cpu", "the GPU if any"),
        ("codecs", names_of("codec", codec_names()), tuple(codec_names()), "to measure"),
        ("elements", several(_count), "64K,1M,16M,64M", "sizes"),
        ("dtypes", names_of("dtype", list(_DTYPES)), tuple(_DTYPES), "of what is compressed"),
        ("versions", several(_count), "2,4,8", "of the step that reduces"),
        ("threads", several(_count), f"1,{os.cpu_count() or 1}", "on CPUs"),
    )
    metrics = (
        ("time", "us", _us),
        ("of_copy", "%", _of_copy),
        ("call_time", "us", lambda row: _us(row, call=True)),
        ("call_of_copy", "%", lambda row: _of_copy(row, call=True)),
    )

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        if given.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device cuda needs a GPU, and torch sees none; look at nvidia-smi, or use --device cpu")

    def plan(self) -> Mapping[Case, Plan]:
        """Each operation is made when the one before has been measured: all together may not fit into memory."""
        given, cases = self.given, []
        for threads in given.threads if given.device == "cpu" else [0]:
            of_threads = {"threads": threads} if threads else {}
            for codec, elements in itertools.product(given.codecs, given.elements):
                for dtype, operation in itertools.product(given.dtypes, OPERATIONS):
                    cases.append(Case(codec=codec, operation=operation, elements=elements, dtype=dtype, **of_threads))
                reductions = [f"reduce {number}" for number in given.versions]
                cases += [Case(codec=codec, operation=one, elements=elements, **of_threads) for one in reductions]
        ways = (CALL,) if given.device == "cpu" else (KERNEL, CALL)
        return {case: {case: [way + suffix for way in ways for suffix in ("", COPY)]} for case in cases}

    @contextlib.contextmanager
    def session(self, group: Case, plan: Plan) -> Iterator[Measure]:
        device = self.given.device
        self.learn({"torch": torch.__version__, "device": "cpu" if device == "cpu" else torch.cuda.get_device_name()})
        if device == "cpu":
            torch.set_num_threads(group.threads)
        moved, call = operation_of(device, group)
        calls = {"": call, COPY: copy(device, moved)}
        turns = {
            way + name: _turn(one, moved, device, way == KERNEL)
            for way in ((CALL,) if device == "cpu" else (KERNEL, CALL))
            for name, one in calls.items()
        }
        yield lambda _case, way, _round: {"us": turns[way]()}

    def rows(self) -> list[Row]:
        return [Row(self.turns, case) for case in dict.fromkeys(case for case, _ in self.turns.samples)]

    def labels(self, row: Row) -> dict[str, Label]:
        return vars(row.case)

    def heading(self) -> str:
        where = describe_machine().caption() if self.given.device == "cpu" else torch.cuda.get_device_name()
        return f"Codecs compared with a copy of the same bytes; {where}, torch {torch.__version__}"


main = Compression.main
