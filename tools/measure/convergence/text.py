"""The sources of Python's standard library, which every machine has: a small GPT predicts the next byte.

A file belongs to the training or to the test split as a whole, by the hash of its path. The text differs from one
version of Python to the next, and losses with it: `Task.source` names version and hash.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from measure.convergence.task import Split, Task

BYTES = 256
# Not the library's own text: tests, packages, tables of characters, and what the build of this Python wrote.
_LEFT_OUT = {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "site-packages", "test", "tests"}
_BUILT = "_sysconfig"
# One file in so many is for testing.
_TEST_FILES = 10


@dataclass(frozen=True)
class Size:
    """
    length: bytes of a sample, and of what attention sees.
    test_samples: spread evenly over the test split; as many of the training split for the training loss.
    """

    layers: int
    width: int
    heads: int
    length: int
    test_samples: int


SMALLEST = Size(layers=1, width=32, heads=2, length=32, test_samples=1024)
SMALL = Size(layers=2, width=64, heads=2, length=64, test_samples=512)
LARGE = Size(layers=6, width=384, heads=6, length=256, test_samples=1024)


def build() -> Task:
    return _task("text", SMALL)


def build_small() -> Task:
    return _task("text-small", SMALLEST)


def build_large() -> Task:
    return _task("text-large", LARGE)


def source_files(library: Path) -> list[Path]:
    """Relative to `library`, sorted."""
    relative = (path.relative_to(library) for path in library.rglob("*.py"))
    return sorted(
        path for path in relative if not _LEFT_OUT.intersection(path.parts) and not path.name.startswith(_BUILT)
    )


def is_for_testing(path: Path) -> bool:
    return hashlib.sha256(path.as_posix().encode()).digest()[0] % _TEST_FILES == 0


def _task(name: str, size: Size) -> Task:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = source_files(library)
    digest = hashlib.sha256()
    texts: dict[bool, bytearray] = {False: bytearray(), True: bytearray()}
    for path in files:
        text = (library / path).read_bytes()
        digest.update(path.as_posix().encode() + b"\0" + text)
        texts[is_for_testing(path)] += text
    if min(map(len, texts.values())) < size.length * size.test_samples:
        raise RuntimeError(
            f"{library} has {len(files)} source files, too few to train with.\nUse a Python with its standard library"
            " as files (Debian: libpython3-stdlib)."
        )
    train, test = (_windows(texts[testing], size.length) for testing in (False, True))
    return Task(
        name=name,
        train=train,
        test=_spread(test, size.test_samples),
        build_model=lambda: Transformer(size),
        classifies=True,
        source=f"Python {platform.python_version()}, {len(files)} files, sha256 {digest.hexdigest()[:16]}",
        evaluated_train=_spread(train, size.test_samples),
    )


def _windows(text: bytearray, length: int) -> Split:
    """Samples that follow each other. What remains at the end is left out."""
    count = (len(text) - 1) // length
    values = torch.frombuffer(text, dtype=torch.uint8)
    return Split(values[: count * length].view(-1, length), values[1 : count * length + 1].view(-1, length))


def _spread(split: Split, count: int) -> Split:
    return split.take(torch.arange(count) * len(split) // count)


class Block(nn.Module):
    """Causal attention, then two linear layers; each after a LayerNorm, and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, values: Tensor) -> Tensor:
        heads = self.queries_keys_values(self.norm_attention(values)).unflatten(2, (3, self._heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.attended(attended.transpose(1, 2).flatten(2))
        found: Tensor = values + self.mlp(self.norm_mlp(values))
        return found


class Transformer(nn.Module):
    """Bytes [batch, length], uint8, to logits [batch, length, 256]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.logits = nn.Linear(size.width, BYTES)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        values = self.bytes(text.long()) + self.positions.weight[: text.shape[1]]
        logits: Tensor = self.logits(self.norm(self.blocks(values)))
        return logits
