"""Numbers that are hard to compress, and the comparison of two implementations of MinMaxUInt8 on them."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from bagua.kernels.minmax_uint8_layout import ChunkLayout, chunk_layout

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = (
    *("normal", "mixed scales", "far from zero", "narrow", "huge", "tiny", "subnormal", "constant", "zeros"),
    *("few not finite", "any bits"),
)


def numbers(kind: str, count: int, generator: torch.Generator) -> Tensor:
    """`count` fp32 numbers."""
    normal = torch.randn(count, generator=generator)
    match kind:
        case "normal":
            return normal
        case "mixed scales":
            return normal * 10.0 ** torch.randint(-44, 37, (count,), generator=generator).float()
        case "far from zero":
            return 1000.0 + 1e-3 * normal
        case "narrow":  # a few units in the last place
            return (1e6 + 0.1 * normal) * 10.0 ** float(torch.randint(-30, 30, (), generator=generator))
        case "huge":
            return (normal * 2e38).clamp(-3.4028e38, 3.4028e38)
        case "tiny":  # around where the levels of a unit become infinitely many
            return normal * 10.0 ** float(torch.randint(-38, -34, (), generator=generator))
        case "subnormal":
            return normal * 1e-40
        case "constant":
            return torch.full((count,), float(normal[0]) if count else 0.0)
        case "zeros":
            return torch.zeros(count) * torch.where(normal > 0, 1.0, -1.0)
        case "few not finite":
            normal[torch.randint(count, (1 + count // 500,), generator=generator)] = torch.inf
            normal[torch.randint(count, (1 + count // 500,), generator=generator)] = torch.nan
            normal[torch.randint(count, (1 + count // 900,), generator=generator)] = -torch.inf
            return normal
        case "any bits":
            bits = torch.randint(-(2**31), 2**31, (count,), generator=generator)
            return bits.to(torch.int32).view(torch.float32)
    raise ValueError(kind)


@dataclass(frozen=True)
class Case:
    kind: str
    elements: int  # of a chunk
    chunks: int
    block: int | None
    dtype: torch.dtype

    @property
    def layout(self) -> ChunkLayout:
        return chunk_layout(self.elements, self.block)

    def source(self, seed: int = 0) -> Tensor:
        """[chunks, elements]."""
        generator = torch.Generator().manual_seed(seed)
        return numbers(self.kind, self.chunks * self.elements, generator).to(self.dtype).view(self.chunks, -1)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, but for the bits of NaN."""
    both_nan = one.isnan() & other.isnan()
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    return bool((both_nan | (one.view(bits) == other.view(bits))).all())


@dataclass
class Results:
    """What an implementation makes of a case: the bytes, and what they decode and sum up to, by what was asked."""

    compressed: Tensor
    targets: dict[tuple[torch.dtype, bool], Tensor]  # by dtype and accumulate
    sums: dict[bool, Tensor]  # by average


def results_of(
    implementation: ModuleType,
    case: Case,
    filler: int,
    device: str = "cpu",
    targets: tuple[torch.dtype, ...] = DTYPES,
    received: Tensor | None = None,
) -> Results:
    """
    Args:
        filler: of the buffers. Every byte is to be written: two results that are compared begin with different ones.
        received: what is decoded; by default what was compressed.
    """
    layout, source = case.layout, case.source()
    compressed = torch.full((case.chunks, layout.total_bytes), filler, dtype=torch.uint8, device=device)
    implementation.compress(source.to(device), layout, compressed)
    received = compressed if received is None else received.to(device)
    results = Results(compressed.cpu(), {}, {})
    for dtype in targets:
        for accumulate in (False, True):
            target = torch.randn(source.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
            implementation.decompress(received, target, accumulate, layout)
            results.targets[dtype, accumulate] = target.cpu()
    for average in (False, True):
        out = torch.full((layout.total_bytes,), filler, dtype=torch.uint8, device=device)
        implementation.decompress_reduce_compress(received, average, layout, out)
        results.sums[average] = out.cpu()
    return results


def differences_of(
    expected: Results,
    tested: ModuleType,
    case: Case,
    device: str = "cpu",
    targets: tuple[torch.dtype, ...] = DTYPES,
) -> list[str]:
    """What `tested`, on a device, makes otherwise than a reference."""
    actual = results_of(tested, case, 99, device, targets, expected.compressed)
    found = []
    if not torch.equal(expected.compressed, actual.compressed):
        found.append(f"compress: {int((expected.compressed != actual.compressed).sum())} bytes")
    for (dtype, accumulate), target in expected.targets.items():
        if not same_numbers(target, actual.targets[dtype, accumulate]):
            found.append(f"decompress to {dtype}, {accumulate=}")
    for average, summed in expected.sums.items():
        if not torch.equal(summed, actual.sums[average]):
            wrong = int((summed != actual.sums[average]).sum())
            found.append(f"decompress_reduce_compress, {average=}: {wrong} bytes")
    return [f"{case}: {one}" for one in found]


def differences(
    reference: ModuleType,
    tested: ModuleType,
    case: Case,
    device: str = "cpu",
    targets: tuple[torch.dtype, ...] = DTYPES,
) -> list[str]:
    """What `tested`, on a device, makes otherwise than `reference` on the CPU."""
    return differences_of(results_of(reference, case, 77, targets=targets), tested, case, device, targets)
