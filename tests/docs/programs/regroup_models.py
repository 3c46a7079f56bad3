# ranks: 1
"""A generator and a discriminator under regroup. The store would be another process's."""

import os

import torch
import torch.distributed as dist
from support.page_programs import run_blocks

import bagua.torch_api as bagua

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ["MASTER_PORT"] = str(store.port)
generator, discriminator = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.01)
bagua.init_process_group(regroup=bagua.Regroup(), backend="gloo")
bagua.with_bagua(generator, [of_generator])
discriminator = bagua.data_parallel.DistributedDataParallel(discriminator, optimizers=[of_discriminator])


def discriminator_loss():
    return discriminator(generator(torch.ones(3, 2)).detach()).mean()


def generator_loss():
    return -discriminator(generator(torch.ones(3, 2))).mean()


while bagua.regroup_step() < 3:
    before = generator.weight.clone(), discriminator.module.weight.clone()
    run_blocks("docs/how-to/train/regroup.md", 4)
    assert not torch.equal(generator.weight, before[0])
    assert not torch.equal(discriminator.module.weight, before[1])
assert not generator.step_was_dropped
bagua.destroy_process_group()
