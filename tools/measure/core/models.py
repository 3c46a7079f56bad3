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

# Batches are made before a turn and taken in turn: a step is timed, not the making of its data.
BATCHES = 4
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ddp_train.py"
TINY_WIDTH = 16
WIDE_LAYERS = 5


@dataclass(frozen=True)
class ModelSize:
    """What the parent asked for: the catalogue's defaults or the user's options."""

    length: int  # see ModelEntry
    batch_size: int
    dtype: str


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


def build(name: str, size: ModelSize, device: torch.device, *, seed: int, rank: int) -> Workload:
    """Every rank begins with other parameters and sees other data. Only a wrapper that broadcasts rank 0's parameters
    and averages all gradients ends with the same model everywhere.

    Raises:
        ValueError: unknown name, or a length that the model cannot have.
    """
    if name not in _BUILDERS:
        raise ValueError(f"unknown model {name!r}; choose of {', '.join(_BUILDERS)}")
    torch.manual_seed(seed + 1_000_003 * rank)
    return _BUILDERS[name](size, device, seed, rank)


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


def _of_pictures(
    model: nn.Module, size: ModelSize, device: torch.device, seed: int, rank: int, rate: float
) -> Workload:
    data = example().NoisyPictures(seed, size.length, device)
    batches = [data.batch(number, rank, size.batch_size) for number in range(BATCHES)]
    return Workload(
        model,
        torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        [pictures for pictures, _ in batches],
        [labels for _, labels in batches],
        functional.cross_entropy,
        size.dtype == BF16,
    )


def _resnet50(size: ModelSize, device: torch.device, seed: int, rank: int) -> Workload:
    if size.length < 32:
        raise ValueError(f"--length {size.length}: resnet50 halves a picture five times; use 32 or more")
    with device:
        model = resnet50()
    return _of_pictures(model, size, device, seed, rank, rate=0.002)


def _vgg16(size: ModelSize, device: torch.device, seed: int, rank: int) -> Workload:
    if size.length % 32:
        raise ValueError(f"--length {size.length}: vgg16 halves a picture five times; use a multiple of 32")
    with device:
        model = example().vgg16(size.length)
    return _of_pictures(model, size, device, seed, rank, rate=0.002)


def _mlp(size: ModelSize, device: torch.device, seed: int, rank: int) -> Workload:
    with device:
        model = example().mlp(size.length)
    return _of_pictures(model, size, device, seed, rank, rate=0.02)


def _convnet(size: ModelSize, device: torch.device, seed: int, rank: int) -> Workload:
    if size.length % 4:
        raise ValueError(f"--length {size.length}: convnet halves a picture twice; use a multiple of 4")
    with device:
        model = convnet(size.length)
    return _of_pictures(model, size, device, seed, rank, rate=0.02)


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


# --- tokens ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        for layer in (self.query_key_value, self.attention_out, self.mlp_in, self.mlp_out):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        for layer in (self.attention_out, self.mlp_out):
            # Two sums a block: without this the sum would grow with the depth.
            nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, hidden: Tensor) -> Tensor:
        samples, tokens, width = hidden.shape
        joined = self.query_key_value(self.before_attention(hidden))
        query, key, value = (
            part.view(samples, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in joined.split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(samples, tokens, width))
        mlp = functional.gelu(self.mlp_in(self.before_mlp(hidden)), approximate="tanh")
        result: Tensor = hidden + self.mlp_out(mlp)
        return result


class Gpt2(nn.Module):
    """GPT-2 (Radford et al., 2019) without dropout; the small one has 124,439,808 parameters in 148 tensors."""

    def __init__(
        self, *, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257, tokens: int = 1024
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.01)
        self.blocks = nn.Sequential(*(Block(width, heads, layers) for _ in range(layers)))
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # One parameter, two users: its gradient is ready only when the embedding's part has been added.
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.token(tokens) + self.position(places))
        scores: Tensor = self.head(self.last_norm(hidden))
        return scores


def _gpt2(size: ModelSize, device: torch.device, seed: int, rank: int) -> Workload:
    with device:
        model = Gpt2(tokens=max(1024, size.length))
    generator = torch.Generator(device)
    generator.manual_seed(seed + 7919 * (rank + 1))
    shape = (size.batch_size, size.length + 1)
    texts = [torch.randint(50257, shape, generator=generator, device=device) for _ in range(BATCHES)]
    return Workload(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda"),
        [text[:, :-1].contiguous() for text in texts],
        [text[:, 1:].contiguous() for text in texts],
        _next_token_loss,
        size.dtype == BF16,
    )


def _next_token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


# --- many small gradients --------------------------------------------------------------------------------------------


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


def _tiny(size: ModelSize, device: torch.device, seed: int, rank: int) -> Workload:
    with device:
        model = tiny(size.length)
    generator = torch.Generator(device)
    generator.manual_seed(seed + 7919 * (rank + 1))
    shape = (BATCHES, size.batch_size, TINY_WIDTH)
    inputs = torch.randn(shape, generator=generator, device=device)
    targets = torch.randn(shape, generator=generator, device=device)
    return Workload(
        model,
        # All layers move the product by as much: the rate has to be small against one over their number.
        torch.optim.SGD(model.parameters(), lr=0.02 / size.length, momentum=0.9),
        list(inputs),
        list(targets),
        functional.mse_loss,
        size.dtype == BF16,
    )


# --- many bytes for little arithmetic --------------------------------------------------------------------------------


def _wide(size: ModelSize, device: torch.device, seed: int, rank: int) -> Workload:
    """Square layers: with a batch of b samples, some 6 b operations for each element, and 4 bytes of gradient."""
    width = size.length
    with device:
        layers: list[nn.Module] = []
        for _ in range(WIDE_LAYERS):
            layers += [nn.Linear(width, width), nn.ReLU()]
        model = nn.Sequential(*layers[:-1])
    generator = torch.Generator(device)
    generator.manual_seed(seed + 7919 * (rank + 1))
    shape = (BATCHES, size.batch_size, width)
    return Workload(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        list(torch.randn(shape, generator=generator, device=device)),
        list(torch.randn(shape, generator=generator, device=device)),
        functional.mse_loss,
        size.dtype == BF16,
    )


_BUILDERS: dict[str, Callable[[ModelSize, torch.device, int, int], Workload]] = {
    "resnet50": _resnet50,
    "vgg16": _vgg16,
    "gpt2": _gpt2,
    "tiny-2000": _tiny,
    "mlp": _mlp,
    "convnet": _convnet,
    "wide": _wide,
}
