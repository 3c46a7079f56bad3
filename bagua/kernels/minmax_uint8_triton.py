"""MinMaxUInt8 for tensors on CUDA devices: launches Triton kernels on the caller's current stream.

Nothing here waits for the device. Ranges that fit into a tile take one kernel, which reads every element once; longer
ones take two for compression and for sums, which read twice. Buffers of bytes that do not lie at a multiple of 16 go
through a copy that does. The arguments were checked by bagua.kernels.minmax_uint8. With TRITON_INTERPRET=1 set before
the import the kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from bagua.kernels import minmax_uint8_triton_kernels as kernels
from bagua.kernels import minmax_uint8_triton_sum_kernels as sum_kernels
from bagua.kernels.minmax_uint8_layout import ChunkLayout
from bagua.kernels.minmax_uint8_reference import weight_of_widest

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
# Vector loads and stores take up to so many bytes, and begin at multiples of their size.
ALIGNMENT = 16


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


@functools.lru_cache(maxsize=4096)
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


def compress(source: Tensor, layout: ChunkLayout, out: Tensor) -> None:
    """As minmax_uint8_reference.compress."""
    if layout.ranges:
        with _device_of(source):
            for first in range(0, source.shape[0], MOST_CHUNKS):
                chunks = source[first : first + MOST_CHUNKS]
                _compress(chunks, layout, out[first : first + MOST_CHUNKS])


def decompress(compressed: Tensor, target: Tensor, accumulate: bool, layout: ChunkLayout) -> None:
    """As minmax_uint8_reference.decompress."""
    if layout.ranges:
        compressed = _aligned(compressed)
        with _device_of(target):
            for first in range(0, target.shape[0], MOST_CHUNKS):
                chunks = slice(first, first + MOST_CHUNKS)
                _decompress(compressed[chunks], target[chunks], accumulate, layout)


def _decompress(compressed: Tensor, target: Tensor, accumulate: bool, layout: ChunkLayout) -> None:
    tiling = _tiling(layout, 0)
    chunks = target.shape[0]
    kernels.decompress_tiles[(tiling.groups * tiling.tiles, chunks)](
        compressed,
        target,
        layout.elements,
        layout.block,
        layout.ranges,
        tiling.tiles,
        layout.header_bytes,
        layout.total_bytes,
        ACCUMULATE=accumulate,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        ALIGNED=_tiles_aligned(layout, chunks),
        LONG=tiling.tiles > 1,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
    )


def decompress_reduce_compress(received: Tensor, average: bool, layout: ChunkLayout, out: Tensor) -> None:
    """As minmax_uint8_reference.decompress_reduce_compress."""
    if layout.ranges:
        with _device_of(received):
            _sum(_aligned(received), 1.0 / received.shape[0] if average else 1.0, layout, out)


def _compress(source: Tensor, layout: ChunkLayout, out: Tensor) -> None:
    tiling = _tiling(layout, 0)
    chunks = source.shape[0]
    result = _aligned_for(out)
    aligned = _tiles_aligned(layout, chunks)
    if tiling.tiles == 1:
        kernels.compress_ranges[(tiling.groups, chunks)](
            source,
            result,
            layout.elements,
            layout.block,
            layout.ranges,
            layout.header_bytes,
            layout.total_bytes,
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            ALIGNED=aligned,
            num_warps=tiling.warps,
            enable_fp_fusion=False,
        )
    else:
        pairs = chunks * layout.ranges * tiling.partials
        ends = torch.empty((pairs, 2), dtype=torch.float32, device=out.device)
        kernels.measure_ranges[(pairs,)](
            source,
            ends,
            layout.elements,
            layout.block,
            layout.ranges,
            tiling.partials,
            COLUMNS=tiling.columns,
            STEPS=tiling.steps,
            ALIGNED=aligned,
            num_warps=tiling.warps,
            enable_fp_fusion=False,
        )
        kernels.compress_pieces[(chunks * layout.ranges * tiling.tiles,)](
            source,
            ends,
            result,
            layout.elements,
            layout.block,
            layout.ranges,
            tiling.tiles,
            tiling.partials,
            layout.header_bytes,
            layout.total_bytes,
            COLUMNS=tiling.columns,
            PARTIALS=_power_of_two(tiling.partials),
            ALIGNED=aligned,
            num_warps=tiling.warps,
            enable_fp_fusion=False,
        )
    if result is not out:
        out.copy_(result)


def _sum(received: Tensor, factor: float, layout: ChunkLayout, out: Tensor) -> None:
    versions = received.shape[0]
    tiling = _tiling(layout, versions)
    result = _aligned_for(out)
    ahead = versions if tiling.at_once else min(2, versions)
    # A tile of sums consists of words of four elements.
    columns = max(tiling.columns, 4)
    aligned = _tiles_aligned(layout, 1)
    if tiling.tiles == 1:
        sum_kernels.sum_ranges[(tiling.groups,)](
            received,
            result,
            layout.elements,
            layout.block,
            layout.ranges,
            layout.header_bytes,
            layout.total_bytes,
            factor,
            VERSIONS=versions,
            WIDEST=weight_of_widest(versions),
            AHEAD=ahead,
            ROWS=tiling.rows,
            COLUMNS=columns,
            ALIGNED=aligned,
            num_warps=tiling.warps,
            enable_fp_fusion=False,
            maxnreg=tiling.registers,
        )
    else:
        pairs = layout.ranges * tiling.partials
        extremes = torch.empty((pairs, 2), dtype=torch.int32, device=out.device)
        sum_kernels.measure_sums[(pairs,)](
            received,
            extremes,
            layout.elements,
            layout.block,
            layout.ranges,
            tiling.partials,
            layout.header_bytes,
            layout.total_bytes,
            VERSIONS=versions,
            WIDEST=weight_of_widest(versions),
            AHEAD=ahead,
            COLUMNS=columns,
            STEPS=tiling.steps,
            ALIGNED=aligned,
            num_warps=tiling.warps,
            enable_fp_fusion=False,
            maxnreg=tiling.registers,
        )
        sum_kernels.sum_pieces[(layout.ranges * tiling.tiles,)](
            received,
            extremes,
            result,
            layout.elements,
            layout.block,
            layout.ranges,
            tiling.tiles,
            tiling.partials,
            layout.header_bytes,
            layout.total_bytes,
            factor,
            VERSIONS=versions,
            WIDEST=weight_of_widest(versions),
            AHEAD=ahead,
            COLUMNS=columns,
            PARTIALS=_power_of_two(tiling.partials),
            ALIGNED=aligned,
            num_warps=tiling.warps,
            enable_fp_fusion=False,
            maxnreg=tiling.registers,
        )
    if result is not out:
        out.copy_(result)


def _tiles_aligned(layout: ChunkLayout, chunks: int) -> bool:
    """Whether every tile begins at a multiple of 16 elements from the start of the tensor."""
    return (chunks == 1 or layout.elements % 16 == 0) and (layout.ranges == 1 or layout.block % 16 == 0)


def _aligned(compressed: Tensor) -> Tensor:
    return compressed if compressed.data_ptr() % ALIGNMENT == 0 else compressed.clone()


def _aligned_for(out: Tensor) -> Tensor:
    """`out`, or what is to be copied to it."""
    return out if out.data_ptr() % ALIGNMENT == 0 else torch.empty_like(out)


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels start on the current device, which need not be the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
