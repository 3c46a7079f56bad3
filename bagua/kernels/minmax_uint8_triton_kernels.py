"""The device code of MinMaxUInt8: Triton kernels that bagua.kernels.minmax_uint8_triton launches.

They compute what bagua.kernels.minmax_uint8_reference does, operation by operation: they are to be compiled without the
contraction of multiplications and additions (enable_fp_fusion=False), and divisions are rounded correctly. Offsets have
64 bits. Sums of several versions are bound by the number of instructions, not by memory: every one for an element, and
every one for a range, which a warp holds, counts.

A program handles a tile, which is ROWS ranges by COLUMNS elements; if ROWS is not 1, a range fits into COLUMNS. A range
has `block` elements (the last of a chunk may have fewer) in `tiles` of COLUMNS. If VERSIONS is 0, `source` is a tensor
of floats, else compressed: so many versions of one chunk, whose sum times `factor` is meant. ALIGNED: tiles begin at
multiples of 16 elements. A tile that is full is read without a mask, in wider pieces.

An integer argument that is 1 may be a number of Python's when a kernel is compiled, which has no methods.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="misc, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_formula import (
    bias_and_step,
    canonical,
    larger,
    numbers_of,
    quantized,
    scale_and_bias,
    smaller,
)

# --- tiles ------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_ends(chunk_at, rows, rows_mask, MASKED: tl.constexpr):
    pairs = chunk_at.to(tl.pointer_type(tl.float32)) + rows * 2
    return _load(pairs, rows_mask, MASKED), _load(pairs + 1, rows_mask, MASKED)


@triton.jit
def _store_ends(chunk_at, rows, rows_mask, lowest, highest):
    pairs = chunk_at.to(tl.pointer_type(tl.float32)) + rows * 2
    tl.store(pairs, lowest, mask=rows_mask)
    tl.store(pairs + 1, highest, mask=rows_mask)


@triton.jit
def _store_padding(chunk_at, elements, ranges, header_bytes, stride):
    """Zeros between the parts of a compressed chunk and after it."""
    at = tl.arange(0, 32)
    zeros = tl.zeros([32], tl.uint8)
    header_end = at.to(tl.int64) + ranges * 8
    tl.store(chunk_at + header_end, zeros, mask=header_end < header_bytes)
    end = at.to(tl.int64) + elements + header_bytes
    tl.store(chunk_at + end, zeros, mask=end < stride)


@triton.jit
def _tile(row, tile, block, elements, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr):
    """(where it begins in its chunk, offsets in it, which of them are elements, whether all are)."""
    columns = tl.arange(0, COLUMNS)[None, :]
    first_column = tile.to(tl.int64) * COLUMNS
    start = row.to(tl.int64) * block + first_column
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    local = tl.arange(0, ROWS)[:, None] * block + columns
    mask = (columns < block - first_column) & (local < elements - start)
    full = (block - first_column >= COLUMNS) & (elements - start >= (ROWS - 1) * block + COLUMNS)
    return start, local, mask, full


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    else:  # noqa: RET505 (a branch that is not taken must not be compiled)
        return tl.load(pointers)


@triton.jit
def _store(pointers, values, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, values, mask=mask)
    else:
        tl.store(pointers, values)


@triton.jit
def _load_version(
    chunk_at, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):
    """(lowest, highest, levels) of a tile of a compressed chunk; the levels as words of four if that can be."""
    lowest, highest = _load_ends(chunk_at, rows, rows_mask, MASKED)
    levels_at = chunk_at + header_bytes + first
    if ALIGNED and not MASKED and local.shape[1] >= 4:
        words = tl.arange(0, local.shape[0])[:, None] * (block // 4) + tl.arange(0, local.shape[1] // 4)[None, :]
        levels = tl.load(levels_at.to(tl.pointer_type(tl.int32)) + words)
    else:
        levels = _load(levels_at + local, mask, MASKED)
    return lowest, highest, levels


@triton.jit
def _decoded(lowest, highest, levels):
    """fp32 elements, of which some may lie half a level outside of their range."""
    bias, step = bias_and_step(lowest, highest)
    return (numbers_of(levels) - bias[:, None]) * step[:, None]


@triton.jit
def _sum_at_once(
    source, header_bytes, stride, first, block, local, mask, rows, rows_mask,
    VERSIONS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """fp32 elements of all versions, which are on their way together."""
    at = source
    loaded = ()
    for _ in tl.static_range(VERSIONS):
        loaded = loaded + _load_version(at, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED, MASKED)
        at += stride
    values = _decoded(loaded[0], loaded[1], loaded[2])
    for version in tl.static_range(1, VERSIONS):
        values += _decoded(loaded[3 * version], loaded[3 * version + 1], loaded[3 * version + 2])
    return values


@triton.jit
def _sum_in_turns(
    source, header_bytes, stride, first, block, local, mask, rows, rows_mask,
    VERSIONS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The same in a loop: registers for many versions would leave room for too few warps."""
    low, high, levels = _load_version(source, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED, MASKED)
    at = source
    if levels.dtype == tl.uint8 or VERSIONS == 1:
        values = _decoded(low, high, levels)
        for _ in tl.range(1, VERSIONS):
            at += stride
            low, high, levels = _load_version(
                at, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED, MASKED
            )
            values += _decoded(low, high, levels)
    else:
        # The next version is on its way while one is added.
        at += stride
        next_low, next_high, next_levels = _load_version(
            at, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED, MASKED
        )
        values = _decoded(low, high, levels)
        for _ in tl.range(2, VERSIONS):
            low, high, levels = next_low, next_high, next_levels
            at += stride
            next_low, next_high, next_levels = _load_version(
                at, header_bytes, first, block, local, mask, rows, rows_mask, ALIGNED, MASKED
            )
            values += _decoded(low, high, levels)
        values += _decoded(next_low, next_high, next_levels)
    return values


@triton.jit
def _values(
    source, header_bytes, stride, first, block, local, mask, rows, rows_mask,
    VERSIONS: tl.constexpr, AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """fp32 elements of the tile that begins with element `first`, or the sum of its versions; anything where masked."""
    if VERSIONS == 0:
        values = _load(source + first + local, mask, MASKED).to(tl.float32)
    elif AT_ONCE and ALIGNED and not MASKED:  # as words: every byte would take a register
        values = _sum_at_once(
            source, header_bytes, stride, first, block, local, mask, rows, rows_mask, VERSIONS, ALIGNED, MASKED
        )
    else:
        values = _sum_in_turns(
            source, header_bytes, stride, first, block, local, mask, rows, rows_mask, VERSIONS, ALIGNED, MASKED
        )
    return values


@triton.jit
def _lowest_and_highest(values, mask, MASKED: tl.constexpr):
    """Of each row."""
    if MASKED:
        lowest = tl.reduce(tl.where(mask, values, float("inf")), 1, smaller)
        highest = tl.reduce(tl.where(mask, values, float("-inf")), 1, larger)
    else:
        lowest = tl.reduce(values, 1, smaller)
        highest = tl.reduce(values, 1, larger)
    return lowest, highest


@triton.jit
def _range_of(lowest, highest, factor, VERSIONS: tl.constexpr):
    """(lowest, highest, scale, bias) of what is compressed, of the extremes of `_values`. The scale is for those."""
    if VERSIONS != 0:
        lowest *= factor
        highest *= factor
    lowest, highest = canonical(lowest, highest)
    scale, bias = scale_and_bias(lowest, highest)
    if VERSIONS != 0:
        scale *= factor
    return lowest, highest, scale, bias


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _compress_tile(
    source, header_bytes, stride, factor, from_chunk, chunk_at, start, block, local, mask, rows, rows_mask,
    VERSIONS: tl.constexpr, AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    values = _values(
        source, header_bytes, stride, from_chunk + start, block, local, mask, rows, rows_mask,
        VERSIONS, AT_ONCE, ALIGNED, MASKED,
    )  # fmt: skip
    lowest, highest = _lowest_and_highest(values, mask, MASKED)
    lowest, highest, scale, bias = _range_of(lowest, highest, factor, VERSIONS)
    levels = quantized(values, scale, bias)
    _store(chunk_at + header_bytes + start + local, levels, mask, MASKED)
    _store_ends(chunk_at, rows, rows_mask, lowest, highest)


@triton.jit(do_not_specialize=["ranges"])
def compress_ranges(
    source, out, elements, block, ranges, header_bytes, stride, factor,
    VERSIONS: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
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
    start, local, mask, full = _tile(row, tl.zeros_like(row), block, elements, ROWS, COLUMNS, ALIGNED)
    if full:
        _compress_tile(
            source, header_bytes, stride, factor, from_chunk, chunk_at, start, block, local, mask, rows, rows_mask,
            VERSIONS, AT_ONCE, ALIGNED, False,
        )  # fmt: skip
    else:
        _compress_tile(
            source, header_bytes, stride, factor, from_chunk, chunk_at, start, block, local, mask, rows, rows_mask,
            VERSIONS, AT_ONCE, ALIGNED, True,
        )  # fmt: skip
    if row + ROWS >= ranges:
        _store_padding(chunk_at, elements, ranges, header_bytes, stride)


@triton.jit
def _wider(
    lowest, highest, source, header_bytes, stride, first, block, local, mask, rows, rows_mask,
    VERSIONS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    values = _values(
        source, header_bytes, stride, first, block, local, mask, rows, rows_mask, VERSIONS, False, ALIGNED, MASKED
    )
    if MASKED:
        lowest = smaller(lowest, tl.where(mask, values, float("inf")))
        highest = larger(highest, tl.where(mask, values, float("-inf")))
    else:
        lowest = smaller(lowest, values)
        highest = larger(highest, values)
    return lowest, highest


@triton.jit(do_not_specialize=["ranges", "partials"])
def measure_ranges(
    source, ends, elements, block, ranges, partials, header_bytes, stride,
    VERSIONS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Long ranges, first step: `partials` pairs of each in `ends`, of up to STEPS tiles each. One program per pair."""
    program = tl.program_id(0)
    row = program // partials % ranges
    rows = row + tl.arange(0, 1)
    rows_mask = rows < ranges
    from_chunk = (program // partials // ranges).to(tl.int64) * elements
    if ALIGNED:
        from_chunk = tl.multiple_of(from_chunk, 16)
    lowest = tl.full([1, COLUMNS], float("inf"), tl.float32)
    highest = tl.full([1, COLUMNS], float("-inf"), tl.float32)
    tile = program % partials
    for _ in range(STEPS):
        start, local, mask, full = _tile(row, tile, block, elements, 1, COLUMNS, ALIGNED)
        first = from_chunk + start
        if full:
            lowest, highest = _wider(
                lowest, highest, source, header_bytes, stride, first, block, local, mask, rows, rows_mask,
                VERSIONS, ALIGNED, False,
            )  # fmt: skip
        else:
            lowest, highest = _wider(
                lowest, highest, source, header_bytes, stride, first, block, local, mask, rows, rows_mask,
                VERSIONS, ALIGNED, True,
            )  # fmt: skip
        tile += partials
    pair = ends + program.to(tl.int64) * 2 + tl.arange(0, 1)
    tl.store(pair, tl.reduce(lowest, 1, smaller))
    tl.store(pair + 1, tl.reduce(highest, 1, larger))


@triton.jit
def _quantize_tile(
    source, header_bytes, stride, from_chunk, chunk_at, start, block, local, mask, rows, rows_mask, scale, bias,
    VERSIONS: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    values = _values(
        source, header_bytes, stride, from_chunk + start, block, local, mask, rows, rows_mask,
        VERSIONS, False, ALIGNED, MASKED,
    )  # fmt: skip
    _store(chunk_at + header_bytes + start + local, quantized(values, scale, bias), mask, MASKED)


@triton.jit(do_not_specialize=["ranges", "tiles", "partials"])
def compress_pieces(
    source, ends, out, elements, block, ranges, tiles, partials, header_bytes, stride, factor,
    VERSIONS: tl.constexpr, COLUMNS: tl.constexpr, PARTIALS: tl.constexpr, ALIGNED: tl.constexpr,
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
    lowest, highest, scale, bias = _range_of(lowest, highest, factor, VERSIONS)
    start, local, mask, full = _tile(row, tile, block, elements, 1, COLUMNS, ALIGNED)
    if full:
        _quantize_tile(
            source, header_bytes, stride, from_chunk, chunk_at, start, block, local, mask, rows, rows_mask,
            scale, bias, VERSIONS, ALIGNED, False,
        )  # fmt: skip
    else:
        _quantize_tile(
            source, header_bytes, stride, from_chunk, chunk_at, start, block, local, mask, rows, rows_mask,
            scale, bias, VERSIONS, ALIGNED, True,
        )  # fmt: skip
    if tile == 0:
        _store_ends(chunk_at, rows, rows_mask, lowest, highest)
        if row + 1 == ranges:
            _store_padding(chunk_at, elements, ranges, header_bytes, stride)


@triton.jit
def _decompress_tile(
    chunk_at, header_bytes, target_at, start, block, local, mask, rows, rows_mask,
    ACCUMULATE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    lowest, highest, levels = _load_version(
        chunk_at, header_bytes, start, block, local, mask, rows, rows_mask, ALIGNED, MASKED
    )
    values = smaller(larger(_decoded(lowest, highest, levels), lowest[:, None]), highest[:, None])
    pointers = target_at + start + local
    if ACCUMULATE:
        values = _load(pointers, mask, MASKED).to(tl.float32) + values
    _store(pointers, values.to(pointers.dtype.element_ty), mask, MASKED)


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
    start, local, mask, full = _tile(row, tile, block, elements, ROWS, COLUMNS, ALIGNED)
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
