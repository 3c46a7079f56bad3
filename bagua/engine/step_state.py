"""The states of a training step, of a module and of each of its buckets, and every way from one to another.

Owned by the module's TrainingSteps and its CommScheduler, which report what happens and ask for the state. What is not
in a table cannot happen: it is a defect of the engine, and raises.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar


class State(enum.Enum):
    """One of several. In tables it is found by identity, for the hash of enum's own members is a function in Python."""

    __hash__ = object.__hash__


_State = TypeVar("_State", bound=State)


class Event(dict[_State, _State]):
    """What happens: the state after it, by the state before it. A plain lookup, because buckets meet three in a step.

    Args:
        what: happens.
        after: the table.
    """

    def __init__(self, what: str, after: Mapping[_State, _State]) -> None:
        super().__init__(after)
        self.what = what

    def __missing__(self, state: _State) -> _State:
        raise AssertionError(f"{state.name}: it cannot happen here that {self.what}")


class PassState(State):
    """Of a module: where it is between its backward passes."""

    CLOSED = "no backward pass is open"
    OPEN = "a backward pass has begun, and autograd has not called at its end"
    INTERRUPTED = "the last pass ended with an exception, and nobody was told yet"
    FROZEN = "the last forward pass found no parameter that needs a gradient"


class BucketState(State):
    """Of a bucket in a step. Its ready flags are apart: some may be set in each state but LAUNCHED."""

    WAITING = "not communicated in this step"
    HELD = "is not launched before the end of the pass: it may add to gradients, or other models send before"
    LAUNCHED = "its operations have started, and nobody has waited for them"
    SENT = "communicated in an earlier pass of this step"


class PassEvent:
    """What happens to a module."""

    BEGINS = Event(
        "the first hook of a backward pass runs",
        {
            PassState.CLOSED: PassState.OPEN,
            # A graph that was made before everything was frozen is still gone through.
            PassState.FROZEN: PassState.OPEN,
        },
    )
    ENDS = Event("autograd calls at the end of the pass", {PassState.OPEN: PassState.CLOSED})
    # The ranks may differ then: gradients were communicated, and nobody has waited for them.
    RAISES = Event(
        "autograd drops that call: the pass ended with an exception", {PassState.OPEN: PassState.INTERRUPTED}
    )
    TOLD = Event(
        "it was said that the pass before has not ended",
        {
            PassState.INTERRUPTED: PassState.CLOSED,
            # A forward pass before autograd has dropped the call of a pass that raised: the same, a little earlier.
            PassState.OPEN: PassState.CLOSED,
        },
    )
    # Not of OPEN and INTERRUPTED: evaluation without gradients tells nobody, the next pass in training does.
    ALL_FROZEN = Event("a forward pass finds all parameters frozen", {PassState.CLOSED: PassState.FROZEN})
    SOME_TRAINED = Event("a forward pass finds parameters that need a gradient", {PassState.FROZEN: PassState.CLOSED})


class BucketEvent:
    """What happens to a bucket."""

    LAUNCH = Event(
        "all flags are set, and it is its turn",
        {
            BucketState.WAITING: BucketState.LAUNCHED,
            # At the end of a pass: nothing more can be added to its gradients.
            BucketState.HELD: BucketState.LAUNCHED,
            # Another backward pass of the same step.
            BucketState.SENT: BucketState.LAUNCHED,
        },
    )
    WAITED_FOR = Event("the pass is over: results are in place", {BucketState.LAUNCHED: BucketState.SENT})
    LEFT_PARTLY = Event(
        "the pass is over, and only some of its flags are set",
        {
            BucketState.WAITING: BucketState.HELD,
            BucketState.SENT: BucketState.HELD,
            BucketState.HELD: BucketState.HELD,
        },
    )
    DEFERRED = Event(
        "a pass begins whose buckets are launched at its end",
        {
            BucketState.WAITING: BucketState.HELD,
            BucketState.SENT: BucketState.HELD,
            BucketState.HELD: BucketState.HELD,
        },
    )
    # Not of LAUNCHED: exchanges of weights go on across steps, and are waited for in the next one. Nor of HELD:
    # complete, but behind one that is not; the step is refused, and the scheduler reset.
    STEP_ENDS = Event("the optimizer steps, or the next forward pass begins", {BucketState.SENT: BucketState.WAITING})
