"""Models with the shapes of those that people train, small enough for a step of some ten milliseconds on one core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from core_comparison.models import Bottleneck, Gpt2
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[nn.Module, int], Tensor]

_VOCABULARY = 4000


def build(name: str, rank: int, device: torch.device) -> tuple[nn.Module, Loss]:
    """A module, and its loss in the step of a number. The data are random, the same in each run.

    Raises:
        KeyError: no such model.
    """
    torch.manual_seed(1)
    with device:
        return MODELS[name](torch.Generator(device).manual_seed(17 + rank))


def _of_pictures(model: nn.Module, size: int, batch: int, generator: torch.Generator) -> tuple[nn.Module, Loss]:
    pictures = torch.randn(4, batch, 3, size, size, generator=generator, device=generator.device)
    labels = torch.randint(10, (4, batch), generator=generator, device=generator.device)
    return model, lambda module, step: functional.cross_entropy(module(pictures[step % 4]), labels[step % 4])


def _mlp(generator: torch.Generator) -> tuple[nn.Module, Loss]:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(3 * 16 * 16, 768)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(768, 768)]
    return _of_pictures(nn.Sequential(*layers, nn.Linear(768, 10)), 16, 32, generator)


def _convnet(generator: torch.Generator) -> tuple[nn.Module, Loss]:
    """Few parameters in its convolutions, most of them in one layer, as VGG16."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    return _of_pictures(nn.Sequential(model, nn.ReLU(), nn.Linear(1024, 10)), 32, 8, generator)


def _vgg(generator: torch.Generator) -> tuple[nn.Module, Loss]:
    """Simonyan and Zisserman, 2015, configuration D, with an eighth of its channels."""
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((8, 2), (16, 2), (32, 3), (64, 3), (64, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(64 * 4, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    return _of_pictures(nn.Sequential(*layers), 64, 4, generator)


def _resnet(generator: torch.Generator) -> tuple[nn.Module, Loss]:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    channels = 32
    for width, depth in ((32, 2), (64, 3), (128, 4)):
        for number in range(depth):
            layers.append(Bottleneck(channels, width, 2 if number == 0 and width > 32 else 1))
            channels = 4 * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return _of_pictures(model, 32, 4, generator)


def _gpt(generator: torch.Generator) -> tuple[nn.Module, Loss]:
    texts = torch.randint(_VOCABULARY, (4, 2, 33), generator=generator, device=generator.device)
    model = Gpt2(layers=4, width=192, heads=4, vocabulary=_VOCABULARY, tokens=32)

    def loss(module: nn.Module, step: int) -> Tensor:
        text = texts[step % 4]
        return functional.cross_entropy(module(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    return model, loss


MODELS: dict[str, Any] = {"mlp": _mlp, "convnet": _convnet, "vgg16": _vgg, "resnet": _resnet, "gpt2": _gpt}
