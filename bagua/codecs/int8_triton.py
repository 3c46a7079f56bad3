"""The tiles of int8 for the kernels of bagua.codecs.fused_triton; its own kernels are in bagua.kernels."""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_tiles import decoded as decoded_numbers
from bagua.kernels.minmax_uint8_triton_tiles import larger, load_version, smaller

BLOCK = tl.constexpr(1024)
PARTS = 1  # of a tile, see fused_triton


@triton.jit
def offsets(ROWS: tl.constexpr, BITS: tl.constexpr):  # noqa: ARG001
    return (tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :],)


@triton.jit
def decoded(chunk_at, header_bytes, row, rows, rows_mask, offsets, left, ROWS: tl.constexpr,  # noqa: ARG001
            HARDWARE: tl.constexpr, MASKED: tl.constexpr):  # noqa: ARG001  # fmt: skip
    first = row.to(tl.int64) * BLOCK
    lowest, highest, levels = load_version(
        chunk_at, header_bytes, first, BLOCK, offsets[0], offsets[0] < left, rows, rows_mask, True, MASKED
    )
    values = decoded_numbers(lowest, highest, levels)
    return (smaller(larger(values, lowest[:, None]), highest[:, None]),)
