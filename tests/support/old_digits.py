"""A training script as one wrote them for Bagua 0.9: tests run it as it is.

The data are scikit-learn's handwritten digits, which need no download. Importing scikit-learn itself takes a second.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
from pathlib import Path

import numpy as np
import torch
from torch import nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bagua.torch_api as bagua


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(8 * 4 * 4, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        hidden = functional.max_pool2d(functional.relu(self.conv(pictures)), 2).flatten(1)
        return functional.log_softmax(self.fc2(self.dropout(functional.relu(self.fc1(hidden)))), dim=1)


def datasets() -> tuple[Dataset[tuple[torch.Tensor, ...]], Dataset[tuple[torch.Tensor, ...]]]:
    found = importlib.util.find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    rows = np.loadtxt(Path(found.origin).parent / "datasets/data/digits.csv.gz", delimiter=",", dtype=np.float32)
    data = torch.from_numpy(rows[:, :-1]).reshape(-1, 1, 8, 8) / 16, torch.from_numpy(rows[:, -1]).long()
    return TensorDataset(*(one[:1440] for one in data)), TensorDataset(*(one[1440:] for one in data))


def train(args: argparse.Namespace, model: nn.Module, loader: DataLoader, optimizer: optim.Optimizer) -> None:
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(data.to(args.device)), target.to(args.device))
        loss.backward()
        optimizer.step()


def test(args: argparse.Namespace, model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            correct += int((model(data.to(args.device)).argmax(dim=1) == target.to(args.device)).sum())
    return correct / len(loader.dataset)  # type: ignore[arg-type]


def make_algorithm(args: argparse.Namespace, optimizer: optim.Optimizer) -> bagua.algorithms.Algorithm:
    if args.algorithm == "gradient_allreduce":
        from bagua.torch_api.algorithms import gradient_allreduce

        return gradient_allreduce.GradientAllReduceAlgorithm()
    if args.algorithm == "bytegrad":
        from bagua.torch_api.algorithms import bytegrad

        return bytegrad.ByteGradAlgorithm()
    if args.algorithm == "decentralized":
        from bagua.torch_api.algorithms import decentralized

        return decentralized.DecentralizedAlgorithm()
    if args.algorithm == "low_precision_decentralized":
        from bagua.torch_api.algorithms import decentralized

        return decentralized.LowPrecisionDecentralizedAlgorithm()
    if args.algorithm == "qadam":
        from bagua.torch_api.algorithms.q_adam import QAdamAlgorithm

        return QAdamAlgorithm(optimizer)
    if args.algorithm == "async":
        from bagua.torch_api.algorithms import async_model_average

        return async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=args.async_sync_interval)
    raise NotImplementedError(args.algorithm)


def main() -> float:
    parser = argparse.ArgumentParser(description="Handwritten digits with Bagua.")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.8)
    parser.add_argument("--algorithm", default="gradient_allreduce")
    parser.add_argument("--async-sync-interval", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=0)  # of --set_additional_flag
    args = parser.parse_args()

    args.device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(bagua.get_local_rank())
        args.device = torch.device("cuda", bagua.get_local_rank())
    if not bagua.communication.is_initialized():
        bagua.init_process_group()
    logging.getLogger().setLevel(logging.INFO if bagua.get_rank() == 0 else logging.ERROR)
    assert args.local_rank == bagua.get_local_rank()

    torch.manual_seed(1)
    train_set, test_set = datasets()
    sampler = DistributedSampler(train_set, num_replicas=bagua.get_world_size(), rank=bagua.get_rank())
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    test_loader = DataLoader(test_set, batch_size=512)

    model: nn.Module = Net().to(args.device)
    if args.algorithm == "qadam":
        from bagua.torch_api.algorithms.q_adam import QAdamOptimizer

        optimizer: optim.Optimizer = QAdamOptimizer(model.parameters(), lr=args.lr / 30, warmup_steps=20)
    else:
        optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model = model.with_bagua([optimizer], make_algorithm(args, optimizer))

    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        if args.algorithm == "async":
            model.bagua_algorithm.resume(model)
        train(args, model, train_loader, optimizer)
        if args.algorithm == "async":
            model.bagua_algorithm.abort(model)
        scheduler.step()
    return test(args, model, test_loader)


if __name__ == "__main__":
    print(f"accuracy {main():.4f}")
