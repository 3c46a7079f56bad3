"""torchrun's restarts: the ranks of the next attempt find each other, and not those that have died."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from support.ranks import run_ranks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm


def _train(folder: str) -> None:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    bagua.init_process_group()
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.with_bagua([optimizer], GradientAllReduceAlgorithm())
    for step in range(5):
        if attempt == "0" and step == 3 and bagua.get_rank() == 1:
            os._exit(3)
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    Path(folder, f"finished {bagua.get_rank()} attempt {attempt}").touch()


def _launch(folder: str) -> None:
    """What torchrun does, but for the command line; the ranks are forked from here, which has imported torch."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        rdzv_configs={"store_type": "tcp"},
        local_addr="127.0.0.1",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, _train)(folder)


def test_the_next_attempt_begins_anew(tmp_path: Path) -> None:
    run_ranks(1, _launch, str(tmp_path))
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["finished 0 attempt 1", "finished 1 attempt 1"]
