"""The Triton kernels of bagua.codecs.fused, for all codecs with device code.

A codec's module has two functions:

    offsets(ROWS, BITS)        the elements of a tile of ROWS blocks, as PARTS tensors of offsets, laid out for elements
                               of so many bits
    decoded(chunk_at, header_bytes, row, rows, rows_mask, offsets, left, ROWS, HARDWARE, MASKED)
                               those elements in fp32: PARTS tensors

A tile has ROWS blocks of BLOCK elements from block `row` on, of which `left` elements are in the chunk. MASKED: not all
of the tile may be. HARDWARE: the device converts the codes. The kernels are compiled as those of
bagua.codecs.block_scale_triton, and give the bits of the operations that they stand for.
"""

# Triton reads the sources of these functions; their arguments have no Python types.
# mypy: disable-error-code="assignment, misc, no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from bagua.kernels.minmax_uint8_triton_tiles import load, quantized, scale_and_bias, store, store_ends, store_padding

# Of a range of int8: what is stored of a chunk of which nothing was taken.
RANGE = tl.constexpr(1024)
LEVEL_OF_NOTHING = tl.constexpr(255)
# Up to so many versions are on their way before the first is added.
MOST_AT_ONCE = tl.constexpr(8)


@triton.jit
def _loaded(pointer, offsets, left, PARTS: tl.constexpr, MASKED: tl.constexpr):
    values = ()
    for part in tl.static_range(PARTS):
        values = values + (load(pointer + offsets[part], offsets[part] < left, MASKED).to(tl.float32),)
    return values


@triton.jit
def _stored(pointer, offsets, left, values, PARTS: tl.constexpr, MASKED: tl.constexpr):
    for part in tl.static_range(PARTS):
        store(pointer + offsets[part], values[part].to(pointer.dtype.element_ty), offsets[part] < left, MASKED)


@triton.jit
def _sum(one, other, PARTS: tl.constexpr):
    total = ()
    for part in tl.static_range(PARTS):
        total = total + (one[part] + other[part],)
    return total


@triton.jit
def _finite(values):
    return tl.where(tl.abs(values) < float("inf"), values, 0.0)


@triton.jit
def _reduce_tile(
    received, own_at, out_at, left, factor, header_bytes, stride, row, rows, rows_mask, OFFSETS: tl.constexpr,
    DECODED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, VERSIONS: tl.constexpr, POSITION: tl.constexpr,
    HARDWARE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    offsets = OFFSETS(ROWS, own_at.dtype.element_ty.primitive_bitwidth)
    own = _loaded(own_at, offsets, left, PARTS, MASKED)
    total = ()
    for part in tl.static_range(PARTS):
        total = total + (tl.zeros(offsets[part].shape, tl.float32),)
    if VERSIONS <= MOST_AT_ONCE:
        for _ in tl.static_range(POSITION):
            one = DECODED(received, header_bytes, row, rows, rows_mask, offsets, left, ROWS, HARDWARE, MASKED)
            total = _sum(total, one, PARTS)
            received += stride
        total = _sum(total, own, PARTS)
        for _ in tl.static_range(POSITION + 1, VERSIONS):
            received += stride
            one = DECODED(received, header_bytes, row, rows, rows_mask, offsets, left, ROWS, HARDWARE, MASKED)
            total = _sum(total, one, PARTS)
    else:
        for _ in tl.range(POSITION):
            one = DECODED(received, header_bytes, row, rows, rows_mask, offsets, left, ROWS, HARDWARE, MASKED)
            total = _sum(total, one, PARTS)
            received += stride
        total = _sum(total, own, PARTS)
        for _ in tl.range(POSITION + 1, VERSIONS):
            received += stride
            one = DECODED(received, header_bytes, row, rows, rows_mask, offsets, left, ROWS, HARDWARE, MASKED)
            total = _sum(total, one, PARTS)
    means = ()
    for part in tl.static_range(PARTS):
        means = means + (total[part] * factor,)
    _stored(out_at, offsets, left, means, PARTS, MASKED)


@triton.jit
def reduce_tiles(
    received, own, out, elements, blocks, header_bytes, stride, factor, OFFSETS: tl.constexpr, DECODED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, VERSIONS: tl.constexpr, POSITION: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """decompress_reduce: one program for each tile."""
    row = tl.program_id(0) * ROWS
    rows = row + tl.arange(0, ROWS)
    rows_mask = rows < blocks
    start = row.to(tl.int64) * BLOCK
    left = elements - start
    if left >= ROWS * BLOCK:
        _reduce_tile(
            received, own + start, out + start, left, factor, header_bytes, stride, row, rows, rows_mask, OFFSETS,
            DECODED, PARTS, ROWS, VERSIONS, POSITION, HARDWARE, False,
        )  # fmt: skip
    else:
        _reduce_tile(
            received, own + start, out + start, left, factor, header_bytes, stride, row, rows, rows_mask, OFFSETS,
            DECODED, PARTS, ROWS, VERSIONS, POSITION, HARDWARE, True,
        )  # fmt: skip


@triton.jit
def _rest_tile(
    values_at, sent_at, out_at, left, header_bytes, out_header_bytes, range_row, row, rows, rows_mask, ranges,
    OFFSETS: tl.constexpr, DECODED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    element = values_at.dtype.element_ty
    offsets = OFFSETS(ROWS, element.primitive_bitwidth)
    values = _loaded(values_at, offsets, left, PARTS, MASKED)
    decoded = DECODED(sent_at, header_bytes, row, rows, rows_mask, offsets, left, ROWS, HARDWARE, MASKED)
    rests = ()
    for part in tl.static_range(PARTS):
        rests = rests + (_finite((values[part] - decoded[part]).to(element).to(tl.float32)),)
    # Finite, so that no NaN has to be kept.
    smallest = rests[0]
    largest = rests[0]
    if MASKED:
        smallest = tl.where(offsets[0] < left, smallest, float("inf"))
        largest = tl.where(offsets[0] < left, largest, float("-inf"))
    for part in tl.static_range(1, PARTS):
        if MASKED:
            smallest = tl.minimum(smallest, tl.where(offsets[part] < left, rests[part], float("inf")))
            largest = tl.maximum(largest, tl.where(offsets[part] < left, rests[part], float("-inf")))
        else:
            smallest = tl.minimum(smallest, rests[part])
            largest = tl.maximum(largest, rests[part])
    # Added to 0.0, -0.0 becomes 0.0, as it is stored.
    nothing = tl.zeros([1], tl.float32)
    lowest, highest = tl.min(smallest) + nothing, tl.max(largest) + nothing
    scale, bias = scale_and_bias(lowest, highest)
    codes_at = out_at + out_header_bytes + range_row.to(tl.int64) * RANGE
    for part in tl.static_range(PARTS):
        store(codes_at + offsets[part], quantized(rests[part], scale, bias), offsets[part] < left, MASKED)
    range_rows = range_row + tl.arange(0, 1)
    store_ends(out_at, range_rows, range_rows < ranges, lowest, highest)


@triton.jit(do_not_specialize=["ranges", "chunks", "exact"])
def rest_ranges(
    values, sent, out, elements, blocks, ranges, chunks, exact, header_bytes, stride, out_header_bytes, out_stride,
    OFFSETS: tl.constexpr, DECODED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: ARG001 (as others)
    ROWS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """compress_rest: one program for each range of int8, which is ROWS blocks, of each chunk but the exact one, whose
    ranges are written beside those of the first other."""
    others = tl.maximum(chunks - 1, 1)
    program = tl.program_id(0)
    range_row = program // others
    other = program % others
    range_rows = range_row + tl.arange(0, 1)
    start = range_row.to(tl.int64) * RANGE
    left = elements - start
    is_last = range_row + 1 == ranges
    if other == 0:
        exact_at = out + exact.to(tl.int64) * out_stride
        columns = tl.arange(0, RANGE)
        codes = tl.full([RANGE], LEVEL_OF_NOTHING, tl.uint8)
        tl.store(exact_at + out_header_bytes + start + columns, codes, mask=columns < left)
        nothing = tl.zeros([1], tl.float32)
        store_ends(exact_at, range_rows, range_rows < ranges, nothing, nothing)
        if is_last:
            store_padding(exact_at, elements, ranges, out_header_bytes, out_stride)
    chunk = other + (other >= exact).to(tl.int32)
    if chunk < chunks:
        row = range_row * ROWS
        rows = row + tl.arange(0, ROWS)
        rows_mask = rows < blocks
        values_at = values + (chunk.to(tl.int64) * elements + start)
        sent_at = sent + chunk.to(tl.int64) * stride
        out_at = out + chunk.to(tl.int64) * out_stride
        if left >= RANGE:
            _rest_tile(
                values_at, sent_at, out_at, left, header_bytes, out_header_bytes, range_row, row, rows, rows_mask,
                ranges, OFFSETS, DECODED, PARTS, ROWS, HARDWARE, False,
            )  # fmt: skip
        else:
            _rest_tile(
                values_at, sent_at, out_at, left, header_bytes, out_header_bytes, range_row, row, rows, rows_mask,
                ranges, OFFSETS, DECODED, PARTS, ROWS, HARDWARE, True,
            )  # fmt: skip
        if is_last:
            store_padding(out_at, elements, ranges, out_header_bytes, out_stride)


@triton.jit
def _differences_tile(
    differences_at, reference_at, out_at, left, header_bytes, row, rows, rows_mask, OFFSETS: tl.constexpr,
    DECODED: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    offsets = OFFSETS(ROWS, reference_at.dtype.element_ty.primitive_bitwidth)
    values = _loaded(reference_at, offsets, left, PARTS, MASKED)
    decoded = DECODED(differences_at, header_bytes, row, rows, rows_mask, offsets, left, ROWS, HARDWARE, MASKED)
    moved = ()
    for part in tl.static_range(PARTS):
        moved = moved + (_finite(values[part]) + decoded[part],)
    _stored(reference_at, offsets, left, moved, PARTS, MASKED)
    _stored(out_at, offsets, left, moved, PARTS, MASKED)


@triton.jit
def differences_tiles(
    differences, reference, out, elements, blocks, groups, header_bytes, stride, OFFSETS: tl.constexpr,
    DECODED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """add_differences: one program for each tile of each chunk."""
    program = tl.program_id(0)
    row = program % groups * ROWS
    chunk = (program // groups).to(tl.int64)
    rows = row + tl.arange(0, ROWS)
    rows_mask = rows < blocks
    start = row.to(tl.int64) * BLOCK
    left = elements - start
    at = chunk * elements + start
    differences_at = differences + chunk * stride
    if left >= ROWS * BLOCK:
        _differences_tile(
            differences_at, reference + at, out + at, left, header_bytes, row, rows, rows_mask, OFFSETS, DECODED,
            PARTS, ROWS, HARDWARE, False,
        )  # fmt: skip
    else:
        _differences_tile(
            differences_at, reference + at, out + at, left, header_bytes, row, rows, rows_mask, OFFSETS, DECODED,
            PARTS, ROWS, HARDWARE, True,
        )  # fmt: skip
