"""How accurate is MinMaxUInt8, by the number of elements that share a range?

    python tools/kernels/study_minmax_uint8_accuracy.py

Prints the relative L2 error, |decoded - original| / |original|, of one compression, for data like gradients:
- Gauss, Laplace, Student (3 degrees of freedom): independent elements with ever heavier tails;
- layers: one bucket of several layers, whose gradients differ in size by up to a thousand;
- rows: an embedding's gradient, in which one row of 512 elements out of 16 is not zero;
- network: gradients of a small convolutional network on random images, laid out as a bucket has them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bagua.kernels.minmax_uint8 import compress, compressed_bytes, decompress

BLOCKS: list[int | None] = [128, 256, 512, 1024, 2048, 4096, 16384, None]
ELEMENTS = 1 << 20


def _layers(generator: torch.Generator) -> Tensor:
    sizes = [1728, 64, 36864, 64, 73728, 128, 147456, 128, 294912, 256, 493248]
    scales = torch.logspace(0, -3, len(sizes))
    parts = [torch.randn(size, generator=generator) * scale for size, scale in zip(sizes, scales, strict=True)]
    return torch.cat(parts)


def _rows(generator: torch.Generator) -> Tensor:
    rows = torch.randn(ELEMENTS // 512, 512, generator=generator)
    return (rows * (torch.rand(len(rows), 1, generator=generator) < 1 / 16)).view(-1)


def _student(generator: torch.Generator) -> Tensor:
    normal = torch.randn(ELEMENTS, generator=generator)
    chi = sum(torch.randn(ELEMENTS, generator=generator) ** 2 for _ in range(3))
    return normal / (torch.as_tensor(chi) / 3).sqrt()


def _laplace(generator: torch.Generator) -> Tensor:
    uniform = torch.rand(ELEMENTS, generator=generator).clamp_min(1e-12)
    return -uniform.log() * torch.randn(ELEMENTS, generator=generator).sign()


def _network(generator: torch.Generator) -> Tensor:
    torch.manual_seed(int(torch.randint(1 << 30, (), generator=generator)))
    channels = [3, 32, 64, 128, 256]
    convolutions = [
        layer
        for inner, outer in itertools.pairwise(channels)
        for layer in (nn.Conv2d(inner, outer, 3, stride=2), nn.BatchNorm2d(outer), nn.ReLU())
    ]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    images = torch.randn(64, 3, 32, 32)
    nn.functional.cross_entropy(model(images), torch.randint(10, (64,))).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


DATA: dict[str, Callable[[torch.Generator], Tensor]] = {
    "Gauss": lambda generator: torch.randn(ELEMENTS, generator=generator),
    "Laplace": _laplace,
    "Student": _student,
    "layers": _layers,
    "rows": _rows,
    "network": _network,
}


def relative_error(values: Tensor, block: int | None) -> float:
    decoded = decompress(compress(values, block_elements=block), torch.empty_like(values), block_elements=block)
    return float((decoded - values).double().norm() / values.double().norm())


def smallest_part_error(values: Tensor, block: int | None) -> float:
    """Of the hundredth of the elements, in a row, that is hurt most: a small layer beside a large one."""
    decoded = decompress(compress(values, block_elements=block), torch.empty_like(values), block_elements=block)
    size = values.numel() // 100
    errors = [
        float((a - b).double().norm() / b.double().norm().clamp_min(1e-300))
        for a, b in zip(decoded.split(size), values.split(size), strict=True)
        if b.numel() == size and b.abs().max() > 0
    ]
    return max(errors)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="study_minmax_uint8_accuracy.py",
        description="How accurate MinMaxUInt8 is, by the number of elements that share a range: the relative L2 error"
        " of one compression, for six kinds of data like gradients.",
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the data (default 0)")
    seed = parser.parse_args(words).seed
    print("| range | bytes | " + " | ".join(DATA) + " | layers, worst part |")
    print("|---" * (len(DATA) + 3) + "|")
    data = {name: make(torch.Generator().manual_seed(seed)) for name, make in DATA.items()}
    for block in BLOCKS:
        cells = [f"{100 * relative_error(values, block):.2f} %" for values in data.values()]
        more = 100 * (compressed_bytes(ELEMENTS, block) / ELEMENTS - 1)
        worst = f"{100 * smallest_part_error(data['layers'], block):.1f} %"
        print(f"| {block or 'chunk'} | + {more:.1f} % | " + " | ".join(cells) + f" | {worst} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
