"""Fragments of a model whose weights are exchanged together, with the weights of the last round where a round needs
them: DiLoCo's outer parameters.

One round of a fragment, with x the weights of this rank and y the outer parameters, which all ranks have alike:

    average:       x = mean of x over all ranks
    outer step:    g = mean of (y - x) over all ranks;  y = outer_optimizer(y, g);  x = y + alpha * (x - y)

Owned by an algorithm, which decides when a round begins and ends. Training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagua.collectives.process_group import BaguaProcessGroup
from bagua.comm_ops.public_bucket import BaguaBucket, WeightBucket
from bagua.engine.bucket import BucketOp
from bagua.engine.comm_scheduler import CommScheduler
from bagua.engine.step_statistics import PassRecorder
from bagua.kernels.argument_checks import HALF_DTYPES

OuterOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class FragmentBucket(WeightBucket):
    """Weights of one dtype and device. The bucket's memory is what this rank contributes to the mean, then the mean.

    Attributes:
        outer: y, in float32 where weights have two bytes; empty: weights are averaged.
    """

    def __init__(self, tensors: Sequence[Tensor], name: str, do_flatten: bool, alignment: int = 1) -> None:
        super().__init__(tensors, name, do_flatten, alignment)
        self.outer: list[nn.Parameter] = []
        self._alignment = alignment

    def part(self, names: Collection[str]) -> FragmentBucket | None:
        """A bucket of the weights of these names, with the same y; None, if there are none."""
        chosen = [index for index, record in enumerate(self.records) if record.name in names]
        if not chosen:
            return None
        part = FragmentBucket([self.tensors[index] for index in chosen], self.name, False, self._alignment)
        part.outer = [self.outer[index] for index in chosen] if self.outer else []
        return part

    @torch.no_grad()
    def begin_outer(self) -> None:
        """y is what the weights are now."""
        wide = torch.float32 if self.dtype in HALF_DTYPES else self.dtype
        self.outer = [nn.Parameter(tensor.detach().to(wide, copy=True)) for tensor in self.tensors]

    @torch.no_grad()
    def copy_in(self) -> None:
        if not self.outer:
            super().copy_in()
            return
        self.check_tensors()
        torch._foreach_copy_(self.views, [*self.outer])
        torch._foreach_sub_(self.views, list(self.tensors))
        if self.weight is not None:
            self.flattened_tensor().mul_(self.weight)

    def copy_out(self) -> None:
        """Nothing: weights are in use until the round ends."""

    @torch.no_grad()
    def take_mean(self) -> None:
        """The mean becomes the weights."""
        BaguaBucket.copy_out(self)

    @torch.no_grad()
    def take_outer(self, alpha: float) -> None:
        """The weights become y, mixed with `alpha` of themselves."""
        weights = list(self.tensors)
        if alpha:
            outer: list[Tensor] = [one.to(self.dtype) for one in self.outer]
            # y + alpha (x - y), as x + (1 - alpha) (y - x)
            torch._foreach_lerp_(weights, outer, 1.0 - alpha)
        else:
            torch._foreach_copy_(weights, [*self.outer])

    def give_gradients(self) -> None:
        """The mean becomes the gradients of y."""
        for parameter, view in zip(self.outer, self.views, strict=True):
            parameter.grad = view.to(parameter.dtype)


class Fragment:
    """
    Args:
        buckets: of its weights; none: it has no part in what is trained.
        outer_optimizer: makes the optimizer of y from y; None: weights are averaged.
        alpha: of the weights that this rank has made since the round began.
        momentum_rounds: over which the momentum of the outer optimizer rises; 0: it is what it is.

    Raises:
        TypeError: `outer_optimizer` returns something else than an optimizer of the parameters that it was given.
        ValueError: momentum has to rise, and the outer optimizer has no option of this name, or it is 0.
    """

    def __init__(
        self,
        buckets: Sequence[FragmentBucket],
        outer_optimizer: OuterOptimizer | None,
        alpha: float,
        momentum_rounds: int = 0,
    ) -> None:
        self.buckets = list(buckets)
        self._alpha, self._momentum_rounds = alpha, momentum_rounds
        # Of the last exchange: all of them, or others of a part of their weights.
        self._exchanged = self.buckets
        self._scheduler: CommScheduler | None = None
        self.outer_optimizer: torch.optim.Optimizer | None = None
        if outer_optimizer is None or not buckets:
            return
        for bucket in self.buckets:
            bucket.begin_outer()
        made: object = outer_optimizer(self.outer_parameters)
        held = (
            {id(one) for group in made.param_groups for one in group["params"]}
            if isinstance(made, torch.optim.Optimizer)
            else set()
        )
        if not isinstance(made, torch.optim.Optimizer) or held != {id(one) for one in self.outer_parameters}:
            raise TypeError(
                f"outer_optimizer returned {made!r}, which is not an optimizer of the parameters that it was given.\n"
                "Pass a function of the parameters: lambda parameters: torch.optim.SGD(parameters, lr=0.7)."
            )
        if momentum_rounds and not all("momentum" in group for group in made.param_groups):
            raise ValueError(
                f"momentum_rounds={momentum_rounds}, but the outer optimizer, {type(made).__name__}, has no option"
                " 'momentum'. Leave momentum_rounds out, or use torch.optim.SGD."
            )
        if momentum_rounds and not any(group["momentum"] for group in made.param_groups):
            raise ValueError(
                f"momentum_rounds={momentum_rounds} has no effect, because the outer optimizer's momentum is 0.\n"
                "Leave momentum_rounds out, or give the outer optimizer a momentum."
            )
        self.outer_optimizer = made

    @property
    def names(self) -> list[str]:
        """Of its weights."""
        return [record.name for bucket in self.buckets for record in bucket.records]

    @property
    def means(self) -> dict[str, Tensor]:
        """Of the last exchange, by the names of the weights; views."""
        return {
            record.name: view
            for bucket in self._exchanged
            for record, view in zip(bucket.records, bucket.views, strict=True)
        }

    @property
    def first_ops(self) -> Sequence[BucketOp]:
        """Of the first bucket of the last exchange."""
        return self._exchanged[0].ops

    @property
    def outer_parameters(self) -> list[nn.Parameter]:
        """y."""
        return [parameter for bucket in self.buckets for parameter in bucket.outer]

    @property
    def outer_class(self) -> str | None:
        """Name of the outer optimizer's class; None: there is none."""
        return None if self.outer_optimizer is None else type(self.outer_optimizer).__name__

    @property
    def outer_options(self) -> str:
        """Class and options of the outer optimizer, which ranks must have alike; "" for none. Options that are tensors
        are left out: reading them would wait for the GPU."""
        if self.outer_optimizer is None:
            return ""
        groups = [
            {name: value for name, value in group.items() if not isinstance(value, torch.Tensor)}
            for group in self.outer_groups
        ]
        return f"{self.outer_class} with {groups}"

    def outer_by_name(self) -> dict[str, tuple[nn.Parameter, Any]]:
        """y and its state in the outer optimizer, by the names of the weights."""
        if self.outer_optimizer is None:
            return {}
        return {
            record.name: (parameter, self.outer_optimizer.state.get(parameter))
            for bucket in self.buckets
            for record, parameter in zip(bucket.records, bucket.outer, strict=True)
        }

    @torch.no_grad()
    def take_over(self, kept: dict[str, tuple[nn.Parameter, Any]]) -> None:
        """Go on with the y of these names, and its state, and take them out of `kept`."""
        for name, (parameter, _) in self.outer_by_name().items():
            former, state = kept.pop(name, (None, None))
            if former is not None and former.shape == parameter.shape:
                parameter.copy_(former)
                if self.outer_optimizer is not None and state is not None:
                    self.outer_optimizer.state[parameter] = state

    @property
    def outer_groups(self) -> list[dict[str, Any]]:
        """The options of the outer optimizer, by parameter groups; empty: there is none."""
        groups = [] if self.outer_optimizer is None else self.outer_optimizer.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def take_over_options(self, groups: Sequence[dict[str, Any]]) -> None:
        """Go on with the options of a fragment in this one's place, if it had as many groups."""
        if self.outer_optimizer is not None and len(groups) == len(self.outer_optimizer.param_groups):
            for group, former in zip(self.outer_optimizer.param_groups, groups, strict=True):
                group.update(former)

    # --- a round -----------------------------------------------------------------------------------------------------

    def choose(self, names: Collection[str], append_operations: Callable[[FragmentBucket, bool], None]) -> None:
        """The next exchange is of the weights of these names alone. The others, their y and its state stay as they are.

        Args:
            names: of some of its weights.
            append_operations: of a bucket, which is the first one of the exchange or not.
        """
        if names == self.means.keys():
            return
        self.close()
        self._exchanged = self.buckets
        if names != set(self.names):
            self._exchanged = [one for bucket in self.buckets if (one := bucket.part(names)) is not None]
            for bucket in self._exchanged:
                append_operations(bucket, bucket is self._exchanged[0])

    def begin(
        self, group: BaguaProcessGroup, recorder: PassRecorder, what: str, share: float | Tensor | None = None
    ) -> None:
        """Start the exchange, of the weights as they are now.

        Args:
            group: which carries exchanges of weights alone.
            recorder: takes the times.
            what: is exchanged, for errors and logs.
            share: what this rank's part is multiplied by before the mean (bagua.engine.batch_weights); None: nothing.
        """
        for bucket in self._exchanged:
            bucket.weight = share
        if self._scheduler is None:
            # Of its own: other fragments of the plan are not part of the step, and its exchange outlasts steps.
            self._scheduler = CommScheduler(self._exchanged, group, recorder, sees_flags=False)
        self._scheduler.what = what
        # One exchange in eight would be one in thousands of steps.
        recorder.samples_all = True
        self._scheduler.launch_buckets(self._exchanged)

    def wait(self) -> None:
        """Until the mean is there."""
        if self._scheduler is not None:
            self._scheduler.wait_pending_comm_ops()
            self._scheduler.end_step()

    def end(self, rounds: int) -> None:
        """The mean takes effect on the weights. It has been waited for.

        Args:
            rounds: of this fragment that are over.
        """
        if self.outer_optimizer is None:
            for bucket in self._exchanged:
                bucket.take_mean()
            return
        for bucket in self._exchanged:
            bucket.give_gradients()
        for group in self.outer_optimizer.param_groups:
            if rounds + 1 < self._momentum_rounds:
                last = group.setdefault("last_momentum", group["momentum"])
                group["momentum"] = last * (rounds + 1) / self._momentum_rounds
            elif "last_momentum" in group:
                # Once, since it may be changed from here on. A state of an earlier version may have been saved before.
                group["momentum"] = group.pop("last_momentum")
        self.outer_optimizer.step()
        self.outer_optimizer.zero_grad(set_to_none=True)
        for bucket in self._exchanged:
            bucket.take_outer(self._alpha)

    def close(self) -> None:
        """No round follows."""
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None


def split(tensors: Sequence[Tensor], fragments: int) -> list[list[Tensor]]:
    """As many parts in order, of about as many elements each, none of them empty.

    Raises:
        ValueError: there are fewer tensors.
    """
    count = len(tensors)
    if count < fragments:
        raise ValueError(
            f"fragments={fragments}, but the model has {count} parameters to exchange; use at most {count}"
        )
    total = sum(tensor.numel() for tensor in tensors)
    parts: list[list[Tensor]] = [[]]
    seen = 0
    for index, tensor in enumerate(tensors):
        left = fragments - len(parts)  # parts to come
        is_full = seen + tensor.numel() / 2 > total * len(parts) / fragments
        if parts[-1] and left and (is_full or count - index == left):
            parts.append([])
        parts[-1].append(tensor)
        seen += tensor.numel()
    return parts
