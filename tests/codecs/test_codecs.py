"""What every codec promises: sizes, error bound, what is not finite, sums, and arguments that are refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.minmax_data import DTYPES, KINDS, numbers

from bagua.codecs import Codec, block_scale, codec_names, get_codec
from bagua.engine import compression_cost
from bagua.kernels import minmax_uint8

NAMES = codec_names()


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
def test_default_dtype_and_device_are_the_users(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are set when a process uses a codec for the first time. "meta" stands for any other device."""
    monkeypatch.setattr(compression_cost, "_ELEMENTS", 1 << 12)  # of more, the formulas of torch take seconds
    codec, source = get_codec(name), torch.randn(1000, generator=torch.Generator().manual_seed(3))
    expected = codec.compress(source)
    for dtype, device in ((torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        block_scale._unit_of.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                assert torch.equal(codec.compress(source), expected), (dtype, device)
                assert compression_cost.compression_s_per_byte(name, source.device, 2) > 0
        finally:
            torch.set_default_dtype(torch.float32)


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
