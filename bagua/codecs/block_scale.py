"""Codecs whose blocks of elements share a scale: the layout of a compressed chunk, the scale, and the formula in torch.

offset          bytes               content
0               2 * blocks          the scale of every block, bf16, little-endian
2 * blocks      -                   zeros up to the next multiple of 32
header_bytes    blocks * payload    the codes of every block; those that are missing in the last one are codes of 0
...             -                   zeros up to the next multiple of 32: total_bytes

With a the largest absolute value of a block and L the largest code, in fp32, every operation rounded on its own:

    s    = a * (1 / L), cut to the 8 significant bits of bf16      1 / L is taken a little too small, so that L * s <= a
    code = rounded(v * (1 / s))
    v'   = code * s

A code has at most 4 significant bits, so that code * s is exact in fp32: fused and separate multiplications and
additions give the same sums. s is 0 where it would be below 2^-126 (all elements decode to 0), and NaN, with codes that
are 0 bits, where an element is not finite (all decode to NaN). A sum adds the versions in their order, in fp32.

Blocks with a scale of their own: QSGD (arXiv:1610.02132); ZeRO++ (arXiv:2306.10209) for training with 4 and 8 bits.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bagua.codecs.portable import PortableCodec
from bagua.kernels.argument_checks import check_vector
from bagua.kernels.minmax_uint8_layout import padded

# Smaller scales have no reciprocal in fp32, and are taken as 0.
SMALLEST_SCALE = 2.0**-126
# Elements that are encoded at a time on CPU, so that what is in between stays in the caches.
PIECE_ELEMENTS = 1 << 16


# Compared by identity, since every operation looks launches up by it; `block_layout` returns the same object again.
@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Where what lies in one compressed chunk."""

    elements: int
    """Elements of the chunk."""
    block: int
    """Elements of a block."""
    blocks: int
    payload: int
    """Bytes of a block's codes."""
    header_bytes: int
    total_bytes: int


@functools.lru_cache(maxsize=4096)
def block_layout(elements: int, block: int, payload: int) -> BlockLayout:
    """
    Raises:
        ValueError: a negative number of elements.
    """
    if elements < 0:
        raise ValueError(f"a chunk cannot have {elements} elements; give 0 or more")
    blocks = -(-elements // block)
    header_bytes = padded(2 * blocks)
    return BlockLayout(elements, block, blocks, payload, header_bytes, header_bytes + padded(payload * blocks))


@functools.cache
def _unit_of(largest_code: float) -> float:
    unit = torch.tensor(1.0 / largest_code, dtype=torch.float32, device="cpu")
    for _ in range(2):
        unit = torch.nextafter(unit, torch.zeros_like(unit))
    return float(unit)


class BlockScaleCodec(PortableCodec):
    """
    Attributes:
        alignment: also the elements that share a scale.
        payload_bytes: of a block's codes.
        largest_code: L.
        kernels_module: with the Triton kernels.
    """

    triton_module = "block_scale_launch"
    is_slow_on_cpus = True
    payload_bytes: ClassVar[int]
    largest_code: ClassVar[float]
    kernels_module: ClassVar[str]

    @property
    def unit(self) -> float:
        """1 / L, two units in the last place of fp32 too small."""
        return _unit_of(self.largest_code)

    @abstractmethod
    def _encode(self, scaled: Tensor) -> Tensor:
        """fp32 [..., block] of at most L * (1 + 2^-7) -> uint8 [..., payload]; anything where they are NaN."""

    @abstractmethod
    def _decode(self, codes: Tensor) -> Tensor:
        """uint8 [..., payload] -> fp32 [..., block]."""

    def layout(self, elements: int) -> BlockLayout:
        return block_layout(elements, self.alignment, self.payload_bytes)

    def compressed_bytes(self, elements: int) -> int:
        return self.layout(elements).total_bytes

    def header_bytes(self, elements: int) -> int:
        return self.layout(elements).header_bytes

    def scales(self, blocks: Tensor) -> Tensor:
        """s of fp32 [..., block]: fp32 [..., 1]."""
        largest = blocks.abs().amax(dim=-1, keepdim=True)
        bits = (largest * self.unit).view(torch.int32) & -0x10000
        scale = bits.view(torch.float32)
        scale = torch.where(scale >= SMALLEST_SCALE, scale, 0.0)
        return torch.where(largest.isfinite(), scale, torch.nan)

    @torch.no_grad()
    def error_bound(self, source: Tensor, chunks: int = 1) -> Tensor:
        """That of the code, or the element itself where the scale is 0; and rounding to the source's dtype."""
        check_vector("source", source, self.dtypes)
        if not source.numel():
            return source.float()
        layout = self.layout(source.numel() // chunks)
        values = _by_block(source.view(chunks, -1).float(), layout)
        scale = self.scales(values)
        kind = torch.finfo(source.dtype)
        rounding = kind.eps * values.abs() + kind.smallest_normal
        bound = torch.where(scale == 0.0, values.abs(), self._code_error(values, scale) * (1 + 1e-5) + rounding)
        return bound.reshape(chunks, -1)[:, : layout.elements].reshape(-1)

    @abstractmethod
    def _code_error(self, values: Tensor, scale: Tensor) -> Tensor:
        """The largest error of the codes, in exact arithmetic; NaN where the scale is."""

    @torch.no_grad()
    def compress_in_torch(self, source: Tensor, elements: int, out: Tensor) -> None:
        layout = self.layout(elements)
        for values, row in zip(source.view(out.shape[0], -1), out, strict=True):
            for part, scales, codes in _pieces(values, row, layout):
                self._write(_by_block(part.float(), layout, codes.numel() // layout.payload), scales, codes)
            _clear_padding(row, layout)

    @torch.no_grad()
    def decompress_in_torch(self, compressed: Tensor, elements: int, target: Tensor, accumulate: bool) -> None:
        layout = self.layout(elements)
        for values, row in zip(target.view(compressed.shape[0], -1), compressed, strict=True):
            for part, scales, codes in _pieces(values, row, layout):
                decoded = self._read(scales, codes).view(-1)[: part.numel()]
                part.copy_(part.float() + decoded if accumulate else decoded)

    def sum_in_torch(self, received: Tensor, elements: int, average: bool, out: Tensor) -> None:
        layout = self.layout(elements)
        versions = [_parts(row, layout) for row in received]
        scales_out, codes_out = _parts(out, layout)
        step = max(1, PIECE_ELEMENTS // layout.block) if out.device.type == "cpu" else layout.blocks
        for first in range(0, layout.blocks, step):
            some = slice(first, first + step)
            total = torch.zeros((), dtype=torch.float32, device=out.device)
            for scales, codes in versions:
                total = total + self._read(_rows(scales, some, 2), _rows(codes, some, layout.payload))
            if average:
                total = total * torch.full((), 1.0 / len(received), dtype=torch.float32, device=out.device)
            self._write(total, _rows(scales_out, some, 2), _rows(codes_out, some, layout.payload))
        _clear_padding(out, layout)

    def _write(self, blocks: Tensor, scales: Tensor, codes: Tensor) -> None:
        """fp32 [blocks, block] -> bytes of scales and codes."""
        scale = self.scales(blocks)
        is_lost = scale.isnan()
        inverse = torch.where(scale > 0.0, scale.reciprocal(), 0.0)
        encoded = self._encode(torch.where(is_lost, 0.0, blocks * inverse))
        codes.copy_(torch.where(is_lost, 0, encoded).view(-1))
        bits = torch.where(is_lost, 0x7FC0, scale.view(torch.int32) >> 16).to(torch.int16)
        scales.copy_(bits.view(-1).view(torch.uint8))

    def _read(self, scales: Tensor, codes: Tensor) -> Tensor:
        """fp32 [blocks, block]."""
        # A copy, because the bytes need not lie at a multiple of 2.
        bits = scales.clone(memory_format=torch.contiguous_format).view(torch.int16).to(torch.int32) << 16
        return self._decode(codes.view(-1, self.payload_bytes)) * bits.view(torch.float32).unsqueeze(1)


def _parts(row: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """The bytes of the scales and those of the codes of a compressed chunk."""
    return row[: 2 * layout.blocks], row[layout.header_bytes : layout.header_bytes + layout.payload * layout.blocks]


def _rows(parts: Tensor, some: slice, size: int) -> Tensor:
    return parts[some.start * size : some.stop * size]


def _clear_padding(row: Tensor, layout: BlockLayout) -> None:
    row[2 * layout.blocks : layout.header_bytes].zero_()
    row[layout.header_bytes + layout.payload * layout.blocks :].zero_()


def _pieces(values: Tensor, row: Tensor, layout: BlockLayout) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(elements, bytes of scales, bytes of codes) of one chunk; on CPU in pieces."""
    scales, codes = _parts(row, layout)
    step = max(1, PIECE_ELEMENTS // layout.block) if values.device.type == "cpu" else layout.blocks
    return list(
        zip(
            torch.split(values, step * layout.block),
            torch.split(scales, step * 2),
            torch.split(codes, step * layout.payload),
            strict=True,
        )
    )


def _by_block(values: Tensor, layout: BlockLayout, blocks: int | None = None) -> Tensor:
    """fp32 [..., elements] as [..., blocks, block]; a shorter last block is filled up with zeros."""
    blocks = layout.blocks if blocks is None else blocks
    missing = blocks * layout.block - values.shape[-1]
    if missing:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.reshape(*values.shape[:-1], blocks, layout.block)
