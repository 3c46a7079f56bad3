"""The compiled MinMaxUInt8 of the CPU: for every instruction set the bytes of the reference, with any threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.forked_program import run_programs
from support.minmax_data import DTYPES, KINDS, Case, differences_of, results_of
from support.sweeps import each_value_once

from bagua.kernels import _minmax_uint8, minmax_uint8, minmax_uint8_native, minmax_uint8_reference
from bagua.kernels.minmax_uint8_layout import chunk_layout

# (elements of a chunk, chunks, block): odd ends, one range, ranges shorter than a register and longer than a slice.
SHAPES = [
    *((1, 1, 1024), (7, 1, 3), (33, 3, 4), (64, 1, 64), (40, 2, 1), (1000, 5, 100), (2048, 2, 1024), (7003, 1, 1024)),
    *((5000, 1, None), (40001, 2, None), (50000, 2, 20000), (20480, 2, 256)),
]


def has(instructions: str) -> bool:
    try:
        _minmax_uint8.compress(0, 0, 0, 0, 1, 0, 0, 1, instructions)
    except ValueError:
        return False
    return True


# Where the processor has not got them all, the missing ones cannot be tested: their names are then not in this list.
INSTRUCTIONS = [name for name in ("portable", "avx2", "avx512", "avx512bf16") if has(name)]


def with_instructions(name: str) -> ModuleType:
    """minmax_uint8_native, bound to an instruction set."""

    def bound(function: Any) -> Any:
        return lambda *arguments: function(*arguments, instructions=name)

    functions = ("compress", "decompress", "decompress_reduce_compress")
    return SimpleNamespace(**{one: bound(getattr(minmax_uint8_native, one)) for one in functions})  # type: ignore[return-value]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", KINDS)
def test_same_bytes_as_the_reference(kind: str) -> None:
    found = []
    for elements, chunks, block in SHAPES:
        for dtype in DTYPES:
            case = Case(kind, elements, chunks, block, dtype)
            expected = results_of(minmax_uint8_reference, case, 77)
            for name in INSTRUCTIONS:
                found += [f"{name}: {one}" for one in differences_of(expected, with_instructions(name), case)]
    assert found == []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("versions", [*range(1, 10), 16, 17, 40, 600])
def test_any_number_of_versions(versions: int) -> None:
    """Also of ranges that begin anywhere, of different sizes, with one level, and of more than a slice."""
    for elements, block in ((3000, 1024), (777, 100), (64, 3), (20001 if versions < 100 else 500, None)):
        layout = chunk_layout(elements, block)
        generator = torch.Generator().manual_seed(versions)
        source = torch.randn(versions, elements, generator=generator)
        source *= 10.0 ** torch.randint(-6, 6, (versions, 1), generator=generator)
        source[::3] = source[::3].abs()
        source[1::5, : elements // 2] = 0.25
        received = torch.zeros(versions, layout.total_bytes, dtype=torch.uint8)
        minmax_uint8_reference.compress(source, layout, received)
        expected = torch.full((layout.total_bytes,), 77, dtype=torch.uint8)
        for average in (False, True):
            minmax_uint8_reference.decompress_reduce_compress(received, average, layout, expected)
            for name in INSTRUCTIONS:
                actual = torch.full_like(expected, 99)
                with_instructions(name).decompress_reduce_compress(received, average, layout, actual)
                assert torch.equal(expected, actual), (name, elements, block, average)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_ends_in_the_wrong_order(instructions: str) -> None:
    """No range of ours has them: they have no levels, and what the others weigh stays within 16 bits."""
    tested = with_instructions(instructions)
    layout = chunk_layout(256, 64)
    source = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    received = torch.zeros(3, layout.total_bytes, dtype=torch.uint8)
    minmax_uint8_reference.compress(source, layout, received)
    ends = torch.tensor([1e-3, -1e-3, 1e-30, -1e-30, 1e30, -1e30, 3e38, -3e38])
    received[1, :32] = ends.view(torch.uint8)
    expected, actual = (torch.full((layout.total_bytes,), filler, dtype=torch.uint8) for filler in (77, 99))
    minmax_uint8_reference.decompress_reduce_compress(received, False, layout, expected)
    tested.decompress_reduce_compress(received, False, layout, actual)
    assert torch.equal(expected, actual)


def test_the_cpu_runs_the_compiled_module() -> None:
    assert minmax_uint8._implementation("cpu") is minmax_uint8_native  # type: ignore[comparison-overlap]
    assert INSTRUCTIONS[-1] == _minmax_uint8.INSTRUCTIONS


def test_unknown_instructions_are_refused() -> None:
    with pytest.raises(ValueError, match="this processor or this build has no instructions 'mmx'; known are portable"):
        _minmax_uint8.compress(0, 0, 0, 0, 1, 0, 0, 1, "mmx")


def all_results(source: torch.Tensor, block: int | None) -> list[torch.Tensor]:
    layout = chunk_layout(source.shape[1], block)
    compressed = torch.full((source.shape[0], layout.total_bytes), 99, dtype=torch.uint8)
    minmax_uint8_native.compress(source, layout, compressed)
    target = torch.full_like(source, 9.0)
    minmax_uint8_native.decompress(compressed, target, False, layout)
    added = torch.ones_like(source)
    minmax_uint8_native.decompress(compressed, added, True, layout)
    out = torch.full((layout.total_bytes,), 99, dtype=torch.uint8)
    minmax_uint8_native.decompress_reduce_compress(compressed, True, layout, out)
    return [compressed, target, added, out]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("dtype", "block"), each_value_once(DTYPES, [1024, 20000, None]))
def test_threads_change_nothing(dtype: torch.dtype, block: int | None) -> None:
    """Enough elements for several threads, and for stores around the caches; chunks that do not begin aligned."""
    generator = torch.Generator().manual_seed(6)
    source = torch.randn(3, 2_000_003, generator=generator).to(dtype)
    expected = all_results(source, block)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        for one, other in zip(expected, all_results(source, block), strict=True):
            assert torch.equal(one, other)


def test_callers_do_not_disturb_each_other() -> None:
    """The threads are shared: who comes while they work does its own."""
    sources = [torch.randn(1, 1_500_000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [all_results(source, 1024) for source in sources]
    wrong: list[int] = []

    def call(number: int) -> None:
        for _ in range(5):
            results = all_results(sources[number], 1024)
            if not all(torch.equal(one, other) for one, other in zip(expected[number], results, strict=True)):
                wrong.append(number)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert wrong == []


def test_flushed_subnormal_numbers_change_nothing() -> None:
    """torch.set_flush_denormal is of the calling thread; bytes must not depend on it."""
    source = torch.linspace(0, 2e-36, 2048).view(1, -1)
    expected = all_results(source, 512)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        results = all_results(source, 512)
        assert torch.get_num_threads() >= 1
        assert float(torch.tensor(1e-39) * torch.tensor(1.0)) == 0.0, "the setting of the caller is back"
    finally:
        torch.set_flush_denormal(False)
    for one, other in zip(expected, results, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


FORK = """
import os, sys, torch
from bagua.kernels import minmax_uint8

def result():
    torch.manual_seed(0)
    return minmax_uint8.compress(source).numpy().tobytes()

torch.set_num_threads(2)
source = torch.randn(3_000_000)
expected = result()
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if result() == expected and result() == expected else 9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert result() == expected
"""


def test_works_after_fork() -> None:
    """The child has none of the threads of its parent."""
    (done,) = run_programs(1, FORK)
    assert done.returncode == 0, done.stderr
