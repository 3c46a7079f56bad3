"""What a training loop may do with a wrapped module, call by call, and what must hold after each (support.step_programs
makes programs of these calls).

Gradients are compared with a copy of the module that knows nothing of buckets: its gradients are averaged when a
backward pass has made them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from support.algorithm_cases import Case
from support.branching import HEADS, PARTS, Branching, interrupt
from support.ranks import device_for
from support.training import gathered
from torch import Tensor

TOLERANCE = 1e-4  # of sums in another order, after some steps


def _expect(holds: bool, otherwise: str) -> None:
    """Within the handling of an exception, of which `otherwise` tells."""
    if not holds:
        raise AssertionError(otherwise)


class Trainer:
    """Of gradients, which are the same on all ranks after each pass.

    Attributes:
        net: the wrapped module. `model`: what is called, the same or its wrapper. `twin`: the copy.
        planned: names of parameters that the engine communicates.
        reached: those that got a gradient in synchronized passes of this step.
        is_interrupted: a pass of this step raised. `lost`: it reached what is not planned any more.
        is_plain: each pass of this step reached all that is planned, in one plan.
        local: those whose gradients may differ by rank: they must not be stepped.
        is_exact: with two ranks, the same bits are expected. `has_exact_gradients`: likewise.
    """

    def __init__(self, case: Case, options: dict[str, Any]) -> None:
        self.case = case
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = device_for(int(os.environ["RANK"]))
        self.net: Any = Branching().to(self.device)
        self.twin: Any = copy.deepcopy(self.net)
        self.optimizer, self.other = case.optimizer(self.net), case.optimizer(self.twin)
        self.zeroes_after_refusal = options["zeroes"]
        self.how = options["how"]
        self.data = torch.Generator().manual_seed(self.rank)
        self.losses: list[tuple[Tensor, Tensor, set[str]]] = []
        self.saved: Any = None
        self.local: set[str] = set()
        self.is_exact = self.ranks == 2 and case.name == "gradient_allreduce"
        self.has_exact_gradients = True
        self.begin_step()
        self.wrap()
        self.resize(options["bytes"])

    # --- what is expected --------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self.reached: set[str] = set()
        self.is_interrupted, self.lost, self.is_plain = False, False, True

    @property
    def trained(self) -> set[str]:
        return {name for name, parameter in self.net.named_parameters() if parameter.requires_grad}

    @property
    def finds_unused(self) -> bool:
        """Then a pass reaches all that is planned; of the rest there is a zero, or what earlier passes made."""
        return "finding unused" in self.how

    @property
    def must_be_refused(self) -> bool:
        return bool(self.reached) and not self.reached >= self.planned

    @property
    def must_be_accepted(self) -> bool:
        return (not self.reached and not self.lost) or (self.is_plain and not self.is_interrupted)

    def end_step(self, attempt: Callable[[], Any]) -> bool:
        """What ends a step for the engine. Whether it was done; it is right that it was or was not."""
        try:
            attempt()
        except RuntimeError as error:
            _expect(not self.must_be_accepted, f"a complete step was refused: {error}")
            for words in ("before the next forward", "before optimizer.step", "at the beginning of a backward"):
                if str(error).startswith(words):
                    break
            else:
                raise
            _expect(("ended with an exception" in str(error)) == self.is_interrupted, str(error))
            self.local |= self.reached
            self.begin_step()
            if self.zeroes_after_refusal:
                self.zero(True)
            return False
        assert not self.must_be_refused, f"{sorted(self.planned - self.reached)} were missing, and nothing was said"
        self.begin_step()
        return True

    def follow_plan(self) -> None:
        """The engine has looked at what is trained."""
        if not self.trained or self.trained == self.planned:
            return
        self.change_plan(self.trained)

    def change_plan(self, planned: set[str]) -> None:
        """Of a step that is complete, nothing remains. What the engine thinks of one that was made in parts depends on
        its buckets."""
        is_reached = self.reached >= self.planned
        self.lost |= self.is_interrupted and not self.reached <= planned
        self.reached = set(planned) if is_reached else self.reached & planned
        self.planned = planned
        if is_reached and self.is_plain and not self.is_interrupted:
            self.begin_step()
        self.is_plain &= not self.reached

    def synchronize_twin(self, names: Collection[str]) -> None:
        for name, parameter in self.twin.named_parameters():
            if name in names and parameter.grad is not None:
                every = [one / self.ranks for one in gathered(parameter.grad)]
                parameter.grad = sum(every[1:], every[0])

    # --- calls -------------------------------------------------------------------------------------------------------

    def wrap(self) -> None:
        """Again, too."""
        if not self.trained:
            return
        self.model: Any = self.case.wrap(self.net, self.optimizer, self.how)
        self.planned = self.trained
        # What has not been sent is not sent later.
        self.local |= self.reached
        self.losses.clear()
        self.begin_step()

    def batch(self) -> Tensor:
        return torch.randn(3, 2, generator=self.data).to(self.device)

    def quiet(self, is_quiet: bool) -> contextlib.AbstractContextManager[None]:
        return self.net.bagua_ddp.no_sync() if is_quiet else contextlib.nullcontext()

    def forward(self, heads: Sequence[str], is_quiet: bool = False, raises: str = "") -> None:
        x = self.batch()
        if raises:
            x.requires_grad_()
        on_hidden = interrupt if raises == "middle" else None
        with self.quiet(is_quiet):
            output = self.attempt_forward(lambda: self.model(x.clone() if raises else x, heads, on_hidden))
        losses = []
        for loss in (output.square().mean(), self.twin(x.clone() if raises else x, heads, on_hidden).square().mean()):
            if raises == "start" and loss.requires_grad:
                loss.register_hook(interrupt)
            losses.append(loss)
        if raises == "end":
            x.register_hook(interrupt)
        parts = {name.partition(".")[0] for name in ("trunk", *heads)}
        self.losses.append((losses[0], losses[1], {name for name in self.trained if name.partition(".")[0] in parts}))

    def attempt_forward(self, call: Callable[[], Any]) -> Any:
        outputs: list[Tensor] = []
        while not self.end_step(lambda: outputs.append(call())):
            pass  # continue with the next forward pass
        self.follow_plan()
        return outputs[-1]

    def backward(self, is_quiet: bool = False, keeps: bool = False, raises: str = "") -> None:
        """Of the oldest loss."""
        if not self.losses:
            return
        ours, theirs, names = self.losses[0] if keeps else self.losses.pop(0)
        if not ours.requires_grad:
            return
        made = names & self.trained
        if raises:
            made = {name for name in made if raises == "end" or (raises == "middle" and "trunk" not in name)}
        foreign = made - self.planned
        with self.quiet(is_quiet):
            if not is_quiet and self.is_interrupted and self.reached:
                if not self.end_step(lambda: ours.backward(retain_graph=True)):
                    return
                raise AssertionError("a backward pass after one that raised was not refused")
            self.run_pass(ours, keeps, raises, bool(foreign) and not is_quiet)
        self.run_twin(theirs, keeps, raises)
        if is_quiet:
            self.local |= made
            return
        if self.finds_unused and not raises and not foreign:
            made |= self.planned
        self.has_exact_gradients &= made >= self.planned
        self.is_plain &= made >= self.planned
        self.reached |= made & self.planned
        if raises or foreign:
            self.is_interrupted |= bool(raises != "start" or foreign)
            self.local |= made
            self.has_exact_gradients = False
            return
        self.synchronize_twin(made)
        if self.reached >= self.planned:
            self.local -= self.reached

    def run_pass(self, loss: Tensor, keeps: bool, raises: str, is_foreign: bool) -> None:
        try:
            loss.backward(retain_graph=keeps)
        except MemoryError:
            assert raises
        except RuntimeError as error:
            _expect(is_foreign and "is not synchronized" in str(error), str(error))
        else:
            assert not raises
            assert not is_foreign

    def run_twin(self, loss: Tensor, keeps: bool, raises: str) -> None:
        with contextlib.suppress(MemoryError):
            loss.backward(retain_graph=keeps)

    def raising(self, heads: Sequence[str], place: str, is_quiet: bool) -> None:
        self.losses.clear()
        self.forward(heads, is_quiet, place)
        self.backward(is_quiet, False, place)

    def two_losses(self, first: Sequence[str], second: Sequence[str]) -> None:
        self.losses.clear()
        for heads in (first, second):
            self.forward(heads)
        for _ in range(2):
            self.backward()

    def train(self, heads: Sequence[str] = HEADS[0], skips: int | None = None) -> None:
        self.losses.clear()
        self.zero(True)
        self.forward(heads)
        self.backward()
        self.step(skips)

    def step(self, skips: int | None = None) -> None:
        """Gradients that may differ by rank are not stepped, but where the engine has to refuse it."""
        if skips is not None or (self.local and not self.must_be_refused):
            return
        # Graphs of the weights before are of no use.
        self.losses.clear()
        if self.end_step(self.optimizer.step):
            self.other.step()
            self.is_exact &= self.has_exact_gradients
            self.compare()

    def zero(self, to_none: bool) -> None:
        for optimizer in (self.optimizer, self.other):
            optimizer.zero_grad(set_to_none=to_none)
        self.local.clear()
        self.has_exact_gradients = True

    def freeze(self, part: str, is_frozen: bool) -> None:
        if is_frozen:
            # torch calls the hooks of what is frozen after the forward pass, as if a gradient had been made.
            self.losses.clear()
        for net in (self.net, self.twin):
            getattr(net, part).requires_grad_(not is_frozen)

    def resize(self, size: int | None, is_rebuilt: bool = False) -> None:
        engine = self.net.bagua_ddp
        setup = dataclasses.replace(engine.setup, bucket_bytes=size, first_bucket_bytes=size)
        try:
            (engine.rebuild_buckets if is_rebuilt else engine.replan)(setup)
        except ValueError as error:
            _expect(not self.trained, str(error))
            return
        assert self.trained
        self.change_plan(self.trained)

    def evaluate(self, alone: int | None, with_gradients: bool, in_training: bool) -> None:
        if alone not in (None, self.rank):
            return
        is_local = alone is not None
        self.net.train(in_training and not is_local)
        if with_gradients and not is_local:
            self.attempt_forward(lambda: self.model(self.batch(), HEADS[0])) if in_training else self.end_step(
                lambda: self.model(self.batch(), HEADS[0])
            )
        else:
            with torch.set_grad_enabled(with_gradients and not self.reached):
                self.model(self.batch(), HEADS[0])
            if self.net.training:
                self.follow_plan()
        self.net.train()

    def save(self) -> None:
        parts = (self.net, self.optimizer, self.twin, self.other, self.net.bagua_ddp)
        self.saved = self.layout(), self.is_exact, copy.deepcopy([part.state_dict() for part in parts])

    def layout(self) -> list[tuple[str, ...]]:
        """Of the buckets, by names."""
        return [tuple(record.name for record in bucket.records) for bucket in self.net.bagua_buckets]

    def load(self) -> None:
        """Where it is possible: algorithms' states are of buckets."""
        if self.saved is None:
            return
        self.losses.clear()
        layout, self.is_exact, states = self.saved
        parts = [self.net, self.optimizer, self.twin, self.other]
        for part, state in zip(parts, states, strict=False):
            part.load_state_dict(copy.deepcopy(state))
        if layout == self.layout():
            self.net.bagua_ddp.load_state_dict(copy.deepcopy(states[-1]))

    # --- what must hold ----------------------------------------------------------------------------------------------

    def compare(self) -> None:
        for (name, ours), theirs in zip(self.net.named_parameters(), self.twin.parameters(), strict=True):
            every = gathered(ours.detach())
            assert all(torch.equal(one, every[0]) for one in every), f"the ranks differ in {name}"
            assert ours.isfinite().all(), name
            if self.case.name == "gradient_allreduce":
                distance = (ours - theirs).abs().max().item()
                assert distance <= (0 if self.is_exact else TOLERANCE), f"{name} is {distance} away"

    def finish(self) -> None:
        """A step by which the ranks show that they go on together."""
        for part in PARTS:
            self.freeze(part, False)
        for _ in range(2):
            self.train()
