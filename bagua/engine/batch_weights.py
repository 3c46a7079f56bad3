"""What the batch of each rank counts for, in the mean of the gradients of all. Owned by the module's TrainingSteps.

[Note: a weighted mean]
The gradient g of a rank is the mean over its n samples. The mean over the samples of all R ranks is sum(n g) / W, where
W is sum(n). An algorithm averages over the ranks, in whatever way. So each rank multiplies its buckets by n R / W as
they are filled (Bucket.weight): before any sum and any compression, and near 1, so that float16 does not overflow.

W comes from an all-gather of one number of each rank. It begins in the forward pass, or with the number if that comes
later, and is waited for when the first gradient has come. What comes before it and after it is the same on all ranks,
whether they give their numbers before the forward pass or after it.

Passes in no_sync add to gradients that are there. Those are kept in units of the pass that comes next: before it, they
are multiplied by n_before / n. So autograd adds as it always does, and the factor of the last pass, with the W of all
passes, is right for the sum. Where losses are sums, gradients are added as they are, and the factor is R / W.

Where the job goes on without ranks that it loses, W is asked for when the first gradient has come: so it is the last
thing before the buckets on all ranks, also on those that repeat a pass. Then W is that of the ranks that are left.

Where replicas are exchanged after some steps of their own, gradients stay a rank's own: a mean over its samples. What
counts in the exchange is how many there were since the last one (`share`).
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bagua.collectives.communicator import BaguaCommunicator
from bagua.engine.bucket import Bucket
from bagua.engine.module_hooks import call_at_end
from bagua.engine.setup import Setup
from bagua.job import torch_internals
from bagua.job.failure_report import failures_named
from bagua.job.regrouped import Regrouped
from bagua.misuse import shown
from bagua.regroup.coordinator import Regrouping

LOSSES = ("mean", "sum")

_MOST = 2.0**53  # of which sums are numbers, too
_NONE_GIVEN = -math.inf
_WHAT = "telling the weights of batches"

_logger = logging.getLogger("bagua")


class BatchWeights:
    """
    Args:
        setup: how the module is trained; `loss` and `counts_batch` are in it.
        parameters: gives (name, parameter) of what is synchronized now.
        communicates: whether backward passes do now, and what: gradients, or no more than that replicas have moved.
        regrouping: takes this process on when a rank is lost; None: nobody does.

    Attributes:
        samples: of this rank's passes so far whose gradients were its own.
        lost: a rank was, before the others had said what their batches count for in this pass; for the end of it.
    """

    def __init__(
        self,
        setup: Setup,
        parameters: Callable[[], Sequence[tuple[str, nn.Parameter]]],
        communicates: Callable[[], tuple[bool, bool]],
        regrouping: Regrouping | None = None,
    ) -> None:
        self._regrouping = regrouping
        self._group, self._communicator = setup.group, setup.communicator
        self._is_mean = setup.loss == "mean"
        self._name = setup.name
        self._parameters, self._communicates = parameters, communicates
        self.samples = 0.0
        self.lost: Regrouped | None = None
        self._weight: float | None = None  # of the next pass
        self._is_counted = False  # not given
        self._has_forward = False  # since the last pass
        self._gather: _Gather | None = None  # of this weight
        self._outdated: list[_Gather] = []  # of weights that were replaced
        # Of passes in no_sync since the last one that communicated.
        self._counted = 0.0
        self._refused: float | None = None  # a weight that is none
        self._refused_since_exchange: float | None = None  # of passes whose gradients were this rank's own
        self._unit = 0.0  # the weight in units of which gradients are; 0: there are none
        self._versions: list[int] = []  # of gradients, when the last of these passes had ended
        self._uncommunicated: object | None = None  # the end of such a pass, which autograd will call
        # Gradients of passes that have communicated, until others are added.
        self._set_aside: list[tuple[nn.Parameter, Tensor]] = []
        self._was_sent = False  # since the last optimizer step
        self._own_factor = 1.0  # of a pass whose gradients are this rank's own
        self._zeroing: list[Any] = []  # hooks
        self._was_told = False  # that all weights were 0
        self._unchecked: _Gather | None = None
        self._told, self._last_unit = 0.0, 0.0  # of the last pass that communicated

    # --- the weight of a pass ----------------------------------------------------------------------------------------

    def set(self, weight: Any) -> None:
        """Of the next backward pass. What no rank may give is an error of that pass, on all ranks.

        Raises:
            TypeError: not a number.
        """
        if isinstance(weight, Tensor) and weight.numel() == 1:
            weight = weight.item()
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise TypeError(
                f"set_batch_weight: {shown(weight)} is not a number.\n"
                "Pass the number of samples or tokens of this rank's batch."
            )
        try:
            value = float(weight)
        except OverflowError:  # an integer that is larger than floating point can be
            value = math.inf
        self._set(value, is_counted=False)

    def _set(self, weight: float, is_counted: bool) -> None:
        self._weight, self._is_counted = weight, is_counted
        if self._gather is not None:
            self._outdated.append(self._gather)
            self._gather = None
        self._stop_zeroing()
        self._forget_discarded()
        if weight == 0:
            # Not by a factor: 0 times infinity is no number.
            for _, parameter in self._parameters():
                if parameter.requires_grad:
                    self._zeroing.append(parameter.register_hook(torch.zeros_like))  # type: ignore[no-untyped-call]
        elif weight > 0:
            if self._is_mean and self._counted and self._unit not in (0.0, weight):
                gradients = [one.grad for _, one in self._parameters() if one.grad is not None]
                with torch.no_grad():
                    torch._foreach_mul_(gradients, self._unit / weight)
                self._note_versions()
            self._unit = weight
        if self._has_forward:
            self._begin_gather()

    def count(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """In a forward pass: its weight is the first dimension of the first tensor, unless another one was given.

        Raises:
            ValueError: there is no such tensor.
        """
        if not torch.is_grad_enabled() or (self._weight is not None and not self._is_counted):
            return
        for leaf in pytree.tree_leaves((arguments, keywords)):
            if isinstance(leaf, Tensor):
                if leaf.dim() == 0:
                    break
                self._set(float(leaf.shape[0]), is_counted=True)
                return
        raise ValueError(
            "count_batch=True: the first tensor that the module is called with has no dimension to count, or there is"
            f" none.\nModule: {self._name}.\n"
            "Use batch_weights=True, and call set_batch_weight(n) before each backward pass."
        )

    def begin_forward(self) -> None:
        """A forward pass of training begins, with gradients."""
        self._has_forward = True
        self._forget_discarded()
        # A mean of what all ranks have is what they have, by whatever weights. A sum of it is not, nor what is kept in
        # units of a rank's next pass.
        if self._was_sent and not self._counted and not (self._is_mean and self._sends_gradients):
            self._set_sent_aside()
        self._begin_gather()

    @property
    def _sends_gradients(self) -> bool:
        return all(self._communicates())

    def _begin_gather(self) -> None:
        if self._regrouping is None and self._gather is None and self._weight is not None and self._sends_gradients:
            self._gather = self._start_gather(self._counted + self._weight)

    def _start_gather(self, total: float) -> _Gather:
        if self._refused is not None:
            total = self._refused
        elif self._weight is not None and not _is_weight(self._weight):
            total = self._weight
        self._told = total
        with failures_named(self._group, _WHAT):
            return _Gather(total, self._communicator)

    # --- a pass ------------------------------------------------------------------------------------------------------

    def note_gradient(self) -> None:
        """Of a pass that does not communicate."""
        if self._uncommunicated is None:
            self._uncommunicated = call_at_end(self._end_uncommunicated, 0, self._drop_uncommunicated)

    def _drop_uncommunicated(self, _: object = None) -> None:
        self._uncommunicated, self._has_forward, self._weight = None, False, None
        self._stop_zeroing()

    def _end_uncommunicated(self, _: int) -> None:
        weight = self._weight
        self._drop_uncommunicated()
        if weight is None:
            self._refused = _NONE_GIVEN
        elif not _is_weight(weight):
            self._refused = weight
        else:
            self._counted += weight
        self._note_versions()

    def begin_pass(self, buckets: Sequence[Bucket]) -> None:
        """The first gradient of a pass that communicates has come.

        Raises:
            RuntimeError: a rank has given no weight, or one that is none; on all ranks.
        """
        if self._weight is None and self._refused is None:
            self._refused = _NONE_GIVEN
        if any(one.grad is None for one, _ in self._set_aside):  # zero_grad() after the forward pass
            self._set_aside.clear()
        total = self._counted + (self._weight or 0.0)
        if self._sends_gradients:
            self._weigh(buckets, total)
        else:
            self._weigh_own(total)

    def take_part_without_batch(self, buckets: Sequence[Bucket]) -> None:
        """In a pass of the other ranks."""
        self._weight = 0.0
        self._weigh(buckets, 0.0)

    def _weigh_own(self, total: float) -> None:
        if self._weight is not None and not _is_weight(self._weight):
            self._refused = self._weight
        if self._refused is not None:
            self._refused_since_exchange, self._refused = self._refused, None
        if _is_weight(total):
            self.samples += total
        unit = self._unit if self._is_mean else 1.0
        self._own_factor = unit / total if total > 0 else 1.0
        self._weight, self._has_forward, self._was_sent = None, False, True
        self._counted, self._unit = 0.0, 0.0

    def _weigh(self, buckets: Sequence[Bucket], total: float) -> None:
        gather, self._gather = self._gather or self._start_gather(total), None
        self._weight, self._has_forward = None, False
        unit, self._unit = (self._unit if total > 0 else 0.0), 0.0
        self._counted, self._refused = 0.0, None
        self._was_sent = True
        self._last_unit = unit
        self._wait_for(gather, unit, buckets)

    def weigh_again(self, buckets: Sequence[Bucket]) -> None:
        """The last pass is repeated, among other ranks. Collective."""
        self._wait_for(self._start_gather(self._told), self._last_unit, buckets)

    def _wait_for(self, gather: _Gather, unit: float, buckets: Sequence[Bucket]) -> None:
        if self._regrouping is None:
            factor = self._factor_of(gather, unit)
        else:
            try:
                with self._regrouping.within():
                    factor = self._factor_of(gather, unit)
            except Regrouped as error:
                self.lost, factor = error, 1.0
        for bucket in buckets:
            bucket.weight = factor

    def _factor_of(self, gather: _Gather, unit: float) -> float | Tensor:
        for one in (*self._outdated, gather):  # each: a rank that has told more than others is found
            with failures_named(self._group, _WHAT, in_order=True):
                one.wait()
        self._outdated.clear()
        return self._factor(gather, unit if self._is_mean else 1.0)

    def rewind(self) -> None:
        """What was asked of the others in the last pass is forgotten. If its gradients are dropped, what they count for
        is found out as where a program drops them."""
        self._outdated.clear()
        self._gather = self._unchecked = self.lost = None

    def _factor(self, gather: _Gather, unit: float, without_samples: float = 0.0) -> float | Tensor:
        if gather.is_on_gpu:
            self._unchecked = gather
        else:
            self._check(gather)
        return gather.factor(unit, without_samples)

    def share(self, samples: float, communicator: BaguaCommunicator) -> float | Tensor:
        """By what this rank multiplies its replica, or how far that has moved, before an exchange makes the mean over
        the ranks. Collective. On a GPU a tensor.

        Raises:
            RuntimeError: as `begin_pass`, of a pass since the last exchange.
        """
        refused, self._refused_since_exchange = self._refused_since_exchange, None
        gather = _Gather(samples if refused is None else refused, communicator)
        gather.wait()
        return self._factor(gather, samples, without_samples=1.0)

    def end_pass(self) -> None:
        """The pass has ended, and its results are in place."""
        self._stop_zeroing()
        factor, self._own_factor = self._own_factor, 1.0
        if factor != 1.0:
            with torch.no_grad():
                torch._foreach_mul_([one.grad for _, one in self._parameters() if one.grad is not None], factor)
        if self._set_aside:
            with torch.no_grad():
                for parameter, gradient in self._set_aside:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            self._set_aside.clear()

    def before_step(self) -> None:
        """Of an optimizer.

        Raises:
            RuntimeError: as `begin_pass`, where that could not tell without waiting for the GPU.
        """
        self._forget_accumulated()
        self._was_sent = False
        gather, self._unchecked = self._unchecked, None
        if gather is not None:
            self._check(gather)

    def _check(self, gather: _Gather) -> None:
        totals, ranks = gather.totals(), self._communicator.ranks
        if self._regrouping is not None and self._regrouping.is_pending:
            return  # they may be garbage of a GPU; the pass is not used then
        wrong = [(ranks[one], total) for one, total in enumerate(totals) if not _is_weight(total)]
        if wrong:
            said = "; ".join(
                f"rank {rank} gave {'no weight' if total == _NONE_GIVEN else f'{total:g}'}" for rank, total in wrong
            )
            # What this rank has is not the mean of all, and an optimizer could step with it.
            self._set_aside.clear()
            for _, parameter in self._parameters():
                parameter.grad = None
            raise RuntimeError(
                f"The weights of batches are not complete: {said}.\n"
                f"Module: {self._name}. A weight is a number from 0 to 2**53, such as the number of samples.\n"
                "On every rank call set_batch_weight(n) before each backward pass, or wrap with count_batch=True. Call"
                " backward() once for each forward pass. There are no gradients now: continue with the next forward"
                " pass."
            )
        if not any(totals) and not self._was_told:
            self._was_told = True
            _logger.warning(f"{self._name}: all ranks gave batch weight 0; the gradients of such a step are zeros.")

    # --- gradients that are there ------------------------------------------------------------------------------------

    def _set_sent_aside(self) -> None:
        """They count as they are, whatever is accumulated beside them."""
        with torch.no_grad():
            for _, parameter in self._parameters():
                if parameter.grad is not None:
                    self._set_aside.append((parameter, parameter.grad.clone()))
                    parameter.grad.zero_()
        self._was_sent = False
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [one.grad._version for _, one in self._parameters() if one.grad is not None]

    def _forget_discarded(self) -> None:
        """What was accumulated counts no more if the user has dropped or zeroed all of it."""
        if not self._counted and self._refused is None and not self._set_aside:
            return
        gradients = [one.grad for _, one in self._parameters() if one.grad is not None]
        if gradients and (
            [one._version for one in gradients] == self._versions or any(bool(one.any()) for one in gradients)
        ):
            return
        self._forget_accumulated()
        self._refused = None

    def _forget_accumulated(self) -> None:
        # In units of the next pass, if that has its weight already.
        self._unit = self._weight if self._weight is not None and _is_weight(self._weight) else 0.0
        self._counted = 0.0
        self._set_aside.clear()

    def _stop_zeroing(self) -> None:
        for one in self._zeroing:
            one.remove()
        self._zeroing.clear()


class _Gather:
    """What all ranks count for in a pass; under way when it is made.

    Attributes:
        is_on_gpu: the host knows the results later than the GPU.
    """

    def __init__(self, total: float, communicator: BaguaCommunicator) -> None:
        device, self._ranks = communicator.device, communicator.nranks()
        self.is_on_gpu = device.type == "cuda"
        self._own = torch.full((1,), total, dtype=torch.float64, device=device)
        self._totals, self._work = self._own, None
        if self._ranks > 1:
            self._totals = self._own.new_empty(self._ranks)
            self._work = torch_internals.all_gather_flat(
                self._totals, self._own, group=communicator.torch_group, async_op=True
            )
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """With CUDA, the current stream does."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self.is_on_gpu and self._host is None:
            self._host = torch.empty(self._ranks, dtype=torch.float64, device="cpu", pin_memory=True)
            self._host.copy_(self._totals, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(self._totals.device))

    def factor(self, unit: float, without_samples: float) -> float | Tensor:
        """`unit` times the number of ranks over the sum of all; where that is 0, the other. On a GPU a tensor."""
        if self.is_on_gpu:
            total = self._totals.sum()
            return torch.where(total > 0, unit * self._ranks / total, without_samples)
        whole = math.fsum(self._totals.tolist())
        return unit * self._ranks / whole if whole > 0 else without_samples

    def totals(self) -> list[float]:
        """By rank."""
        if self._event is not None:
            self._event.synchronize()
        totals: list[float] = (self._totals if self._host is None else self._host).tolist()
        return totals


def check_weights(setup: Setup) -> None:
    """
    Raises:
        ValueError: `loss` is unknown.
        NotImplementedError: the algorithm does not average gradients over all ranks.
    """
    if setup.loss is None:
        return
    if setup.loss not in LOSSES:
        raise ValueError(f'loss={setup.loss!r} is unknown. Pass "mean" or "sum": what the loss is of its samples.')
    name = setup.algorithm_name
    if not vars(type(setup.algorithm)).get("weighs_batches", False):
        raise NotImplementedError(
            f"batch weights: the algorithm {name} does not support them.\n"
            "Use the default algorithm, or another one that averages the gradients of all ranks."
        )
    if not getattr(setup.algorithm, "average", True):
        raise NotImplementedError(
            f"batch weights: {name} with average=False adds gradients up, which has no weights.\n"
            "Leave average=False out, or the batch weights."
        )


def _is_weight(value: float) -> bool:
    return 0 <= value <= _MOST
