"""Where this process is in the present step of the job: which models have made their backward pass, and which
optimizers have stepped.

[Note: a step of the job] It is over when each optimizer of each wrapped model has stepped once, and it counts when the
first of them has: what that has changed is not taken back. If a rank is lost meanwhile, the rest of the step is dropped
on all ranks: some may have been at another model than others, and all begin the next step together. Passes and
optimizers that come until then do nothing.

On the training thread, and in backward passes on autograd's. Owned by `Regrouping`, whose lock guards `count` and
`made`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from bagua.job.places import Place
from bagua.regroup.following import Follower, Source
from bagua.regroup.transfer import Offer


class WorldChange(NamedTuple):
    """What `on_regroup` tells.

    Attributes:
        epoch: the number of the new one.
        rank: of this process now.
        world_size: now.
        previous_rank: before.
        previous_world_size: before.
        lost_ranks: those that are gone, as they were numbered before.
        step: steps that the job has made so far.
        joined_ranks: those that are new, as they are numbered now.
    """

    epoch: int
    rank: int
    world_size: int
    previous_rank: int
    previous_world_size: int
    lost_ranks: tuple[int, ...]
    step: int
    joined_ranks: tuple[int, ...] = ()


class Participant(Protocol):
    """A model's training, which follows."""

    @property
    def name(self) -> str:
        """Of the model."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """That step the model."""

    def synchronizes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it steps parameters of the model."""

    @property
    def weighs_batches(self) -> bool:
        """Whether its batches have weights, which ranks tell each other at the beginning of a pass."""

    @property
    def is_in_open_pass(self) -> bool:
        """Whether a backward pass that counts has begun, and has not ended."""

    @property
    def end_number(self) -> int:
        """When the call at the end of its last backward pass was asked for, among those of all models."""

    def drop_step(self) -> None:
        """What was done of the present step is forgotten: there are no gradients."""

    def rewind(self) -> None:
        """What was communicated of a pass is forgotten. This rank's own gradients are kept for `reduce_again`."""

    def reduce_again(self) -> None:
        """Collective: with them, the pass ends among the ranks that are there now.

        Raises:
            Regrouped: another rank was lost.
        """

    def follow_world(self) -> None:
        """The group has other ranks now. Communicates nothing."""

    def keep_state(self) -> Callable[[], None]:
        """What restores the state of now."""

    def share_state(self) -> None:
        """Collective: all take the state of rank 0.

        Raises:
            Regrouped: another rank was lost.
        """

    def tell_users(self, change: WorldChange) -> None:
        """Call what users have asked for."""

    def described(self) -> dict[str, Any]:
        """The model, for comparison with that of a process that joins. JSON. Any thread."""

    def why_not(self, described: dict[str, Any], place: Place, rank: int) -> str | None:
        """Why a process with this model cannot join, as this rank. Any thread."""

    def give_state(self, step: int) -> Offer:
        """Parameters and optimizer states, which nobody changes meanwhile."""

    def take_state(self, description: bytes) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """Tensors to fill, and what puts them into place."""

    def feed(self, share: int, of: int) -> Source:
        """For a process that joins: what it follows."""

    def follower(self) -> Follower:
        """Of this process, which joins."""

    def give_rest(self) -> dict[str, Any]:
        """What users may change between two steps: options of the optimizers, and buffers."""

    def take_rest(self, rest: dict[str, Any]) -> None:
        """As `give_rest` of another process has it."""


class Turn:
    """A wrapped model, in the steps of the job.

    Args:
        participant: the model.
        on_end: called if that is collected.

    Attributes:
        participant: the model; None: it is no longer wrapped.
        has_passed: its backward pass of the present step has begun.
        is_dropped: its last step was dropped, and no backward pass that counts has begun since.
    """

    def __init__(self, participant: Participant, on_end: Callable[[object], None]) -> None:
        self._participant: Callable[[], Participant | None] = weakref.ref(participant, on_end)
        self.has_passed = self.is_dropped = False

    @property
    def participant(self) -> Participant | None:
        return self._participant()

    def end(self) -> None:
        """It is no longer wrapped."""
        self._participant = _no_participant


def _no_participant() -> None: ...


class JobStep:
    """
    Attributes:
        count: steps that are done.
        made: ids of the optimizers that have stepped in the present one.
        ended: ids of those whose `step` was called, whatever that did.
        is_dropped: what was not made of the present one is dropped.
        has_begun: something of it was communicated.
        is_between: no forward pass of training has begun in it.
        calls: collectives of forward passes that are done, where they may have to be repeated.
        replays: likewise, that have to be repeated before anything else is communicated.
        is_in_order: until a step is made, models communicate one after the other, where a backward pass goes through
            several: ranks that repeat it do so, and others make it for the first time.
    """

    def __init__(self) -> None:
        self.count = 0
        self.made: set[int] = set()
        self.ended: set[int] = set()
        self.is_dropped = False
        self.has_begun = False
        self.is_between = True
        self.is_in_order = False
        self.calls: list[Callable[[], None]] = []
        self.replays: list[Callable[[], None]] = []
        self.turns: list[Turn] = []
        self._owners: weakref.WeakKeyDictionary[torch.optim.Optimizer, Sequence[Turn]] = weakref.WeakKeyDictionary()
        self._count: int | None = None  # of the optimizers
        self._is_complete = False  # no further model may be wrapped

    # --- models and optimizers ---------------------------------------------------------------------------------------

    def add(self, participant: Participant) -> Turn:
        """A model is wrapped.

        Raises:
            NotImplementedError: training has begun without it.
        """
        self._forget()
        for turn in self.turns:
            if turn.participant is participant:
                return turn
        turn = Turn(participant, self._forget)
        for position, other in enumerate(self.turns):
            if other.participant is None:  # it was wrapped again, as all ranks do that
                self.turns[position] = turn
                return turn
        if self._is_complete:
            raise NotImplementedError(
                f"regroup: {participant.name} is wrapped after training has begun (step {self.count}), which is not"
                " supported under regroup: a process that joins would wrap it too late.\n"
                "Wrap all models before the first backward pass."
            )
        self.turns.append(turn)
        return turn

    def remove(self, participant: Participant) -> None:
        """It is no longer wrapped."""
        self._forget()
        for turn in self.turns:
            if turn.participant is participant:
                turn.end()

    def _forget(self, _: object = None) -> None:
        self._owners.clear()
        self._count = None

    @property
    def participants(self) -> list[Participant]:
        """In the order in which all ranks have wrapped them."""
        return [one for turn in self.turns if (one := turn.participant) is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Of all models, each once."""
        return list({id(one): one for participant in self.participants for one in participant.optimizers}.values())

    def turns_of(self, optimizer: torch.optim.Optimizer) -> Sequence[Turn]:
        """Of the models that it steps.

        Raises:
            NotImplementedError: it steps parameters of one that was wrapped without it.
        """
        turns = self._owners.get(optimizer)
        if turns is None:
            turns = []
            for turn in self.turns:
                participant = turn.participant
                if participant is None:
                    continue
                if any(one is optimizer for one in participant.optimizers):
                    turns.append(turn)
                elif participant.synchronizes(optimizer):
                    raise NotImplementedError(
                        f"regroup: {type(optimizer).__name__} steps parameters of {participant.name}, which was wrapped"
                        " without it. If a rank is lost, nobody would know whether it has stepped.\n"
                        "Pass all optimizers of a model where it is wrapped."
                    )
            self._owners[optimizer] = turns
        return turns

    # --- what happens in it ------------------------------------------------------------------------------------------

    def begin_pass(self, turn: Turn) -> bool:
        """A backward pass of a model begins that communicates.

        Returns:
            False: it belongs to a step that is dropped. It communicates nothing then.

        Raises:
            NotImplementedError: the model has made one since the step began.
        """
        if self.is_dropped:
            if not turn.has_passed:
                turn.has_passed = True
                return False
            self.begin_next()
        elif turn.has_passed:
            raise self._second_pass(turn)
        turn.has_passed = self.has_begun = self._is_complete = True
        turn.is_dropped = self.is_between = False
        return True

    def end(self, optimizer: torch.optim.Optimizer, is_made: bool) -> bool:
        """The `step` of an optimizer has been called.

        Args:
            optimizer: of a model that is wrapped.
            is_made: as a part of a step that counts.

        Returns:
            whether the step of the job is over.
        """
        self.ended.add(id(optimizer))
        if is_made:
            self.made.add(id(optimizer))
        if self._count is None:
            self._count = len(self.optimizers)
        if len(self.ended) < self._count:
            return False
        self.count += bool(self.made)
        self.is_in_order &= not self.made
        self.begin_next()
        return True

    def is_half_stepped(self, turns: Sequence[Turn]) -> bool:
        """Whether an optimizer of these models is still to come."""
        alive = [participant for turn in turns if (participant := turn.participant) is not None]
        return any(id(optimizer) not in self.ended for one in alive for optimizer in one.optimizers)

    @property
    def passed(self) -> list[Participant]:
        """Whose backward passes of the present step have begun, in the order of their ends."""
        alive = [one for turn in self.turns if turn.has_passed and (one := turn.participant) is not None]
        return sorted(alive, key=lambda one: one.end_number)

    @property
    def is_left_out(self) -> bool:
        """Whether a model is still to come of a step that is dropped."""
        return self.is_dropped and any(not turn.has_passed for turn in self.turns if turn.participant is not None)

    def drop(self) -> None:
        """What was not made of it is dropped."""
        self.is_dropped = True
        for turn in self.turns:
            participant = turn.participant
            if participant is not None and not self.made.issuperset(map(id, participant.optimizers)):
                turn.is_dropped = True
        self.is_between = not self.is_left_out
        self._forget_calls()

    def settle(self, count: int) -> None:
        """All ranks have made so many steps, and have the same state."""
        self.count = count
        self.made.clear()

    def begin_next(self) -> None:
        """The next step."""
        self.made.clear()
        self.ended.clear()
        self.is_dropped = self.has_begun = False
        self.is_between = True
        if self.calls or self.replays:
            self._forget_calls()
        for turn in self.turns:
            turn.has_passed = False

    def _forget_calls(self) -> None:
        self.calls, self.replays = [], []

    def replay_from(self, number: int) -> None:
        """All calls of forward passes from this one on have to be repeated."""
        self.replays = self.calls[number:] + self.replays
        del self.calls[number:]

    def replay(self) -> None:
        """Collective.

        Raises:
            Regrouped: another rank was lost.
        """
        while self.replays:
            self.replays[0]()
            self.calls.append(self.replays.pop(0))

    def refuse_second_step(self, optimizer: torch.optim.Optimizer) -> None:
        """It has been called in this step.

        Raises:
            NotImplementedError: others have not been.
        """
        if not self.is_dropped:
            raise NotImplementedError(self._unfinished(f"{type(optimizer).__name__} steps a second time"))

    def _second_pass(self, turn: Turn) -> NotImplementedError:
        participant = turn.participant
        assert participant is not None
        if self.ended.issuperset(map(id, participant.optimizers)):
            return NotImplementedError(self._unfinished(f"{participant.name} makes a second backward pass"))
        return NotImplementedError(
            "regroup: a second backward pass communicates before optimizer.step().\n"
            f"Model: {participant.name}. If a rank is lost, ranks could drop different passes of a step. Accumulate"
            " gradients in no_sync(), so that the last pass of a step alone communicates. To leave a step out, call"
            " optimizer.zero_grad() and optimizer.step() all the same: that changes nothing, and counts as a step."
        )

    def _unfinished(self, what: str) -> str:
        missing = [
            f"{type(optimizer).__name__} of {participant.name}"
            for participant in self.participants
            for optimizer in participant.optimizers
            if id(optimizer) not in self.ended
        ]
        return (
            f"regroup: {what}, before {', '.join(missing)} has stepped.\n"
            "A step of the job is over when each optimizer of each model has stepped once.\n"
            "In a step that is to leave a model out, call its optimizer.zero_grad() and optimizer.step() all the same:"
            " that changes nothing. Make a backward pass whose gradients are not wanted in no_sync()."
        )
