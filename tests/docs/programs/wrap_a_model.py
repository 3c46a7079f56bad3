# ranks: 2
"""Wrapping in place broadcasts state, and replicas stay equal."""

import copy

import torch
from support.page_programs import run_blocks

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

bagua.init_process_group()
torch.manual_seed(bagua.get_rank())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())


def same(tensor):
    everywhere = torch.empty(2 * tensor.numel())
    bagua.allgather(tensor.detach().contiguous().view(-1), everywhere)
    return torch.equal(everywhere[: tensor.numel()], everywhere[tensor.numel() :])


def train(steps, set_to_none=True):
    for _ in range(steps):
        optimizer.zero_grad(set_to_none)
        model(torch.randn(4, 8)).square().mean().backward()
        assert all(same(parameter.grad) for parameter in model.parameters() if parameter.requires_grad)
        optimizer.step()


assert not same(model[0].weight)
model[1].running_mean.fill_(bagua.get_rank())
optimizer.param_groups[0]["lr"] = 0.1 if bagua.get_rank() == 0 else 0.2
assert model.with_bagua([optimizer], GradientAllReduceAlgorithm()) is model
assert same(model[0].weight)
assert not same(model[1].running_mean)
assert optimizer.param_groups[0]["lr"] == 0.1
train(2)
train(2, set_to_none=False)
bucket = model.bagua_buckets[0]
assert model[2].bias.grad.untyped_storage().data_ptr() == bucket.flattened_tensor().untyped_storage().data_ptr()
model[0].weight.requires_grad_(False)
train(2)
model[0].weight.requires_grad_(True)
train(2)
assert all(same(parameter) for parameter in model.parameters())
assert model.bagua_train_step_counter == 8

run_blocks("docs/how-to/train/wrap-a-model.md", 1)

assert bagua.communication.get_backend(model.bagua_module_name) is engine.scheduler
model.with_bagua([optimizer], GradientAllReduceAlgorithm(average=False))
assert model.bagua_ddp is not engine
assert model.bagua_train_step_counter == 0
train(2)
twin = copy.deepcopy(model)
twin(torch.randn(4, 8)).sum().backward()
if bagua.get_rank() == 0:
    model.eval()(torch.randn(4, 8))
bagua.barrier()

device = torch.device("cpu")
run_blocks("docs/how-to/train/wrap-a-model.md", 3)

assert model.bagua_ddp.communicator.device == device
