"""Sums of compressed versions by their definition: how exact they are, and what is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.minmax_data import DTYPES, error_bound, numbers
from torch import Tensor

from bagua.kernels.minmax_uint8 import BLOCK_ELEMENTS, compress, decompress, decompress_reduce_compress


def levels_of(compressed: Tensor, elements: int, block: int) -> tuple[Tensor, Tensor]:
    """(what every byte stands for, how far levels lie apart): [versions, ranges, block] and [versions, ranges, 1].

    In fp64, without clamping to the ends; of ranges whose levels are normal numbers.
    """
    ranges = elements // block
    header = compressed.shape[1] - elements
    ends = compressed[:, : 8 * ranges].clone().view(torch.float32).view(-1, ranges, 2)
    lowest, highest = ends[..., :1], ends[..., 1:]
    half = highest * 0.5 - lowest * 0.5
    zero = 255.0 - (highest * (torch.full_like(half, 127.5) / half)).round().double()
    step = half.double() / 127.5
    return (compressed[:, header:].view(-1, ranges, block).double() - zero) * step, step


@given(
    kind=st.sampled_from(["normal", "far from zero", "positive", "apart"]),
    versions=st.integers(1, 20),
    average=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_error_bound(kind: str, versions: int, average: bool, seed: int) -> None:
    """Half a level of the result and 3 parts of it, and 2 parts of a level of the widest version for every other.

    A level has 128 parts; that of the widest version 64 with 3 or 4 versions, and 32 with 5 to 8.
    """
    elements, block = 640, 128
    generator = torch.Generator().manual_seed(seed)
    sources = []
    for version in range(versions):
        if kind == "positive":
            source = torch.rand(elements, generator=generator) * (1 + version)
        elif kind == "apart":
            source = numbers("normal", elements, generator) * 10.0 ** -(version % 7)
        else:
            source = numbers(kind, elements, generator)
        sources.append(source)
    received = torch.cat([compress(source, block_elements=block) for source in sources])
    reduced = decompress_reduce_compress(received, elements, average, block_elements=block).unsqueeze(0)
    values, steps = levels_of(received, elements, block)
    factor = 1 / versions if average else 1.0
    exact = values.sum(dim=0) * factor
    result, step = levels_of(reduced, elements, block)
    parts = 128 if versions <= 2 or versions > 8 else 64 if versions <= 4 else 32
    adding = steps.amax(dim=0) * factor * (versions - 1) * 2 / parts
    last_places = torch.finfo(torch.float32).eps * values.abs().sum(dim=0).amax() * (versions + 4)
    assert ((result - exact).abs() <= step * (0.5 + 3 / 128) + adding + last_places).all()


@pytest.mark.parametrize("versions", [1, 2, 3, 8, 9, 40])
def test_unbiased(versions: int) -> None:
    """The errors of many elements have a mean of about none, for numbers on both sides of zero and on one."""
    elements = 1 << 16
    generator = torch.Generator().manual_seed(versions)
    for positive in (False, True):
        sources = [torch.randn(elements, generator=generator) * (1 + 0.1 * rank) for rank in range(versions)]
        received = torch.cat([compress(source.abs() if positive else source) for source in sources])
        reduced = decompress_reduce_compress(received, elements, True).unsqueeze(0)
        values, _ = levels_of(received, elements, BLOCK_ELEMENTS)
        result, step = levels_of(reduced, elements, BLOCK_ELEMENTS)
        assert abs(float(((result - values.mean(dim=0)) / step).mean())) < 0.02


@pytest.mark.parametrize("versions", [1, 2, 3, 5, 8, 9, 33])
@pytest.mark.parametrize("average", [False, True])
def test_what_is_zero_in_all_versions_stays_zero(versions: int, average: bool) -> None:
    """Rows of an embedding that no rank has touched, whatever the sizes of the others."""
    generator = torch.Generator().manual_seed(versions)
    touched = torch.rand(8192, generator=generator) < 0.1
    received = torch.cat(
        [
            compress(torch.randn(8192, generator=generator) * touched * 10.0 ** -(rank % 5) * (-1) ** rank)
            for rank in range(versions)
        ]
    )
    reduced = decompress_reduce_compress(received, 8192, average).unsqueeze(0)
    result = decompress(reduced, torch.empty(8192))
    assert (result[~touched] == 0).all()
    assert int((result[touched] != 0).sum()) > 700


@pytest.mark.parametrize("versions", [2, 4, 8, 16])
def test_equal_levels_are_added_exactly(versions: int) -> None:
    """Versions with the same ends: their bytes are added as they are, and the mean has only the result's rounding."""
    source = torch.arange(1024).remainder(256).float() - 100.0
    received = compress(source).repeat(versions, 1)
    reduced = decompress_reduce_compress(received, 1024, True).unsqueeze(0)
    assert torch.equal(decompress(reduced, torch.empty(1024)), source)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_of_versions(average: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    for versions in (1, 2, 3, 8, 17):
        sources = [(torch.randn(5000, generator=generator) * (1 + rank)).to(dtype) for rank in range(versions)]
        received = torch.cat([compress(source) for source in sources])
        result = torch.empty(5000)
        decompress(decompress_reduce_compress(received, 5000, average).unsqueeze(0), result)
        exact = sum(source.double() for source in sources) / (versions if average else 1)
        assert isinstance(exact, Tensor)
        for number, part in enumerate(exact.split(BLOCK_ELEMENTS)):
            places = slice(number * BLOCK_ELEMENTS, number * BLOCK_ELEMENTS + part.numel())
            bound = sum(error_bound(source[places].float()) for source in sources) / (versions if average else 1)
            level = (float(part.max() - part.min()) + 2 * bound) / 255
            assert float((result[places] - part).abs().max()) <= bound + level / 2 + 1e-4


def test_sum_is_made_in_the_order_of_the_versions() -> None:
    """(1e8 + 1) - 1e8 is 0 in fp32, and 1 in another order."""
    parts = [torch.full((64,), value) for value in (1e8, 1.0, -1e8)]

    def sum_of(order: tuple[int, ...]) -> float:
        received = torch.cat([compress(parts[i]) for i in order])
        compressed = decompress_reduce_compress(received, 64, False)
        return float(decompress(compressed.unsqueeze(0), torch.empty(64))[0])

    assert sum_of((0, 1, 2)) == 0.0
    assert sum_of((0, 2, 1)) == 1.0


def test_mean_multiplies_by_the_reciprocal() -> None:
    received = torch.cat([compress(torch.full((32,), 0.1)) for _ in range(3)])
    result = decompress(decompress_reduce_compress(received, 32, True).unsqueeze(0), torch.empty(32))
    one = torch.tensor(0.1)
    assert (result == (one + one + one) * torch.tensor(1 / 3)).all()


def test_a_sum_beyond_fp32_is_nan() -> None:
    received = torch.cat([compress(torch.full((8,), 3e38)) for _ in range(2)])
    result = decompress(decompress_reduce_compress(received, 8, True).unsqueeze(0), torch.empty(8))
    assert result.isnan().all()
