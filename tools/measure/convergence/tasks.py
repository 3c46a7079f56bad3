"""Tasks: data that packages ship, a model, and what its outputs are worth. Deterministic: all ranks build the same."""

from __future__ import annotations

import hashlib
import importlib
import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from measure.transformer import Block


@dataclass(frozen=True)
class Split:
    """Inputs and targets, the first dimension of both is the sample."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> Split:
        return Split(self.inputs.to(device), self.targets.to(device))

    def take(self, indices: Tensor) -> Split:
        return Split(self.inputs[indices], self.targets[indices])


@dataclass(frozen=True)
class Task:
    """
    build_model: of torch's global random state.
    classifies: targets are classes, losses are cross-entropies in nats, and accuracy means something. Otherwise losses
        are mean squared errors.
    source: where the data comes from, with what tells versions of it apart.
    evaluated_train: the training samples that the reported training loss is of; None: all.
    penalty: times half the sum of squares of all parameters is added to the loss that is trained with, not to those
        that are reported. It is part of the loss because optimizers differ in what they make of weight decay.
    """

    name: str
    train: Split
    test: Split
    build_model: Callable[[], nn.Module]
    classifies: bool
    source: str
    evaluated_train: Split | None = None
    penalty: float = 0.0

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over all targets: classes [...] for outputs [..., classes], or values of the outputs' shape."""
        if self.classifies:
            return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten().long())
        return functional.mse_loss(outputs, targets)

    def training_loss(self, model: nn.Module, batch: Split) -> Tensor:
        loss = self.loss(model(batch.inputs), batch.targets)
        if self.penalty:
            squares = torch.stack([parameter.square().sum() for parameter in model.parameters()])
            loss = loss + self.penalty / 2 * squares.sum()
        return loss

    def right(self, outputs: Tensor, targets: Tensor) -> int:
        """How many targets the outputs predict; 0 where they are no classes."""
        return int((outputs.argmax(dim=-1) == targets).sum()) if self.classifies else 0


def build_task(name: str) -> Task:
    """
    Raises:
        RuntimeError: a package that brings the data is missing.
    """
    return build_text(name) if name in SIZES else build_digits() if name == "digits" else build_photographs()


def dataset_of_sklearn(loader: str) -> tuple[Any, str]:
    """What sklearn.datasets.LOADER() gives, and its source; nothing is downloaded."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise RuntimeError(
            "this task's data comes with scikit-learn, which is not installed; run: pip install scikit-learn"
        ) from error
    return getattr(datasets, loader)(), f"scikit-learn {importlib.import_module('sklearn').__version__}"


# --- digits -----------------------------------------------------------------------------------------------------------

# 1,797 handwritten digits of 8x8 pixels in ten classes (sklearn.datasets.load_digits): 1,297 to train with, 500 to
# test.

_DIGITS_FOR_TESTING = 500
# Without it the training loss goes to zero, and a per cent of nothing says nothing.
_PENALTY = 3e-3


def build_digits() -> Task:
    bunch, source = dataset_of_sklearn("load_digits")
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    pictures = torch.tensor(bunch.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)[order]
    return Task(
        name="digits",
        train=Split(pictures[_DIGITS_FOR_TESTING:], labels[_DIGITS_FOR_TESTING:]),
        test=Split(pictures[:_DIGITS_FOR_TESTING], labels[:_DIGITS_FOR_TESTING]),
        build_model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        classifies=True,
        source=source,
        penalty=_PENALTY,
    )


# --- photographs ------------------------------------------------------------------------------------------------------

# Two photographs of 427x640 pixels (sklearn.datasets.load_sample_images), cut into patches of 8x8 grey levels. Noise
# is added to them, and the four pixels in the middle of each are to be found.
#
# The photographs are divided into tiles; patches that begin in every fifth tile are for testing, and the others, unless
# they overlap with such a tile, for training: no pixel is in both.

_SIDE = 8
_STRIDE = 4
_TILE = 64
# Grey levels are scaled to a variance of 1.
_NOISE = 0.5


def build_photographs() -> Task:
    bunch, source = dataset_of_sklearn("load_sample_images")
    generator = torch.Generator().manual_seed(0)
    parts = [_patches(torch.tensor(picture), generator) for picture in bunch.images]
    inputs, targets, is_test, is_train = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Task(
        name="photographs",
        train=Split(inputs[is_train], targets[is_train]),
        test=Split(inputs[is_test], targets[is_test]),
        build_model=lambda: nn.Sequential(
            nn.Linear(_SIDE**2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
        ),
        classifies=False,
        source=source,
    )


def _patches(picture: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Noisy patches [n, 64], clean middles [n, 4], and for each whether it tests, and whether it trains."""
    grey = picture.to(torch.float32).mean(dim=2)
    grey = (grey - grey.mean()) / grey.std()
    noisy = grey + _NOISE * torch.randn(grey.shape, generator=generator)
    windows = noisy.unfold(0, _SIDE, _STRIDE).unfold(1, _SIDE, _STRIDE)
    middle = slice(_SIDE // 2 - 1, _SIDE // 2 + 1)
    clean = grey.unfold(0, _SIDE, _STRIDE).unfold(1, _SIDE, _STRIDE)[..., middle, middle]
    down, across = (torch.arange(count) * _STRIDE for count in windows.shape[:2])
    corners = torch.stack([_is_test_tile(down + y, across + x) for y in (0, _SIDE - 1) for x in (0, _SIDE - 1)])
    return (
        windows.reshape(-1, _SIDE**2),
        clean.reshape(-1, 4),
        corners.all(dim=0).flatten(),
        ~corners.any(dim=0).flatten(),
    )


def _is_test_tile(down: Tensor, across: Tensor) -> Tensor:
    """For each pixel of these rows and columns: [rows, columns]."""
    return ((down // _TILE)[:, None] * 3 + (across // _TILE)[None, :]) % 5 == 0


# --- text -------------------------------------------------------------------------------------------------------------

# The sources of Python's standard library, which every machine has: a small GPT predicts the next byte.
#
# A file belongs to the training or to the test split as a whole, by the hash of its path. The text differs from one
# version of Python to the next, and losses with it: `Task.source` names version and hash.

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


SIZES = {
    "text": Size(layers=2, width=64, heads=2, length=64, test_samples=512),
    "text-small": Size(layers=1, width=32, heads=2, length=32, test_samples=1024),
    "text-large": Size(layers=6, width=384, heads=6, length=256, test_samples=1024),
}


def source_files(library: Path) -> list[Path]:
    """Relative to `library`, sorted."""
    relative = (path.relative_to(library) for path in library.rglob("*.py"))
    return sorted(
        path for path in relative if not _LEFT_OUT.intersection(path.parts) and not path.name.startswith(_BUILT)
    )


def is_for_testing(path: Path) -> bool:
    return hashlib.sha256(path.as_posix().encode()).digest()[0] % _TEST_FILES == 0


def build_text(name: str) -> Task:
    size = SIZES[name]
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
        test=_evenly(test, size.test_samples),
        build_model=lambda: Transformer(size),
        classifies=True,
        source=f"Python {platform.python_version()}, {len(files)} files, sha256 {digest.hexdigest()[:16]}",
        evaluated_train=_evenly(train, size.test_samples),
    )


def _windows(text: bytearray, length: int) -> Split:
    """Samples that follow each other. What remains at the end is left out."""
    count = (len(text) - 1) // length
    values = torch.frombuffer(text, dtype=torch.uint8)
    return Split(values[: count * length].view(-1, length), values[1 : count * length + 1].view(-1, length))


def _evenly(split: Split, count: int) -> Split:
    return split.take(torch.arange(count) * len(split) // count)


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
