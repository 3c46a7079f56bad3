"""A model whose parts are trained in turn, and algorithms that exchange weights written out as loops, for all ranks in
one process: what is exchanged, and when, is here without plans, buckets and hooks.

`Turns` trains the model on a rank and the loop beside it, call by call (support.step_programs makes programs of these
calls), and compares them.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.low_precision_ring import quantised
from support.ranks import device_for
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm

PARTS = ("first", "middle", "last")
RATE, MOMENTUM = 0.05, 0.5
OUTER = {"lr": 0.7, "momentum": 0.9}


class Chain(nn.Module):
    """Every part's gradient needs the weights of those behind it: weights that change too early are found."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def batch_of(number: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * number + rank))


def loss_of(output: Tensor, rank: int) -> Tensor:
    """Pulls each rank somewhere else."""
    return (output - rank).square().mean()


def optimizers_of(net: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """One for each parameter."""
    return {name: torch.optim.SGD([one], RATE, MOMENTUM) for name, one in net.named_parameters()}


def freeze_all_but(net: nn.Module, parts: Collection[str]) -> None:
    for part in PARTS:
        getattr(net, part).requires_grad_(part in parts)


class ByHand:
    """Replicas of all ranks. What is exchanged is what was trained since it was last exchanged."""

    def __init__(self, ranks: int) -> None:
        self.nets = [Chain() for _ in range(ranks)]
        self.weights = [dict(net.named_parameters()) for net in self.nets]
        self.momenta: list[dict[str, Tensor]] = [{} for _ in self.nets]
        self.unexchanged: set[str] = set()

    @property
    def unfrozen(self) -> set[str]:
        return {name for name, one in self.weights[0].items() if one.requires_grad}

    def take(self, names: Collection[str]) -> list[str]:
        """Those of them that an exchange covers, the last first."""
        covered = [name for name in reversed(self.weights[0]) if name in names and name in self.unexchanged]
        self.unexchanged -= set(covered)
        return covered

    def mean(self, name: str) -> Tensor:
        return torch.stack([one[name].detach() for one in self.weights]).mean(0)

    @torch.no_grad()
    def set(self, name: str, value: Tensor) -> None:
        for one in self.weights:
            one[name].copy_(value)

    def turn(self, number: int, stepped: Sequence[Collection[str]], counts: bool = True) -> None:
        """A pass of each rank, after which its optimizers of these names step; one that counts, or is in no_sync."""
        if counts:
            self.before_pass()
        for rank, net in enumerate(self.nets):
            net.zero_grad()
            loss_of(net(batch_of(number, rank)), rank).backward()
        if counts:
            self.unexchanged |= self.unfrozen
            self.before_steps()
        for weights, momenta, names in zip(self.weights, self.momenta, stepped, strict=True):
            for name in names:
                gradient = weights[name].grad
                assert gradient is not None
                momenta[name] = MOMENTUM * momenta[name] + gradient if name in momenta else gradient.clone()
                weights[name].data -= RATE * momenta[name]
        if counts:
            self.after_steps()

    def before_pass(self) -> None: ...
    def before_steps(self) -> None: ...
    def after_steps(self) -> None: ...


class MeansByHand(ByHand):
    """decentralized: the mean of the weights of the forward pass, before the step."""

    def __init__(self, ranks: int, communication_interval: int = 1, hierarchical: bool = False) -> None:
        super().__init__(ranks)
        self.interval, self.passes = communication_interval, 0
        self.means: dict[str, Tensor] = {}

    def before_pass(self) -> None:
        if self.passes % self.interval == 0:
            self.unexchanged |= self.unfrozen
            self.means = {name: self.mean(name) for name in self.take(self.weights[0])}
        self.passes += 1

    def before_steps(self) -> None:
        for name, mean in self.means.items():
            self.set(name, mean)
        self.means = {}


class RingByHand(ByHand):
    """low_precision_decentralized."""

    def __init__(self, ranks: int, communication_interval: int = 1, hierarchical: bool = False) -> None:
        super().__init__(ranks)
        self.interval, self.rounds = communication_interval, 0
        self.last = [{name: weight.detach().clone() for name, weight in one.items()} for one in self.weights]

    @torch.no_grad()
    def after_steps(self) -> None:
        self.rounds += 1
        if (self.rounds - 1) % self.interval:
            return
        covered = self.take(self.weights[0])
        now, last = (
            [torch.cat([one[name].reshape(-1).double() for name in covered]) for one in ones]
            for ones in (self.weights, self.last)
        )
        for rank, weights in enumerate(self.weights):
            neighbors = last[rank - 1] + last[(rank + 1) % len(last)]
            sent = quantised(now[rank] + neighbors / 3 - 5 / 3 * last[rank])
            place = 0
            for name in covered:
                part = sent[place : place + weights[name].numel()].view_as(weights[name])
                place += part.numel()
                self.last[rank][name] = self.last[rank][name] + part
                weights[name].copy_(self.last[rank][name])


class RoundsByHand(ByHand):
    """local_sgd (no outer optimizer) and diloco, of fragments one after the other.

    Attributes:
        fragments: names of their parameters; None until they are known.
    """

    def __init__(
        self, ranks: int, is_outer: bool, sync_every: int, fragments: int = 1, delay: int = 0, alpha: float = 0.0
    ) -> None:
        super().__init__(ranks)
        self.is_outer, self.interval, self.delay, self.alpha = is_outer, sync_every // fragments, delay, alpha
        self.fragments: list[list[str]] | None = None
        self.outer = {name: one.detach().clone() for name, one in self.weights[0].items()}
        self.velocity: dict[str, Tensor] = {}
        self.steps = self.rounds = self.exchanges = 0
        self.means: dict[str, Tensor] = {}

    @torch.no_grad()
    def after_steps(self) -> None:
        assert self.fragments is not None
        self.steps += 1
        if self.steps >= self.interval - self.delay and not self.means:
            covered = self.take(self.fragments[self.rounds % len(self.fragments)])
            self.means = {name: self.mean(name) for name in covered}
        if self.steps < self.interval:
            return
        for name, mean in self.means.items():
            new = self.outer_step(name, mean) if self.is_outer else mean
            for one in self.weights:
                one[name].copy_(new + self.alpha * (one[name] - new) if self.is_outer else new)
        self.exchanges += bool(self.means)
        self.means, self.steps, self.rounds = {}, 0, self.rounds + 1

    def outer_step(self, name: str, mean: Tensor) -> Tensor:
        """SGD with Nesterov's momentum."""
        gradient = self.outer[name] - mean
        before = self.velocity.get(name)
        self.velocity[name] = gradient.clone() if before is None else OUTER["momentum"] * before + gradient
        self.outer[name] = self.outer[name] - OUTER["lr"] * (gradient + OUTER["momentum"] * self.velocity[name])
        return self.outer[name]


def by_hand(name: str, options: dict[str, Any], ranks: int) -> ByHand:
    if name == "decentralized":
        return MeansByHand(ranks, **options)
    if name == "low_precision_decentralized":
        return RingByHand(ranks, **options)
    return RoundsByHand(ranks, name != "local_sgd", **({"fragments": 2} if "streaming" in name else {}) | options)


class Turns:
    """
    Args:
        case: name and options of an algorithm that exchanges weights.
        frozen: parts that are frozen when the model is wrapped.
    """

    def __init__(self, case: tuple[str, dict[str, Any]], frozen: Collection[str] = ()) -> None:
        self.name, self.options = case
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = device_for(int(os.environ["RANK"]))
        self.hand = by_hand(self.name, self.options, self.ranks)
        # Between two levels of the quantizer, rounding decides.
        self.tolerance = 1e-2 if isinstance(self.hand, RingByHand) else 1e-4
        self.number = 0
        self.saved: Any = None
        self.owes = False
        self.wrap([part for part in PARTS if part not in frozen])
        if isinstance(self.hand, RoundsByHand):
            # One alone has all that is unfrozen later, too.
            found = self.fragments()
            self.hand.fragments = found if len(found) > 1 else [[*self.hand.weights[0]]]

    def wrap(self, trained: Collection[str]) -> None:
        self.net: Any = Chain().to(self.device)
        freeze_all_but(self.net, trained)
        self.optimizers = optimizers_of(self.net)
        bagua.with_bagua(self.net, [*self.optimizers.values()], Algorithm.init(self.name, **self.options))

    def fragments(self) -> list[list[str]]:
        found: dict[str, list[str]] = {}
        for bucket in self.net.bagua_buckets:
            found.setdefault(bucket.name.partition(".")[0], []).extend(record.name for record in bucket.records)
        return [*found.values()]

    # --- calls -------------------------------------------------------------------------------------------------------

    def turn(
        self,
        parts: Collection[str],
        freezes: bool = True,
        how: str = "plain",
        skips: int | None = None,
        trial: int | None = None,
    ) -> None:
        """A half step: these parts are trained.

        Args:
            freezes: the others are frozen meanwhile; otherwise no optimizer steps them.
            how: "plain"; "hooks" of the backward pass step; "quiet": in no_sync; "partly": only the weights are
                stepped, not the biases.
            skips: the rank whose optimizers do not step, as a GradScaler decides.
            trial: the rank that makes another forward pass before.
        """
        names = [name for name, _ in self.net.named_parameters() if name.partition(".")[0] in parts]
        stepped = [name for name in names if how != "partly" or name.endswith("weight")]
        every = [stepped if rank != skips else [] for rank in range(self.ranks)]
        for net in (self.net, *self.hand.nets):
            freeze_all_but(net, parts if freezes else PARTS)
        self.number += 1
        self.hand.turn(self.number, every, how != "quiet")
        self.net.zero_grad()
        inputs = batch_of(self.number, self.rank).to(self.device)
        if trial == self.rank and how != "quiet":
            self.net(inputs)
        with self.net.bagua_ddp.no_sync() if how == "quiet" else contextlib.nullcontext():
            loss = loss_of(self.net(inputs), self.rank)
            with self.stepping_in_hooks(every[self.rank]) if how == "hooks" else contextlib.nullcontext():
                loss.backward()
        if how != "hooks":
            for name in every[self.rank]:
                self.optimizers[name].step()
        # What it owes is exchanged in the next forward pass; in no_sync, too.
        self.owes = how != "quiet" and (skips is not None or how == "partly" or not freezes)
        self.compare()

    @contextlib.contextmanager
    def stepping_in_hooks(self, names: Collection[str]) -> Any:
        def hook_of(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
            def hook(_: Tensor) -> None:
                optimizer.step()
                optimizer.zero_grad()

            return hook

        handles: list[Any] = [
            one.register_post_accumulate_grad_hook(hook_of(self.optimizers[name]))  # type: ignore[no-untyped-call]
            for name, one in self.net.named_parameters()
            if name in names
        ]
        yield
        for handle in handles:
            handle.remove()

    def evaluate(self, alone: int | None, in_training: bool) -> None:
        if alone in (None, self.rank):
            self.net.train(in_training)
            with torch.no_grad():
                self.net(batch_of(0, self.rank).to(self.device))
            self.net.train()

    def save(self) -> None:
        engine = self.net.bagua_ddp.state_dict()  # first: it makes the exchange that is owed
        parts = [self.net, *self.optimizers.values()]
        self.owes = False
        states = copy.deepcopy([engine, *(part.state_dict() for part in parts)])
        # The same tensors in weights, nets and optimizers.
        self.saved = self.number, copy.deepcopy(self.hand), states

    def load(self, trained: Collection[str] = PARTS, fresh: bool = True) -> None:
        """Into a model that is wrapped anew while these parts are trained, or into this one."""
        if self.saved is None:
            return
        self.number, self.hand, (engine, *states) = copy.deepcopy(self.saved)
        if fresh:
            former = self.net.bagua_ddp
            former.bagua_algorithm.complete_exchange(former)
            self.wrap(trained)
        for part, state in zip([self.net, *self.optimizers.values()], states, strict=True):
            part.load_state_dict(state)
        self.net.bagua_ddp.load_state_dict(engine)
        self.owes = False
        self.compare()

    def finish(self) -> None:
        for parts in (*((part,) for part in PARTS), PARTS):
            self.turn(parts)
        self.turn(PARTS)

    # --- what must hold ----------------------------------------------------------------------------------------------

    def compare(self) -> None:
        if self.owes:
            return
        for name, one in self.net.named_parameters():
            distance = (one.detach().cpu() - self.hand.weights[self.rank][name].detach()).abs().max().item()
            assert distance <= self.tolerance, f"{name} is {distance} away on rank {self.rank}, turn {self.number}"
