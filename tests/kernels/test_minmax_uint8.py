"""MinMaxUInt8 by its definition: error bound, exactness, what is not finite, and arguments that are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.minmax_data import DTYPES, KINDS, error_bound, numbers
from torch import Tensor

from bagua.kernels import minmax_uint8
from bagua.kernels.minmax_uint8 import (
    BLOCK_ELEMENTS,
    compress,
    compressed_bytes,
    decompress,
    decompress_reduce_compress,
)

FLOATS = {dtype: torch.finfo(dtype) for dtype in DTYPES}


def round_trip(source: Tensor, chunks: int = 1, block: int | None = BLOCK_ELEMENTS) -> Tensor:
    compressed = compress(source, chunks, block_elements=block)
    return decompress(compressed, torch.full_like(source, 7.0), block_elements=block)


def ranges(values: Tensor, chunks: int, block: int | None) -> list[Tensor]:
    """The elements that share a range."""
    size = max(values.numel() // chunks, 1)
    return [part for chunk in values.split(size) for part in chunk.split(min(block or size, size))]


def assert_close(source: Tensor, result: Tensor, chunks: int, block: int | None) -> None:
    for part, decoded in zip(ranges(source, chunks, block), ranges(result, chunks, block), strict=True):
        if part.numel() == 0:
            continue
        if not part.isfinite().all():
            assert decoded.isnan().all()
            continue
        assert (decoded >= part.min()).all()
        assert (decoded <= part.max()).all()
        assert float((part.double() - decoded.double()).abs().max()) <= error_bound(part)
        if part.min() <= 0 <= part.max():
            assert (decoded[part == 0] == 0).all()
        if part.min() == part.max():
            assert (decoded == part).all()


dtypes = st.sampled_from(DTYPES)
blocks = st.sampled_from([None, 1, 2, 31, 32, 100, 512, 1024, 4096, 20000])


@given(
    kind=st.sampled_from(KINDS),
    elements=st.integers(0, 3000),
    chunks=st.integers(1, 4),
    block=blocks,
    dtype=dtypes,
    seed=st.integers(0, 2**32 - 1),
)
def test_error_bound(kind: str, elements: int, chunks: int, block: int | None, dtype: torch.dtype, seed: int) -> None:
    count = max(elements, kind == "few not finite") * chunks
    source = numbers(kind, count, torch.Generator().manual_seed(seed)).to(dtype)
    before = source.clone()
    result = round_trip(source, chunks, block)
    assert torch.equal(source.nan_to_num(), before.nan_to_num())
    assert_close(source, result, chunks, block)


@given(values=st.lists(st.floats(width=32), max_size=40), block=st.sampled_from([None, 1, 3, 7, 1024]))
@example(values=[3.4028234663852886e38, -3.4028234663852886e38, 0.0], block=None)
@example(values=[3.4028234663852886e38, 0.0], block=None)
@example(values=[1e-45, 0.0, -1e-45], block=None)
@example(values=[7.5e-37, 0.0], block=None)
@example(values=[1000.0, 1000.00006103515625], block=None)
@example(values=[-0.0, 0.0], block=None)
def test_error_bound_of_any_floats(values: list[float], block: int | None) -> None:
    source = torch.tensor(values, dtype=torch.float32)
    assert_close(source, round_trip(source, 1, block), 1, block)


@given(values=st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
@example(values=[65504.0, 0.0])
@example(values=[65504.0, -65504.0, 1.0])
@example(values=[6e-8, 0.0])
def test_float16_never_overflows(values: list[float]) -> None:
    source = torch.tensor(values, dtype=torch.float16)
    result = round_trip(source)
    assert result.isfinite().all()
    assert_close(source, result, 1, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_gradients_survive(dtype: torch.dtype) -> None:
    """A constant added to the range, as in the original formula, would make them all one number."""
    scale = 1e-8 if dtype != torch.float16 else 1e-6
    source = (torch.randn(4096, generator=torch.Generator().manual_seed(3)) * scale).to(dtype)
    assert_close(source, round_trip(source), 1, BLOCK_ELEMENTS)
    assert float((source - round_trip(source)).abs().max()) < 0.03 * scale


@pytest.mark.parametrize("shift", [0.0, 1.0, -5.0])
def test_unbiased(shift: float) -> None:
    """The mean error of many elements is that of rounding to the nearest: about none."""
    count = 1 << 20
    source = torch.randn(count, generator=torch.Generator().manual_seed(int(shift) + 9)) + shift
    compressed = compress(source)
    result = decompress(compressed, torch.empty_like(source))
    ends = compressed[0, : count // BLOCK_ELEMENTS * 8].view(torch.float32).view(-1, 2)
    level = float((ends[:, 1] - ends[:, 0]).mean()) / 255
    errors = (result - source).double()
    standard_error = level / math.sqrt(12 * count)
    assert abs(float(errors.mean())) < 5 * standard_error
    assert abs(float(errors.std()) - level / math.sqrt(12)) < 0.05 * level


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_carried(bad: float, dtype: torch.dtype) -> None:
    """It makes its own range NaN, also in the sum with versions that are finite, and no other."""
    source = torch.randn(4 * 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    poisoned = source.clone()
    poisoned[100] = bad
    received = torch.cat([compress(one, block_elements=64) for one in (source, poisoned, source)])
    for result in (
        round_trip(poisoned, block=64),
        decompress(
            decompress_reduce_compress(received, 256, True, block_elements=64).unsqueeze(0),
            torch.empty_like(source),
            block_elements=64,
        ),
    ):
        is_nan = result.isnan().view(4, 64)
        assert is_nan[1].all()
        assert not is_nan[[0, 2, 3]].any()
    whole = round_trip(poisoned, block=None)
    assert whole.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_adds_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    source, before = (torch.randn(1500, generator=generator).to(dtype) for _ in range(2))
    compressed = compress(source)
    decoded = decompress(compressed, torch.empty(1500))
    target = before.clone()
    assert decompress(compressed, target, accumulate=True) is target
    assert torch.equal(target, (before.float() + decoded).to(dtype))


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-3, 1.0, 1e3]), chunks=st.integers(1, 3))
def test_whole_chunks_are_as_the_original_formula(seed: int, scale: float, chunks: int) -> None:
    """On ordinary data: within one level, where that adds 1e-7 to the range and rounds before it takes the offset.

    Levels by their numbers, which are bytes plus that of the lowest: it may be rounded differently.
    """
    elements = 4000
    source = torch.randn(chunks * elements, generator=torch.Generator().manual_seed(seed)) * scale
    compressed = compress(source, chunks, block_elements=None)
    for chunk, values in enumerate(source.split(elements)):
        low, high = values.min(), values.max()
        levels_per_unit = 255 / (high - low + 1e-7)
        upper = torch.round(high * levels_per_unit)
        original = torch.minimum(torch.round(values * levels_per_unit), upper)
        ours = compressed[chunk, 32 : 32 + elements].float() + torch.round(high * (127.5 / (high / 2 - low / 2))) - 255
        assert float((original - ours).abs().max()) <= 1
        assert float((original != ours).float().mean()) < (0.02 if scale >= 1 else 0.2)
        assert torch.equal(compressed[chunk, :8].clone().view(torch.float32), torch.stack([low, high]))


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
    implementation = minmax_uint8._implementation.__wrapped__
    assert implementation("cpu").__name__ == "bagua.kernels.minmax_uint8_reference"
    with pytest.warns(RuntimeWarning, match="Triton is not installed"):
        assert implementation("cuda").__name__ == "bagua.kernels.minmax_uint8_reference"
