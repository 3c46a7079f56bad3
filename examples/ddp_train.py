"""Train a model with PyTorch's DistributedDataParallel and print loss and step time. It never imports bagua:

    torchrun --nproc-per-node 2 examples/ddp_train.py                       # NCCL's own network (gloo without GPUs)
    ENABLE_BAGUA_NET=1 torchrun --nproc-per-node 2 examples/ddp_train.py    # the same script through Bagua-Net

The data needs no download: each class is a fixed random picture, and a sample is its class's picture under noise, so
the loss falls when and only when gradients are right. Every batch depends on seed, step and rank alone: two runs with
the same seed see the same numbers, whatever network carries the gradients.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CLASSES = 10
# The noise is stronger than the picture, so that a model has to average over many samples.
NOISE = 2.0


def mlp(image_size: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * image_size * image_size, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, CLASSES),
    )


def vgg16(image_size: int) -> nn.Module:
    """VGG16 (Simonyan and Zisserman, configuration D): at 224 pixels 138 million parameters, most of them in one
    layer. It sends many bytes for little arithmetic, which is why it is used to judge networks."""
    if image_size < 32 or image_size % 32:
        raise SystemExit(f"--image-size {image_size}: vgg16 halves the picture five times; use a multiple of 32")
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [
        nn.Flatten(),
        nn.Linear(512 * (image_size // 32) ** 2, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        # As many outputs as for ImageNet, so that size and traffic are those of the published model.
        nn.Linear(4096, 1000),
    ]
    model = nn.Sequential(*layers)
    for layer in model:
        if not isinstance(layer, nn.Conv2d | nn.Linear):
            continue
        if isinstance(layer, nn.Conv2d):
            # Without normalization layers the signal would fade out on its way through 13 convolutions ...
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        else:
            # ... and the classifier starts near zero, so that its first guesses are even and its gradients small.
            nn.init.normal_(layer.weight, std=0.01)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return model


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(8, channels),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        result: Tensor = torch.relu(pictures + self.branch(pictures))
        return result


def resnet(image_size: int) -> nn.Module:
    """A small residual network: many small gradients instead of VGG16's few large ones."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), ResidualBlock(32)]
    for channels in (32, 64):
        layers += [nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), ResidualBlock(2 * channels)]
    # A mean over fixed axes: the backward of adaptive pooling is not deterministic on GPUs.
    layers += [nn.AvgPool2d(image_size // 4), nn.Flatten(), nn.Linear(128, CLASSES)]
    return nn.Sequential(*layers)


MODELS: dict[str, Callable[[int], nn.Module]] = {"mlp": mlp, "vgg16": vgg16, "resnet": resnet}


class NoisyPictures:
    def __init__(self, seed: int, image_size: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device
        self._generator = torch.Generator(device)
        self._generator.manual_seed(seed)
        self._pictures = torch.randn(CLASSES, 3, image_size, image_size, generator=self._generator, device=device)

    def batch(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        # One seed per batch instead of one long stream: a resumed run sees what an uninterrupted one sees.
        self._generator.manual_seed(self._seed + 1_000_003 * (step + 1) + rank)
        labels = torch.randint(CLASSES, (size,), generator=self._generator, device=self._device)
        pictures = self._pictures[labels]
        noise = torch.empty_like(pictures).normal_(0.0, NOISE, generator=self._generator)
        return pictures + noise, labels


@dataclass(frozen=True)
class Training:
    losses: list[float]  # of each step, the mean over all ranks
    step_seconds: list[float]  # of each step, the slowest rank's


def train(
    model: nn.Module, data: NoisyPictures, arguments: argparse.Namespace, rank: int, device: torch.device
) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    losses, seconds = [], []
    for step in range(arguments.steps):
        pictures, labels = data.batch(step, rank, arguments.batch_size)
        synchronize(device)
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.dtype == "bf16"):
            loss = criterion(model(pictures), labels)
        loss.backward()
        optimizer.step()
        synchronize(device)
        elapsed = time.perf_counter() - began
        shared_loss = loss.detach().float().clone()
        dist.all_reduce(shared_loss)
        slowest = torch.tensor(elapsed, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        losses.append(shared_loss.item() / dist.get_world_size())
        seconds.append(slowest.item())
        if rank == 0 and not arguments.quiet:
            print(f"step {step:3d}  loss {losses[-1]:.6f}  {seconds[-1] * 1e3:9.2f} ms", flush=True)
    return Training(losses, seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fingerprint(model: nn.Module, device: torch.device) -> Tensor:
    """Two sums over the bits of all parameters: a wrong or misplaced bit anywhere changes one of them."""
    total = torch.zeros(2, dtype=torch.int64, device=device)
    for number, parameter in enumerate(model.parameters()):
        bits = parameter.detach().contiguous().view(torch.int32).to(torch.int64).flatten()
        weights = torch.arange(1, bits.numel() + 1, device=device)
        total[0] += bits.sum() * (number + 1)
        total[1] += (bits * weights).sum()
    return total


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a model with PyTorch's DistributedDataParallel and print loss and step time. It never"
        " imports bagua: whether Bagua-Net carries the gradients is decided outside, by ENABLE_BAGUA_NET=1."
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp", help="default mlp")
    parser.add_argument("--steps", type=int, default=30, help="default 30")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step (default 32)")
    parser.add_argument("--image-size", type=int, help="pixels (default: 224 for vgg16, else 32)")
    parser.add_argument(
        "--dtype", choices=("float32", "bf16"), default="float32", help="bf16: autocast (default float32)"
    )
    parser.add_argument("--lr", type=float, help="learning rate (default: 0.002 for vgg16, else 0.02)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches (default 1)")
    parser.add_argument(
        "--backend", choices=("auto", "nccl", "gloo"), default="auto", help="auto: NCCL if there are GPUs"
    )
    parser.add_argument("--timeout-s", type=float, default=120, help="of one collective (default 120)")
    parser.add_argument("--json", type=Path, help="write losses and step times to this file (rank 0)")
    parser.add_argument("--quiet", action="store_true", help="print only the closing line")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.batch_size < 1:
        parser.error(f"--steps {arguments.steps} and --batch-size {arguments.batch_size} must be at least 1")
    if arguments.backend == "nccl" and not torch.cuda.is_available():
        parser.error("--backend nccl needs a GPU for each rank, and torch sees none; use --backend gloo")
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json {arguments.json}: folder {arguments.json.parent} does not exist; create it first")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/ddp_train.py")
    arguments.image_size = arguments.image_size or (224 if arguments.model == "vgg16" else 32)
    arguments.lr = arguments.lr or (0.002 if arguments.model == "vgg16" else 0.02)
    if arguments.backend == "auto":
        arguments.backend = "nccl" if torch.cuda.is_available() else "gloo"
    return arguments


def main() -> None:
    arguments = parse_arguments()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if arguments.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    # Two runs are compared number by number. Warn only: some operators have no deterministic form.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Ranks share the host's cores; each with a pool for all of them would only get in each other's way.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))

    dist.init_process_group(arguments.backend, timeout=datetime.timedelta(seconds=arguments.timeout_s))
    try:
        torch.manual_seed(arguments.seed)
        model = MODELS[arguments.model](arguments.image_size).to(device)
        ddp = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
        data = NoisyPictures(arguments.seed, arguments.image_size, device)
        training = train(ddp, data, arguments, rank, device)
        # Maximum and minimum over the ranks are equal if all ranks have the same parameters, bit for bit.
        mine = fingerprint(model, device)
        extremes = torch.cat([mine, -mine])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        agree = bool(torch.equal(extremes[:2], -extremes[2:]))
        if rank == 0:
            report(arguments, training, agree, sum(parameter.numel() for parameter in model.parameters()))
    finally:
        dist.destroy_process_group()
    if not agree:
        print(f"rank {rank}: the ranks ended with different parameters", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by returning: with torch 2.13, gloo's destructor waits for its thread while it holds Python's lock, and now
    # and then that thread is just waiting for the lock. The process group has been destroyed in order above.
    os._exit(0 if agree else 1)


def report(arguments: argparse.Namespace, training: Training, agree: bool, parameters: int) -> None:
    # The first steps create communicators and choose kernels.
    steady = training.step_seconds[min(5, len(training.step_seconds) - 1) :]
    step_s = statistics.median(steady)
    samples_per_s = arguments.batch_size * dist.get_world_size() / step_s
    print(
        f"{arguments.model}, {parameters / 1e6:.1f} M parameters, {dist.get_world_size()} ranks, {arguments.backend}:"
        f" loss {training.losses[0]:.6f} -> {training.losses[-1]:.6f}, median step {step_s * 1e3:.2f} ms,"
        f" {samples_per_s:.1f} samples/s, replicas {'agree' if agree else 'DIFFER'}",
        flush=True,
    )
    if arguments.json:
        document = {
            "model": arguments.model,
            "parameters": parameters,
            "ranks": dist.get_world_size(),
            "backend": arguments.backend,
            "dtype": arguments.dtype,
            "batch_size": arguments.batch_size,
            "seed": arguments.seed,
            "torch": torch.__version__,
            "median_step_seconds": step_s,
            "samples_per_second": samples_per_s,
            "replicas_agree": agree,
            "losses": training.losses,
            "step_seconds": training.step_seconds,
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
