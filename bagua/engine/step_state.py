"""The states of a training step, of a module and of each of its buckets, and every way from one to another.

Owned by the module's TrainingSteps and its CommScheduler, which report what happens and ask for the state. What is not
in a table cannot happen: it is a defect of the engine, and raises.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Generic, TypeVar


class _Member(enum.Enum):
    """Of a table below: found by identity, for the hash of enum's own members is a function in Python."""

    __hash__ = object.__hash__


class PassState(_Member):
    """Of a module: where it is between its backward passes."""

    CLOSED = "no backward pass is open"
    OPEN = "a backward pass has begun, and autograd has not called at its end"
    INTERRUPTED = "the last pass ended with an exception, and nobody was told yet"
    FROZEN = "the last forward pass found no parameter that needs a gradient"


class PassEvent(_Member):
    """What happens to a module."""

    BEGINS = "the first hook of a backward pass runs"
    ENDS = "autograd calls at the end of the pass"
    RAISES = "autograd drops that call: the pass ended with an exception"
    TOLD = "it was said that the pass before has not ended"
    ALL_FROZEN = "a forward pass finds all parameters frozen"
    SOME_TRAINED = "a forward pass finds parameters that need a gradient"


class BucketState(_Member):
    """Of a bucket in a step. Its ready flags are apart: some may be set in each state but LAUNCHED."""

    WAITING = "not communicated in this step"
    HELD = "has flags of an earlier pass, whose gradients this pass may add to"
    LAUNCHED = "its operations have started, and nobody has waited for them"
    SENT = "communicated in an earlier pass of this step"


class BucketEvent(_Member):
    """What happens to a bucket."""

    LAUNCH = "all flags are set, and it is its turn"
    WAITED_FOR = "the pass is over: results are in place"
    LEFT_PARTLY = "the pass is over, and only some of its flags are set"
    STEP_ENDS = "the optimizer steps, or the next forward pass begins"


_State = TypeVar("_State", bound=enum.Enum)
_Event = TypeVar("_Event", bound=enum.Enum)

PASS_TRANSITIONS: Mapping[tuple[PassState, PassEvent], PassState] = {
    (PassState.CLOSED, PassEvent.BEGINS): PassState.OPEN,
    # A graph that was made before everything was frozen is still gone through.
    (PassState.FROZEN, PassEvent.BEGINS): PassState.OPEN,
    (PassState.OPEN, PassEvent.ENDS): PassState.CLOSED,
    # The ranks may differ now: gradients were communicated, and nobody has waited for them.
    (PassState.OPEN, PassEvent.RAISES): PassState.INTERRUPTED,
    (PassState.INTERRUPTED, PassEvent.TOLD): PassState.CLOSED,
    # A forward pass before autograd has dropped the call of a pass that raised: the same, a little earlier.
    (PassState.OPEN, PassEvent.TOLD): PassState.CLOSED,
    # Not of the two above: evaluation without gradients tells nobody, the next pass in training does.
    (PassState.CLOSED, PassEvent.ALL_FROZEN): PassState.FROZEN,
    (PassState.FROZEN, PassEvent.SOME_TRAINED): PassState.CLOSED,
}

BUCKET_TRANSITIONS: Mapping[tuple[BucketState, BucketEvent], BucketState] = {
    (BucketState.WAITING, BucketEvent.LAUNCH): BucketState.LAUNCHED,
    # At the end of a pass: nothing more can be added to its gradients.
    (BucketState.HELD, BucketEvent.LAUNCH): BucketState.LAUNCHED,
    # Another backward pass of the same step.
    (BucketState.SENT, BucketEvent.LAUNCH): BucketState.LAUNCHED,
    (BucketState.LAUNCHED, BucketEvent.WAITED_FOR): BucketState.SENT,
    (BucketState.WAITING, BucketEvent.LEFT_PARTLY): BucketState.HELD,
    (BucketState.SENT, BucketEvent.LEFT_PARTLY): BucketState.HELD,
    (BucketState.HELD, BucketEvent.LEFT_PARTLY): BucketState.HELD,
    # Not of LAUNCHED: exchanges of weights go on across steps, and are waited for in the next one. Nor of HELD:
    # complete, but behind one that is not; the step is refused, and the scheduler reset.
    (BucketState.SENT, BucketEvent.STEP_ENDS): BucketState.WAITING,
}


class StateMachine(Generic[_State, _Event]):
    """A state, and what is allowed to happen to it.

    Args:
        first: the state in the beginning.
        transitions: the state after each event, by state and event.
    """

    __slots__ = ("_transitions", "state")

    def __init__(self, first: _State, transitions: Mapping[tuple[_State, _Event], _State]) -> None:
        self.state = first
        self._transitions = transitions

    def on(self, event: _Event) -> None:
        """Go to the state after `event`."""
        after = self._transitions.get((self.state, event))
        assert after is not None, f"{self.state.name}: {event.name} cannot happen here"
        self.state = after
