"""An algorithm that communicates some of its buckets in each step, as those of local steps will."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.rank_tests import on_ranks
from support.training import algorithm_of, batches, check_ranks_equal, loss_of, message_of, mlp, momentum

from bagua.torch_api.algorithms.base import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket


class AlternatingImpl(AlgorithmImpl):
    def tensors_to_buckets(self, tensors: Any, do_flatten: bool) -> list[BaguaBucket]:
        every = [tensor for group in tensors for tensor in group]
        return [BaguaBucket([tensor], str(number), do_flatten) for number, tensor in enumerate(every)]

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op(average=True, group=self.process_group)

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Callable[[Any], None]:
        def choose(_: Any) -> None:
            first = bagua_ddp.bagua_train_step_counter % 2
            bagua_ddp.scheduler.choose_buckets(bagua_ddp.bagua_buckets[first::2])

        return choose


@on_ranks(2)
def test_some_buckets_are_communicated_in_each_step(rank: int, device: torch.device) -> None:
    net: Any = mlp(0, device)
    twin = mlp(0, device)
    optimizer = momentum(net)
    net.with_bagua([optimizer], algorithm_of(AlternatingImpl))
    every = [batches(one, 6, device) for one in range(2)]
    for step in range(6):
        twin.load_state_dict(net.state_dict())
        ranks = [torch.autograd.grad(loss_of(twin, every[one][step]), list(twin.parameters())) for one in range(2)]
        optimizer.zero_grad()
        loss_of(net, every[rank][step]).backward()
        chosen = net.bagua_buckets[net.bagua_train_step_counter % 2 :: 2]
        averaged = {id(tensor) for bucket in chosen for tensor in bucket.tensors}
        assert len(averaged) == 3
        for parameter, own, first, second in zip(net.parameters(), ranks[rank], *ranks, strict=True):
            if id(parameter) in averaged:
                torch.testing.assert_close(parameter.grad, (first + second) / 2)
            else:
                assert torch.equal(parameter.grad, own)
                parameter.grad = first  # of rank 0 on all ranks, so that they stay equal
        optimizer.step()
        check_ranks_equal(net)
    # Gradients of the launch set that do not come are missing; those of other buckets are not.
    net(every[rank][0][0])
    net[0](every[rank][0][0]).sum().backward()
    message = message_of(RuntimeError, optimizer.step)
    assert "2 of 6 parameters got no gradient in the last backward pass: 4.weight, 2.weight." in message
