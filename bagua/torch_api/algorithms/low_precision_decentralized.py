"""Decentralized training with compressed differences, to each neighbor (DCD-PSGD, Tang et al.,
2018).

After each step of the optimizer, for each bucket of weights x, with W, L and R the weights of this rank and of its left
and right neighbor in the ring as they were after the last exchange:

    d = x + 1/3 L + 1/3 R - 5/3 W
    q = compress(d), to both neighbors; ql from the left one, qr from the right one
    L += decompress(ql);  R += decompress(qr);  x = W + decompress(q);  W = x

so that, but for the compression, x becomes the step of this rank from the mean of the three. W is the L of the right
neighbor and the R of the left one, to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.codecs import Codec, get_codec
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.averaging_memory import Scratch
from bagua.comm_ops.compressed import DEFAULT_CODEC, idle_hierarchy
from bagua.comm_ops.low_precision_decentralized import LowPrecisionRing
from bagua.comm_ops.public_bucket import BaguaBucket, WeightBucket
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.torch_api.algorithms.after_steps import ExchangeAfterSteps
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.algorithms.rounds import Interval, check_interval
from bagua.torch_api.algorithms.saved_layout import check_layout, check_names, restore_plan, split_flat


class ReplicaBucket(WeightBucket):
    """Weights, and copies of their own past and of the neighbors'. The bucket's memory is that of W.

    Attributes:
        _left_peer_weight, _right_peer_weight: L and R.
        neighborhood: whose L, W and R are: as of LowPrecisionRing.
    """

    neighborhood: list[int]
    _left_peer_weight: Tensor
    _right_peer_weight: Tensor

    @torch.no_grad()
    def begin(self, group: BaguaProcessGroup, hierarchical: bool, scratch: Scratch, codec: Codec) -> None:
        """W, L and R are what the weights are now, and the operation is there.

        Args:
            group: as of LowPrecisionRing.
            hierarchical: as of LowPrecisionRing.
            scratch: for one bucket at a time.
            codec: as of LowPrecisionRing.
        """
        BaguaBucket.copy_in(self)
        self._left_peer_weight, self._right_peer_weight = self._weight.clone(), self._weight.clone()
        weights = scratch.like(self._weight)[: self._weight.numel()]
        views = [weights.as_strided(view.shape, view.stride(), view.storage_offset()) for view in self.views]

        @torch.inference_mode()  # a tenth faster than no_grad for thousands of small ones
        def take_weights() -> Tensor:
            torch._foreach_copy_(views, self.tensors)
            return weights

        ring = LowPrecisionRing(group, *self.replicas, hierarchical, take_weights, codec)
        self.neighborhood = ring.neighborhood
        self.append_op(ring)

    def copy_in(self) -> None:
        """The operation takes the weights when its turn comes. Here they are refused if they do not fit."""
        self.check_tensors()

    @property
    def _weight(self) -> Tensor:
        """W."""
        return self.flattened_tensor()

    @property
    def replicas(self) -> tuple[Tensor, Tensor, Tensor]:
        """W, L and R."""
        return self._weight, self._left_peer_weight, self._right_peer_weight

    def replicas_by_name(self) -> Iterator[tuple[str, list[Tensor]]]:
        """(name, its parts of W, L and R) of each tensor."""
        for record, view in zip(self.records, self.views, strict=True):
            start = view.storage_offset()
            yield record.name, [replica[start : start + view.numel()] for replica in self.replicas]


class LowPrecisionDecentralizedAlgorithmImpl(ExchangeAfterSteps):
    """See LowPrecisionDecentralizedAlgorithm."""

    added_to_state = (*ExchangeAfterSteps.added_to_state, "kept")

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        hierarchical: bool = True,
        communication_interval: int = 1,
        codec: str | Codec = DEFAULT_CODEC,
    ) -> None:
        super().__init__(process_group)
        self.codec = get_codec(codec)
        self.hierarchical = hierarchical
        self.communication_interval = communication_interval
        self._interval = Interval(communication_interval)
        self._buckets: list[ReplicaBucket] = []
        # What buckets begin with when they are made anew without a broadcast: of parameters that are frozen now, too.
        self._kept: dict[str, list[Tensor]] = {}

    @property
    def kept_in_plan(self) -> Collection[str]:
        return self._unexchanged.names

    # --- buckets -----------------------------------------------------------------------------------------------------

    def start_from_broadcast(self) -> None:
        self._kept.clear()
        self._unexchanged.load(())
        self._buckets = []

    def init_tensors(self, bagua_ddp: AlgorithmFacade) -> list[Tensor]:
        self._kept.update((name, parts) for bucket in self._buckets for name, parts in bucket.replicas_by_name())
        return super().init_tensors(bagua_ddp)

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> list[ReplicaBucket]:
        self._buckets = [ReplicaBucket(group, str(number), do_flatten) for number, group in enumerate(tensors)]
        self._scratch = Scratch([bucket.flattened_tensor() for bucket in self._buckets])
        return self._buckets

    @torch.no_grad()
    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        assert isinstance(bucket, ReplicaBucket)
        bucket.clear_ops()
        # After the broadcast, every rank's weights are these.
        bucket.begin(self.process_group, self.hierarchical, self._scratch, self.codec)
        for name, parts in bucket.replicas_by_name():
            for part, kept in zip(parts, self._kept.pop(name, ()), strict=False):
                part.copy_(kept)

    def options_without_effect(self, bagua_ddp: AlgorithmFacade) -> list[str]:
        return idle_hierarchy(self.process_group, self.hierarchical, "weights")

    def after_step(self, bagua_ddp: AlgorithmFacade) -> None:
        if self._interval.count() and self._unexchanged.begin_plan(bagua_ddp):
            bagua_ddp.scheduler.launch_buckets(self._buckets)
            bagua_ddp.scheduler.wait_pending_comm_ops()
            self._unexchanged.end()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "rounds": self._interval.rounds,
            "neighborhoods": [bucket.neighborhood for bucket in self._buckets],
            "replicas": [list(bucket.replicas) for bucket in self._buckets],
            "names": [[record.name for record in bucket.records] for bucket in self._buckets],
            # Views of former buckets.
            "kept": {name: [part.clone() for part in self._kept[name]] for name in sorted(self._kept)},
        }

    @torch.no_grad()
    def load_state_dict(self, bagua_ddp: AlgorithmFacade, state: Mapping[str, Any]) -> None:
        self.make_step_before_load(bagua_ddp)
        cause = "another model, or of buckets of another size (BAGUA_DEFAULT_BUCKET_SIZE, bucket_cap_mb)"
        saved = state.get("names")
        if saved is None:
            here = [bucket.replicas for bucket in self._buckets]
            check_layout("copies of weights", state["replicas"], here, cause)
            saved = [[record.name for record in bucket.records] for bucket in self._buckets]
        kept: dict[str, Sequence[Tensor]] = dict(state.get("kept", {}))
        planned = [name for names in saved for name in names]
        check_names(bagua_ddp, [*planned, *kept], cause)
        by_name = dict(kept)
        for names, replicas in zip(saved, state["replicas"], strict=True):
            split = [split_flat(bagua_ddp, names, replica, cause) for replica in replicas]
            by_name.update((name, [one[name] for one in split]) for name in names)
        # All buckets have the same.
        neighborhoods = [bucket.neighborhood for bucket in self._buckets[:1]]
        if state["neighborhoods"][:1] != neighborhoods:
            raise ValueError(
                f"the state has the replicas of ranks {state['neighborhoods'][0]} (left neighbor, own and right"
                f" neighbor), the neighbors are {neighborhoods[0]} now: weights would drift apart.\n"
                "It was saved with another setting of hierarchical, or on nodes with other ranks.\n"
                f"Use the same, not hierarchical={self.hierarchical}. Or load the weights alone, and wrap the module"
                " again."
            )
        restore_plan(bagua_ddp, planned, kept)
        super().load_state_dict(bagua_ddp, state)
        self._interval.rounds = int(state["rounds"])
        for bucket in self._buckets:
            for name, parts in bucket.replicas_by_name():
                for ours, theirs in zip(parts, by_name.pop(name), strict=True):
                    ours.copy_(theirs)
        self._kept = {name: [part.clone() for part in parts] for name, parts in by_name.items()}


class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """
    Args:
        hierarchical: the mean within each node first, uncompressed; then the nodes' leaders form the ring.
        communication_interval: exchange after every so many rounds (bagua.torch_api.algorithms.rounds).
        codec: what is sent: a name of `bagua.codecs.codec_names()`, or a Codec. The same on all ranks. A checkpoint
            may be continued with another one: W, L and R do not depend on it.

    Raises:
        ValueError: an interval below 1, or an unknown codec; the error lists the known ones.
        RuntimeError: when a module is wrapped: a parameter is in none of the optimizers.
    """

    def __init__(
        self, hierarchical: bool = True, communication_interval: int = 1, codec: str | Codec = DEFAULT_CODEC
    ) -> None:
        self._codec = get_codec(codec)
        self.codec = self._codec.name
        check_interval(communication_interval)
        self.hierarchical = hierarchical
        self.communication_interval = communication_interval

    def reify(self, process_group: BaguaProcessGroup) -> LowPrecisionDecentralizedAlgorithmImpl:
        return LowPrecisionDecentralizedAlgorithmImpl(
            process_group, self.hierarchical, self.communication_interval, self._codec
        )
