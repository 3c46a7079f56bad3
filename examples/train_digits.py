"""Train a small convolutional network on scikit-learn's handwritten digits with Bagua, on several processes:

    torchrun --nproc-per-node 2 examples/train_digits.py          # Bagua
    torchrun --nproc-per-node 2 examples/train_digits.py --ddp    # torch's DistributedDataParallel, for comparison

Needs scikit-learn, which brings the data (pip install '.[torch,examples]'). It takes seconds on two CPU cores. Two
runs with the same seed and the same number of processes print the same lines; with two processes, Bagua and DDP do.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,797 pictures of 8x8 pixels: four fifths to train with, one fifth to test. The split depends on the seed alone,
    so that all processes make the same."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("this example needs scikit-learn: pip install scikit-learn") from None
    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    pictures = torch.tensor(pictures, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels, dtype=torch.int64)[order]
    test = len(labels) // 5
    return pictures[test:], labels[test:], pictures[:test], labels[:test]


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def with_bagua(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """All that a training script needs of Bagua."""
    import bagua.torch_api as bagua
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

    bagua.init_process_group()
    return model.with_bagua([optimizer], GradientAllReduceAlgorithm())


def with_ddp(model: nn.Module) -> nn.Module:
    dist.init_process_group("nccl" if next(model.parameters()).is_cuda else "gloo")
    return DistributedDataParallel(model)


def accuracy(model: nn.Module, pictures: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(pictures).argmax(dim=1) == labels).float().mean()
    model.train()
    return float(right)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network on scikit-learn's handwritten digits with Bagua, on several"
        " processes."
    )
    parser.add_argument("--ddp", action="store_true", help="torch's DistributedDataParallel instead of Bagua")
    parser.add_argument("--epochs", type=int, default=15, help="default 15")
    parser.add_argument("--batch-size", type=int, default=32, help="of one process (default 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default 0.002)")
    parser.add_argument("--seed", type=int, default=1, help="of weights, split and batches (default 1)")
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.batch_size < 1:
        parser.error(f"--epochs {arguments.epochs} and --batch-size {arguments.batch_size} must be at least 1")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/train_digits.py")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    rank, local_rank, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cpu")
    # One GPU for each process of this host, or none at all.
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # Convolutions and their gradients come from one fixed algorithm, so that two runs print the same.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True

    pictures, labels, test_pictures, test_labels = (part.to(device) for part in digits(arguments.seed))
    torch.manual_seed(arguments.seed)
    model = convnet().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    wrapped = with_ddp(model) if arguments.ddp else with_bagua(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)

    right = 0.0
    # A batch of all processes together; what is left over at the end of an epoch comes in another one.
    together = arguments.batch_size * ranks
    began = time.monotonic()
    for epoch in range(1, arguments.epochs + 1):
        shuffle = torch.Generator().manual_seed(arguments.seed + epoch)
        order = torch.randperm(len(labels), generator=shuffle).to(device)
        batches = order[: len(order) // together * together].view(-1, ranks, arguments.batch_size)
        total = torch.zeros((), device=device)
        for batch in batches[:, rank]:
            optimizer.zero_grad()
            loss = functional.cross_entropy(wrapped(pictures[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        schedule.step()
        right = accuracy(wrapped, test_pictures, test_labels)
        if rank == 0:
            mean = float(total) / (len(batches) * ranks)
            print(f"epoch {epoch:2d}  loss {mean:.6f}  test accuracy {right:.2%}", flush=True)
    if rank == 0:
        name = "torch DDP" if arguments.ddp else "Bagua"
        seconds = time.monotonic() - began
        print(f"{name}, {ranks} processes on {device.type}: test accuracy {right:.2%} in {seconds:.1f} s", flush=True)

    dist.destroy_process_group()
    sys.stdout.flush()
    # Not by returning: with torch 2.13, gloo's destructor waits for its thread while it holds Python's lock, and now
    # and then that thread is just waiting for the lock.
    os._exit(0)


if __name__ == "__main__":
    main()
