"""Ranks that run out of inputs before others (`DistributedDataParallel.join`).

A rank without inputs must take part in everything that the others do in a step, in the same order, or they wait for it
indefinitely. torch.distributed.algorithms.Join tells it that a step begins; after that, in this order:

1. one all-reduce of the flags of the step, by which the others say whether its backward pass communicates
2. the broadcast of buffers, from the last rank that still has inputs
3. with batch weights, the gather of them
4. the operations of every bucket, with zeros
5. with find_unused_parameters, the agreement on what was used

When all are done, what the last ones learned is broadcast from one of them. Gradients that it has dropped are dropped.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from bagua.collectives.coalesced import broadcast_coalesced
from bagua.engine.data_parallel import DataParallelEngine
from bagua.engine.setup import ActiveRanks
from bagua.job.failure_report import failures_named
from bagua.regroup import coordinator
from bagua.torch_api.data_parallel.forward_buffers import ForwardBuffers

# Positions of the flags, which are summed over the ranks.
_ACTIVE, _BACKWARD, _BUFFERS = range(3)


class JoinableWrapper(Joinable):
    """A base class of the wrapper: torch.distributed.algorithms.Join with one module, and what uneven inputs ask of the
    wrapper that they belong to.

    Attributes:
        device: of the replica.
        broadcast_buffers: whether the wrapper synchronizes buffers.
        forward_buffers: does that.
    """

    device: torch.device
    broadcast_buffers: bool
    forward_buffers: ForwardBuffers
    _uneven: UnevenInputs

    @property
    @abstractmethod
    def inner(self) -> DataParallelEngine:
        """The engine."""

    @abstractmethod
    def replicated_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(name, parameter) of all that are alike on all ranks, trained or frozen."""

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """A context in which ranks may run out of inputs at different times: those that have take part with zeros.

        Args:
            divide_by_initial_world_size: Whether gradients are divided by the number of ranks, or else by the number of
                those that still have inputs. An algorithm that sums them (average=False) divides by neither.
            enable: If False, the context does nothing.
            throw_on_early_termination: Whether all ranks raise an error as soon as one runs out.

        Raises:
            NotImplementedError: the algorithm communicates something else than gradients.
        """
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Used by torch.distributed.algorithms.Join."""
        return self._uneven.hook(**kwargs)

    @property
    def join_device(self) -> torch.device:
        """Of the small tensors by which the ranks count those that still have inputs."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The torch group of all ranks that train together."""
        return self.inner.communicator.torch_group


class UnevenInputs:
    """Of one wrapper; idle outside of `join`.

    Attributes:
        active_ranks: what the engine asks: which ranks take part in a step.
        source: the group rank whose buffers count.
    """

    def __init__(self, wrapper: JoinableWrapper) -> None:
        self._wrapper = wrapper
        self.active_ranks = ActiveRanks()
        self.source = 0
        self._divide_by_active = False

    def hook(self, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """What a rank does when it has run out; made at the beginning of the context.

        Raises:
            NotImplementedError: the algorithm communicates something else than gradients, now or later.
        """
        coordinator.refuse(
            "join()", "Ranks follow the longest one: loop while regroup_step() is below a number of steps"
        )
        engine = self._wrapper.inner
        changes = engine.bagua_algorithm.may_change
        if changes or not all(bucket.holds_gradients for bucket in engine.bagua_buckets):
            raise NotImplementedError(
                f"join: {engine.setup.algorithm_name} communicates something else than gradients"
                f"{', or begins to in some step' if changes else ''}. A rank without inputs cannot take part in that.\n"
                "Give every rank the same number of batches."
            )
        self.active_ranks.is_uneven, self.active_ranks.gradient_scale = True, 1.0
        # Of a sum there is nothing to divide, nor where batches have weights: this rank's is 0.
        divides = getattr(engine.bagua_algorithm, "average", True) and engine.setup.loss is None
        self._divide_by_active = not divide_by_initial_world_size and divides
        return _ShadowStep(self._wrapper, self)

    def before_forward(self) -> None:
        """Within `join`, on a rank that has inputs: tell those that have none what this step will do."""
        wrapper = self._wrapper
        backward = torch.is_grad_enabled() and wrapper.inner.require_backward_grad_sync
        buffers = wrapper.forward_buffers.will_run(wrapper.broadcast_buffers)
        self.exchange(active=True, backward=backward, buffers=buffers)

    def exchange(self, active: bool, backward: bool, buffers: bool) -> tuple[bool, bool]:
        """All ranks: (whether the step's backward pass communicates, whether buffers are broadcast)."""
        wrapper = self._wrapper
        communicator = wrapper.inner.communicator
        ranks = communicator.nranks()
        flags = torch.zeros(ranks, 3, dtype=torch.int32, device=wrapper.device)
        flags[communicator.rank()] = torch.tensor([active, backward, buffers], dtype=torch.int32, device="cpu")
        with failures_named(wrapper.inner.process_group, "counting the ranks that still have inputs", in_order=True):
            counted = Join.notify_join_context(wrapper) if active else None
            dist.all_reduce(flags, group=communicator.torch_group)
            table = flags.tolist()
            if counted is not None:
                counted.wait()
        running = [rank for rank in range(ranks) if table[rank][_ACTIVE]]
        # The last one, as torch's DDP has it.
        self.source = running[-1] if running else 0
        if self._divide_by_active and running:
            self.active_ranks.gradient_scale = ranks / len(running)
        return any(row[_BACKWARD] for row in table), any(row[_BUFFERS] for row in table)

    def finish(self) -> None:
        """All ranks have run out, and have the same parameters and buffers."""
        self.source = 0
        self.active_ranks.is_uneven, self.active_ranks.gradient_scale = False, 1.0
        self._wrapper.forward_buffers.differ = False
        # Outside of the context, ranks may call forward unequally often.
        Joinable.__init__(self._wrapper)


class _ShadowStep(JoinHook):
    """What a rank without inputs does, step by step."""

    def __init__(self, wrapper: JoinableWrapper, uneven: UnevenInputs) -> None:
        super().__init__()
        self._wrapper = wrapper
        self._uneven = uneven

    def main_hook(self) -> None:
        wrapper = self._wrapper
        backward, buffers = self._uneven.exchange(active=False, backward=False, buffers=False)
        if buffers:
            wrapper.forward_buffers.run(self._uneven.source)
        if backward:
            wrapper.inner.contribute_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        wrapper = self._wrapper
        communicator = wrapper.inner.communicator
        mine = communicator.rank() if is_last_joiner else -1
        chosen = torch.tensor([mine], dtype=torch.int32, device=wrapper.device)
        with failures_named(
            wrapper.inner.process_group, "broadcasting the final parameters and buffers", in_order=True
        ):
            dist.all_reduce(chosen, dist.ReduceOp.MAX, group=communicator.torch_group)
            last = int(chosen.item())
            broadcast_coalesced([parameter for _, parameter in wrapper.replicated_parameters()], last, communicator)
            self._drop_gradients_like(last)
        if wrapper.broadcast_buffers and wrapper.forward_buffers.has_buffers:
            wrapper.forward_buffers.broadcast_from(last)
        self._uneven.finish()

    def _drop_gradients_like(self, last: int) -> None:
        """Group rank `last` may have dropped its gradients, after a step of its optimizer. Others still have those of
        its last backward pass, to which their next one would add."""
        engine = self._wrapper.inner
        communicator = engine.communicator
        parameters = [parameter for _, parameter in engine.synchronized_parameters]
        has_gradient = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int32, device="cpu")
        flags = has_gradient.to(self._wrapper.device)
        dist.broadcast(flags, communicator.ranks[last], group=communicator.torch_group)
        for parameter, kept in zip(parameters, flags.tolist(), strict=True):
            if not kept:
                parameter.grad = None
