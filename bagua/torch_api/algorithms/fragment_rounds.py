"""Rounds of local steps: when the fragments of a model are exchanged, and how a training that was saved goes on. The
algorithms of bagua.torch_api.algorithms.local_steps at work for one module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua.codecs import Codec
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.collectives.tensor import require_record
from bagua.comm_ops.compressed import CompressedAllReduce, compressed_alignment
from bagua.comm_ops.public_bucket import BaguaBucket
from bagua.comm_ops.round_check import RoundCheck
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.speed_shares import LEAST_STEPS
from bagua.torch_api.algorithms.after_steps import ExchangeAfterSteps
from bagua.torch_api.algorithms.base import idle_codec
from bagua.torch_api.algorithms.fragments import Fragment, FragmentBucket, OuterOptimizer, split
from bagua.torch_api.algorithms.rounds import group_of_weights
from bagua.torch_api.algorithms.saved_layout import check_layout, check_names
from bagua.torch_api.algorithms.step_shares import StepShares
from bagua.torch_api.algorithms.warm_up import WarmUp


class FragmentRounds(ExchangeAfterSteps):
    """One after the other, each fragment has a round of `interval` steps: its exchange begins `delay` steps before the
    round ends, and takes effect when it ends. It covers what was trained since its last exchange; if that is nothing,
    there is none.

    The plan only grows, so that fragments stay what they are while parts of the model are frozen in turn.

    Args:
        process_group: the ranks that train together.
        warm_up: before the first round.
        interval: steps of a round, of the fastest rank.
        fragments: of the model.
        delay: steps that an exchange has, less than `interval`.
        alpha: see bagua.torch_api.algorithms.fragments.
        outer_optimizer: None: weights are averaged.
        momentum_rounds: see bagua.torch_api.algorithms.fragments.
        codec: by which differences are compressed; None: not at all.
        shares: of the steps of a round, see StepShares.
    """

    added_to_state = (*ExchangeAfterSteps.added_to_state, "outer_classes", "momentum_rounds", "samples", "shares")

    def __init__(
        self,
        process_group: BaguaProcessGroup,
        warm_up: WarmUp,
        interval: int,
        fragments: int,
        delay: int,
        alpha: float,
        outer_optimizer: OuterOptimizer | None,
        momentum_rounds: int,
        codec: Codec | None,
        shares: str | Sequence[float] | None = None,
    ) -> None:
        super().__init__(process_group)
        self._warm_up = warm_up
        self._alpha = alpha
        rank = 0 if shares is None else process_group.get_global_communicator().rank()
        self._shares = StepShares(shares, process_group.size, rank, interval, delay)
        self._fragment_count = fragments
        self._outer_optimizer, self._momentum_rounds = outer_optimizer, momentum_rounds
        self._codec = codec
        self._fragments: list[Fragment] = []
        # By name of each parameter, the fragment that it is in.
        self._fragment_of: dict[str, int] = {}
        self.steps = 0  # of this round
        self.rounds = 0  # that are over
        # The exchange of this round has begun.
        self._is_under_way = False
        # With batch weights: of this rank so far, and by fragment when its last exchange began.
        self._samples = 0.0
        self._samples_then: dict[int, float] = {}
        # What fragments begin with when they are made anew without a broadcast: each rank has weights of its own then,
        # from which ranks could not begin alike.
        self._kept: dict[str, tuple[nn.Parameter, Any]] = {}
        # Likewise the options of their outer optimizers, which may have been changed.
        self._kept_groups: list[list[dict[str, Any]]] = []

    @property
    def ranks_in_step(self) -> bool:
        """During warm-up. Later nothing may be communicated in each step."""
        return not self._warm_up.is_over

    @property
    def phase(self) -> Hashable:
        """Changes before the first forward pass after the warm-up: the first round begins with the weights of then."""
        return self._warm_up.is_over

    @property
    def kept_in_plan(self) -> Collection[str] | None:
        """During warm-up gradients are communicated."""
        return None if self.ranks_in_step else self._fragment_of.keys()

    # --- buckets -----------------------------------------------------------------------------------------------------

    def start_from_broadcast(self) -> None:
        self._close()
        self._kept.clear()
        self._kept_groups = []
        self._unexchanged.load(())
        self._fragments, self._fragment_of = [], {}
        self.steps = self.rounds = 0
        self._shares.restart()

    def init_tensors(self, bagua_ddp: AlgorithmFacade) -> list[Tensor]:
        for fragment in self._fragments:
            self._kept.update(fragment.outer_by_name())
        if self._fragments:
            self._kept_groups = [fragment.outer_groups for fragment in self._fragments]
        self._close()
        weights = super().init_tensors(bagua_ddp)
        return self._warm_up.algorithm.init_tensors(bagua_ddp) if self.ranks_in_step else weights

    def tensors_to_buckets(self, tensors: Sequence[Sequence[Tensor]], do_flatten: bool) -> Sequence[BaguaBucket]:
        self._fragments = []
        everything = [tensor for group in tensors for tensor in group]
        names = [require_record(tensor).name for tensor in everything]
        if not self._fragment_of.keys() >= set(names):
            parts = split(everything, self._fragment_count)
            self._fragment_of = {require_record(one).name: number for number, part in enumerate(parts) for one in part}
        if self.ranks_in_step:
            self._fragment_of = {}  # it is another plan that has fragments
            return self._warm_up.algorithm.tensors_to_buckets(tensors, do_flatten)
        alignment = 1 if self._codec is None else compressed_alignment(self.process_group, False, self._codec)
        for number in range(self._fragment_count if everything else 0):
            groups = [
                [tensor for tensor in group if self._fragment_of[require_record(tensor).name] == number]
                for group in tensors
            ]
            buckets = [
                FragmentBucket(group, f"{number}.{place}", do_flatten, alignment)
                for place, group in enumerate(one for one in groups if one)
            ]
            fragment = Fragment(buckets, self._outer_optimizer, self._alpha, self._momentum_rounds)
            fragment.take_over(self._kept)
            if number < len(self._kept_groups):
                fragment.take_over_options(self._kept_groups[number])
            self._fragments.append(fragment)
        return [bucket for fragment in self._fragments for bucket in fragment.buckets]

    def init_operations(self, bagua_ddp: AlgorithmFacade, bucket: BaguaBucket) -> None:
        if self.ranks_in_step:
            self._warm_up.algorithm.init_operations(bagua_ddp, bucket)
            return
        bucket.clear_ops()
        self._append_operations(bucket, any(bucket in fragment.buckets[:1] for fragment in self._fragments))

    def _append_operations(self, bucket: BaguaBucket, is_first: bool) -> None:
        group = group_of_weights(self.process_group)
        communicator = group.get_global_communicator()
        if is_first and group.size > 1:
            bucket.append_op(
                RoundCheck(
                    communicator,
                    lambda: self.rounds + 1,
                    lambda: self._fragment.means,
                    lambda: self._fragment.outer_options,
                    lambda: self._shares.told_steps,
                    self._shares.seconds,
                )
            )
        if self._codec is not None and bucket.dtype in self._codec.dtypes:
            bucket.append_op(CompressedAllReduce(group, average=True, everybody=communicator, codec=self._codec))
        else:
            bucket.append_decentralized_synchronous_op(bucket.flattened_tensor(), hierarchical=False, group=group)

    def options_without_effect(self, bagua_ddp: AlgorithmFacade) -> list[str]:
        found = idle_codec("codec", self._codec, bagua_ddp)
        if self._alpha == 1 and self.process_group.size > 1:
            found.append("alpha=1 leaves each rank its own weights: exchanges have no effect on them")
        codec = self._warm_up.codec
        if codec is not None and not self._warm_up.steps:
            found.append(f"warmup_codec={codec.name!r} has no effect without warmup_steps")
            return found
        return found + idle_codec("warmup_codec", codec, bagua_ddp)

    # --- hooks of the warm-up ----------------------------------------------------------------------------------------

    def init_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[str, Tensor], None]:
        return bagua_ddp.mark_ready if self.ranks_in_step else super().init_backward_hook(bagua_ddp)

    def init_post_backward_hook(self, bagua_ddp: AlgorithmFacade) -> Callable[[], None]:
        if self.ranks_in_step:
            return functools.partial(self._warm_up.end_pass, bagua_ddp)
        return super().init_post_backward_hook(bagua_ddp)

    # --- a round -----------------------------------------------------------------------------------------------------

    @property
    def _fragment(self) -> Fragment:
        """Whose round it is."""
        return self._fragments[self.rounds % len(self._fragments)]

    @property
    def _what(self) -> str:
        count = len(self._fragments)
        part = f", fragment {self.rounds % count + 1} of {count}" if count > 1 else ""
        return f"the weights exchanged in round {self.rounds + 1}{part}"

    def after_step(self, bagua_ddp: AlgorithmFacade) -> None:
        if not self._fragments:
            return
        # What it waits for in an exchange is not part of a step, nor is what users do between two rounds. On a GPU that
        # takes two events a step.
        device = next(bucket.tensors[0].device for fragment in self._fragments for bucket in fragment.buckets)
        recorder = bagua_ddp.scheduler.recorder
        recorder.end_own_step(device)
        before = self.rounds
        self._go_on(bagua_ddp)
        is_between_rounds = self.rounds != before and self._shares.own > LEAST_STEPS
        if (device.type == "cpu" or self._shares.is_automatic) and not is_between_rounds:
            recorder.begin_own_step(device)

    def _go_on(self, bagua_ddp: AlgorithmFacade) -> None:
        if bagua_ddp.batch_weights is not None:
            self._samples = bagua_ddp.batch_weights.samples
        self.steps += 1
        # More steps than in a round: the state of a longer one was loaded.
        if self.steps >= self._shares.own - self._shares.own_delay and not self._is_under_way:
            fragment = self._fragment
            covered = self._unexchanged.begin(fragment.names)
            if covered:
                fragment.choose(covered, self._append_operations)
                group = group_of_weights(self.process_group)
                fragment.begin(group, bagua_ddp.scheduler.recorder, self._what, self._share(bagua_ddp, group))
                self._is_under_way = True
        if self.steps >= self._shares.own:
            self._end_round()

    def _share(self, bagua_ddp: AlgorithmFacade, group: BaguaProcessGroup) -> float | Tensor | None:
        """See Fragment.begin. Collective."""
        weights, number = bagua_ddp.batch_weights, self.rounds % len(self._fragments)
        by_steps = self._shares.begin_exchange(number, bagua_ddp.scheduler.recorder)
        if weights is None:
            return by_steps
        since = self._samples - self._samples_then.get(number, 0.0)
        self._samples_then[number] = self._samples
        return weights.share(since, group.get_global_communicator())

    def _end_round(self) -> None:
        if self._is_under_way:
            self._wait()
            self._fragment.end(self.rounds // len(self._fragments))
            self._unexchanged.end()
            self._is_under_way = False
        self._shares.end_round()
        self.steps = 0
        self.rounds += 1

    def _wait(self) -> None:
        self._fragment.wait()
        for op in self._fragment.first_ops:
            if isinstance(op, RoundCheck):
                op.check()
                self._shares.take(op.take_seconds())

    def finish(self, bagua_ddp: AlgorithmFacade) -> None:
        super().finish(bagua_ddp)
        self._warm_up.algorithm.finish(bagua_ddp)
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
        outer = [fragment.outer_optimizer.state_dict() for fragment in self._fragments if fragment.outer_optimizer]
        return {
            **super().state_dict(),
            "warmup_steps_done": self._warm_up.done,
            "rounds": self.rounds,
            "steps": self.steps,
            "outer_parameters": [[one.data for one in fragment.outer_parameters] for fragment in self._fragments],
            "outer_optimizers": outer,
            "outer_classes": [fragment.outer_class for fragment in self._fragments],
            "momentum_rounds": self._momentum_rounds,
            "under_way": self._fragment.means if self._is_under_way else {},
            "names": [fragment.names for fragment in self._fragments],
            "samples": {number: self._samples - then for number, then in self._samples_then.items()},
            "shares": self._shares.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, bagua_ddp: AlgorithmFacade, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: the state is of another model, has another number of fragments, or an outer optimizer of another
                class or with another momentum to come.
            RuntimeError: the warm-up is over here, and not in `state`.
        """
        was_in_step = self.ranks_in_step
        has_rounds = bool(state["outer_parameters"])
        self._warm_up.load(int(state["warmup_steps_done"]), was_over=has_rounds)
        if not has_rounds:
            return
        if was_in_step:
            bagua_ddp.rebuild_buckets()
        self._check_outer_optimizers(state)
        self.make_step_before_load(bagua_ddp)
        if self._is_under_way:
            self._wait()
            self._is_under_way = False
        self._restore_fragments(bagua_ddp, state)
        super().load_state_dict(bagua_ddp, state)
        self.rounds, self.steps = int(state["rounds"]), int(state["steps"])
        if bagua_ddp.batch_weights is not None:
            self._samples = bagua_ddp.batch_weights.samples
        self._samples_then = {number: self._samples - since for number, since in state.get("samples", {}).items()}
        self._shares.load_state_dict(state.get("shares", {}))
        for fragment, parameters in zip(self._fragments, state["outer_parameters"], strict=True):
            for own, saved in zip(fragment.outer_parameters, parameters, strict=True):
                own.copy_(saved)
        optimizers = [fragment.outer_optimizer for fragment in self._fragments if fragment.outer_optimizer]
        for optimizer, saved in zip(optimizers, state["outer_optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._restore_exchange(state["under_way"])

    def _restore_fragments(self, bagua_ddp: AlgorithmFacade, state: Mapping[str, Any]) -> None:
        """Those of the state, whatever is frozen now."""
        cause = "another model, or has another number of fragments"
        saved = state.get("names")
        if saved is not None and len(saved) == len(self._fragments):
            fragment_of = {name: number for number, names in enumerate(saved) for name in names}
            check_names(bagua_ddp, fragment_of, cause)
            if saved != [fragment.names for fragment in self._fragments]:
                self._fragment_of = fragment_of
                bagua_ddp.communicate(fragment_of)
        self._kept.clear()
        here = [fragment.outer_parameters for fragment in self._fragments]
        check_layout("outer parameters", state["outer_parameters"], here, cause)

    def _restore_exchange(self, means: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
        """The exchange under way of a state: means by name, or of an earlier version, of buckets."""
        if not means:
            return
        fragment = self._fragment
        if not isinstance(means, Mapping):
            flats = [bucket.flattened_tensor() for bucket in fragment.buckets]
            fragment.choose(set(fragment.names), self._append_operations)
            for flat, mean in zip(flats, means, strict=True):
                elements = min(len(flat), len(mean))  # another codec may pad to another length
                flat[:elements].copy_(mean[:elements])
        else:
            fragment.choose(means.keys(), self._append_operations)
            for name, view in fragment.means.items():
                view.copy_(means[name])
        self._is_under_way = True
        self._unexchanged.load(self._unexchanged.names, fragment.means)

    def _check_outer_optimizers(self, state: Mapping[str, Any]) -> None:
        # Names and options of another class have another meaning, and so has a momentum that is still rising.
        here = [fragment.outer_class for fragment in self._fragments]
        saved = state.get("outer_classes", here)
        theirs, ours = (", ".join(dict.fromkeys(one or "none" for one in classes)) for classes in (saved, here))
        if theirs != ours:
            raise ValueError(
                f"The outer optimizer of the state is {theirs}, and here it is {ours}.\n"
                "Make one of the same class. To start with another one, load the weights without this state, before"
                " wrapping: load_checkpoint(..., average_replicas=True) does."
            )
        before = state.get("momentum_rounds", self._momentum_rounds)
        over = int(state["rounds"]) // len(self._fragments)  # of each fragment
        if before != self._momentum_rounds and over < max(before, self._momentum_rounds):
            raise ValueError(
                f"The state was saved with momentum_rounds={before} when {over} rounds were over, and here it is"
                f" {self._momentum_rounds}: the outer momentum would go on with another value.\n"
                f"Give momentum_rounds={before}. It can be changed once {max(before, self._momentum_rounds)} rounds are"
                " over."
            )
