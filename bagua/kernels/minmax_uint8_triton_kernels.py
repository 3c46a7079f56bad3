"""The device code of MinMaxUInt8: Triton kernels that bagua.kernels.minmax_uint8_triton launches.

They compute what bagua.kernels.minmax_uint8_reference does, operation by operation: they are to be compiled without the
contraction of multiplications and additions (enable_fp_fusion=False), divisions are rounded correctly, and adding 2^23
rounds to even. Offsets have 64 bits.

A program handles a tile, which is ROWS ranges by COLUMNS elements; if ROWS is not 1, a range fits into COLUMNS. A chunk
has `groups` of ROWS ranges, a range has `block` elements (the last of a chunk may have fewer) in `tiles` of COLUMNS.
If VERSIONS is 0, `source` is a tensor of floats, else compressed: so many versions of one chunk, whose sum times
`factor` is meant. ALIGNED: tiles begin at multiples of 16 elements. A tile that is full is read without a mask, in
wider pieces.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

# 1 / 127.5 as fp32 has it.
UNITS_PER_LEVEL = tl.constexpr(0.007843137718737125)
# So many versions are summed without a loop, so that their loads are all under way at once.
UNROLLED_VERSIONS = tl.constexpr(8)

# --- ranges -----------------------------------------------------------------------------------------------------------


@triton.jit
def _smaller(one, other):
    return tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _canonical(lowest, highest):
    """As they are stored: both NaN if one is not finite, and no -0.0."""
    finite = (tl.abs(lowest) < float("inf")) & (tl.abs(highest) < float("inf"))
    return tl.where(finite, lowest + 0.0, float("nan")), tl.where(finite, highest + 0.0, float("nan"))


@triton.jit
def _scale(lowest, highest):
    """(levels per unit, number of the lowest level); 0 levels per unit if there is but one level."""
    half = highest * 0.5 - lowest * 0.5
    scale = tl.div_rn(tl.full(half.shape, 127.5, tl.float32), half)
    scale = tl.where(tl.abs(scale) < float("inf"), scale, 0.0)
    # Rounded to even; from 2^23 on all numbers are integers.
    top = highest * scale
    magnitude = tl.abs(top)
    rounded = (magnitude + 8388608.0) - 8388608.0
    rounded = tl.where(top < 0.0, -rounded, rounded)
    return scale, tl.where(magnitude < 8388608.0, rounded, top) - 255.0


@triton.jit
def _levels(lowest, highest):
    """(number of the lowest level, units per level)."""
    scale, lower_bound = _scale(lowest, highest)
    step = (highest * 0.5 - lowest * 0.5) * UNITS_PER_LEVEL
    # One level: (255 - 254) * what it stands for. NaN is in no order, and stays.
    closest_to_zero = tl.where(lowest > 0.0, lowest, tl.where(highest < 0.0, highest, highest - highest))
    return tl.where(scale == 0.0, -254.0, lower_bound), tl.where(scale == 0.0, closest_to_zero, step)


@triton.jit
def _quantized(values, lowest, highest):
    """Bytes of rows of elements, 0 where the ends are NaN."""
    scale, lower_bound = _scale(lowest, highest)
    numbers = values * scale[:, None] - lower_bound[:, None]
    # Not a maximum, which for NaN is 0 on devices and NaN in the interpreter.
    numbers = tl.minimum(tl.where(numbers > 0.0, numbers, 0.0), 255.0)
    # Adding 2^23 rounds to even; the last byte of the sum is the number.
    return ((numbers + 8388608.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def _load_ends(chunk_at, rows, rows_mask):
    pairs = chunk_at.to(tl.pointer_type(tl.float32)) + rows * 2
    return tl.load(pairs, mask=rows_mask, other=0.0), tl.load(pairs + 1, mask=rows_mask, other=0.0)


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
    header_end = ranges.to(tl.int64) * 8 + at
    tl.store(chunk_at + header_end, zeros, mask=header_end < header_bytes)
    end = header_bytes + elements.to(tl.int64) + at
    tl.store(chunk_at + end, zeros, mask=end < stride)


# --- tiles ------------------------------------------------------------------------------------------------------------


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
def _version(chunk_at, header_bytes, offsets, mask, rows, rows_mask, CLAMP: tl.constexpr, MASKED: tl.constexpr):
    """fp32 elements of a compressed chunk."""
    lowest, highest = _load_ends(chunk_at, rows, rows_mask)
    lower_bound, step = _levels(lowest, highest)
    levels = _load(chunk_at + header_bytes + offsets, mask, MASKED).to(tl.float32)
    values = (levels + lower_bound[:, None]) * step[:, None]
    if CLAMP:
        values = _smaller(_larger(values, lowest[:, None]), highest[:, None])
    return values


@triton.jit
def _values(
    source, header_bytes, stride, factor, offsets, mask, rows, rows_mask, VERSIONS: tl.constexpr, MASKED: tl.constexpr
):
    """fp32 elements of the source at `offsets`; anything where the mask is false."""
    if VERSIONS == 0:
        values = _load(source + offsets, mask, MASKED).to(tl.float32)
    else:
        values = _version(source, header_bytes, offsets, mask, rows, rows_mask, False, MASKED)
        version_at = source
        if VERSIONS <= UNROLLED_VERSIONS:
            for _ in tl.static_range(1, VERSIONS):
                version_at += stride
                values += _version(version_at, header_bytes, offsets, mask, rows, rows_mask, False, MASKED)
        else:
            for _ in tl.range(1, VERSIONS):
                version_at += stride
                values += _version(version_at, header_bytes, offsets, mask, rows, rows_mask, False, MASKED)
        values *= factor
    return values


@triton.jit
def _lowest_and_highest(values, mask, MASKED: tl.constexpr):
    """Of each row."""
    if MASKED:
        lowest = tl.reduce(tl.where(mask, values, float("inf")), 1, _smaller)
        highest = tl.reduce(tl.where(mask, values, float("-inf")), 1, _larger)
    else:
        lowest = tl.reduce(values, 1, _smaller)
        highest = tl.reduce(values, 1, _larger)
    return lowest, highest


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _compress_tile(
    source, header_bytes, stride, factor, from_chunk, chunk_at, start, local, mask, rows, rows_mask,
    VERSIONS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    values = _values(
        source, header_bytes, stride, factor, from_chunk + start + local, mask, rows, rows_mask, VERSIONS, MASKED
    )
    lowest, highest = _lowest_and_highest(values, mask, MASKED)
    lowest, highest = _canonical(lowest, highest)
    levels = _quantized(values, lowest, highest)
    if MASKED:
        tl.store(chunk_at + header_bytes + start + local, levels, mask=mask)
    else:
        tl.store(chunk_at + header_bytes + start + local, levels)
    _store_ends(chunk_at, rows, rows_mask, lowest, highest)


@triton.jit(do_not_specialize=["ranges", "groups"])
def compress_ranges(
    source, out, elements, block, ranges, groups, header_bytes, stride, factor,
    VERSIONS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Ranges that fit into a tile: read, measured, and written while they are in registers. One program per group."""
    program = tl.program_id(0)
    chunk = (program // groups).to(tl.int64)
    row = program % groups * ROWS
    rows = row + tl.arange(0, ROWS)
    rows_mask = rows < ranges
    chunk_at = out + chunk * stride
    from_chunk = chunk * elements
    if ALIGNED:
        from_chunk = tl.multiple_of(from_chunk, 16)
    start, local, mask, full = _tile(row, tl.zeros_like(row), block, elements, ROWS, COLUMNS, ALIGNED)
    if full:
        _compress_tile(
            source, header_bytes, stride, factor, from_chunk, chunk_at, start, local, mask, rows, rows_mask,
            VERSIONS, False,
        )  # fmt: skip
    else:
        _compress_tile(
            source, header_bytes, stride, factor, from_chunk, chunk_at, start, local, mask, rows, rows_mask,
            VERSIONS, True,
        )  # fmt: skip
    if row + ROWS >= ranges:
        _store_padding(chunk_at, elements, ranges, header_bytes, stride)


@triton.jit
def _wider(
    lowest, highest, source, header_bytes, stride, factor, offsets, mask, rows, rows_mask,
    VERSIONS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    values = _values(source, header_bytes, stride, factor, offsets, mask, rows, rows_mask, VERSIONS, MASKED)
    if MASKED:
        lowest = _smaller(lowest, tl.where(mask, values, float("inf")))
        highest = _larger(highest, tl.where(mask, values, float("-inf")))
    else:
        lowest = _smaller(lowest, values)
        highest = _larger(highest, values)
    return lowest, highest


@triton.jit(do_not_specialize=["ranges", "partials"])
def measure_ranges(
    source, ends, elements, block, ranges, partials, header_bytes, stride, factor,
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
        offsets = from_chunk + start + local
        if full:
            lowest, highest = _wider(
                lowest, highest, source, header_bytes, stride, factor, offsets, mask, rows, rows_mask, VERSIONS, False
            )
        else:
            lowest, highest = _wider(
                lowest, highest, source, header_bytes, stride, factor, offsets, mask, rows, rows_mask, VERSIONS, True
            )
        tile += partials
    pair = ends + program.to(tl.int64) * 2 + tl.arange(0, 1)
    tl.store(pair, tl.reduce(lowest, 1, _smaller))
    tl.store(pair + 1, tl.reduce(highest, 1, _larger))


@triton.jit
def _quantize_tile(
    source, header_bytes, stride, factor, from_chunk, chunk_at, start, local, mask, rows, rows_mask, lowest, highest,
    VERSIONS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    values = _values(
        source, header_bytes, stride, factor, from_chunk + start + local, mask, rows, rows_mask, VERSIONS, MASKED
    )
    levels = _quantized(values, lowest, highest)
    if MASKED:
        tl.store(chunk_at + header_bytes + start + local, levels, mask=mask)
    else:
        tl.store(chunk_at + header_bytes + start + local, levels)


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
    lowest = tl.reduce(tl.load(pairs, mask=partial < partials, other=float("inf")), 1, _smaller)
    highest = tl.reduce(tl.load(pairs + 1, mask=partial < partials, other=float("-inf")), 1, _larger)
    lowest, highest = _canonical(lowest, highest)
    start, local, mask, full = _tile(row, tile, block, elements, 1, COLUMNS, ALIGNED)
    if full:
        _quantize_tile(
            source, header_bytes, stride, factor, from_chunk, chunk_at, start, local, mask, rows, rows_mask,
            lowest, highest, VERSIONS, False,
        )  # fmt: skip
    else:
        _quantize_tile(
            source, header_bytes, stride, factor, from_chunk, chunk_at, start, local, mask, rows, rows_mask,
            lowest, highest, VERSIONS, True,
        )  # fmt: skip
    if tile == 0:
        _store_ends(chunk_at, rows, rows_mask, lowest, highest)
        if row + 1 == ranges:
            _store_padding(chunk_at, elements, ranges, header_bytes, stride)


@triton.jit
def _decompress_tile(
    chunk_at, header_bytes, target_at, start, local, mask, rows, rows_mask,
    ACCUMULATE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    values = _version(chunk_at, header_bytes, start + local, mask, rows, rows_mask, True, MASKED)
    pointers = target_at + start + local
    if ACCUMULATE:
        values = _load(pointers, mask, MASKED).to(tl.float32) + values
    values = values.to(pointers.dtype.element_ty)
    if MASKED:
        tl.store(pointers, values, mask=mask)
    else:
        tl.store(pointers, values)


@triton.jit(do_not_specialize=["ranges", "groups", "tiles"])
def decompress_tiles(
    compressed, target, elements, block, ranges, groups, tiles, header_bytes, stride,
    ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program per tile, of ranges that fit into it or of long ones."""
    program = tl.program_id(0)
    tile = program % tiles
    row = program // tiles % groups * ROWS
    chunk = (program // tiles // groups).to(tl.int64)
    rows = row + tl.arange(0, ROWS)
    rows_mask = rows < ranges
    chunk_at = compressed + chunk * stride
    to_chunk = chunk * elements
    if ALIGNED:
        to_chunk = tl.multiple_of(to_chunk, 16)
    start, local, mask, full = _tile(row, tile, block, elements, ROWS, COLUMNS, ALIGNED)
    if full:
        _decompress_tile(
            chunk_at, header_bytes, target + to_chunk, start, local, mask, rows, rows_mask, ACCUMULATE, False
        )
    else:
        _decompress_tile(
            chunk_at, header_bytes, target + to_chunk, start, local, mask, rows, rows_mask, ACCUMULATE, True
        )
