"""Programs of training steps: plain data, carried out by every rank of a pool (support.rank_pool).

A program is a list of calls, each a name of the methods of `Trainer` with its arguments, the same on all ranks; a rank
among the arguments says who makes the call alone, or does not make it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.algorithm_cases import Case
from support.branching import HEADS, Branching
from support.checked_training import TOLERANCE, Trainer
from support.ranks import device_for
from support.training import message_of, torch_ddp

from bagua.torch_api.data_parallel import DistributedDataParallel

Call = tuple[Any, ...]


def trainer_of(case: Case, options: dict[str, Any]) -> Trainer:
    return (Trainer if case.name in ("gradient_allreduce", "bytegrad") else ExchangingTrainer)(case, options)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, 0.9, weight_decay=0.1),
    "foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "not foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "maximize": lambda parameters: torch.optim.SGD(parameters, lr=0.01, maximize=True),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
}


class BesideTorch:
    """Our wrapper and torch's, which are called alike: what torch can do, with the same gradients and weights after
    each call.

    Args:
        options: `bytes`: of a bucket, or None; `finds_unused`: then ranks may take different heads; `views`: of buckets
            as gradients; `listed`: our wrapper knows the optimizer; `kind`: one of OPTIMIZERS.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = device_for(int(os.environ["RANK"]))
        self.data = torch.Generator().manual_seed(self.rank)
        self.finds_unused, self.is_quiet = options["finds_unused"], False
        nets = [Branching().to(self.device) for _ in range(2)]
        for net in nets:  # the first rank's are those of all
            torch.nn.init.constant_(net.trunk.weight, 0.1 * self.rank + 0.5)
        every = [list(net.parameters()) for net in nets]
        self.later = [parameters.pop() for parameters in every]  # are stepped only when they are added
        self.optimizers = [OPTIMIZERS[options["kind"]](parameters) for parameters in every]
        ours = DistributedDataParallel(
            nets[0],
            bucket_cap_mb=25 if options["bytes"] is None else options["bytes"] / (1 << 20),
            find_unused_parameters=self.finds_unused,
            gradient_as_bucket_view=options["views"],
            optimizers=self.optimizers[:1] if options["listed"] else [],
        )
        self.models: list[Any] = [ours, torch_ddp(nets[1], find_unused_parameters=self.finds_unused)]

    def zero(self, how: str) -> None:
        if self.finds_unused and self.is_quiet and how == "to none":
            how = "to zero"  # torch remembers what passes without communication used, and misses the gradient
        for optimizer in self.optimizers:
            if how != "by hand":
                optimizer.zero_grad(set_to_none=how == "to none")
                continue
            for parameter in optimizer.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0)
        self.finish()

    def passes(self, heads: int, by_rank: bool, how: str, quiet: str) -> None:
        """A forward and a backward pass.

        Args:
            heads, by_rank: which of HEADS; the next one on each rank. All where ranks wait for unused parameters.
            how: "plain"; "checkpointed" or "reentrant": heads are; "two forward passes" in one graph; "raising": after
                a forward pass that raises; "penalty": of the gradient of the input; "closure": the step makes the pass.
            quiet: "": it communicates; by "no_sync" or the "attribute" it does not.
        """
        if not self.finds_unused and not quiet:
            heads, by_rank = 0, False
        self.is_quiet = bool(quiet)
        taken = HEADS[(heads + by_rank * self.rank) % len(HEADS)]
        # torch looks for unused parameters in graphs without reentrant parts.
        reentrant = {"checkpointed": False, "reentrant": not self.finds_unused}.get(how)
        first, second = (torch.randn(3, 2, generator=self.data).to(self.device) for _ in range(2))
        first.requires_grad_(how == "penalty")
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model.require_backward_grad_sync = quiet != "attribute"
            with model.no_sync() if quiet == "no_sync" else contextlib.nullcontext():
                if how == "raising":
                    message_of(RuntimeError, lambda model=model: model(second[:, :1], taken), "shapes")
                output = model(first, taken, reentrant=reentrant)
                if how == "two forward passes":
                    output = output - model(second, taken)
                loss = output.square().mean()
                if how == "penalty":
                    (slope,) = torch.autograd.grad(output.square().sum(), first, create_graph=True)
                    loss = loss + slope.square().mean()
                if how == "closure" and not quiet:
                    optimizer.step(lambda loss=loss: (loss.backward(), loss)[1])
                else:
                    loss.backward()
            model.require_backward_grad_sync = True
        self.finish()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.finish()

    def schedule(self, factor: float) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] *= factor

    def add_group(self) -> None:
        """The parameters that are left, in a group of their own."""
        for optimizer, parameter in zip(self.optimizers, self.later, strict=False):
            optimizer.add_param_group({"params": [parameter], "lr": 0.03})
        self.later = []

    def train(self, heads: int, by_rank: bool) -> None:
        self.zero("to none")
        self.passes(heads, by_rank, "plain", "")
        self.step()

    def finish(self) -> None:
        """The same bits with two ranks; others add up in another order."""
        ours, theirs = (dict(model.module.named_parameters()) for model in self.models)
        for name in ours:
            for one, other in ((ours[name].detach(), theirs[name].detach()), (ours[name].grad, theirs[name].grad)):
                assert (one is None) == (other is None), name
                if one is not None and other is not None:
                    distance = (one - other).abs().max().item()
                    assert distance <= (0 if self.ranks == 2 else TOLERANCE), f"{name} is {distance} away"


class ExchangingTrainer(Trainer):
    """Of weights: ranks differ, and one may skip a step. Nothing hangs, and all is finite."""

    # What is documented to be refused, once.
    REFUSALS = (
        *("Parameters were changed between", "before optimizer.step", "before the next forward", "at the beg"),
        # torch's: other buckets are other memory for the weights of a graph.
        "one of the variables needed for gradient computation has been modified",
    )

    def end_step(self, attempt: Callable[[], Any]) -> bool:
        try:
            attempt()
        except RuntimeError as error:
            if not str(error).startswith(self.REFUSALS):
                raise
            return False
        return True

    def evaluate(self, alone: int | None, with_gradients: bool, in_training: bool) -> None:
        # Where gradients are communicated, one rank alone must not be told that a pass raised.
        may_be_told = self.case.name == "qadam" or "warmup_steps" in self.case.options
        super().evaluate(alone, with_gradients and not (alone is not None and may_be_told), in_training)

    def backward(self, is_quiet: bool = False, keeps: bool = False, raises: str = "") -> None:
        if not self.losses:
            return
        loss = (self.losses[0] if keeps else self.losses.pop(0))[0]
        if not loss.requires_grad:
            return
        with self.quiet(is_quiet), contextlib.suppress(MemoryError):
            self.end_step(lambda: loss.backward(retain_graph=keeps))

    def step(self, skips: int | None = None) -> None:
        self.losses.clear()
        # QAdam counts steps, so that all ranks have to skip the same ones.
        is_skipped = skips is not None if self.case.name == "qadam" else skips == self.rank
        if not is_skipped:
            self.end_step(self.optimizer.step)

    def compare(self) -> None:
        for name, parameter in self.net.named_parameters():
            assert parameter.isfinite().all(), name

    def finish(self) -> None:
        super().finish()
        self.net.bagua_ddp.bagua_algorithm.finish(self.net.bagua_ddp)
        self.compare()


# --- programs that failed --------------------------------------------------------------------------------------------

BOTH, LEFT, RIGHT = HEADS
TRAIN, STEP, PASS = ("train", BOTH), ("step",), (("forward", BOTH, False), ("backward", False, False))
_INTERRUPTED = (TRAIN, ("raising", BOTH, "middle", False), ("zero", True))
_SKIPPED = ("train", BOTH, 1)  # by rank 1
GRADIENTS, RING = Case("gradient_allreduce"), Case("low_precision_decentralized")


@dataclass(frozen=True)
class Found:
    """A program, with the bytes of a bucket, or None for one bucket; `how` as in Case.wrap."""

    case: Case
    calls: tuple[Call, ...]
    size: int | None = 4
    how: str = "with_bagua"

    @property
    def options(self) -> dict[str, Any]:
        return {"zeroes": False, "how": self.how, "bytes": self.size}


FOUND = {
    "the second loss does not reach the first bucket": Found(GRADIENTS, (TRAIN, ("two_losses", BOTH, LEFT), STEP)),
    "buckets change in an incomplete step": Found(
        GRADIENTS,
        (
            *(("freeze", "trunk", True), TRAIN, ("forward", LEFT, True), ("backward", True, False)),
            *(("forward", RIGHT, False), ("backward", False, False), ("resize", 80, False), STEP),
        ),
    ),
    "buckets change after a pass that raised": Found(
        GRADIENTS, (*_INTERRUPTED, ("resize", 80, False), *PASS, STEP), how="with_bagua unflattened"
    ),
    "wrapped again after a pass that raised": Found(
        GRADIENTS, (*_INTERRUPTED, ("wrap",), *PASS, STEP), how="with_bagua unflattened"
    ),
    "saved when one rank owes an exchange": Found(RING, (TRAIN, _SKIPPED, ("save",), TRAIN, ("load",), TRAIN), None),
    "wrapped again when one rank owes an exchange": Found(RING, (TRAIN, _SKIPPED, ("wrap",), TRAIN), None),
    "loaded when one rank owes an exchange": Found(RING, (TRAIN, ("save",), TRAIN, _SKIPPED, ("load",), TRAIN), None),
}
