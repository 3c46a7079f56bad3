# ranks: 2
"""The weights are the same on all ranks after a round, and after each step before the first one; also where a rank is
half as fast, and makes half of the steps."""

import torch
from support.page_programs import equal_on_all_ranks, run_blocks

from bagua.engine.step_statistics import PassRecorder

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run_blocks("docs/reference/algorithms/local_steps.md", 1)

torch.manual_seed(bagua.get_rank())
for _ in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
assert equal_on_all_ranks(model.weight)


class Loader:
    """Notes after each of the last steps whether the weights are the same on all ranks."""

    def __iter__(self):
        for number in range(340):
            yield torch.randn(4, 8)
            if number < 280:
                continue
            steps.append(equal_on_all_ranks(model.weight))


steps = []
loader = Loader()
run_blocks("docs/reference/algorithms/local_steps.md", 2)
assert all(steps[:20])
assert [number for number, is_equal in enumerate(steps[20:], 1) if is_equal] == [20, 40]

run_blocks("docs/reference/algorithms/local_steps.md", 3, 4)

(group,) = algorithm.outer_optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups
assert group["momentum"] == 0.8

PassRecorder.latest = lambda _, steps: (steps, (1.0, 2.0)[bagua.get_rank()], 0.0)
dataset = [(torch.randn(8), torch.zeros(1)) for _ in range(50)]
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = 0


def mse_loss(outputs, targets):
    global batches
    batches += 1
    return torch.nn.functional.mse_loss(outputs, targets)


run_blocks("docs/reference/algorithms/local_steps.md", 5)
assert batches == (40 * 20, 20 + 39 * 10)[bagua.get_rank()]
assert equal_on_all_ranks(model.weight)
