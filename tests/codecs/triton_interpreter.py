"""Compares the Triton kernels of codecs, run by Triton's interpreter on CPU tensors, with the formula in torch: each
codec a twelfth of the kinds of numbers, or with the argument `all` all of them.

A program of its own, because TRITON_INTERPRET must be set before the kernels are imported. Prints a line for every
difference.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import warnings

import torch
from support.codec_data import SHAPES, differences, fused_differences
from support.minmax_data import KINDS

from bagua.codecs import block_scale_launch, codec_names, get_codec
from bagua.codecs.portable import PortableCodec

# The interpreter makes bf16 of fp32 by cutting off, and of subnormal numbers something else: not tested here.
TARGETS = (torch.float32, torch.float16)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # numpy, which computes, mentions divisions by 0, NaN and sums that wrap around.
    warnings.simplefilter("ignore", RuntimeWarning)
    block_scale_launch.TILE_ELEMENTS = 256
    every = 1 if sys.argv[1:] == ["all"] else 12
    for first, codec in enumerate(map(get_codec, codec_names())):
        if isinstance(codec, PortableCodec):
            for number, kind in list(enumerate(KINDS))[first % every :: every]:
                elements, chunks = SHAPES[number % len(SHAPES)]
                dtype = TARGETS[number % 2]
                for line in differences(codec, kind, elements, chunks, dtype, "cpu", TARGETS):
                    print(line)
            for line in differences(codec, "normal", 40, 2, torch.bfloat16, "cpu", TARGETS):
                print(line)
            for versions in (4, 5, 9) if every == 1 else ((4, 5, 9)[first % 3],):
                for line in differences(codec, "normal", 300, versions, torch.float32, "cpu", TARGETS[:1]):
                    print(line)
        # More than one tile and chunk for int4 and int8; more versions than are added at once for the others; with the
        # argument `all`, both for all, and all kinds.
        cases = [("few not finite", 1030, 2), ("normal", 40, 10)]
        cases = [*cases, *((kind, 33, 2) for kind in KINDS)] if every == 1 else [cases[int(first < 2)]]
        for number, (kind, elements, chunks) in enumerate(cases):
            for line in fused_differences(codec, kind, elements, chunks, TARGETS[number % 2], "cpu"):
                print(line)
    print("compared")
