"""What every codec promises: sizes, error bound, what is not finite, sums, and arguments that are refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.minmax_data import DTYPES, KINDS, numbers
from torch import Tensor

from bagua.codecs import Codec, block_scale, codec_names, fused, get_codec
from bagua.engine.plan_tuner import compression_s_per_byte
from bagua.kernels import minmax_uint8

NAMES = codec_names()
# Seconds for each byte of float32: `CountedCodec` compresses, sums and decompresses it once.
THREE_PASSES = 3e-9 / 4


class CountedCodec(Codec):
    """Another codec, on a clock of its own: 1 ns for each element that it works on, and a second for its first call
    and another for the fourth, when another process has the core.

    Attributes:
        elements: that it has compressed, summed or decompressed.
        chunks: likewise.
        largest: elements of a chunk.
    """

    def __init__(self, codec: Codec) -> None:
        self.elements = self.chunks = self.largest = self._calls = 0
        self._codec = codec

    def clock(self) -> float:
        return 1e-9 * self.elements + (self._calls > 0) + (self._calls > 3)

    def _count(self, chunks: int, elements: int) -> None:
        self._calls += 1
        self.chunks += chunks
        self.elements += chunks * elements
        self.largest = max(self.largest, elements)

    def compressed_bytes(self, elements: int) -> int:
        return self._codec.compressed_bytes(elements)

    def error_bound(self, source: Tensor, chunks: int = 1) -> Tensor:
        raise NotImplementedError

    def _compress(self, source: Tensor, elements: int, out: Tensor) -> None:
        self._count(len(out), elements)
        self._codec._compress(source, elements, out)

    def _decompress(self, compressed: Tensor, elements: int, target: Tensor, accumulate: bool) -> None:
        self._count(len(compressed), elements)
        self._codec._decompress(compressed, elements, target, accumulate)

    def _decompress_reduce_compress(self, received: Tensor, elements: int, average: bool, out: Tensor) -> None:
        self._count(len(received), elements)
        self._codec._decompress_reduce_compress(received, elements, average, out)


def test_names() -> None:
    assert get_codec("MinMaxUInt8") is get_codec("int8")
    assert [get_codec(name).name for name in NAMES] == NAMES == sorted(NAMES)
    codec = get_codec("int8")
    assert get_codec(codec) is codec
    with pytest.raises(ValueError, match=f"Unknown codec 'int9'. Known codecs: {', '.join(NAMES)}"):
        get_codec("int9")
    with pytest.raises(TypeError, match=r"codec is 8\. Pass a name"):
        get_codec(8)  # type: ignore[arg-type]


def test_the_table_of_the_page() -> None:
    """docs/design/compression.md: bits and errors."""
    page = Path(__file__).parents[2] / "docs/design/compression.md"
    lines = [line for line in page.read_text().splitlines() if "|" in line]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    names = next(row[1:] for row in rows if set(row[1:]) == set(NAMES))
    for name, bits, error in zip(
        names,
        next(row[1:] for row in rows if row[0].startswith("bits per element")),
        next(row[1:] for row in rows if row[0].endswith("Gauss")),
        strict=True,
    ):
        codec, source = get_codec(name), torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
        compressed = codec.compress(source)
        assert 8 * compressed.numel() / source.numel() == float(bits), name
        distance = (codec.decompress(compressed, torch.empty_like(source)) - source).norm() / source.norm()
        assert abs(100 * float(distance) - float(error.removesuffix(" %"))) < 0.05, name


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_compresses_alike(name: str) -> None:
    """States of communication hooks are pickled with their codec."""
    codec: Codec = pickle.loads(pickle.dumps(get_codec(name)))
    source = torch.randn(100)
    assert torch.equal(codec.compress(source), get_codec(name).compress(source))


@pytest.mark.parametrize("name", NAMES)
def test_default_dtype_and_device_are_the_users(name: str) -> None:
    """Also where they are set when a process uses a codec for the first time. "meta" stands for any other device."""
    codec, source = get_codec(name), torch.randn(1000, generator=torch.Generator().manual_seed(3))
    expected = codec.compress(source)
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        block_scale._unit_of.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                assert torch.equal(codec.compress(source), expected), (dtype, device)
                counted = CountedCodec(codec)
                cost = compression_s_per_byte(counted, source.device, 2, counted.clock)
                assert cost == pytest.approx(THREE_PASSES), (dtype, device)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("ranks", [1, 2, 5, 1000])
def test_the_cost_of_compression_takes_little_work_to_find(ranks: int) -> None:
    """On CPUs, where int4 is written in torch: some calls for each chunk, and 10 ns for each element. torch divides
    sums and maxima of 32768 elements among threads, which wait for each other where the cores are busy."""
    counted = CountedCodec(get_codec("int4"))
    assert compression_s_per_byte(counted, torch.device("cpu"), ranks, counted.clock) == pytest.approx(THREE_PASSES)
    assert counted.elements <= 1 << 20
    assert counted.chunks <= 64
    assert counted.largest < 1 << 15


@given(
    name=st.sampled_from(NAMES),
    kind=st.sampled_from(KINDS),
    elements=st.integers(0, 3000),
    chunks=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_error_bound(name: str, kind: str, elements: int, chunks: int, dtype: torch.dtype, seed: int) -> None:
    codec = get_codec(name)
    count = max(elements, kind == "few not finite") * chunks
    source = numbers(kind, count, torch.Generator().manual_seed(seed)).to(dtype)
    compressed = codec.compress(source, chunks)
    assert compressed.shape == (chunks, codec.compressed_bytes(count // chunks))
    decoded = codec.decompress(compressed, torch.full_like(source, 7.0))
    bound = codec.error_bound(source, chunks)
    assert bound.shape == source.shape
    assert bound.dtype == torch.float32
    assert torch.equal(decoded.isnan(), bound.isnan())
    within = (decoded.double() - source.double()).abs() <= bound
    assert (within | bound.isnan() | (decoded == source)).all()


def test_int8_is_minmax_uint8() -> None:
    codec = get_codec("int8")
    source = torch.randn(3 * 5000)
    received = codec.compress(source, 3)
    assert torch.equal(received, minmax_uint8.compress(source, 3))
    summed = codec.decompress_reduce_compress(received, 5000, True)
    assert torch.equal(summed, minmax_uint8.decompress_reduce_compress(received, 5000, True))
    decoded = minmax_uint8.decompress(received, torch.empty_like(source))
    assert torch.equal(codec.decompress(received, torch.empty_like(source)), decoded)


def test_several_operations_at_once_refuse_what_does_not_fit() -> None:
    """A chunk that is not there would be written beyond the end of the memory by a kernel."""
    codec, values = get_codec("int4"), torch.randn(64)
    sent = codec.compress(values, 2)
    for exact in (-1, 2):
        with pytest.raises(ValueError, match=f"exact is {exact}; 2 chunks are 0 to 1"):
            fused.compress_rest(codec, values, sent, exact)
        with pytest.raises(ValueError, match=f"position is {exact}; 2 versions are 0 to 1"):
            fused.decompress_reduce(codec, sent, values[:32], exact, 0.5, torch.empty(32))
    with pytest.raises(ValueError, match="values has 63 elements, which 2 chunks do not divide"):
        fused.compress_rest(codec, values[:63], sent, 0)
    with pytest.raises(ValueError, match="reference has 63 elements, which 2 chunks do not divide"):
        fused.add_differences(codec, sent, values[:63], values[:63].clone())
