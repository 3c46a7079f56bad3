"""MinMaxUInt8 by its formula, and arguments that are refused. Its error bound is that of all codecs: tests/codecs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.byte_reference import added, rounded
from support.minmax_data import DTYPES, KINDS, numbers
from torch import Tensor

from bagua.kernels import minmax_uint8
from bagua.kernels.minmax_uint8 import (
    BLOCK_ELEMENTS,
    compress,
    compressed_bytes,
    decompress,
    decompress_reduce_compress,
)
from bagua.kernels.minmax_uint8_triton_launch import has_triton

# Hypothesis draws where a kernel may go wrong; of what is not finite and of one number in all versions, too.
blocks = st.sampled_from([None, 1, 31, 32, 100, 512, 20000])
dtypes = st.sampled_from(DTYPES)
EXTREMES = (
    (3.4028234663852886e38, -3.4028234663852886e38, 0.0),
    (1e-45, 0.0, -1e-45),
    (7.5e-37, 0.0),
    (1000.0, 1000.00006103515625),
    (-0.0, 0.0),
    (65504.0, -65504.0, 1.0),
    (6e-8, 0.0),
)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


def round_trip(source: Tensor, chunks: int = 1, block: int | None = BLOCK_ELEMENTS) -> Tensor:
    compressed = compress(source, chunks, block_elements=block)
    return decompress(compressed, torch.full_like(source, 7.0), block_elements=block)


def check_round_trip(source: Tensor, chunks: int, block: int | None) -> None:
    before = source.clone()
    result = round_trip(source, chunks, block)
    assert torch.equal(source.nan_to_num(), before.nan_to_num())
    size = source.numel() // chunks
    parts = [rounded(chunk, block or max(size, 1)) for chunk in source.float().split(max(size, 1))] if size else []
    assert_same(result, torch.cat([*parts, torch.empty(0)]).to(source.dtype))


@given(
    kind=st.sampled_from(KINDS),
    elements=st.integers(0, 600),
    chunks=st.integers(1, 3),
    block=blocks,
    dtype=dtypes,
    seed=st.integers(0, 2**32 - 1),
)
def test_what_comes_back_is_that_of_the_formula(
    kind: str, elements: int, chunks: int, block: int | None, dtype: torch.dtype, seed: int
) -> None:
    """Bit for bit."""
    count = max(elements, kind == "few not finite") * chunks
    source = numbers(kind, count, torch.Generator().manual_seed(seed)).to(dtype)
    check_round_trip(source, chunks, block)


@given(values=st.lists(st.floats(width=32), max_size=40), block=st.sampled_from([None, 1, 3, 7, 1024]), dtype=dtypes)
def test_any_floats_come_back_as_the_formula_says(values: list[float], block: int | None, dtype: torch.dtype) -> None:
    for one in (values, *EXTREMES):
        check_round_trip(torch.tensor(one, dtype=torch.float32).to(dtype), 1, block)


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=12),
    elements=st.integers(1, 200),
    block=blocks,
    average=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_are_those_of_the_formula(
    kinds: list[str], elements: int, block: int | None, average: bool, seed: int
) -> None:
    """Of versions with ranges of any size: bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    sources = [numbers(kind, elements, generator) * 10.0 ** -(place % 7) for place, kind in enumerate(kinds)]
    received = torch.cat([compress(source, block_elements=block) for source in sources])
    summed = decompress_reduce_compress(received, elements, average, block_elements=block).unsqueeze(0)
    result = decompress(summed, torch.empty(elements), block_elements=block)
    ranges = zip(*(source.split(block or elements) for source in sources), strict=True)
    factor = 1.0 / len(sources) if average else 1.0
    assert_same(result, torch.cat([added(versions, factor) for versions in ranges]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_adds_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    source, before = (torch.randn(1500, generator=generator).to(dtype) for _ in range(2))
    compressed = compress(source)
    decoded = decompress(compressed, torch.empty(1500))
    target = before.clone()
    assert decompress(compressed, target, accumulate=True) is target
    assert torch.equal(target, (before.float() + decoded).to(dtype))


@pytest.mark.parametrize("block", [None, 1, 32, 100, 1024])
@pytest.mark.parametrize("elements", [0, 1, 31, 32, 33, 1024, 1025, 5000])
def test_bytes_of_a_chunk(elements: int, block: int | None) -> None:
    ranges_of_chunk = 0 if elements == 0 else 1 if block is None else math.ceil(elements / block)
    expected = math.ceil(8 * ranges_of_chunk / 32) * 32 + math.ceil(elements / 32) * 32
    assert compressed_bytes(elements, block) == expected
    assert compress(torch.randn(3 * elements), 3, block_elements=block).shape == (3, expected)


def test_nothing_is_compressed_to_nothing() -> None:
    empty = compress(torch.empty(0), 2)
    assert empty.shape == (2, 0)
    assert decompress(empty, torch.empty(0)).numel() == 0
    assert decompress_reduce_compress(empty, 0, True).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1024, 100, None])
@pytest.mark.parametrize("elements", [1000, 40001])
def test_views_need_no_alignment(dtype: torch.dtype, block: int | None, elements: int) -> None:
    """Neither of the elements nor of the bytes."""
    source = torch.randn(elements, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = compress(source, block_elements=block)
    decoded = round_trip(source, block=block)
    summed = decompress_reduce_compress(expected.repeat(3, 1), elements, True, block_elements=block)
    for offset in (1, 3, 17):
        there = torch.empty(elements + offset, dtype=dtype)[offset:]
        there.copy_(source)
        out = torch.empty(expected.numel() + offset, dtype=torch.uint8)[offset:].view(1, -1)
        assert torch.equal(compress(there, out=out, block_elements=block), expected)
        target = torch.empty(elements + offset, dtype=dtype)[offset:]
        assert torch.equal(decompress(out, target, block_elements=block), decoded)
        received = torch.empty(3 * expected.numel() + offset, dtype=torch.uint8)[offset:].view(3, -1)
        received.copy_(expected.repeat(3, 1))
        result = torch.empty(expected.numel() + offset, dtype=torch.uint8)[offset:]
        decompress_reduce_compress(received, elements, True, out=result, block_elements=block)
        assert torch.equal(result, summed)


def test_parameters_need_no_special_care() -> None:
    parameter = torch.nn.Parameter(torch.randn(50))
    compressed = compress(parameter)
    assert not compressed.requires_grad
    assert decompress(compressed, parameter) is parameter
    assert parameter.is_leaf


GOOD = torch.zeros(64)
PACKED = compress(GOOD, 2)
WRONG: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (TypeError, "source is a list", lambda: compress([1.0])),  # type: ignore[arg-type]
    (TypeError, r"source is torch.float64 \[64\] on cpu; give torch.float32", lambda: compress(GOOD.double())),
    (TypeError, "source is torch.int32", lambda: compress(GOOD.int())),
    (ValueError, "not contiguous; give a contiguous tensor of one dimension", lambda: compress(GOOD[::2])),
    (ValueError, r"source is torch.float32 \[8, 8\]", lambda: compress(GOOD.view(8, 8))),
    (ValueError, "source has 64 elements, which 3 chunks do not divide; pad it", lambda: compress(GOOD, 3)),
    (ValueError, "chunks is 0; give 1 or more", lambda: compress(GOOD, 0)),
    (ValueError, "block_elements is 0; a range has at least 1", lambda: compress(GOOD, block_elements=0)),
    (ValueError, "a chunk cannot have -1 elements", lambda: compressed_bytes(-1)),
    (TypeError, "out is torch.float32", lambda: compress(GOOD, out=torch.empty(1, 96))),
    (
        ValueError,
        r"out is torch.uint8 \[1, 95\] on cpu; give a contiguous torch.uint8 \[1, 96\] on cpu",
        lambda: compress(GOOD, out=torch.empty(1, 95, dtype=torch.uint8)),
    ),
    (
        ValueError,
        "out is torch.uint8 .* on meta",
        lambda: compress(GOOD, out=torch.empty(1, 96, dtype=torch.uint8, device="meta")),
    ),
    (TypeError, "compressed is torch.int8", lambda: decompress(PACKED.to(torch.int8), GOOD)),
    (ValueError, r"compressed is torch.uint8 \[128\].* two dimensions", lambda: decompress(PACKED.view(-1), GOOD)),
    (ValueError, r"give a contiguous torch.uint8 \[2, 64\]", lambda: decompress(PACKED[:, :63], GOOD)),
    (ValueError, "not contiguous; give a contiguous", lambda: decompress(PACKED.repeat(1, 2)[:, ::2], GOOD)),
    (ValueError, r"give a contiguous torch.uint8 \[2, 64\]", lambda: decompress(PACKED.repeat(1, 2), GOOD)),
    (
        ValueError,
        "target has 65 elements, which the 2 chunks do not divide",
        lambda: decompress(PACKED, torch.zeros(65)),
    ),
    (TypeError, "target is torch.float64", lambda: decompress(PACKED, GOOD.double())),
    (ValueError, "target is .* not contiguous", lambda: decompress(PACKED, torch.zeros(128)[::2])),
    (
        ValueError,
        "compressed is .* on cpu; give .* on meta",
        lambda: decompress(PACKED, torch.empty(64, device="meta")),
    ),
    (ValueError, "received is .* two dimensions", lambda: decompress_reduce_compress(PACKED[0], 32, True)),
    (ValueError, "received is .* two dimensions", lambda: decompress_reduce_compress(PACKED[:0], 32, True)),
    (ValueError, r"give a contiguous torch.uint8 \[2, 96\]", lambda: decompress_reduce_compress(PACKED, 33, True)),
    (TypeError, "received is torch.float32", lambda: decompress_reduce_compress(GOOD.view(2, 32), 32, True)),
    (
        ValueError,
        r"out is torch.uint8 \[1, 64\]",
        lambda: decompress_reduce_compress(PACKED, 32, True, out=torch.empty(1, 64, dtype=torch.uint8)),
    ),
]


@pytest.mark.parametrize(("error", "message", "call"), WRONG, ids=[f"{i}-{one[1]}" for i, one in enumerate(WRONG)])
def test_wrong_arguments_are_refused(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


def test_other_devices_run_the_reference() -> None:
    assert minmax_uint8._implementation("xpu").__name__ == "bagua.kernels.minmax_uint8_reference"  # type: ignore[attr-defined]


def test_cpu_without_the_compiled_module_runs_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    monkeypatch.setattr(minmax_uint8, "has_triton", has_triton.__wrapped__)
    implementation = minmax_uint8._implementation.__wrapped__
    assert implementation("cpu").__name__ == "bagua.kernels.minmax_uint8_reference"
    with pytest.warns(RuntimeWarning, match="Triton is not installed"):
        assert implementation("cuda").__name__ == "bagua.kernels.minmax_uint8_reference"
