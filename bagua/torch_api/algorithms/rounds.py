"""What algorithms that exchange weights have in common: the states of a round, and which rounds exchange.

A round is a forward pass outside of no_sync and the backward pass that follows. Rounds, not steps of the optimizer, are
what is counted, because every rank makes as many of them: a GradScaler may skip a step on one rank and not on another.
No event of a table depends on values of weights or gradients, so that what one rank does with its own cannot make it
exchange more or less often than its peers.

What an exchange covers is what was trained since it was last exchanged, frozen at that moment or not (`Unexchanged`).
Trained is what needs a gradient at the end of a backward pass that counts: so all ranks come to the same, whoever
evaluates, makes a trial or is late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from bagua.collectives.process_group import BaguaProcessGroup, group_for
from bagua.engine.algorithm_facade import AlgorithmFacade
from bagua.engine.step_state import Event, State

# Steps in a row after backward passes to which no forward pass in training belongs. A few may be a loss of another kind
# now and then; who makes so many does not exchange at all.
_MOST_UNHEARD_STEPS = 10


class RoundState(State):
    """Where a rank is in a round."""

    RESTING = "no round is open, and no exchange has to take effect"
    OPEN = "the forward pass has begun"
    REACHED = "the backward pass has made a gradient"
    DUE = "the backward pass is over: the exchange has to take effect before the next round"
    DUE_REACHED = "due, and another backward pass has made a gradient"


# Asked once per parameter: to look a member up in its class takes longer than all else there.
_WITH_GRADIENTS = (RoundState.REACHED, RoundState.DUE_REACHED)


class RoundEvent:
    """What happens in it."""

    FORWARD = Event(
        "a forward pass in training begins, whose backward pass will communicate",
        {
            RoundState.RESTING: RoundState.OPEN,
            # A trial: the forward pass that counts is still to come.
            RoundState.OPEN: RoundState.OPEN,
            # A backward pass that raised made some of its gradients.
            RoundState.REACHED: RoundState.OPEN,
        },
    )
    GRADIENT = Event(
        "the gradient of a parameter is complete",
        {
            # After evaluation, or a forward pass of which we were not told.
            RoundState.RESTING: RoundState.REACHED,
            RoundState.OPEN: RoundState.REACHED,
            RoundState.DUE: RoundState.DUE_REACHED,
        },
    )
    BACKWARD_ENDS = Event(
        "a backward pass that has made gradients is over",
        {
            RoundState.REACHED: RoundState.DUE,
            # A second loss of the same forward pass.
            RoundState.DUE_REACHED: RoundState.DUE,
        },
    )
    EXCHANGED = Event(
        "the exchange has taken effect on the weights",
        {
            RoundState.DUE: RoundState.RESTING,
            # The other pass raised: it leaves nothing for the next round.
            RoundState.DUE_REACHED: RoundState.RESTING,
            # An optimizer steps in the middle of a round: after a backward pass in no_sync, or within a closure.
            RoundState.RESTING: RoundState.RESTING,
            RoundState.OPEN: RoundState.OPEN,
            RoundState.REACHED: RoundState.REACHED,
        },
    )


class Round:
    """Of one module on this rank.

    Attributes:
        state: of its rounds.
    """

    def __init__(self) -> None:
        self.state = RoundState.RESTING

    def on(self, event: Event[RoundState]) -> None:
        """Go to the state after `event`."""
        self.state = event[self.state]

    @property
    def is_open(self) -> bool:
        """The forward pass has begun, and the backward pass has not ended."""
        return self.state in (RoundState.OPEN, RoundState.REACHED)

    @property
    def is_due(self) -> bool:
        """The exchange has to take effect."""
        return self.state in (RoundState.DUE, RoundState.DUE_REACHED)

    def note_gradient(self, _name: str, _parameter: object) -> None:
        """The backward hook of these algorithms."""
        if self.state not in _WITH_GRADIENTS:
            self.state = RoundEvent.GRADIENT[self.state]

    def end_pass(self) -> bool:
        """A backward pass is over. Whether it belongs to the round: torch.autograd.grad makes no gradients but those
        that go into the loss of the round's own backward pass."""
        if self.state not in _WITH_GRADIENTS:
            return False
        self.state = RoundEvent.BACKWARD_ENDS[self.state]
        return True

    def restart(self) -> None:
        """No round is open any more."""
        self.state = RoundState.RESTING


class Unexchanged:
    """The parameters of a module that were trained since they were last exchanged, by name. The same on all ranks."""

    def __init__(self) -> None:
        self._trained: set[str] = set()
        self._under_way: set[str] = set()

    @property
    def names(self) -> set[str]:
        """With those whose exchange is under way."""
        return self._trained | self._under_way

    @property
    def saved(self) -> list[str]:
        """For a state: without them."""
        return sorted(self._trained)

    def note_trained(self, named: Iterable[tuple[str, Tensor]]) -> list[str]:
        """At the end of a backward pass: which of them it trains. Returns their names."""
        names = [name for name, parameter in named if parameter.requires_grad]
        self.note(names)
        return names

    def note(self, names: Iterable[str]) -> None:
        """The parameters of these names were trained."""
        self._trained.update(names)

    def begin(self, names: Iterable[str]) -> set[str]:
        """An exchange begins. What is trained from now on is left for the next one.

        Args:
            names: that it may cover.

        Returns:
            those that it covers.
        """
        self._under_way = self._trained.intersection(names)
        self._trained -= self._under_way
        return self._under_way

    def begin_plan(self, bagua_ddp: AlgorithmFacade) -> bool:
        """As `begin`, of all that is in the plan. What is not covered is left out of it, on all ranks. Returns whether
        there is anything to exchange."""
        planned = {name for name, _ in bagua_ddp.synchronized_parameters}
        covered = self.begin(planned)
        if covered and covered != planned:
            bagua_ddp.communicate(covered)
        return bool(covered)

    def end(self) -> None:
        """The exchange has taken effect, or was given up."""
        self._under_way = set()

    def load(self, trained: Collection[str], under_way: Collection[str] = ()) -> None:
        """As it was when a state was saved."""
        self._trained, self._under_way = set(trained), set(under_way)


def check_interval(communication_interval: int) -> None:
    """
    Raises:
        ValueError: below 1, or no whole number.
    """
    if communication_interval < 1 or communication_interval % 1 != 0:
        raise ValueError(
            f"communication_interval={communication_interval}: must be at least 1, and whole; 1 is every round"
        )


class Interval:
    """Which rounds exchange: the first, and every `interval`-th after it.

    Args:
        interval: at least 1.

    Attributes:
        rounds: counted so far.
    """

    def __init__(self, interval: int) -> None:
        check_interval(interval)
        self.interval = interval
        self.rounds = 0

    def count(self) -> bool:
        """Count a round. Whether it exchanges."""
        self.rounds += 1
        return (self.rounds - 1) % self.interval == 0


def group_of_weights(process_group: BaguaProcessGroup) -> BaguaProcessGroup:
    """The same ranks, for exchanges of weights alone: these go on in the background of whatever else the ranks tell
    each other (buffers, a logged loss, gradients of another module), and messages of one group need one order. All
    modules share it: their exchanges are launched in the order of the program, and one stream or thread carries them.
    """
    return group_for("exchanges of weights", process_group)


def steppers(bagua_ddp: AlgorithmFacade) -> dict[int, int]:
    """By the id of a parameter, the position of the last listed optimizer that steps it."""
    return {
        id(tensor): position
        for position, optimizer in enumerate(bagua_ddp.bagua_optimizers)
        for tensor in bagua_ddp.tensors_of(optimizer)
    }


class MissingForwardCheck:
    """Notices that a module is trained, and its forward pass, with which exchanges begin, never called in training: by
    the steps of the listed optimizers. Time, steps without a gradient of the module and steps in evaluation are no sign
    of that.

    Args:
        module_name: for the message.
        ranks: that exchange; one alone has nobody to hear from.
    """

    def __init__(self, module_name: str, ranks: int) -> None:
        self._module_name = module_name
        self._is_watching = ranks > 1
        self._steps = 0
        # There was a forward pass, and no backward pass since the steps that followed it.
        self._is_heard = False
        self._has_gradients = False
        # Optimizers that have stepped since the last forward or backward pass.
        self._stepped: set[int] = set()

    def note_forward(self) -> None:
        """A forward pass in training, whose backward pass may or may not communicate."""
        self._steps, self._is_heard = 0, True
        self._stepped.clear()

    def note_gradients(self) -> None:
        """A backward pass has made gradients."""
        self._has_gradients = True
        if self._stepped:
            self._is_heard = False
            self._stepped.clear()

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """A listed optimizer has stepped.

        Raises:
            RuntimeError: too many have.
        """
        if not self._has_gradients or id(optimizer) in self._stepped or not self._is_watching:
            return
        self._stepped.add(id(optimizer))
        if self._is_heard:
            return
        self._steps += 1
        if self._steps < _MOST_UNHEARD_STEPS:
            return
        steps, self._steps = self._steps, 0
        raise RuntimeError(
            f"{self._module_name} was trained for {steps} steps of its optimizers without a forward pass in training"
            " mode, so that no weights were exchanged between the ranks.\n"
            "Found after optimizer.step(). Exchanges of this algorithm begin in forward passes in training mode.\n"
            "Call the module itself, model(...), rather than another method of it, after model.train(). Layers that are"
            " to be in evaluation mode can be put into it one by one after that. Or use gradient_allreduce or"
            " low_precision_decentralized, which need no forward pass."
        )
