"""Trains a deep narrow network with and without fuse_step: the same losses, and how long the optimizer's steps take.

python examples/fuse_optimizer.py
python examples/fuse_optimizer.py --layers 500 --device cuda
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from bagua.torch_api.contrib import fuse_optimizer


def train(options: argparse.Namespace, *, fused: bool) -> tuple[list[float], float]:
    """The loss of each step, and the median time of the optimizer's steps in milliseconds."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(options.layers)]
    model = nn.Sequential(*layers, nn.Linear(16, 1)).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if fused:
        fuse_optimizer(optimizer)
    step = optimizer.fuse_step if fused else optimizer.step
    batch = torch.randn(32, 16, device=options.device)
    losses, times = [], []
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        losses.append(loss.item())
        begin = time.perf_counter()
        step()
        if options.device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return losses, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=50, help="with four parameters each (default 50)")
    parser.add_argument("--steps", type=int, default=20, help="of training (default 20)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default cpu)")
    options = parser.parse_args()
    torch.set_num_threads(1)  # several cost more than such tensors are worth
    plain, plain_ms = train(options, fused=False)
    ours, ours_ms = train(options, fused=True)
    print(f"loss {plain[0]:.4f} -> {plain[-1]:.4f}; with fuse_step {'the same' if plain == ours else 'ANOTHER'}")
    print(f"a step of AdamW: {plain_ms:.2f} ms, with fuse_step {ours_ms:.2f} ms")


if __name__ == "__main__":
    main()
