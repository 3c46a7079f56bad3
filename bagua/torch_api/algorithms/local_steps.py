"""Local steps: every rank trains by itself, and the replicas are brought together after every so many steps.

local_sgd            the mean of the weights                    Stich, "Local SGD Converges Fast and Communicates
                                                                Little", ICLR 2019, arXiv:1805.09767
diloco               an outer optimizer steps on the mean of    Douillard et al., "DiLoCo", 2023, arXiv:2311.08105
                     what the ranks have moved
streaming_diloco     a fragment of the model at a time, while   Douillard et al., "Streaming DiLoCo", 2025,
                     training goes on                           arXiv:2501.18512

bagua.torch_api.algorithms.fragments has the formulas. A step is one of the listed optimizers; see
bagua.torch_api.algorithms.after_steps for what counts as one. Buffers, such as the statistics of BatchNorm, stay each
rank's own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bagua.codecs import Codec, get_codec
from bagua.collectives.purpose_groups import group_for
from bagua.comm_ops.compressed import CompressedAllReduce, compressed_alignment
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.comm_ops.round_exchange import MeanOverRanks, RoundCheck
from bagua.torch_api.algorithms.after_steps import ExchangeAfterSteps
from bagua.torch_api.algorithms.base import Algorithm
from bagua.torch_api.algorithms.fragments import Fragment, FragmentBucket, OuterOptimizer, split
from bagua.torch_api.algorithms.rounds import RoundState

if TYPE_CHECKING:
    from bagua.collectives.process_group import BaguaProcessGroup
    from bagua.engine.algorithm_facade import AlgorithmFacade

# As in bagua.torch_api.algorithms.decentralized: an exchange goes on while ranks communicate something else.
_PURPOSE = "exchanges of weights"

default_outer_optimizer: OuterOptimizer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""Of DiLoCo, as in its paper."""


class LocalStepsImpl(ExchangeAfterSteps):
    """One after the other, each fragment has a round of `interval` steps: its exchange begins `delay` steps before the
    round ends, and takes effect when it ends.

    Args:
        process_group: the ranks that train together.
        interval: steps of a round.
        fragments: of the model.
        delay: steps that an exchange has, less than `interval`.
        alpha: see bagua.torch_api.algorithms.fragments.
        outer_optimizer: None: weights are averaged.
        codec: by which differences are compressed; None: not at all.
    """

    # Nothing may be communicated in each step.
    ranks_in_step = False

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        interval: int,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        outer_optimizer: OuterOptimizer | None = None,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(process_group)
        self._interval, self._delay, self._alpha = interval, delay, alpha
        self._fragment_count = fragments
        self._outer_optimizer = outer_optimizer
        self._codec = codec
        self._fragments: list[Fragment] = []
        self._checks: list[RoundCheck] = []
        self.steps = 0  # of this round
        self.rounds = 0  # that are over
        # The exchange of this round has begun.
        self._is_under_way = False
        # What fragments begin with when they are made anew without a broadcast: of parameters that are frozen now, too.
        # Each rank has weights of its own then, from which ranks could not begin alike.
        self._kept: dict[str, tuple[nn.Parameter, Any]] = {}

    # --- buckets -----------------------------------------------------------------------------------------------------

    def start_from_broadcast(self) -> None:
        self._close()
        self._kept.clear()
        self._fragments = []
        self.steps = self.rounds = 0

    def init_tensors(self, bagua_ddp: AlgorithmFacade) -> list[Tensor]:
        for fragment in self._fragments:
            self._kept.update(fragment.outer_by_name())
        self._close()
        return super().init_tensors(bagua_ddp)

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> list[FragmentBucket]:
        self._checks, self._fragments = [], []
        alignment = 1 if self._codec is None else compressed_alignment(self.process_group, False, self._codec)
        everything = [tensor for group in tensors for tensor in group]
        for number, part in enumerate(split(everything, self._fragment_count) if everything else []):
            ids = {id(tensor) for tensor in part}
            groups = [[tensor for tensor in group if id(tensor) in ids] for group in tensors]
            buckets = [
                FragmentBucket(group, f"{number}.{place}", do_flatten, alignment)
                for place, group in enumerate(one for one in groups if one)
            ]
            fragment = Fragment(buckets, self._outer_optimizer, self._alpha)
            fragment.take_over(self._kept)
            self._fragments.append(fragment)
        return [bucket for fragment in self._fragments for bucket in fragment.buckets]

    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        group = group_for(_PURPOSE, self.process_group)
        communicator = group.get_global_communicator()
        bucket.clear_ops()
        if any(bucket is fragment.buckets[0] for fragment in self._fragments) and group.size > 1:
            check = RoundCheck(communicator, lambda: self.rounds, lambda: self._fragment.outer_options)
            self._checks.append(check)
            bucket.append_op(check)
        if self._codec is not None and bucket.dtype in self._codec.dtypes:
            bucket.append_op(CompressedAllReduce(group, average=True, everybody=communicator, codec=self._codec))
        else:
            bucket.append_op(MeanOverRanks(communicator))

    # --- a round -----------------------------------------------------------------------------------------------------

    @property
    def _fragment(self) -> Fragment:
        """Whose round it is."""
        return self._fragments[self.rounds % len(self._fragments)]

    def after_step(self, bagua_ddp: AlgorithmFacade) -> None:
        if not self._fragments:
            return
        self.steps += 1
        if self.steps == self._interval - self._delay:
            self._fragment.begin(group_for(_PURPOSE, self.process_group), bagua_ddp.scheduler.recorder)
            self._is_under_way = True
        if self.steps >= self._interval:
            self._end_round()

    def _end_round(self) -> None:
        self._wait()
        self._fragment.end()
        self._is_under_way = False
        self.steps = 0
        self.rounds += 1

    def _wait(self) -> None:
        self._fragment.wait()
        for check in self._checks:
            check.check()

    def finish(self, bagua_ddp: AlgorithmFacade) -> None:
        super().finish(bagua_ddp)
        if self._is_under_way and self.process_group.is_alive:
            # The parameters change: what is under way must not be lost on some ranks alone.
            self._end_round()

    def _close(self) -> None:
        for fragment in self._fragments:
            fragment.close()

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._is_under_way:
            self._wait()
        pending = [bucket.flattened_tensor() for bucket in self._fragment.buckets] if self._is_under_way else []
        outer = [fragment.outer_optimizer.state_dict() for fragment in self._fragments if fragment.outer_optimizer]
        return {
            "rounds": self.rounds,
            "steps": self.steps,
            "round": self._round.state.name,
            "stepped": sorted(self._stepped),
            "outer_parameters": [[one.data for one in fragment.outer_parameters] for fragment in self._fragments],
            "outer_optimizers": outer,
            "under_way": pending,
        }

    @torch.no_grad()
    def load_state_dict(self, bagua_ddp: AlgorithmFacade, state: Mapping[str, Any]) -> None:
        ours, theirs = (
            [[(str(one.dtype), list(one.shape)) for one in parameters] for parameters in fragments]
            for fragments in ([fragment.outer_parameters for fragment in self._fragments], state["outer_parameters"])
        )
        if ours != theirs:
            raise ValueError(
                f"the state has outer parameters of {theirs} (dtype and shape, by fragment), this module has {ours}: it"
                " is of another model, or was saved with another number of fragments"
            )
        self.make_owed_step(bagua_ddp)
        if self._is_under_way:
            self._wait()
        self.rounds, self.steps = int(state["rounds"]), int(state["steps"])
        self._round.state = RoundState[state["round"]]
        self._stepped = set(state["stepped"])
        self._is_under_way = bool(state["under_way"])
        for fragment, parameters in zip(self._fragments, state["outer_parameters"], strict=True):
            for own, saved in zip(fragment.outer_parameters, parameters, strict=True):
                own.copy_(saved)
        optimizers = [fragment.outer_optimizer for fragment in self._fragments if fragment.outer_optimizer]
        for optimizer, saved in zip(optimizers, state["outer_optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self._is_under_way:
            for bucket, mean in zip(self._fragment.buckets, state["under_way"], strict=True):
                flat = bucket.flattened_tensor()
                elements = min(len(flat), len(mean))  # another codec may pad to another length
                flat[:elements].copy_(mean[:elements])


# --- recipes ---------------------------------------------------------------------------------------------------------


def _check_steps(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")


class LocalSGDAlgorithm(Algorithm):
    """
    Args:
        sync_every: the weights are averaged when step number H, 2H, ... of the optimizers returns, H being this.

    Raises:
        ValueError: no whole number of at least 1.
        RuntimeError: when a module is wrapped: a parameter is in none of the optimizers.
    """

    def __init__(self, sync_every: int) -> None:
        _check_steps("sync_every", sync_every)
        self.sync_every = sync_every

    def reify(self, process_group: BaguaProcessGroup) -> LocalStepsImpl:
        return LocalStepsImpl(process_group, self.sync_every)


class DiLoCoAlgorithm(Algorithm):
    """
    Args:
        sync_every: the outer optimizer steps when step number H, 2H, ... of the optimizers returns, H being this; then
            the weights are the same on all ranks.
        outer_optimizer: a function that makes the outer optimizer of the parameters that it is given. Default:
            torch.optim.SGD(lr=0.7, momentum=0.9, nesterov=True). Its gradient is the weights of the last round minus
            the mean of the weights now.

    Raises:
        ValueError: `sync_every` is not a whole number of at least 1.
        TypeError: `outer_optimizer` is not a function.
        RuntimeError: when a module is wrapped: a parameter is in none of the optimizers.
    """

    def __init__(self, sync_every: int, outer_optimizer: OuterOptimizer | None = None) -> None:
        _check_steps("sync_every", sync_every)
        if outer_optimizer is not None and not callable(outer_optimizer):
            raise TypeError(
                f"outer_optimizer is {outer_optimizer!r}. Pass a function of the parameters:"
                " lambda parameters: torch.optim.SGD(parameters, lr=0.7)."
            )
        self.sync_every = sync_every
        self.outer_optimizer = outer_optimizer

    def reify(self, process_group: BaguaProcessGroup) -> LocalStepsImpl:
        outer_optimizer = self.outer_optimizer or default_outer_optimizer
        return LocalStepsImpl(process_group, self.sync_every, outer_optimizer=outer_optimizer)


class StreamingDiLoCoAlgorithm(DiLoCoAlgorithm):
    """
    Args:
        sync_every: each fragment is exchanged once in so many steps of the optimizers; a multiple of `fragments`.
        fragments: into which the model is divided, in the order of its parameters from the last to the first.
        delay: steps between the beginning of an exchange and its effect, in which training goes on; less than
            sync_every / fragments. As torchft's fragment_sync_delay.
        alpha: the share of this rank's own weights that a fragment keeps when an exchange takes effect: 0 none, 1 all.
            As torchft's fragment_update_alpha.
        codec: the name of a codec by which differences are sent (bagua.codecs); None: as they are.
        outer_optimizer: as of DiLoCoAlgorithm. Every fragment has its own.

    Raises:
        ValueError: numbers that do not fit together, or an unknown codec.
        TypeError: `outer_optimizer` is not a function.
        RuntimeError: when a module is wrapped: a parameter is in none of the optimizers.
    """

    def __init__(
        self,
        sync_every: int,
        fragments: int = 2,
        delay: int = 0,
        alpha: float = 0.0,
        codec: str | Codec | None = None,
        outer_optimizer: OuterOptimizer | None = None,
    ) -> None:
        super().__init__(sync_every, outer_optimizer)
        _check_steps("fragments", fragments)
        if sync_every % fragments:
            raise ValueError(
                f"sync_every={sync_every} is not a multiple of fragments={fragments}; use"
                f" {_nearest(sync_every, fragments)}"
            )
        interval = sync_every // fragments
        _check_steps("delay", delay, least=0)
        if delay >= interval:
            raise ValueError(
                f"delay={delay} is too long: it must be less than sync_every / fragments, which is {interval}"
            )
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha!r}: must be from 0 to 1")
        self.fragments, self.delay, self.alpha = fragments, delay, alpha
        self._codec = None if codec is None else get_codec(codec)
        self.codec = None if self._codec is None else self._codec.name

    def reify(self, process_group: BaguaProcessGroup) -> LocalStepsImpl:
        return LocalStepsImpl(
            process_group,
            self.sync_every // self.fragments,
            self.fragments,
            self.delay,
            self.alpha,
            self.outer_optimizer or default_outer_optimizer,
            self._codec,
        )


def _nearest(sync_every: int, fragments: int) -> str:
    below = sync_every // fragments * fragments
    above = f"{below + fragments}"
    return f"{below} or {above}" if below else above
