"""Algorithms that exchange weights, written out as loops, for all ranks in one process: what is exchanged, and when, is
here without plans, buckets and hooks.

`Turns` trains a model on a rank and the loop beside it, call by call (support.step_programs makes programs of these
calls), and compares them. The parts of the model may be trained in turn.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import device_for
from support.training import gathered, wrap_with
from torch import Tensor, nn

from bagua.kernels import minmax_uint8_reference
from bagua.kernels.minmax_uint8 import BLOCK_ELEMENTS
from bagua.kernels.minmax_uint8_layout import chunk_layout
from bagua.torch_api.algorithms import Algorithm

PARTS = ("first", "middle", "last")
RATE, MOMENTUM = 0.05, 0.5
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
# Of numbers by which a sum may differ that has another order, or that was rounded once more.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# How a round is made: see Turns.turn.
HOWS = ("plain", "hooks", "quiet", "partly", "accumulated", "repeated", "two losses", "raising", "penalty", "closure")
ALL_RANKS = -1

Case = tuple[str, dict[str, Any]]  # name and options of an algorithm
Nodes = Sequence[Sequence[int]]  # the ranks of each


class Chain(nn.Module):
    """Every part's gradient needs the weights of those behind it: weights that change too early are found."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def batch_of(number: int, rank: int, like: Tensor) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * number + rank)).to(like.device, like.dtype)


def loss_of(output: Tensor, rank: int) -> Tensor:
    """Pulls each rank somewhere else."""
    return (output.float() - rank).square().mean()


def backward(
    net: nn.Module, number: int, rank: int, how: str, no_sync: Callable[[], Any] = contextlib.nullcontext
) -> Tensor:
    """The passes of a round of a rank, of which those within `no_sync` communicate nothing, and its loss.

    Args:
        how: of HOWS, or "forward": without a backward pass.
    """
    like = next(net.parameters())
    for extra in (1000, 2000) if how == "accumulated" else ():
        with no_sync():
            loss_of(net(batch_of(number + extra, rank, like)), rank).backward()
    x = batch_of(number, rank, like)
    with no_sync() if how == "quiet" else contextlib.nullcontext():
        if how == "penalty":  # with a forward pass after the inner backward pass
            x.requires_grad_()
            output = net(x)
            (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
            loss = loss_of(output + net(batch_of(number + 1000, rank, like)), rank) + slope.float().square().mean()
        else:
            loss = loss_of(net(x), rank)
        if how == "forward":
            return loss
        if how == "two losses":
            loss.backward(retain_graph=True)
        (2 * loss if how == "two losses" else loss).backward(retain_graph=how == "raising")
        if how == "raising":
            handle = next(net.parameters()).register_hook(_stop)
            with contextlib.suppress(MemoryError):
                loss.backward()
            handle.remove()
    return loss


def _stop(_: Tensor) -> None:
    raise MemoryError("within the pass")


def optimizers_of(net: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """One for each parameter."""
    return {name: torch.optim.SGD([one], RATE, MOMENTUM) for name, one in net.named_parameters()}


def freeze_all_but(net: nn.Module, parts: Collection[str]) -> None:
    for part in PARTS:
        getattr(net, part).requires_grad_(part in parts)


def bucket_names(net: Any) -> list[list[str]]:
    return [[record.name for record in bucket.records] for bucket in net.bagua_buckets]


# --- by hand ---------------------------------------------------------------------------------------------------------


class ByHand:
    """Replicas of all ranks. What is exchanged is what was trained since it was last exchanged.

    Args:
        nodes: which ranks share one; None: no hierarchy.
    """

    def __init__(self, ranks: int, dtype: torch.dtype = torch.float32, nodes: Nodes | None = None) -> None:
        self.nets = [Chain().to(dtype) for _ in range(ranks)]
        self.weights = [dict(net.named_parameters()) for net in self.nets]
        self.optimizers = [optimizers_of(net) for net in self.nets]
        self.nodes = nodes or [[rank] for rank in range(ranks)]
        self.unexchanged: set[str] = set()

    @property
    def unfrozen(self) -> set[str]:
        return {name for name, one in self.weights[0].items() if one.requires_grad}

    def take(self, names: Collection[str]) -> list[str]:
        """Those of them that an exchange covers, the last first."""
        covered = [name for name in reversed(self.weights[0]) if name in names and name in self.unexchanged]
        self.unexchanged -= set(covered)
        return covered

    def node_means(self, name: str) -> list[Tensor]:
        """Of the ranks of each node, in float64."""
        every = [one[name].detach().double() for one in self.weights]
        return [torch.stack([every[rank] for rank in node]).mean(0) for node in self.nodes]

    def mean(self, name: str) -> Tensor:
        return torch.stack([one[name].detach().double() for one in self.weights]).mean(0)

    @torch.no_grad()
    def set(self, name: str, values: Sequence[Tensor]) -> None:
        """The weights of each node."""
        for node, value in zip(self.nodes, values, strict=True):
            for rank in node:
                self.weights[rank][name].copy_(value)

    def turn(self, number: int, stepped: Sequence[Collection[str]], how: str) -> None:
        """A round of each rank, after which its optimizers of these names step."""
        for net in self.nets:
            net.zero_grad()
        if how == "repeated":
            self.round(number + 3000, [()] * len(self.nets), "plain")
        self.round(number, stepped, how)

    def round(self, number: int, stepped: Sequence[Collection[str]], how: str) -> None:
        counts = how != "quiet"
        if counts:
            self.before_pass()
        for rank, net in enumerate(self.nets):
            backward(net, number, rank, how)
        if counts:
            self.unexchanged |= self.unfrozen
            self.before_steps()
        for optimizers, names in zip(self.optimizers, stepped, strict=True):
            for name in names:
                optimizers[name].step()
        if counts:
            self.after_steps()

    @torch.no_grad()
    def begin_anew(self, counts_on: bool) -> None:
        """All ranks with the weights and optimizers of rank 0. The algorithm is another one, or else it counts on."""
        for net, optimizers in zip(self.nets[1:], self.optimizers[1:], strict=True):
            net.load_state_dict(self.nets[0].state_dict())
            for name, one in optimizers.items():
                one.load_state_dict(copy.deepcopy(self.optimizers[0][name].state_dict()))
        self.unexchanged.clear()

    def before_pass(self) -> None: ...
    def before_steps(self) -> None: ...
    def after_steps(self) -> None: ...


def partner_of(place: int, places: int, exchange: int) -> int:
    if places == 1:
        return place
    half = places // 2
    return (exchange + place) % half + half if place < half else (place - half - exchange) % half


class MeansByHand(ByHand):
    """decentralized: the mean of the weights of the forward pass, before the step."""

    def __init__(self, *place: Any, peer_selection_mode: str = "all", communication_interval: int = 1) -> None:
        super().__init__(*place)
        self.mode, self.interval = peer_selection_mode, communication_interval
        self.passes = self.exchanges = 0
        self.means: dict[str, list[Tensor]] = {}

    def begin_anew(self, counts_on: bool) -> None:
        super().begin_anew(counts_on)
        self.passes, self.exchanges = self.passes * counts_on, 0

    def mixed(self, name: str) -> list[Tensor]:
        means, places = self.node_means(name), len(self.nodes)
        if self.mode == "all":
            return [self.mean(name)] * places
        return [(mean + means[partner_of(place, places, self.exchanges)]) / 2 for place, mean in enumerate(means)]

    def before_pass(self) -> None:
        if self.passes % self.interval == 0:
            self.unexchanged |= self.unfrozen
            self.means = {name: self.mixed(name) for name in self.take(self.weights[0])}
            self.exchanges += 1
        self.passes += 1

    def before_steps(self) -> None:
        for name, means in self.means.items():
            self.set(name, means)
        self.means = {}


def quantised(difference: Tensor) -> Tensor:
    """What the neighbors understand of it, by the plain torch code."""
    source = difference.float().view(1, -1)
    layout = chunk_layout(source.numel(), BLOCK_ELEMENTS)
    message = torch.empty(1, layout.total_bytes, dtype=torch.uint8)
    minmax_uint8_reference.compress(source, layout, message)
    decoded = torch.empty_like(source)
    minmax_uint8_reference.decompress(message, decoded, False, layout)
    return decoded.view(-1)


class RingByHand(ByHand):
    """low_precision_decentralized. As each node knows its neighbors' weights exactly, W of all is all that there is.

    Attributes:
        buckets: names of what is compressed together.
    """

    def __init__(self, *place: Any, communication_interval: int = 1) -> None:
        super().__init__(*place)
        self.interval, self.rounds = communication_interval, 0
        self.buckets = [[*reversed(self.weights[0])]]
        self.remember()

    def remember(self) -> None:
        self.last = [{name: one.detach().clone() for name, one in self.weights[node[0]].items()} for node in self.nodes]

    def begin_anew(self, counts_on: bool) -> None:
        super().begin_anew(counts_on)
        self.rounds *= counts_on
        self.remember()

    @torch.no_grad()
    def after_steps(self) -> None:
        self.rounds += 1
        if (self.rounds - 1) % self.interval:
            return
        covered = self.take(self.weights[0])
        for bucket in self.buckets:
            self.exchange([name for name in bucket if name in covered])

    def exchange(self, names: Sequence[str]) -> None:
        if not names:
            return
        now = [torch.cat(one) for one in zip(*([m.flatten() for m in self.node_means(n)] for n in names), strict=True)]
        last = [torch.cat([one[name].flatten().double() for name in names]) for one in self.last]
        sizes = [self.last[0][name].numel() for name in names]
        for place in range(len(last)):
            neighbors = last[place - 1] + last[(place + 1) % len(last)]
            sent = quantised(now[place] + neighbors / 3 - 5 / 3 * last[place])
            for name, part in zip(names, sent.split(sizes), strict=True):
                before = self.last[place][name]
                self.last[place][name] = (before.float() + part.view_as(before)).to(before.dtype)
        for name in names:
            self.set(name, [one[name] for one in self.last])


class RisingMomentum(torch.optim.SGD):
    """The outer optimizer, whose momentum rises over so many exchanges of its fragment."""

    def __init__(self, parameters: Any, rounds: int) -> None:
        super().__init__(parameters, **OUTER)
        self.param_groups[0]["rounds"] = rounds  # a copy has its groups

    def rise(self, exchanges: int) -> None:
        (group,) = self.param_groups
        group["momentum"] = OUTER["momentum"] * min(exchanges / group["rounds"], 1)


class RoundsByHand(ByHand):
    """local_sgd (no outer optimizer) and diloco, of fragments one after the other.

    Attributes:
        fragments: names of their parameters; None until they are known.
    """

    def __init__(
        self,
        *place: Any,
        is_outer: bool,
        sync_every: int,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        outer_optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
            parameters, **OUTER
        ),
        momentum_rounds: int = 0,
    ) -> None:
        super().__init__(*place)
        self.interval, self.delay, self.alpha = sync_every // fragments, delay, alpha
        self.fragments: list[list[str]] | None = None
        self.outer = {name: one.detach().clone().requires_grad_() for name, one in self.weights[0].items()}
        self.outer_optimizers: Mapping[str, torch.optim.Optimizer] = {
            name: RisingMomentum([one], momentum_rounds) if momentum_rounds else outer_optimizer([one])
            for name, one in (self.outer.items() if is_outer else ())
        }
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
            new = self.outer_step(name, mean) if self.outer_optimizers else mean
            self.set(name, [new + self.alpha * (one[name] - new) for one in self.weights])
        self.exchanges += bool(self.means)
        self.means, self.steps, self.rounds = {}, 0, self.rounds + 1

    def outer_step(self, name: str, mean: Tensor) -> Tensor:
        self.outer[name].grad = self.outer[name] - mean.to(self.outer[name].dtype)
        optimizer = self.outer_optimizers[name]
        if isinstance(optimizer, RisingMomentum):
            assert self.fragments is not None
            optimizer.rise(self.exchanges // len(self.fragments) + 1)
        optimizer.step()
        return self.outer[name]


def by_hand(case: Case, ranks: int, dtype: torch.dtype, nodes: Nodes | None) -> ByHand:
    name, options = case
    options = {key: value for key, value in options.items() if key != "hierarchical"}
    if name == "decentralized":
        return MeansByHand(ranks, dtype, nodes, **options)
    if name == "low_precision_decentralized":
        return RingByHand(ranks, dtype, nodes, **options)
    fragments = {"fragments": 2} if "streaming" in name else {}
    return RoundsByHand(ranks, dtype, is_outer=name != "local_sgd", **fragments | options)


# --- beside it -------------------------------------------------------------------------------------------------------


class Turns:
    """
    Args:
        case: an algorithm that exchanges weights.
        frozen: parts that are frozen when the model is wrapped.
        how: of wrap_with.
        dtype: of the model.
        nodes: which ranks share one, if the algorithm is hierarchical.
    """

    def __init__(
        self,
        case: Case,
        frozen: Collection[str] = (),
        how: str = "with_bagua",
        dtype: torch.dtype = torch.float32,
        nodes: Nodes | None = None,
    ) -> None:
        self.case, self.how, self.dtype = case, how, dtype
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = device_for(int(os.environ["RANK"]))
        self.hand = by_hand(case, self.ranks, dtype, nodes)
        self.number = 0
        self.saved: Any = None
        self.owes = False
        self.stepped: list[Sequence[str]] = []  # of each rank, with gradients that are still there
        self.make([part for part in PARTS if part not in frozen])
        if isinstance(self.hand, RoundsByHand):
            # One alone has all that is unfrozen later, too.
            found = self.fragments()
            self.hand.fragments = found if len(found) > 1 else [[*reversed(self.hand.weights[0])]]

    def make(self, trained: Collection[str]) -> None:
        """A fresh model, which is wrapped while these parts are trained."""
        self.net: Any = Chain().to(self.device, self.dtype)
        if self.rank:
            nn.init.constant_(self.net.last.weight, self.rank)  # wrapping makes it rank 0's
        freeze_all_but(self.net, trained)
        self.optimizers = optimizers_of(self.net)
        self.wrap()

    def wrap(self) -> None:
        name, options = self.case
        self.model = wrap_with(self.how, self.net, [*self.optimizers.values()], Algorithm.init(name, **options))
        self.stepped = []

    def fragments(self) -> list[list[str]]:
        found: dict[str, list[str]] = {}
        for bucket in self.net.bagua_ddp.bagua_buckets:
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
                stepped, not the biases; "accumulated": after two passes in no_sync; "repeated": after a pass that
                communicates, too, and is not stepped; "two losses" of one graph; "raising": the second of them;
                "penalty" of a gradient; "closure": of the first optimizer.
            skips: the rank whose optimizers do not step, as a GradScaler decides.
            trial: the rank that makes another forward pass before, or ALL_RANKS.
        """
        if how in ("two losses", "raising") and isinstance(self.hand, RoundsByHand):
            how = "plain"  # each is a step of its own
        if how == "closure" and not (freezes and skips is trial is None):
            how = "plain"  # where all ranks step, and none has begun the exchange before
        names = [name for name, _ in self.net.named_parameters() if name.partition(".")[0] in parts]
        stepped = [name for name in names if how != "partly" or name.endswith("weight")]
        every = [stepped if rank != skips else [] for rank in range(self.ranks)]
        for net in (self.net, *self.hand.nets):
            freeze_all_but(net, parts if freezes else PARTS)
        self.number += 1
        self.net.zero_grad()
        if trial in (self.rank, ALL_RANKS) and how != "quiet":
            backward(self.model, self.number, self.rank, "forward")
        if how == "repeated":
            backward(self.model, self.number + 3000, self.rank, "plain")
        self.round(every[self.rank], how)
        if isinstance(self.hand, RingByHand):
            self.hand.buckets = bucket_names(self.net.bagua_ddp)
        self.hand.turn(self.number, every, how)
        self.stepped = every if how != "hooks" else []
        # What it owes is exchanged in the next forward pass; in no_sync, too.
        self.owes = how != "quiet" and (skips is not None or how == "partly" or not freezes)
        self.compare()

    def round(self, stepped: Sequence[str], how: str) -> None:
        def passes() -> Tensor:
            return backward(self.model, self.number, self.rank, how, self.net.bagua_ddp.no_sync)

        if how == "closure" and stepped:
            self.optimizers[stepped[0]].step(passes)
            stepped = stepped[1:]
        else:
            with self.stepping_in_hooks(stepped) if how == "hooks" else contextlib.nullcontext():
                passes()
        for name in stepped if how != "hooks" else ():
            self.optimizers[name].step()

    def step_again(self) -> None:
        """With the same gradients, which is no round."""
        if self.owes:
            return  # what is exchanged would be what it is after this step
        for rank, names in enumerate(self.stepped):
            for name in names:
                self.hand.optimizers[rank][name].step()
                if rank == self.rank:
                    self.optimizers[name].step()
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
                backward(self.model, 0, self.rank, "forward")
            self.net.train()

    def rebuild(self, size: int | None) -> None:
        """Buckets of so many bytes, where no exchange may be under way."""
        if isinstance(self.hand, RoundsByHand):
            return
        engine = self.net.bagua_ddp
        engine.rebuild_buckets(dataclasses.replace(engine.setup, bucket_bytes=size, first_bucket_bytes=None))
        self.owes, self.stepped = False, []
        self.compare()

    def wrap_again(self, is_same: bool = False) -> None:
        """All begin with what rank 0 has; rounds of local steps, which begin anew, are tested by `load`.

        Args:
            is_same: algorithm as before.
        """
        if not isinstance(self.hand, RoundsByHand):
            for net in (self.net, *self.hand.nets):
                freeze_all_but(net, PARTS)
            if is_same:
                self.net.bagua_ddp.initialize_again()
            else:
                self.wrap()
            self.hand.begin_anew(is_same)
            self.owes, self.stepped = False, []
            self.compare()

    def save(self) -> None:
        engine = self.net.bagua_ddp.state_dict()  # first: it makes the exchange that is owed, or has the mean in it
        parts = [self.net, *self.optimizers.values()]
        self.owes &= isinstance(self.hand, MeansByHand)
        states = copy.deepcopy([engine, *(part.state_dict() for part in parts)])
        # The same tensors in weights, nets and optimizers.
        self.saved = self.number, self.owes, copy.deepcopy(self.hand), states

    def load(self, trained: Collection[str] = PARTS, fresh: bool = True) -> None:
        """Into a model that is wrapped anew while these parts are trained, or into this one."""
        if self.saved is None:
            return
        self.number, owes, self.hand, (engine, *states) = copy.deepcopy(self.saved)
        if fresh:
            former = self.net.bagua_ddp
            former.bagua_algorithm.complete_exchange(former)
            self.make(trained)
        for part, state in zip([self.net, *self.optimizers.values()], states, strict=True):
            part.load_state_dict(state)
        self.net.bagua_ddp.load_state_dict(engine)
        self.owes, self.stepped = owes, []
        self.compare()

    def finish(self) -> None:
        for parts in (*((part,) for part in PARTS), PARTS):
            self.turn(parts)
        self.turn(PARTS)

    # --- what must hold ----------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Between two levels of the quantizer rounding decides, which is rare, and no more than a level."""
        if self.owes:
            return
        is_ring = isinstance(self.hand, RingByHand)
        tolerance = TOLERANCES[self.dtype]
        far = total = 0
        for name, one in self.net.named_parameters():
            distances = (one.detach().cpu() - self.hand.weights[self.rank][name].detach()).abs().float()
            distance, limit = distances.max().item(), max(tolerance, 1e-2 * is_ring)
            assert distance <= limit, f"{name} is {distance} away on rank {self.rank}, turn {self.number}"
            far, total = far + int((distances > tolerance).sum()), total + one.numel()
        assert far <= total / 10, f"{far} of {total} weights are away on rank {self.rank}, turn {self.number}"
        if is_ring:
            check_replicas(self.net.bagua_ddp.bagua_buckets, self.hand.nodes)


def check_replicas(buckets: Sequence[Any], nodes: Nodes) -> None:
    """Of the low-precision ring: W is the left neighbor's R and the right neighbor's L, to the bit, and the same on all
    ranks of a node."""
    for bucket in buckets:
        weights, lefts, rights = map(gathered, (bucket._weight, bucket._left_peer_weight, bucket._right_peer_weight))
        for place, node in enumerate(nodes):
            left, right = nodes[place - 1][0], nodes[(place + 1) % len(nodes)][0]
            for rank in node:
                assert torch.equal(weights[rank], weights[node[0]]), rank
                assert torch.equal(lefts[rank], weights[left]), rank
                assert torch.equal(rights[rank], weights[right]), rank
