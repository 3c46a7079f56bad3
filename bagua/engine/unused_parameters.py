"""What a backward pass reaches, and the agreement of all ranks on it. Runs in the pass, on autograd's thread."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from bagua.engine.comm_thread import in_order

if TYPE_CHECKING:
    from bagua.collectives.communicator import BaguaCommunicator


class Presence(enum.IntEnum):
    """Of a gradient at the end of a backward pass, in the order in which the ranks' answers win over each other."""

    ABSENT = 0  # there is none
    KEPT = 1  # there is one, of an earlier pass
    USED = 2  # this pass reached the parameter


def will_reach_any(parameters: Iterable[Tensor]) -> bool:
    """Within a backward pass: whether it will accumulate the gradient of any of these parameters, which require one.
    `torch.autograd.grad` does not."""
    try:
        return any(torch._C._will_engine_execute_node(_accumulator(parameter)) for parameter in parameters)
    except RuntimeError:  # torch does not answer where it is asked for the gradients of leaves
        return False


@torch.enable_grad()
def _accumulator(parameter: Tensor) -> Node:
    """The node at which the parameter's gradient is accumulated: as long as a graph has one, always the same. It must
    not be kept: it holds the parameter where Python's collector does not look."""
    node = parameter.view_as(parameter).grad_fn
    assert node is not None
    accumulator = node.next_functions[0][0]
    assert accumulator is not None
    return accumulator


def agree_on_presence(
    presence: Sequence[Presence], communicator: BaguaCommunicator, device: torch.device
) -> list[Presence]:
    """For each position, the most that any rank has. Collective. With CUDA the host waits for it only where this rank
    does not know the answer.

    Args:
        presence: on every rank of the same length.
        device: of the small tensor that travels.
    """
    knows = all(one is Presence.USED for one in presence)
    if knows:
        # Made on the device: a copy to it would wait for all that was queued there, the pass and its communication.
        flags = torch.full((len(presence),), int(Presence.USED), dtype=torch.int32, device=device)
    else:
        flags = torch.tensor([int(one) for one in presence], dtype=torch.int32, device=device)
    group = communicator.torch_group
    in_order(group, device, lambda: dist.all_reduce(flags, dist.ReduceOp.MAX, group=group))
    if knows:
        return list(presence)
    return [Presence(flag) for flag in flags.tolist()]
