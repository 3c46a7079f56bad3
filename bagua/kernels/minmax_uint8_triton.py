"""MinMaxUInt8 for tensors on CUDA devices: launches Triton kernels on the caller's current stream.

Nothing here waits for the device. Ranges that fit into a tile take one kernel, which reads every element once; longer
ones take two for compression and for sums, which read twice. Buffers of bytes that do not lie at a multiple of 16 go
through a copy that does. What is launched for a layout is computed once (`_steps`): the host would otherwise take
longer than the device for a few MiB. The arguments were checked by bagua.kernels.minmax_uint8. With TRITON_INTERPRET=1
set before the import the kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bagua.kernels import minmax_uint8_triton_kernels as kernels
from bagua.kernels import minmax_uint8_triton_sum_kernels as sum_kernels
from bagua.kernels.minmax_uint8_layout import ChunkLayout
from bagua.kernels.minmax_uint8_reference import weight_of_widest
from bagua.kernels.minmax_uint8_triton_launch import KernelLaunch, aligned, aligned_like

# By measurement on H100 and H200 (docs/design/compression.md): elements of a tile, and warps (32 threads each) of a
# program. What is done once for a range is done by every thread: the fewer, the better.
TILE_ELEMENTS, WARPS = 1024, 1
# Fewer warps than these leave a device idle; then those of a sum, which has most to do, share a tile.
BUSY_WARPS, SUM_WARPS = 4096, 4
# Registers of a sum. With more of them, too few programs would run side by side; up to 8 versions need fewer than more.
FAST_SUM_REGISTERS, SUM_REGISTERS = 64, 80
# So few tiles are all under way at the same time, whatever registers a program takes.
FEW_TILES = 512
# Ranges of more elements are cut into tiles.
LONGEST_ROW = 4096
LONG_TILE_ELEMENTS, LONG_WARPS = 4096, 8
# A long range is measured by at most so many programs.
PARTIALS = 256
# The second dimension of a grid of programs has at most so many.
MOST_CHUNKS = 65535


@dataclass(frozen=True)
class _Tiling:
    """How tiles cover chunks of one layout."""

    rows: int
    columns: int
    groups: int
    """Of `rows` ranges, in a chunk."""
    tiles: int
    """Of `columns` elements, in a range."""
    steps: int
    """Tiles of a long range that one program measures."""
    warps: int
    registers: int | None = None
    """That a thread may have at most."""
    at_once: bool = False
    """All versions of a sum, up to 8, are loaded before they are added."""

    @property
    def partials(self) -> int:
        """Programs that measure a long range."""
        return -(-self.tiles // self.steps)


def _tiling(layout: ChunkLayout, versions: int) -> _Tiling:
    """`versions`: 0 for what is no sum."""
    columns = _power_of_two(layout.block)
    if columns > LONGEST_ROW:
        tiles = -(-layout.block // LONG_TILE_ELEMENTS)
        steps = _power_of_two(-(-tiles // PARTIALS))
        registers = SUM_REGISTERS if versions else None
        return _Tiling(1, LONG_TILE_ELEMENTS, layout.ranges, tiles, steps, LONG_WARPS, registers)
    # No more rows than there are ranges, or small inputs would mostly compute what masks throw away.
    rows = min(max(TILE_ELEMENTS // columns, 1), _power_of_two(layout.ranges))
    groups = -(-layout.ranges // rows)
    warps, registers, at_once = _way_to_add(versions, groups) if versions else (WARPS, None, False)
    warps = _power_of_two(max(warps * rows * columns // TILE_ELEMENTS, 1))
    return _Tiling(rows, columns, groups, 1, 1, warps, registers, at_once)


def _way_to_add(versions: int, groups: int) -> tuple[int, int | None, bool]:
    """By measurement of 2, 4 and 8 versions of 1, 16 and 256 Mi bytes in all: warps of a tile, registers, at once."""
    is_few = groups <= FEW_TILES
    if versions <= 2:
        return WARPS, FAST_SUM_REGISTERS, True
    if versions <= 4:
        return (2, 128, True) if is_few else (WARPS, FAST_SUM_REGISTERS, False)
    if versions <= 8:
        return (SUM_WARPS, None, True) if is_few else (2, FAST_SUM_REGISTERS, False)
    return max(WARPS, min(BUSY_WARPS // groups, SUM_WARPS)), SUM_REGISTERS, False


def _power_of_two(count: int) -> int:
    """The smallest that is not less."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class _Steps:
    """What is launched for chunks of one layout."""

    last: KernelLaunch
    measure: KernelLaunch | None = None
    """Of long ranges: writes pairs of extremes, which `last` reads."""
    pairs: int = 0
    pair_dtype: torch.dtype = torch.float32

    def launch(self, source: Tensor, out: Tensor) -> None:
        # Bytes are written in vectors.
        result = aligned_like(out)
        if self.measure is None:
            self.last(source, result)
        else:
            pairs = torch.empty((self.pairs, 2), dtype=self.pair_dtype, device=out.device)
            self.measure(source, pairs)
            self.last(source, pairs, result)
        if result is not out:
            out.copy_(result)


@functools.lru_cache(maxsize=4096)
def _steps(make: Callable[..., _Steps], layout: ChunkLayout, *rest: object) -> _Steps:
    """`rest`: everything else that the launches depend on, the dtype of the tensors included."""
    return make(layout, *rest)


def compress(source: Tensor, layout: ChunkLayout, out: Tensor) -> None:
    """As minmax_uint8_reference.compress."""
    if not layout.ranges:
        return
    chunks = out.shape[0]
    if chunks > MOST_CHUNKS:
        rows = source.view(chunks, -1)
        for first in range(0, chunks, MOST_CHUNKS):
            some = slice(first, first + MOST_CHUNKS)
            compress(rows[some], layout, out[some])
        return
    _steps(_steps_of_compress, layout, chunks, source.dtype).launch(source, out)


def decompress(compressed: Tensor, target: Tensor, accumulate: bool, layout: ChunkLayout) -> None:
    """As minmax_uint8_reference.decompress."""
    if not layout.ranges:
        return
    chunks = compressed.shape[0]
    compressed = aligned(compressed)
    if chunks > MOST_CHUNKS:
        rows = target.view(chunks, -1)
        for first in range(0, chunks, MOST_CHUNKS):
            some = slice(first, first + MOST_CHUNKS)
            decompress(compressed[some], rows[some], accumulate, layout)
        return
    _steps(_steps_of_decompress, layout, chunks, target.dtype, accumulate).last(compressed, target)


def decompress_reduce_compress(received: Tensor, average: bool, layout: ChunkLayout, out: Tensor) -> None:
    """As minmax_uint8_reference.decompress_reduce_compress."""
    if layout.ranges:
        _steps(_steps_of_sum, layout, received.shape[0], average).launch(aligned(received), out)


def _steps_of_compress(layout: ChunkLayout, chunks: int, dtype: torch.dtype) -> _Steps:  # noqa: ARG001 (in the key)
    tiling = _tiling(layout, 0)
    options = _options(tiling)
    shape = (layout.elements, layout.block, layout.ranges)
    sizes = (layout.header_bytes, layout.total_bytes)
    constants: dict[str, float] = {"COLUMNS": tiling.columns, "ALIGNED": _tiles_aligned(layout, chunks)}
    if tiling.tiles == 1:
        constants["ROWS"] = tiling.rows
        grid = (tiling.groups, chunks)
        return _Steps(KernelLaunch(kernels.compress_ranges, grid, (*shape, *sizes), constants, options))
    ranges = chunks * layout.ranges
    pairs = ranges * tiling.partials
    measure = KernelLaunch(
        kernels.measure_ranges, (pairs,), (*shape, tiling.partials), {**constants, "STEPS": tiling.steps}, options
    )
    last = KernelLaunch(
        kernels.compress_pieces,
        (ranges * tiling.tiles,),
        (*shape, tiling.tiles, tiling.partials, *sizes),
        {**constants, "PARTIALS": _power_of_two(tiling.partials)},
        options,
    )
    return _Steps(last, measure, pairs)


def _steps_of_decompress(
    layout: ChunkLayout,
    chunks: int,
    dtype: torch.dtype,  # noqa: ARG001 (in the key)
    accumulate: bool,
) -> _Steps:
    tiling = _tiling(layout, 0)
    launch = KernelLaunch(
        kernels.decompress_tiles,
        (tiling.groups * tiling.tiles, chunks),
        (layout.elements, layout.block, layout.ranges, tiling.tiles, layout.header_bytes, layout.total_bytes),
        {
            "ACCUMULATE": accumulate,
            "ROWS": tiling.rows,
            "COLUMNS": tiling.columns,
            "ALIGNED": _tiles_aligned(layout, chunks),
            "LONG": tiling.tiles > 1,
        },
        _options(tiling),
    )
    return _Steps(launch)


def _steps_of_sum(layout: ChunkLayout, versions: int, average: bool) -> _Steps:
    tiling = _tiling(layout, versions)
    options = {**_options(tiling), "maxnreg": tiling.registers}
    factor = 1.0 / versions if average else 1.0
    shape = (layout.elements, layout.block, layout.ranges)
    sizes = (layout.header_bytes, layout.total_bytes)
    constants: dict[str, float] = {
        "VERSIONS": versions,
        "WIDEST": weight_of_widest(versions),
        "AHEAD": versions if tiling.at_once else min(2, versions),
        # A tile of sums consists of words of four elements.
        "COLUMNS": max(tiling.columns, 4),
        "ALIGNED": _tiles_aligned(layout, 1),
    }
    if tiling.tiles == 1:
        constants["ROWS"] = tiling.rows
        arguments = (*shape, *sizes, factor)
        return _Steps(KernelLaunch(sum_kernels.sum_ranges, (tiling.groups,), arguments, constants, options))
    pairs = layout.ranges * tiling.partials
    measure = KernelLaunch(
        sum_kernels.measure_sums,
        (pairs,),
        (*shape, tiling.partials, *sizes),
        {**constants, "STEPS": tiling.steps},
        options,
    )
    last = KernelLaunch(
        sum_kernels.sum_pieces,
        (layout.ranges * tiling.tiles,),
        (*shape, tiling.tiles, tiling.partials, *sizes, factor),
        {**constants, "PARTIALS": _power_of_two(tiling.partials)},
        options,
    )
    return _Steps(last, measure, pairs, torch.int32)


def _options(tiling: _Tiling) -> dict[str, int | None]:
    return {"num_warps": tiling.warps, "enable_fp_fusion": False}


def _tiles_aligned(layout: ChunkLayout, chunks: int) -> bool:
    """Whether every tile begins at a multiple of 16 elements from the start of the tensor."""
    return (chunks == 1 or layout.elements % 16 == 0) and (layout.ranges == 1 or layout.block % 16 == 0)
