"""Codecs on a CUDA device: the bytes and the floats of their formulas in torch, on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.codec_data import SHAPES, differences, fused_differences
from support.minmax_data import KINDS

from bagua.codecs import codec_names, get_codec
from bagua.codecs.portable import PortableCodec

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


# Several tiles; more versions than are added at once.
@pytest.mark.parametrize(("elements", "chunks"), [*SHAPES, (1030, 4), (5000, 10), (1 << 16, 2)])
@pytest.mark.parametrize("name", codec_names())
def test_same_bits_as_the_formula(name: str, elements: int, chunks: int) -> None:
    codec, found = get_codec(name), []
    for kind, dtype in zip(KINDS, itertools.cycle(DTYPES)):
        if isinstance(codec, PortableCodec):
            found += differences(codec, kind, elements, chunks, dtype, "cuda", DTYPES)
        found += fused_differences(codec, kind, elements, chunks, dtype, "cuda")
    assert found == []
