"""Modules that are not on a GPU, in a group of gloo and NCCL that is bound to one: they train as in any other group."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.training import batches, check_equal, check_ranks_equal, message_of, mlp, momentum, torch_ddp, train, wrap
from torch import nn

import bagua.torch_api as bagua
from bagua.collectives.object_collectives import all_gather_object
from bagua.job import torch_internals
from bagua.torch_api import communication
from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint


def _trained(folder: str) -> list[str]:
    rank = int(os.environ["RANK"])
    # This build of torch has no NCCL: gloo plays its part, which nobody needs here.
    torch_internals.bound_device = lambda _group: torch.device("cuda", rank)
    bagua.init_process_group()
    for how in ("with_bagua", "wrapper"):
        ours: Any = mlp(rank)
        theirs = copy.deepcopy(ours)
        optimizer, other = momentum(ours), momentum(theirs)
        model, reference = wrap(how, ours, optimizer), torch_ddp(theirs)
        for net, its in ((model, optimizer), (reference, other)):
            train(net, its, batches(rank, 3))
        check_equal(ours, theirs, how)
        save_checkpoint(3, f"{folder}/{how}", model, optimizer)
        assert load_checkpoint(f"{folder}/{how}", model, optimizer) == 3
        check_ranks_equal(ours)
    communication.barrier()
    assert all_gather_object(rank) == [0, 1]
    duplicate = communication.new_group()
    assert duplicate.bound_device == torch.device("cuda", rank)
    for where in ("meta", "meta and cpu"):
        net: Any = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2))
        if where == "meta":
            net = net[0]
        message_of(NotImplementedError, lambda net=net: net.with_bagua([momentum(net)]), "is on device 'meta'")
    return [str(dist.get_backend()), str(communication._get_default_group().bound_device)]


def test_a_module_on_the_cpu_trains_in_a_group_that_is_bound_to_a_gpu(tmp_path: Any) -> None:
    assert run_ranks(2, _trained, str(tmp_path)) == [["gloo", f"cuda:{rank}"] for rank in range(2)]
