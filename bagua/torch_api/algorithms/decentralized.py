"""Decentralized training: each rank steps with its own gradient, from a mean of weights (D-PSGD, Lian et al. 2017).

x' = mix(x) - lr * g(x)

mix(x) = the mean of x over all ranks                                  (peer_selection_mode="all")
mix(x) = (x of this rank + x of another one) / 2, another each time    (peer_selection_mode="shift_one")

The gradient is that of the weights before mixing, so the exchange runs while forward and backward do, and it changes
the weights right before the optimizer does. Any optimizer may be in the place of `- lr * g`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.decentralized import PeerWeightAverage
from bagua.comm_ops.peer_selection import check_peer_selection
from bagua.comm_ops.public_bucket import BaguaBucket, WeightBucket
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.comm_scheduler import CommScheduler
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, communicated
from bagua.torch_api.algorithms.rounds import (
    Interval,
    MissingForwardCheck,
    Round,
    RoundEvent,
    RoundState,
    Unexchanged,
    check_interval,
    group_of_weights,
    steppers,
)
from bagua.torch_api.algorithms.saved_layout import check_layout, check_names, restore_plan, split_flat


class PeerWeightBucket(WeightBucket):
    """Weights that are mixed with those of peers. The bucket's memory is that of the peer weight.

    Attributes:
        operation: what makes the mean.
    """

    operation: PeerWeightAverage

    @property
    def _peer_weight(self) -> Tensor:
        """The last mean."""
        return self.flattened_tensor()

    def copy_out(self) -> None:
        """Nothing: communication leaves the weights alone, which are in use meanwhile. The operation puts the mean in
        place when it is told to."""


class _PendingMean:
    """A mean that has not been put in place, and may still be under way.

    Args:
        buckets: whose weights it is of.
        scheduler: in which it is under way.
        names: of weights whose mean it is; None: of all in the buckets.
    """

    def __init__(
        self, buckets: Sequence[PeerWeightBucket], scheduler: CommScheduler, names: Collection[str] | None = None
    ) -> None:
        self._buckets = buckets
        self._scheduler = scheduler
        # Where the weights of each name are that wait for their mean: bucket, and number in it.
        self._left = {
            record.name: (bucket, index)
            for bucket in buckets
            for index, record in enumerate(bucket.records)
            if names is None or record.name in names
        }
        self._is_whole = len(self._left) == sum(len(bucket.records) for bucket in buckets)
        self.note_parameters()

    def wait(self) -> None:
        """Until all peers have it."""
        self._scheduler.wait_pending_comm_ops()

    @torch.no_grad()
    def put_in_place(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Overwrite the weights, each once.

        Args:
            tensors: these of them; None: all.
        """
        self.wait()
        if tensors is None and self._is_whole:
            for bucket in self._buckets:
                bucket.operation.copy_back_peer_weight(bucket)
            self._left = {}
            return
        ids = None if tensors is None else {id(tensor) for tensor in tensors}
        self._is_whole = False
        for name, (bucket, index) in list(self._left.items()):
            if ids is None or id(bucket.tensors[index]) in ids:
                bucket.tensors[index].copy_(bucket.views[index])
                del self._left[name]
        self.note_parameters()

    @property
    def is_over(self) -> bool:
        """Whether all of it is in place."""
        return not self._left

    @property
    def by_name(self) -> dict[str, Tensor]:
        """What is not in place."""
        return {name: bucket.views[index] for name, (bucket, index) in self._left.items()}

    def note_parameters(self) -> None:
        """`is_void` means since now."""
        self._versions = self._current_versions()

    @property
    def is_void(self) -> bool:
        """Whether somebody has changed the weights."""
        return self._versions != self._current_versions()

    def _current_versions(self) -> list[int]:
        return [bucket.tensors[index]._version for bucket, index in self._left.values()]


class DecentralizedAlgorithmImpl(AlgorithmImpl):
    """See DecentralizedAlgorithm.

    [Note: when the mean is put in place]
    It is waited for, and replaces the weights, as late as is safe: before a listed optimizer steps. So all backward
    passes of a round, be they two or the inner one of a gradient penalty, see the weights of their forward pass. It is
    sooner, at the end of the first backward pass, where we would not see the step: if some parameters are in no listed
    optimizer, or a closure runs the passes within `step`. Where no step follows, because a GradScaler skips it, the
    next forward pass begins with it. A forward pass that no backward pass follows leaves the exchange under way for the
    next one. In each case the number of exchanges follows from forward and backward passes alone, never from values.
    An optimizer that steps in a hook of the backward pass takes the mean of its own parameters before that. If other
    parameters are unfrozen within a forward pass, before its backward pass, the mean waits in the buckets of the next
    plan.
    """

    keeps_replicas_equal = False
    added_to_state = ("names", "unexchanged", "pending")

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = communication_interval
        self._interval = Interval(communication_interval)
        self._buckets: list[PeerWeightBucket] = []
        self._round = Round()
        self._unexchanged = Unexchanged()
        # One that has not been put in place.
        self._mean: _PendingMean | None = None
        # What is left of it while buckets are made anew, by name.
        self._carried: dict[str, Tensor] = {}
        # Of the buckets so far, which decides about the next partner.
        self._exchanges = 0
        # See the note.
        self._sees_steps = False
        self._is_stepping = False

    @property
    def kept_in_plan(self) -> Collection[str]:
        return self._unexchanged.names

    # --- buckets -----------------------------------------------------------------------------------------------------

    def start_from_broadcast(self) -> None:
        self._buckets = []
        self._unexchanged.load(())

    def init_tensors(self, bagua_ddp: AlgorithmFacade) -> list[Tensor]:
        if self._mean is None:
            self._round.restart()
        self._is_stepping = False
        self._exchanges = self._buckets[0].operation.exchanges if self._buckets else 0
        self._missing_forward = MissingForwardCheck(bagua_ddp.bagua_module_name, self.process_group.size)
        stepped = steppers(bagua_ddp)
        self._sees_steps = all(id(parameter) in stepped for _, parameter in bagua_ddp.synchronized_parameters)
        return communicated(bagua_ddp)

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> list[PeerWeightBucket]:
        """One bucket for all parameters of one dtype and device, in the order of `init_tensors`, the last first."""
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for group in tensors:
            for tensor in group:
                by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        self._buckets = [
            PeerWeightBucket(group, str(number), do_flatten) for number, group in enumerate(by_kind.values())
        ]
        return self._buckets

    @torch.no_grad()
    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        assert isinstance(bucket, PeerWeightBucket)
        bucket.clear_ops()
        bucket.copy_in()
        bucket.operation = bucket.append_decentralized_synchronous_op(
            bucket._peer_weight,
            hierarchical=self.hierarchical,
            peer_selection_mode=self.peer_selection_mode,
            group=group_of_weights(self.process_group),
        )
        bucket.operation.exchanges = self._exchanges
        for record, view in zip(bucket.records, bucket.views, strict=True):
            if record.name in self._carried:
                view.copy_(self._carried[record.name])

    def options_without_effect(self, bagua_ddp: AlgorithmFacade) -> list[str]:
        group = self.process_group
        if self.peer_selection_mode == "all" or not self.hierarchical or group.size == 1:
            return []
        if not group.topology.is_one_node:
            return []
        why = "with hierarchical=True nodes are paired, and there is one. hierarchical=False pairs ranks"
        return [f"peer_selection_mode={self.peer_selection_mode!r} has no effect: {why}"]

    # --- a round -----------------------------------------------------------------------------------------------------

    def settle(self, bagua_ddp: AlgorithmFacade) -> None:
        # Within a forward pass, its backward passes are still to come.
        if self._round.is_due and not bagua_ddp.is_within_forward:
            self._refuse_changed_parameters()
            self._put_in_place()

    def init_forward_pre_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[Any], None]:
        if self._mean is not None:
            self._mean = _PendingMean(self._buckets, bagua_ddp.scheduler, self._carried)
            self._carried = {}

        def begin_round(_: Any) -> None:
            if not torch.is_grad_enabled():
                return
            self._missing_forward.note_forward()
            # A forward pass after which no backward pass communicates does not start what it would have to wait for.
            if not bagua_ddp.require_backward_grad_sync:
                return
            if not self._round.is_open:
                if self._interval.count():
                    # With what is trained from now on, which may take no more than this exchange.
                    self._unexchanged.note_trained(bagua_ddp.synchronized_parameters)
                    self._unexchanged.begin_plan(bagua_ddp)
                    # Weights are copied now: a program that swaps them for a moment does not change what peers get.
                    bagua_ddp.scheduler.launch_buckets(self._buckets)
                    self._mean = _PendingMean(self._buckets, bagua_ddp.scheduler)
            elif self._mean is not None and self._mean.is_void:
                # Loaded, for instance, after a forward pass that was a mere trial: the mean of what they were is void.
                # This rank goes without one until the next round: only it knows, so it cannot ask its peers again.
                self._drop_mean()
            self._round.on(RoundEvent.FORWARD)

        return begin_round

    def init_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[str, Tensor], None]:
        return self._round.note_gradient

    def init_post_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[], None]:
        return lambda: self._end_pass(bagua_ddp)

    def _end_pass(self, bagua_ddp: AlgorithmFacade) -> None:
        if not self._round.end_pass():
            return
        self._missing_forward.note_gradients()
        self._unexchanged.note_trained(bagua_ddp.synchronized_parameters)
        if self._sees_steps and not self._is_stepping and (self._mean is None or not self._mean.is_over):
            if self._mean is not None:
                self._mean.note_parameters()
            return  # due until a step, or the next forward pass
        if not self._is_stepping:
            self._refuse_changed_parameters()
        self._put_in_place()

    def init_pre_optimizer_step_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[torch.optim.Optimizer], None]:
        def before_step(optimizer: torch.optim.Optimizer) -> None:
            if bagua_ddp.is_in_pass:
                if self._mean is not None:
                    self._mean.put_in_place(bagua_ddp.tensors_of(optimizer))
                return
            self._is_stepping = True
            self._put_in_place()

        return before_step

    def init_post_optimizer_step_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[torch.optim.Optimizer], None]:
        def after_step(optimizer: torch.optim.Optimizer) -> None:
            self._is_stepping = False
            if self._mean is not None:
                # The step was in the backward pass, which is over: what it left out has its mean now.
                self._put_in_place()
            self._missing_forward.note_step(optimizer)

        return after_step

    def finish(self, bagua_ddp: AlgorithmFacade) -> None:
        mean, self._mean = self._mean, None
        if mean is None:
            return
        mean.wait()
        if bagua_ddp.is_within_forward and not mean.is_void:
            self._mean, self._carried = mean, mean.by_name
            return
        self._unexchanged.end()
        if not mean.is_void:
            with contextlib.suppress(RuntimeError):  # converted or moved since the backward pass: void, too
                mean.put_in_place()

    # --- an exchange -------------------------------------------------------------------------------------------------

    def _put_in_place(self) -> None:
        """The mean, if there is one."""
        mean, self._mean = self._mean, None
        self._round.on(RoundEvent.EXCHANGED)
        if mean is not None:
            mean.put_in_place()
            self._unexchanged.end()

    def _drop_mean(self) -> None:
        mean, self._mean = self._mean, None
        if mean is not None:
            mean.wait()
            self._unexchanged.end()

    def _refuse_changed_parameters(self) -> None:
        # To put the mean of what they were in their place would undo the change.
        if self._mean is not None and self._mean.is_void:
            self._drop_mean()
            self._round.on(RoundEvent.EXCHANGED)
            raise RuntimeError(
                "Parameters were changed between the backward pass and the step of the optimizers that the module was"
                " wrapped with.\n"
                "If another optimizer changed them, wrap the module with exactly the optimizers that you step. If they"
                " were loaded, load them after step(), or right after wrapping."
            )

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._mean is not None:
            self._mean.wait()
        return {
            "rounds": self._interval.rounds,
            "round": self._round.state.name,
            "is_pending": self._mean is not None,
            "exchanges": [bucket.operation.exchanges for bucket in self._buckets],
            "peer_weights": [bucket._peer_weight for bucket in self._buckets],
            "names": [[record.name for record in bucket.records] for bucket in self._buckets],
            "unexchanged": self._unexchanged.saved,
            "pending": [] if self._mean is None else [*self._mean.by_name],
        }

    @torch.no_grad()
    def load_state_dict(self, bagua_ddp: AlgorithmFacade, state: Mapping[str, Any]) -> None:
        saved = state.get("names")
        if saved is None:
            check_layout("peer weights", [state["peer_weights"]], [[bucket._peer_weight for bucket in self._buckets]])
            saved = [[record.name for record in bucket.records] for bucket in self._buckets]
        names = [name for group in saved for name in group]
        check_names(bagua_ddp, names)
        means: dict[str, Tensor] = {}
        for group, flat in zip(saved, state["peer_weights"], strict=True):
            means |= split_flat(bagua_ddp, group, flat)
        self._drop_mean()  # it is none of the state's
        restore_plan(bagua_ddp, names, bagua_ddp.synchronized_names)
        self._interval.rounds = int(state["rounds"])
        self._round.state = RoundState[state["round"]]
        for bucket in self._buckets:
            bucket.operation.exchanges = max(map(int, state["exchanges"]))
            for record, view in zip(bucket.records, bucket.views, strict=True):
                if record.name in means:
                    view.copy_(means[record.name].view_as(view))
        # An earlier version kept in its plan what was trained alone.
        pending: Sequence[str] = state.get("pending", names) if state["is_pending"] else ()
        if state["is_pending"]:
            self._mean = _PendingMean(self._buckets, bagua_ddp.scheduler, pending)
        self._unexchanged.load(state.get("unexchanged", names), pending)


class DecentralizedAlgorithm(Algorithm):
    """
    Args:
        hierarchical: the mean within each node first; then its leader exchanges with the leaders of other nodes.
        peer_selection_mode: "all": the mean over all ranks. "shift_one": with one other rank (`hierarchical`: node) at
            a time, of which there must be an even number, or one.
        communication_interval: exchange in every so many rounds (bagua.torch_api.algorithms.rounds).

    Raises:
        ValueError: an unknown mode, or an interval below 1. When a module is wrapped: "shift_one" with an odd number.
    """

    def __init__(
        self, hierarchical: bool = True, peer_selection_mode: str = "all", communication_interval: int = 1
    ) -> None:
        check_peer_selection(peer_selection_mode)
        check_interval(communication_interval)
        self.hierarchical = hierarchical
        self.peer_selection_mode = peer_selection_mode
        self.communication_interval = communication_interval

    def reify(self, process_group: BaguaProcessGroup) -> DecentralizedAlgorithmImpl:
        return DecentralizedAlgorithmImpl(
            process_group, self.hierarchical, self.peer_selection_mode, self.communication_interval
        )
