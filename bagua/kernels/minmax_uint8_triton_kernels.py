"""The device code of MinMaxUInt8: Triton kernels that bagua.kernels.minmax_uint8_triton launches; those of sums are in
bagua.kernels.minmax_uint8_triton_sum_kernels.

They compute what bagua.kernels.minmax_uint8_reference does, operation by operation: they are to be compiled without the
contraction of multiplications and additions (enable_fp_fusion=False), and divisions are rounded correctly. Offsets have
64 bits.

A program handles a tile; that of measure_ranges several. bagua.kernels.minmax_uint8_triton_tiles says what a tile is,
and what ROWS, COLUMNS, ALIGNED and MASKED mean. A range that does not fit into a tile has `tiles` of them.

An integer argument that is 1 may be a number of Python's when a kernel is compiled, which has no methods.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_tiles import (
    canonical,
    decoded,
    larger,
    load,
    load_version,
    lowest_and_highest,
    quantized,
    scale_and_bias,
    smaller,
    store,
    store_ends,
    store_padding,
    tile_at,
)


@triton.jit
def _compress_tile(values_at, header_bytes, chunk_at, start, local, mask, rows, rows_mask, MASKED: tl.constexpr):
    values = load(values_at + local, mask, MASKED).to(tl.float32)
    lowest, highest = lowest_and_highest(values, mask, MASKED)
    lowest, highest = canonical(lowest, highest)
    scale, bias = scale_and_bias(lowest, highest)
    store(chunk_at + header_bytes + start + local, quantized(values, scale, bias), mask, MASKED)
    store_ends(chunk_at, rows, rows_mask, lowest, highest)


@triton.jit(do_not_specialize=["ranges"])
def compress_ranges(
    source, out, elements, block, ranges, header_bytes, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Ranges that fit into a tile: read, measured, and written while they are in registers. Programs: (tile, chunk)."""
    row = tl.program_id(0) * ROWS
    chunk = tl.program_id(1).to(tl.int64)
    rows = row + tl.arange(0, ROWS)
    rows_mask = rows < ranges
    chunk_at = out + chunk * stride
    from_chunk = chunk * elements
    if ALIGNED:
        from_chunk = tl.multiple_of(from_chunk, 16)
    start, local, mask, full = tile_at(row, tl.zeros_like(row), block, elements, ROWS, COLUMNS, ALIGNED)
    values_at = source + (from_chunk + start)
    if full:
        _compress_tile(values_at, header_bytes, chunk_at, start, local, mask, rows, rows_mask, False)
    else:
        _compress_tile(values_at, header_bytes, chunk_at, start, local, mask, rows, rows_mask, True)
    if row + ROWS >= ranges:
        store_padding(chunk_at, elements, ranges, header_bytes, stride)


@triton.jit
def _wider(lowest, highest, values_at, local, mask, MASKED: tl.constexpr):
    values = load(values_at + local, mask, MASKED).to(tl.float32)
    if MASKED:
        lowest = smaller(lowest, tl.where(mask, values, float("inf")))
        highest = larger(highest, tl.where(mask, values, float("-inf")))
    else:
        lowest = smaller(lowest, values)
        highest = larger(highest, values)
    return lowest, highest


@triton.jit(do_not_specialize=["ranges", "partials"])
def measure_ranges(
    source, ends, elements, block, ranges, partials,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Long ranges, first step: `partials` pairs of each in `ends`, of up to STEPS tiles each. One program per pair."""
    program = tl.program_id(0)
    row = program // partials % ranges
    from_chunk = (program // partials // ranges).to(tl.int64) * elements
    if ALIGNED:
        from_chunk = tl.multiple_of(from_chunk, 16)
    lowest = tl.full([1, COLUMNS], float("inf"), tl.float32)
    highest = tl.full([1, COLUMNS], float("-inf"), tl.float32)
    tile = program % partials
    for _ in range(STEPS):
        start, local, mask, full = tile_at(row, tile, block, elements, 1, COLUMNS, ALIGNED)
        values_at = source + (from_chunk + start)
        if full:
            lowest, highest = _wider(lowest, highest, values_at, local, mask, False)
        else:
            lowest, highest = _wider(lowest, highest, values_at, local, mask, True)
        tile += partials
    pair = ends + program.to(tl.int64) * 2 + tl.arange(0, 1)
    tl.store(pair, tl.reduce(lowest, 1, smaller))
    tl.store(pair + 1, tl.reduce(highest, 1, larger))


@triton.jit
def _quantize_tile(values_at, bytes_at, local, mask, scale, bias, MASKED: tl.constexpr):
    values = load(values_at + local, mask, MASKED).to(tl.float32)
    store(bytes_at + local, quantized(values, scale, bias), mask, MASKED)


@triton.jit(do_not_specialize=["ranges", "tiles", "partials"])
def compress_pieces(
    source, ends, out, elements, block, ranges, tiles, partials, header_bytes, stride,
    COLUMNS: tl.constexpr, PARTIALS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Long ranges, second step, with the pairs of the first, at most PARTIALS of each range. One program per tile."""
    program = tl.program_id(0)
    tile = program % tiles
    row = program // tiles % ranges
    chunk = (program // tiles // ranges).to(tl.int64)
    rows = row + tl.arange(0, 1)
    rows_mask = rows < ranges
    chunk_at = out + chunk * stride
    from_chunk = chunk * elements
    if ALIGNED:
        from_chunk = tl.multiple_of(from_chunk, 16)
    partial = tl.arange(0, PARTIALS)[None, :]
    pairs = ends + ((chunk * ranges + row) * partials + partial) * 2
    lowest = tl.reduce(tl.load(pairs, mask=partial < partials, other=float("inf")), 1, smaller)
    highest = tl.reduce(tl.load(pairs + 1, mask=partial < partials, other=float("-inf")), 1, larger)
    lowest, highest = canonical(lowest, highest)
    scale, bias = scale_and_bias(lowest, highest)
    start, local, mask, full = tile_at(row, tile, block, elements, 1, COLUMNS, ALIGNED)
    values_at = source + (from_chunk + start)
    bytes_at = chunk_at + header_bytes + start
    if full:
        _quantize_tile(values_at, bytes_at, local, mask, scale, bias, False)
    else:
        _quantize_tile(values_at, bytes_at, local, mask, scale, bias, True)
    if tile == 0:
        store_ends(chunk_at, rows, rows_mask, lowest, highest)
        if row + 1 == ranges:
            store_padding(chunk_at, elements, ranges, header_bytes, stride)


@triton.jit
def _decompress_tile(
    chunk_at, header_bytes, target_at, start, block, local, mask, rows, rows_mask,
    ACCUMULATE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    lowest, highest, levels = load_version(
        chunk_at, header_bytes, start, block, local, mask, rows, rows_mask, ALIGNED, MASKED
    )
    values = smaller(larger(decoded(lowest, highest, levels), lowest[:, None]), highest[:, None])
    pointers = target_at + start + local
    if ACCUMULATE:
        values = load(pointers, mask, MASKED).to(tl.float32) + values
    store(pointers, values.to(pointers.dtype.element_ty), mask, MASKED)


@triton.jit(do_not_specialize=["ranges", "tiles"])
def decompress_tiles(
    compressed, target, elements, block, ranges, tiles, header_bytes, stride,
    ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Tiles of ranges that fit into them, or of LONG ones. Programs: (tile, chunk)."""
    program = tl.program_id(0)
    if LONG:
        row = program // tiles
        tile = program % tiles
    else:
        row = program * ROWS
        tile = tl.zeros_like(program)
    chunk = tl.program_id(1).to(tl.int64)
    rows = row + tl.arange(0, ROWS)
    rows_mask = rows < ranges
    chunk_at = compressed + chunk * stride
    to_chunk = chunk * elements
    if ALIGNED:
        to_chunk = tl.multiple_of(to_chunk, 16)
    start, local, mask, full = tile_at(row, tile, block, elements, ROWS, COLUMNS, ALIGNED)
    if full:
        _decompress_tile(
            chunk_at, header_bytes, target + to_chunk, start, block, local, mask, rows, rows_mask,
            ACCUMULATE, ALIGNED, False,
        )  # fmt: skip
    else:
        _decompress_tile(
            chunk_at, header_bytes, target + to_chunk, start, block, local, mask, rows, rows_mask,
            ACCUMULATE, ALIGNED, True,
        )  # fmt: skip
