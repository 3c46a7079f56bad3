"""MinMaxUInt8 on a CUDA device: the bytes of the CPU, whatever the sizes, the alignment and the device in use."""

from __future__ import annotations

import pytest
import torch
from support.minmax_data import DTYPES, KINDS, Case, differences

from bagua.kernels import minmax_uint8, minmax_uint8_reference
from bagua.kernels.minmax_uint8 import BLOCK_ELEMENTS, compress, decompress, decompress_reduce_compress

pytestmark = pytest.mark.gpu

SHAPES = [
    *((1, 1, 1024), (7, 1, 3), (33, 3, 4), (64, 1, 64), (40, 2, 1), (1000, 5, 100), (2048, 2, 1024), (7003, 3, 1024)),
    *((5000, 1, None), (70001, 2, None), (50000, 2, 20000), (2048 * 64, 2, 256), (9 * 4096, 1, 4096), (999, 4, None)),
]


# By shape, because kernels are compiled for shapes: tests that run side by side then compile different ones.
@pytest.mark.parametrize(("elements", "chunks", "block"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bytes_as_the_reference(dtype: torch.dtype, elements: int, chunks: int, block: int | None) -> None:
    from bagua.kernels import minmax_uint8_triton

    found = []
    for kind in KINDS:
        case = Case(kind, elements, chunks, block, dtype)
        found += differences(minmax_uint8_reference, minmax_uint8_triton, case, "cuda")  # type: ignore[arg-type]
    assert found == []


def test_the_reference_gives_the_same_on_both_devices() -> None:
    found = []
    for kind in KINDS:
        case = Case(kind, 5003, 2, 1024, torch.float32)
        found += differences(minmax_uint8_reference, minmax_uint8_reference, case, "cuda")
    assert found == []


def test_cuda_runs_triton() -> None:
    assert minmax_uint8._implementation("cuda").__name__ == "bagua.kernels.minmax_uint8_triton"  # type: ignore[attr-defined]


@pytest.mark.parametrize("block", [1024, None])
def test_only_the_first_launch_goes_through_triton(block: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from bagua.kernels.minmax_uint8_triton_launch import KernelLaunch

    def all_operations(source: torch.Tensor) -> list[torch.Tensor]:
        packed = compress(source, block_elements=block)
        decoded = decompress(packed, torch.empty_like(source), block_elements=block)
        return [packed, decoded, decompress_reduce_compress(packed, source.numel(), True, block_elements=block)]

    all_operations(torch.randn(50000, device="cuda"))

    def through_triton(_launch: KernelLaunch, *_tensors: torch.Tensor) -> None:
        pytest.fail("not launched directly")

    monkeypatch.setattr(KernelLaunch, "through_triton", through_triton)
    source = torch.randn(50000, generator=torch.Generator().manual_seed(9))
    for expected, actual in zip(all_operations(source), all_operations(source.cuda()), strict=True):
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("versions", [1, 2, 3, 4, 5, 8, 9, 20])
@pytest.mark.parametrize("block", [1024, None])
def test_any_number_of_versions(versions: int, block: int | None) -> None:
    generator = torch.Generator().manual_seed(versions)
    received = torch.cat(
        [compress(torch.randn(30001, generator=generator), block_elements=block) for _ in range(versions)]
    )
    expected = decompress_reduce_compress(received, 30001, True, block_elements=block)
    actual = decompress_reduce_compress(received.cuda(), 30001, True, block_elements=block)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1024, None])
def test_views_need_no_alignment(dtype: torch.dtype, block: int | None) -> None:
    source = torch.randn(40001, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = compress(source, block_elements=block)
    decoded = decompress(expected, torch.empty_like(source), block_elements=block)
    for offset in (1, 3, 8):
        there = torch.empty(40001 + offset, dtype=dtype, device="cuda")[offset:]
        there.copy_(source)
        out = torch.empty(expected.numel() + offset, dtype=torch.uint8, device="cuda")[offset:].view(1, -1)
        assert torch.equal(compress(there, out=out, block_elements=block).cpu(), expected)
        there.zero_()
        assert torch.equal(decompress(out, there, block_elements=block).cpu(), decoded)


@pytest.mark.parametrize(("elements", "block"), [(3, 2), (16, 16)])
def test_more_chunks_than_a_grid_has_rows(elements: int, block: int) -> None:
    chunks = 2 * 65535 + 7
    source = torch.randn(chunks * elements, generator=torch.Generator().manual_seed(6))
    expected = compress(source, chunks, block_elements=block)
    there = source.cuda()
    compressed = compress(there, chunks, block_elements=block)
    assert torch.equal(compressed.cpu(), expected)
    decoded = decompress(expected, torch.empty_like(source), block_elements=block)
    assert torch.equal(decompress(compressed, there, block_elements=block).cpu(), decoded)


def test_nothing_waits_for_the_device() -> None:
    """What waits cannot be captured into a graph."""
    source = torch.randn(50000, device="cuda")
    out = compress(source)
    target = torch.empty_like(source)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decompress(out, target)
        decompress_reduce_compress(out, 50000, True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            compress(source, out=out)
            decompress(out, target)
            result = decompress_reduce_compress(out, 50000, True)
        source.copy_(torch.randn(50000, generator=torch.Generator().manual_seed(8)))
        graph.replay()
    torch.cuda.synchronize()
    expected = compress(source.cpu())
    assert torch.equal(out.cpu(), expected)
    assert torch.equal(result.cpu(), decompress_reduce_compress(expected, 50000, True))


def test_another_device_than_the_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    source = torch.randn(5000)
    there = source.to("cuda:1")
    assert torch.cuda.current_device() == 0
    compressed = compress(there)
    assert compressed.device.index == 1
    assert torch.equal(compressed.cpu(), compress(source))
    result = decompress_reduce_compress(compressed, 5000, False)
    assert torch.equal(result.cpu(), decompress_reduce_compress(compress(source), 5000, False))
    assert torch.equal(decompress(compressed, there).cpu(), decompress(compress(source), source))


@pytest.mark.parametrize("block", [BLOCK_ELEMENTS, None])
def test_more_elements_than_32_bits_count(block: int | None) -> None:
    """The ends of 2^31 + 3 * 2^20 elements, compared with themselves alone, and both sides of 2^31."""
    elements = (1 << 31) + 3 * (1 << 20)
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    source = torch.empty(elements, dtype=torch.bfloat16, device="cuda")
    for piece in source.split(1 << 28):
        piece.normal_()
    source[0], source[-1] = 9.0, -9.0  # the ends of the only range that a whole chunk has
    compressed = compress(source, block_elements=block)
    header = compressed.shape[1] - elements
    decoded = decompress(compressed, torch.empty_like(source), block_elements=block)
    for first in (0, (1 << 31) - (1 << 20), 1 << 31, elements - (1 << 20)):
        part = source[first : first + (1 << 20)]
        levels = compressed[0, header + first : header + first + (1 << 20)]
        if block is not None:
            alone = compress(part, block_elements=block)
            assert torch.equal(levels, alone[0, -(1 << 20) :])
        assert float((decoded[first : first + (1 << 20)] - part).abs().max()) <= 18 / 510 + 0.04
        assert levels.unique().numel() > 60
