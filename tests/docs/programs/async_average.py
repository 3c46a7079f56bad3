# ranks: 2
"""Replicas are equal after `abort`, and averages were applied."""

import time

import torch
from support.page_programs import equal_on_all_ranks, run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


class Loader:
    """Slow enough for some averages in an epoch, on a busy machine, too."""

    def __iter__(self):
        for _ in range(20 + 10 * bagua.get_rank()):
            time.sleep(0.01)
            yield torch.randn(16, 8)


loader = Loader()


def evaluate(model):
    assert equal_on_all_ranks(*model.parameters())


run_blocks("docs/reference/algorithms/async.md", 1)


assert model.bagua_algorithm.status == "stopped"
assert model.bagua_algorithm.staleness.count > 0
assert Algorithm.init("async").sync_interval_ms == 500
