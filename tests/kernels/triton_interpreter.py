"""Compares the Triton kernels of MinMaxUInt8, run by Triton's interpreter on CPU tensors, with the reference: a sixth
of the cases, or with the argument `all` all of them.

A program of its own, because TRITON_INTERPRET must be set before the kernels are imported. Prints a line for every
difference. The interpreter takes some 20 us for an element of a reduction, hence the small sizes.
"""

from __future__ import annotations

import itertools
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import warnings

import torch
from support.minmax_data import KINDS, Case, differences

from bagua.kernels import minmax_uint8_reference, minmax_uint8_triton

# The interpreter makes bf16 of fp32 by cutting off, and of subnormal numbers something else: not tested here.
TARGETS = (torch.float32, torch.float16)


def cases() -> list[Case]:
    # Odd ends, ranges that are not powers of two, one element to a range, chunks that do not begin aligned, full tiles.
    shapes = [(70, 1, 32), (1, 1, 1024), (7, 3, 3), (33, 3, 4), (40, 1, 1), (96, 2, 16), (64, 1, None), (37, 2, None)]
    found = [Case(kind, *shape, torch.float32) for kind, shape in zip(KINDS, itertools.cycle(shapes), strict=False)]
    return found + [Case("normal", 40, 2, 16, dtype) for dtype in (torch.float16, torch.bfloat16)]


def long_ranges() -> list[Case]:
    """With LONGEST_ROW 16: ranges of several tiles, more than a program measures; shorter last tiles and ranges."""
    shapes = [(40, 2, None), (70, 1, 50)]
    found = [Case("normal", elements, chunks, block, torch.float32) for elements, chunks, block in shapes]
    return [*found, Case("few not finite", 60, 1, 40, torch.float16), Case("constant", 70, 1, None, torch.float32)]


def run(found: list[Case]) -> None:
    for case in found:
        # Whatever the numbers are, they are rounded to a target alike.
        targets = TARGETS if case.kind == "normal" else (torch.float32,)
        for line in differences(minmax_uint8_reference, minmax_uint8_triton, case, targets=targets):  # type: ignore[arg-type]
            print(line)


def many_versions() -> None:
    """Loaded at once, and one after the other in a loop: with full tiles, and with a shorter last range."""
    for elements, versions in ((64, 1), (64, 6), (40, 11)):
        case = Case("normal", elements, versions, 32, torch.float32)
        received = torch.empty(versions, case.layout.total_bytes, dtype=torch.uint8)
        minmax_uint8_reference.compress(case.source(), case.layout, received)
        expected, actual = (torch.full((case.layout.total_bytes,), filler, dtype=torch.uint8) for filler in (7, 9))
        minmax_uint8_reference.decompress_reduce_compress(received, True, case.layout, expected)
        minmax_uint8_triton.decompress_reduce_compress(received, True, case.layout, actual)
        if not torch.equal(expected, actual):
            print(f"{versions} versions of {elements} elements differ")


def unaligned_bytes() -> None:
    layout = Case("normal", 70, 2, 32, torch.float32).layout
    source = Case("normal", 70, 2, 32, torch.float32).source()
    expected = torch.empty(2, layout.total_bytes, dtype=torch.uint8)
    minmax_uint8_reference.compress(source, layout, expected)
    out = torch.empty(2 * layout.total_bytes + 1, dtype=torch.uint8)[1:].view(2, -1)
    minmax_uint8_triton.compress(source, layout, out)
    target, reference_target = torch.empty_like(source), torch.empty_like(source)
    minmax_uint8_triton.decompress(out, target, False, layout)
    minmax_uint8_reference.decompress(expected, reference_target, False, layout)
    if not torch.equal(out, expected) or not torch.equal(target, reference_target):
        print("unaligned bytes differ")


if __name__ == "__main__":
    torch.set_num_threads(1)
    # numpy, which computes, mentions divisions by 0 and NaN.
    warnings.simplefilter("ignore", RuntimeWarning)
    every = 1 if sys.argv[1:] == ["all"] else 6
    run(cases()[::every])
    many_versions()
    unaligned_bytes()
    minmax_uint8_triton.LONGEST_ROW = minmax_uint8_triton.LONG_TILE_ELEMENTS = 16
    minmax_uint8_triton.PARTIALS = 2
    minmax_uint8_triton._steps.cache_clear()
    run(long_ranges()[::every])
    print("compared")
