"""The Triton kernels of MinMaxUInt8 compile for a GPU, which need not be there: the interpreter takes more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and arm64")

from support.sweeps import rest_is_deep
from support.triton_compiler import Launch, Recorder, ptx_of

from bagua.kernels import minmax_uint8_triton as launcher
from bagua.kernels import minmax_uint8_triton_kernels as kernels
from bagua.kernels import minmax_uint8_triton_sum_kernels as sum_kernels
from bagua.kernels.minmax_uint8_layout import chunk_layout

KERNELS = {
    kernels: ("compress_ranges", "measure_ranges", "compress_pieces", "decompress_tiles"),
    sum_kernels: ("sum_ranges", "measure_sums", "sum_pieces"),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    found: list[Launch] = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    launcher._steps.cache_clear()
    yield found
    launcher._steps.cache_clear()


def launch_all(elements: int, chunks: int, block: int | None, dtype: torch.dtype, versions: int) -> None:
    layout = chunk_layout(elements, block)
    floats = torch.zeros(chunks, elements, dtype=dtype)
    compressed = torch.zeros(chunks, layout.total_bytes, dtype=torch.uint8)
    launcher.compress(floats, layout, compressed)
    launcher.decompress(compressed, floats, True, layout)
    received = torch.zeros(versions, layout.total_bytes, dtype=torch.uint8)
    launcher.decompress_reduce_compress(received, True, layout, received[0])


# (elements, chunks, block, dtype, versions): one element, ranges of one, of three, whole chunks, long ranges.
SHAPES = [
    (1, 1, 1024, torch.float32, 1),
    (40, 2, 1, torch.float16, 2),
    (7, 3, 3, torch.bfloat16, 3),
    (37, 2, None, torch.float32, 9),
    (4096, 2, 1024, torch.float16, 2),
    (4096, 1, 1024, torch.float32, 4),
    (4096, 1, 1024, torch.float32, 5),
    (50000, 2, 20000, torch.bfloat16, 3),
]


@pytest.mark.parametrize(("elements", "chunks", "block", "dtype", "versions"), rest_is_deep(SHAPES, 1, 3, 7))
def test_compiles(
    launches: list[Launch], elements: int, chunks: int, block: int | None, dtype: torch.dtype, versions: int
) -> None:
    launch_all(elements, chunks, block, dtype, versions)
    assert len(launches) == (5 if elements == 50000 else 3)
    for launch in launches:
        assert ".visible .entry" in ptx_of(launch)


@pytest.mark.parametrize("block", rest_is_deep([1024, None], 0))
def test_full_tiles_are_read_and_written_in_pieces_of_16_bytes(launches: list[Launch], block: int | None) -> None:
    launch_all(8192 * 1024, 1, block, torch.float32, 8)
    for launch in launches:
        ptx = ptx_of(launch)
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx or launch[0].__name__ in ("measure_ranges", "measure_sums")


# Warps of a tile of 1024 elements: 32 elements of a thread, 16 or 8.
@pytest.mark.parametrize(("ranges", "versions", "warps"), rest_is_deep([(8192, 2, 1), (8192, 8, 2), (256, 8, 4)], 0))
def test_a_sum_adds_a_byte_with_two_instructions(
    launches: list[Launch], ranges: int, versions: int, warps: int
) -> None:
    """One that makes a number of it, and a multiply-add; in full tiles and in others, which have their own code."""
    launch_all(ranges * 1024, 1, 1024, torch.float32, versions)
    *_, (_, _, keywords) = launches
    assert keywords["num_warps"] == warps
    ptx = ptx_of(launches[-1])
    elements = 1024 // (32 * warps)
    assert ptx.count(", 0x47000000, ") == 2 * versions * elements
    # One more for each version: its zero.
    assert ptx.count("fma.rn.f32") == 2 * versions * (elements + 1)
    # Neither is anything shifted, nor multiplied but to make the result: a product and a sum for a byte.
    for instruction in ("mul.lo.s32", "mad.lo.s32", "shr."):
        assert ptx.count(instruction) <= 2 * (elements + 8), instruction


@pytest.mark.parametrize("ranges", rest_is_deep([8192, 256], 0))
def test_a_warp_finds_the_extremes_of_sums_with_one_instruction_each(launches: list[Launch], ranges: int) -> None:
    launch_all(ranges * 1024, 1, 1024, torch.float32, 4)
    ptx = ptx_of(launches[-1])
    assert ptx.count("redux.sync.min.s32") == ptx.count("redux.sync.max.s32") == 2


@pytest.mark.parametrize(("ranges", "versions", "warps"), rest_is_deep([(8192, 2, 1), (256, 4, 2), (256, 8, 4)], 0))
def test_a_sum_of_few_versions_or_ranges_waits_for_memory_once(
    launches: list[Launch], ranges: int, versions: int, warps: int
) -> None:
    """What the threads hold of a range comes in loads of at most 16 bytes, all of which precede the first division."""
    launch_all(ranges * 1024, 1, 1024, torch.float32, versions)
    *_, (_, _, keywords) = launches
    assert keywords["num_warps"] == warps
    before = ptx_of(launches[-1]).split("div.rn.f32")[0]
    bytes_of_a_thread = 1024 // (32 * warps)
    words = 4 if bytes_of_a_thread >= 16 else bytes_of_a_thread // 4
    assert before.count(f"ld.global.v{words}.b32") == versions * bytes_of_a_thread // (4 * words)
    assert "fma.rn.f32" not in before
    # The ends of each version.
    assert before.count("ld.global.b64") == versions
