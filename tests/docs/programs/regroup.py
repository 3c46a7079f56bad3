# ranks: 2
"""Two ranks whose connections are lost train on, with a store that none of them serves."""

import os
import signal

import torch
import torch.distributed as dist
from support.page_programs import run_blocks

import bagua.torch_api as bagua
from bagua.distributed.run import main
from bagua.regroup import coordinator
from bagua.regroup.groups import abort

rank = int(os.environ["RANK"])
server = 0
if rank == 0:
    server = os.fork()
    if server == 0:
        os._exit(main(["--regroup", "--store-only", "--master-port", os.environ["MASTER_PORT"]]))

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
bagua.init_process_group(regroup=bagua.Regroup(), backend="gloo")
model = bagua.with_bagua(model, [optimizer])
changes = []
model.on_regroup(changes.append)
run_blocks("docs/how-to/train/regroup.md", 1)

calls = 0
losses = []


def train_step():
    global calls
    calls += 1
    if rank == 1 and calls == 10:
        abort(coordinator.current()._groups.made)
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


run_blocks("docs/how-to/train/regroup.md", 2)
assert len(changes) == 1
assert (changes[0].world_size, changes[0].lost_ranks) == (2, ())
assert bagua.regroup_step() == 20
assert optimizer.param_groups[0]["lr"] == 0.01

dataset = list(torch.arange(80 * 8.0).reshape(80, 8))
seen = []


def loss_of(model, batch):
    seen.extend(int(one) // 8 for one in batch[:, 0])
    if rank == 1 and len(seen) == 60:
        abort(coordinator.current()._groups.made)
    return model(batch).square().mean() * 0


run_blocks("docs/how-to/train/regroup.md", 3)
everybody = [None] * 2
dist.all_gather_object(everybody, seen)
# One step of each rank was dropped.
assert sum(map(len, everybody)) == 2 * 80 + 2 * 4
assert set(everybody[0] + everybody[1]) == set(range(80))
assert len(changes) == 2
dist.barrier()
bagua.destroy_process_group()
if rank == 0:
    os.kill(server, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) == 0
