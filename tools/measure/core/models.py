"""The synthetic models and their data: parameters of the published shapes, batches made from a seed, no downloads.

VGG16, the MLP and the pictures are those of examples/ddp_train.py.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional

from measure.core.catalogue import BF16
from measure.transformer import Block

# Batches are made before a turn and taken in turn: a step is timed, not the making of its data.
BATCHES = 4
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ddp_train.py"
TINY_WIDTH = 16
WIDE_LAYERS = 5
VOCABULARY = 50257


@dataclass(frozen=True)
class Workload:
    """A model with what is needed to train it on one device; `inputs[i]` and `targets[i]` are one batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    criterion: Callable[[Tensor, Tensor], Tensor]
    autocast: bool

    def loss(self, forward: nn.Module, number: int) -> Tensor:
        """Of batch `number`, through the module that the algorithm made of `model`."""
        place = number % len(self.inputs)
        with torch.autocast(self.inputs[0].device.type, torch.bfloat16, enabled=self.autocast):
            return self.criterion(forward(self.inputs[place]), self.targets[place])


def build(
    name: str, device: torch.device, *, length: int, batch_size: int, dtype: str, seed: int, rank: int
) -> Workload:
    """Every rank begins with other parameters and sees other data. Only a wrapper that broadcasts rank 0's parameters
    and averages all gradients ends with the same model everywhere.

    Args:
        length: See ModelEntry.

    Raises:
        ValueError: a length that the model cannot have.
    """
    torch.manual_seed(seed + 1_000_003 * rank)
    generator = torch.Generator(device)
    generator.manual_seed(seed + 7919 * (rank + 1))
    inputs: Sequence[Tensor]
    targets: Sequence[Tensor]
    if name in _PICTURES:
        make, rate, multiple = _PICTURES[name]
        if length % multiple:
            raise ValueError(f"--length {length}: {name} makes a picture smaller; use a multiple of {multiple}")
        with device:
            model = make(length)
        data = example().NoisyPictures(seed, length, device)
        inputs, targets = zip(*(data.batch(number, rank, batch_size) for number in range(BATCHES)), strict=True)
        criterion = functional.cross_entropy
    elif name == "gpt2":
        with device:
            model = Gpt2(tokens=max(1024, length))
        shape = (batch_size, length + 1)
        texts = [torch.randint(VOCABULARY, shape, generator=generator, device=device) for _ in range(BATCHES)]
        inputs = [text[:, :-1].contiguous() for text in texts]
        targets = [text[:, 1:].contiguous() for text in texts]
        criterion = _next_token_loss
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")
        return Workload(model, optimizer, inputs, targets, criterion, dtype == BF16)
    else:
        with device:
            model = tiny(length) if name == "tiny-2000" else wide(length)
        # All layers of `tiny` move the product by as much: the rate has to be small against one over their number.
        rate = 0.02 / length if name == "tiny-2000" else 0.01
        shape = (BATCHES, batch_size, TINY_WIDTH if name == "tiny-2000" else length)
        inputs, targets = (list(torch.randn(shape, generator=generator, device=device)) for _ in range(2))
        criterion = functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return Workload(model, optimizer, inputs, targets, criterion, dtype == BF16)


def example() -> ModuleType:
    """examples/ddp_train.py, which is a script and in no package."""
    name = "bagua_example_ddp_train"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # dataclasses look their module up by name.
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


# --- pictures --------------------------------------------------------------------------------------------------------


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """BatchNorm takes any constant away, so that the convolution needs none."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return [layer, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """1x1 to `width` channels, 3x3, 1x1 to four times as many; the sum with the input where shapes agree."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.branch = nn.Sequential(
            *_convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, outputs, 1),
        )
        # The network begins as its shortcuts. Otherwise it amplifies a difference in the last bit ten thousand times a
        # step in its first steps, and two orders of adding four ranks' gradients train two different models.
        nn.init.zeros_(self.branch[-1].weight)
        same = stride == 1 and inputs == outputs
        self.shortcut: nn.Module = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, pictures: Tensor) -> Tensor:
        return functional.relu(self.branch(pictures) + self.shortcut(pictures), inplace=True)


def resnet50() -> nn.Module:
    """ResNet-50 (He, Zhang, Ren and Sun, 2015) with the stride in the 3x3 convolution, as it is trained today:
    25,557,032 parameters in 161 tensors, and 159 buffers."""
    layers = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(depth):
            layers.append(Bottleneck(channels, width, 2 if number == 0 and width > 64 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def convnet(image_size: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, stride in ((16, 1), (32, 2), (32, 1), (64, 2)):
        layers += [*_convolution(channels, width, 3, stride), nn.ReLU(inplace=True)]
        channels = width
    return nn.Sequential(*layers, nn.AvgPool2d(image_size // 4), nn.Flatten(), nn.Linear(channels, 10))


# Of the side of a picture; learning rate; what the side is a multiple of.
_PICTURES: dict[str, tuple[Callable[[int], nn.Module], float, int]] = {
    "resnet50": (lambda _side: resnet50(), 0.002, 32),
    "vgg16": (lambda side: example().vgg16(side), 0.002, 32),
    "mlp": (lambda side: example().mlp(side), 0.02, 1),
    "convnet": (convnet, 0.02, 4),
}


# --- tokens ----------------------------------------------------------------------------------------------------------


def _gpt2_block(width: int, heads: int, layers: int) -> Block:
    block = Block(width, heads, approximate="tanh")
    for layer in (block.queries_keys_values, block.attended, block.mlp[0], block.mlp[2]):
        nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)
    for layer in (block.attended, block.mlp[2]):
        # Two sums a block: without this the sum would grow with the depth.
        nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))
    return block


class Gpt2(nn.Module):
    """GPT-2 (Radford et al., 2019) without dropout; the small one has 124,439,808 parameters in 148 tensors."""

    def __init__(self, tokens: int, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(tokens, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.01)
        self.blocks = nn.Sequential(*(_gpt2_block(width, heads, layers) for _ in range(layers)))
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        # One parameter, two users: its gradient is ready only when the embedding's part has been added.
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.token(tokens) + self.position(places))
        scores: Tensor = self.head(self.last_norm(hidden))
        return scores


def _next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


# --- vectors ---------------------------------------------------------------------------------------------------------


def tiny(layers: int) -> nn.Module:
    """Twice as many gradients as layers, 64 B and 1 KiB: bytes are nothing, so what is left is the cost of a gradient.

    Orthogonal matrices keep the signal's length; with torch's own start it would be gone after a hundred layers.
    """
    weights, _ = torch.linalg.qr(torch.randn(layers, TINY_WIDTH, TINY_WIDTH, device="cpu"))
    model = nn.Sequential(*(nn.Linear(TINY_WIDTH, TINY_WIDTH) for _ in range(layers)))
    with torch.no_grad():
        for layer, weight in zip(model, weights, strict=True):
            assert isinstance(layer, nn.Linear)
            layer.weight.copy_(weight)
            layer.bias.zero_()
    return model


def wide(width: int) -> nn.Module:
    """Square layers: with a batch of b samples, some 6 b operations for each element, and 4 bytes of gradient."""
    layers: list[nn.Module] = []
    for _ in range(WIDE_LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
