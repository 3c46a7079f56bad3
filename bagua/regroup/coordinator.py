"""Takes this process from one epoch to the next. One per process, from `init_process_group(regroup=...)` on.

[Note: what happens when a rank is lost]
    found    by any thread: an error of a collective, the end of a watched process (bagua.regroup.detection)
    told     to all members, by the store. What is under way in this process is ended: `Regrouping.tell`
    report   of each member: how many optimizer steps it has made. One that is in a forward pass reports at once, and
             one in `optimizer.step` when that has ended; from the report on, no step begins before the next epoch
    decided  by whoever has all reports: bagua.regroup.epochs
    settled  on the training thread of each, when it comes to its next collective or step: `Regrouping._settle`. New
             groups, what depends on them, and the state of the last step for those that are behind
    dropped  what this process had done of its present step; or repeated: see `Ready` in bagua.regroup.epochs

The training thread is the one that has called `init_process_group`. A collective on another thread raises as well, and
does not regroup.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import json
import logging
import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bagua.collectives.object_collectives import broadcast_object
from bagua.collectives.process_group import BaguaProcessGroup
from bagua.error_text import one_line
from bagua.job import gloo_exit, presence, torch_internals
from bagua.job.failure_report import failures_named
from bagua.job.job_thread import leave_watch_to_others
from bagua.job.places import place_of_this_process
from bagua.job.regrouped import Regrouped
from bagua.job.rendezvous import wait_for_all
from bagua.job.torch_internals import Store
from bagua.rank_list import rank_list
from bagua.regroup import grad_scaler, joining
from bagua.regroup.detection import Mailbox, Watch
from bagua.regroup.epochs import (
    NOTHING,
    PASS,
    PREFIX,
    START,
    Decision,
    Epoch,
    EpochStore,
    Member,
    Ready,
    Report,
    decide,
    first_call,
    kept,
)
from bagua.regroup.following import Feed, Followers, Record
from bagua.regroup.groups import CONNECT_TIMEOUT, Groups, abort
from bagua.regroup.job_step import JobStep, Participant, Turn, WorldChange
from bagua.regroup.joining import Guests
from bagua.regroup.nccl_group import TIMED_OUT, results_deferred
from bagua.regroup.samplers import FollowingSampler, Position, refuse_fixed_samplers, warn_of_fixed_samplers
from bagua.regroup.transfer import Fetch, Guest, Offer, StateDoor, StateServer

LOOK_S = 0.01  # between two looks at the store, while this process regroups
MAX_LOOK_S = 0.25
# Of the time that was waited, so that long waits cost the store little.
LOOK_SHARE = 0.05
TELL_AFTER_S = 10.0  # who is waited for, in a log line
ALONE = -1  # the epoch of a process that has not joined yet
# Epochs of the same members without a step in between. Then it is no fault of the network that passes.
MAX_IDLE_EPOCHS = 3

_NO_SUBGROUPS = (
    "regroup: groups of some ranks (torch.distributed.new_group, meshes, Bagua's new_group) are not supported under"
    " regroup: they would not follow when a rank is lost.\n"
    "Use the default group, or leave regroup out of init_process_group()."
)

_logger = logging.getLogger("bagua")


class Options(Protocol):
    """What a user has said: bagua.regroup.options.Regroup."""

    min_ranks: int | None
    on_loss: str
    state: dict[str, Any]


class Regrouping:
    """
    Args:
        server: client of the job's store, for the training thread alone.
        timeout: of the collectives, and of a regroup.
        device: the GPU of this process, on which NCCL communicates; None: gloo alone.

    Attributes:
        repeats: a step in which a rank is lost is repeated, and not dropped.
    """

    def __init__(
        self,
        options: Options,
        server: Store,
        epoch: Epoch,
        token: str,
        timeout: datetime.timedelta,
        device: torch.device | None = None,
    ) -> None:
        self.epoch, self.repeats = epoch, options.on_loss == "repeat"
        self._present = JobStep()
        self._options, self._token, self._timeout = options, token, timeout
        self._server, self._store = server, EpochStore(server)
        self._others_store = EpochStore(torch_internals.second_client(server))  # of all other threads, under its lock
        self._others_lock = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self._is_told = False
        self._has_reported = False
        self._is_stepping = False
        self._stepping: torch.optim.Optimizer | None = None
        self._half_stepped: Sequence[Turn] = ()  # some of the optimizers of these models have stepped
        self._has_gradients = False  # of all ranks: this process will step, if steps are repeated
        self._thread = threading.get_ident()
        self._depth = 0  # of `within`
        self._is_settling = False
        self._is_stopped = False
        self._has_trained = False  # a step, in this process
        self._idle_epochs = 0
        # It has the state of the job. One that joins has not, until the wrap of its model returns.
        self._is_whole = epoch.number >= 0
        self._fetched: int | None = None  # the step whose parameters and optimizer states it has taken
        self._state = dict(options.state)
        self._guests = Guests()
        self._began = time.monotonic()  # the present step
        self._step_s = 0.0  # that the last one has taken
        self._feeds: list[Feed] = []
        self._has_followed = False  # the others, until it was admitted
        self._is_new = False  # it has joined, and the others are in the forward pass that it makes first
        self._samplers: list[weakref.ref[FollowingSampler]] = []  # the n-th is that of all ranks
        # Of samplers that this process will make, which has joined: states by their numbers, and what ranks have said.
        self._given_samplers: dict[int, dict[str, Any]] = {}
        self._said_before: list[tuple[list[Ready], int, list[bool]]] = []
        self._hold = START  # of the present step, in the regroup under way: see Ready
        self._readies: list[Ready] = []  # of the members of the last epoch that this process has come to
        self._has_begun = False
        self._unsaid: Regrouped | None = None  # what the next collective of the program raises
        self._groups = Groups(
            server, timeout, device, self._on_failure, self._why_not, self._on_nccl_problem, self._why_waiting
        )
        self._watch = Watch(token, self._on_lost)
        self._mailbox = Mailbox(EpochStore(torch_internals.second_client(server)), token, self._on_mail)
        self._server_of_state = StateServer(self._on_join, self._on_follow)
        self._store.set_door(token, self._server_of_state.door.to_json())
        leave_watch_to_others(True)
        self._undo: list[Callable[[], object]] = [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
            grad_scaler.install(self),
            torch_internals.refuse_new_groups(_NO_SUBGROUPS),
            torch_internals.let_former_groups_fail(),
            functools.partial(leave_watch_to_others, False),
        ]

    # --- what the rest of Bagua asks ---------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps that the job has made (bagua.regroup.job_step)."""
        return self._present.count

    def add(self, participant: Participant) -> Turn:
        """A model is wrapped.

        Raises:
            NotImplementedError: training has begun without it; or steps are repeated, and one of several models weighs
                batches.
        """
        models = {id(one): one for one in (*self._present.participants, participant)}.values()
        if self.repeats and len(models) > 1 and any(one.weighs_batches for one in models):
            raise NotImplementedError(
                f'regroup: on_loss="repeat" with batch weights is for one model, and {participant.name} is another'
                " one.\n"
                'Pass Regroup(on_loss="drop"), leave batch weights out, or wrap one module that has both.'
            )
        return self._present.add(participant)

    def remove(self, participant: Participant) -> None:
        """It is no longer wrapped."""
        self._present.remove(participant)

    def add_sampler(self, sampler: FollowingSampler) -> None:
        """Made by all ranks in the same order."""
        number = len(self._samplers)
        self._samplers.append(weakref.ref(sampler))
        if number in self._given_samplers:
            sampler.load_state_dict(self._given_samplers.pop(number))
            for said in self._said_before:
                _follow(sampler, number, *said)

    def _has_following_sampler(self) -> bool:
        return any(one() is not None for one in self._samplers)

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Around collectives of Bagua's own on the training thread: they raise Regrouped, and whoever has entered this
        regroups then."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def ending_pass(self) -> Iterator[None]:
        """As `within`, at the end of a backward pass. Collectives on GPUs may still be under way after it:
        `_wait_for_pass` waits for them."""
        self._depth += 1
        try:
            with results_deferred():
                yield
        finally:
            self._depth -= 1
        if self._groups.nccl is not None:
            self._groups.nccl.note_pass()

    def begin_pass(self, turn: Turn) -> bool:
        """A backward pass of a model begins that communicates.

        Returns:
            False: it belongs to a step that is dropped, and communicates nothing.

        Raises:
            NotImplementedError: the model has made one since the last step.
            RuntimeError: this process was to join a job of more models.
        """
        if not self._is_whole:
            raise RuntimeError(
                f"This process has wrapped {len(self._present.participants)} models, and the job that it was to join"
                " has more. It cannot train alone.\n"
                "Wrap all models before the first backward pass, as the other ranks do."
            )
        if not self._present.begin_pass(turn):
            return False
        self._unsaid = None
        if not self._has_begun:
            self._has_begun = True
            warn_of_fixed_samplers(self._has_following_sampler())
        return True

    def repeat(self, function: Callable[[], None]) -> None:
        """Calls it, collectives of Bagua's own with which a model is wrapped; again after each regroup."""
        while True:
            try:
                with self.within():
                    function()
                return
            except Regrouped:
                self._settle(START)

    def repeat_in_forward(self, function: Callable[[], None]) -> None:
        """Calls it, collectives of Bagua's own in a forward pass; again after each regroup. If nothing else of the step
        was communicated before, or steps are repeated, the pass goes on with what its loop has drawn, and with the
        gradients that were accumulated before. Otherwise the step is dropped, and nothing is called for the rest of
        it."""
        present = self._present
        while not (present.is_dropped and present.is_left_out):
            try:
                with self.within():
                    if present.replays:
                        present.replay()
                    function()
                if not present.is_between:
                    present.has_begun = True
                    if self.repeats:
                        present.calls.append(function)
                return
            except Regrouped:
                self._settle_present()

    def end_pass(self) -> None:
        """A backward pass of a model has ended. If it is the last one of its backward(), this process makes its step
        whatever comes from now on, unless it has been told already: others may have to take it from here."""
        if not any(one.is_in_open_pass for one in self._present.participants) and not self._note_gradients():
            self.settle_pass()

    def _note_gradients(self) -> bool:
        self._wait_for_pass()
        with self._lock:
            self._is_stepping = not self._is_told
            # Those of a backward() before this one are the program's by now.
            self._has_gradients |= self._is_stepping
            return self._is_stepping

    def settle_pass(self) -> None:
        """Passes of a backward() are at their end, and a collective of theirs has failed: regroup. Repeat them, one
        after the other, or drop the step."""
        while self._settle_present():
            try:
                with self.within(), results_deferred(False):
                    self._present.replay()
                for participant in self._present.passed:
                    with self.ending_pass():
                        participant.reduce_again()
            except Regrouped:
                continue
            if self._note_gradients():
                return

    def _settle_present(self) -> bool:
        """Regroup within a step.

        Returns:
            whether it goes on.
        """
        present = self._present
        hold = START
        if present.has_begun or present.made:
            hold = PASS if self.repeats and not self._has_gradients else NOTHING
        lost = self._settle(hold)
        if hold != START and any(one.hold == NOTHING for one in self._readies):
            self._unsaid = self._regrouped(lost)
        if self._hold == NOTHING:
            return False
        present.replay_from(first_call(self.epoch, self._readies))
        return True

    # --- a rank joins: [Note: how a rank joins] in bagua.regroup.joining ----------------------------------------------

    def enter(self) -> None:
        """A model of this process is wrapped. If the job has begun without it, it joins here, with the last one of as
        many as the other ranks have.

        Raises:
            RuntimeError: the job has ended, or refuses this process.
        """
        if self._is_whole:
            return
        participants = self._present.participants
        member = self.epoch.members[0]
        looks = _Looks(time.monotonic() + self._timeout.total_seconds(), self._timeout)

        def followers() -> Followers:
            return Followers([one.follower() for one in participants], self._present.optimizers)

        try:
            said = {
                "models": [one.described() for one in participants],
                "member": json.loads(Epoch(0, (member,)).to_json()),
            }
            self._is_settling = True  # steps that it makes now are the others'
            followed = joining.ask(self._store, member, said, followers, looks.pause_for)
            if followed is None:
                self._is_settling = False
                _logger.info(f"The job has more models than the {len(participants)} that this process has wrapped.")
                return
            self._has_followed = followed
            self._settle(START, counts=False)
            self._present.is_between = False
            self._is_new = True
        except BaseException as error:
            self._is_settling = False
            if self.epoch.number != ALONE:
                # The others are not to wait for it.
                self._on_lost(member, f"could not join ({type(error).__name__})")
            raise

    def _on_join(self, said: dict[str, Any]) -> tuple[dict[str, Any], Guest | None]:
        """A process asks for admission; on a thread of its connection."""
        epoch, participants, models = self.epoch, self._present.participants, said["models"]
        if not self._has_begun or not self._is_whole:  # before that, it may not have wrapped all models
            return {"later": f"rank {epoch.rank_of(self._token)} to begin training"}, None
        (member,) = Epoch.of_json(json.dumps(said["member"]).encode()).members
        for one, model in zip(participants, models, strict=False):
            problem = one.why_not(model, member.place, len(epoch.members))
            if problem is not None:
                return {"refused": problem}, None
        if len(models) > len(participants):
            problem = (
                f"This process cannot join the job, as rank {len(epoch.members)}.\n"
                f"It has wrapped {len(models)} models, and rank {epoch.rank_of(self._token)} {len(participants)}."
            )
            return {"refused": problem}, None
        if len(models) < len(participants):
            return {"more": len(participants)}, None
        guest = Guest(said["name"], member.token)
        with self._lock:
            if self._is_told or said["epoch"] != self.epoch.number or self._is_stopped:
                return {"later": "the ranks to regroup"}, None
            self._guests.add(guest)
        return {}, guest

    def _on_follow(self, said: dict[str, Any], connection: socket.socket) -> None:
        """A process follows; on a thread of its connection."""
        feed = Feed(said["share"], said["of"])
        with self._lock:
            if self._is_told or said["epoch"] != self.epoch.number or self._is_stopped:
                return
            self._feeds.append(feed)
        feed.send_to(connection)

    def _feed(self) -> None:
        """Before a step."""
        present = self._present
        for feed in tuple(self._feeds):
            if not feed.is_over:
                feed.begin_step(present.count, present.participants, present.optimizers)
            if feed.is_over:
                with self._lock:
                    self._feeds.remove(feed)

    def _end_feeds(self, *last: Record) -> None:
        with self._lock:
            feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.end(*last)

    def begin_forward(self) -> None:
        """A forward pass of training begins. Before the first of a step, ranks join."""
        present = self._present
        self._is_new = False
        if present.is_between:
            if present.is_dropped:
                present.begin_next()
            present.is_between = False
            now = time.monotonic()
            self._began, self._step_s = now, now - self._began
            if self._guests and not self._is_told:
                self._admit_guests()
            if self._feeds and not self._is_told:
                self._feed()

    def _admit_guests(self) -> None:
        epoch = self.epoch
        tokens: tuple[str, ...] = ()
        # Without its store, a job trains until the next loss.
        with contextlib.suppress(dist.DistError):
            tokens = self._guests.admitted(self._store, epoch, self.step, epoch.rank_of(self._token) == 0)
        if tokens:
            self._admit(tokens)

    def _admit(self, tokens: tuple[str, ...]) -> None:
        """All members are about to come here, or are told of a loss."""
        epoch = self.epoch
        with self._lock:
            if self._is_told or self._has_reported:
                return  # the pass that begins is dropped
            self._has_reported = True
            report = self._own_report(tokens)
        self._store.report(epoch, self._token, report)
        if self._wait_for_next(time.monotonic() + self._timeout.total_seconds()).is_agreed:
            self._end_feeds(Record(("admitted",)))
            self._settle(START, counts=False)
        else:
            self._note(epoch, "the job has lost a rank")

    # --- a loss is found, and told -----------------------------------------------------------------------------------

    def _on_lost(self, member: Member, how: str) -> None:
        """On a thread of the watch."""
        self._ask(lambda store: store.add_lost(member.token, how))
        epoch = self.epoch
        if member.token in epoch.tokens:
            rank = epoch.rank_of(member.token)
            self.tell(epoch, f"{rank_list([rank], {rank: member.place.host})} {how}")

    def _on_nccl_problem(self, epoch: Epoch, problem: str) -> None:
        """On a thread that looks after NCCL."""
        if TIMED_OUT in problem:
            # The user's timeout: whoever waits raises.
            if epoch is self.epoch:
                abort(self._groups.made, problem)
        else:
            self.tell(epoch, problem)

    def _why_waiting(self, epoch: Epoch, queued: int) -> str | None:
        """On a thread that looks after NCCL, whose kernels do not fail because a rank has left."""
        left: list[Member] = []
        self._ask(lambda store: left.extend(store.left_before(epoch, queued)))
        return f"{rank_list([epoch.rank_of(one.token) for one in left])} left the job" if left else None

    def _on_mail(self, epoch: Epoch, why: str) -> None:
        self._note(epoch, why)

    def tell(self, epoch: Epoch, why: str) -> None:
        """The epoch is over, all members. Any thread."""
        if self._note(epoch, why):
            self._ask(lambda store: store.tell(epoch, why, [one for one in epoch.tokens if one != self._token]))

    def _note(self, epoch: Epoch, why: str) -> bool:
        """Whether this is news."""
        with self._lock:
            if self._is_told or epoch.number != self.epoch.number or self._is_stopped:
                return False
            self._is_told = True
            reports = not self._is_stepping
            # Not those of the next epoch, which the training thread may make before this thread goes on.
            groups = self._groups.made
        _logger.warning(f"{why[:1].upper()}{why[1:]}: regrouping (epoch {epoch.number} is over).")
        if reports:
            self._report()
        abort(groups)
        return True

    def _report(self) -> None:
        """How far this process has come, once an epoch."""
        with self._lock:
            if self._has_reported or not self._is_told:
                return
            self._has_reported = True
            report, epoch = self._own_report(), self.epoch
        self._ask(lambda store: store.report(epoch, self._token, report))

    def _own_report(self, admits: tuple[str, ...] = ()) -> Report:
        present = self._present
        return Report(present.count, len(present.participants), self._is_whole, admits, len(present.made))

    def _ask(self, request: Callable[[EpochStore], None]) -> None:
        # Without the store nobody can regroup: the training thread finds out, and says so.
        with contextlib.suppress(RuntimeError), self._others_lock:
            request(self._others_store)

    def _on_failure(self, epoch: Epoch, error: Exception) -> None:
        """A collective of this epoch has failed, on the thread that waits for it.

        Raises:
            Regrouped: the job goes on without a rank, or will.
        """
        with self._lock:
            is_over, is_told = epoch.number != self.epoch.number, self._is_told
        if is_over:
            raise Regrouped(
                "A collective that was under way when the job regrouped was ended; its result is of no use.",
                self.epoch.number,
            ) from error
        if not is_told:
            default = self._groups.default
            if "timed out" in str(error).lower() or default is None or default.get_global_communicator().check_abort():
                return  # the user's timeout, or his abort
            self.tell(epoch, "a collective failed")
        if threading.get_ident() != self._thread or self._depth:
            raise Regrouped("The job is regrouping: a rank was lost.", epoch.number + 1) from error
        lost = self.settle()
        self._unsaid = None
        self._present.begin_next()  # which the program goes on with
        raise self._regrouped(lost) from error

    def _why_not(self) -> RuntimeError | None:
        """Ranks may have regrouped in this collective of the program, and go on with the next step. Those that did so
        in the pass before it must not wait for them here. Nor must one that has joined."""
        if self._depth or threading.get_ident() != self._thread:
            return None
        if self._is_new:
            return RuntimeError(
                f"regroup: this process has joined the job as rank {self.epoch.rank_of(self._token)}, and calls a"
                f" collective before the forward pass of step {self.step}, in which the other ranks are already: they"
                " would not come.\n"
                "Call collectives before the model is wrapped, where this process is the only rank, or after the"
                " forward pass of a step."
            )
        if self._unsaid is None:
            return None
        said, self._unsaid = self._unsaid, None
        self._present.begin_next()
        return said

    def _regrouped(self, lost: tuple[int, ...]) -> Regrouped:
        who = f"{rank_list(lost).capitalize()} is gone" if lost else "A collective has failed"
        return Regrouped(
            f"{who}. The job goes on with {len(self.epoch.members)} ranks; this one is rank"
            f" {self.epoch.rank_of(self._token)} now.\n"
            "The collective under way was ended, and its result is of no use.\n"
            "Catch bagua.torch_api.Regrouped around the training step, and go on with the next one.",
            self.epoch.number,
            lost,
        )

    # --- the next epoch ----------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        """The GPU of this process, on which NCCL communicates."""
        return self._groups.device

    @property
    def sends_in_order(self) -> bool:
        """Where steps are repeated, whether the models of a backward pass communicate at its end, one after the other
        (`JobStep.is_in_order`)."""
        return self._present.is_in_order and len(self._present.participants) > 1

    @property
    def is_pending(self) -> bool:
        """Whether this process has been told that its epoch is over."""
        return self._is_told

    def settle(self) -> tuple[int, ...]:
        """Regroup, and drop what was done of the present step. On the training thread.

        Returns:
            the ranks that are gone, as they were numbered.

        Raises:
            RuntimeError: the job cannot go on, or this process is no part of it any more.
        """
        lost = self._settle(NOTHING)
        self._unsaid = self._regrouped(lost)
        return lost

    def _settle(self, hold: str, counts: bool = True) -> tuple[int, ...]:
        """
        Args:
            hold: what this process would keep of the present step (bagua.regroup.epochs.Ready). What it does keep is
                in `_hold` then.
            counts: as an epoch in which no step may be made.
        """
        before = self.epoch
        with self._lock:
            self._is_stepping = self._has_gradients = False
            self._half_stepped = ()
        if self.step == before.step and counts:
            self._idle_epochs += 1
        else:
            self._idle_epochs = 0
        begin = time.monotonic()
        deadline = begin + self._timeout.total_seconds()
        self._is_settling = True
        try:
            with self.within(), results_deferred(False):
                # Nothing of the former epoch writes into gradients or buffers any more.
                self._groups.leave_gpu()
                self._hold = hold
                if hold == NOTHING:
                    self._drop_step()
                elif hold == PASS:
                    for turn in self._present.turns:
                        if turn.has_passed and turn.participant is not None:
                            turn.participant.rewind()
                lost = self._reach_whole(before, deadline, begin)
                self._present.is_in_order = True
        except dist.DistError as error:
            raise RuntimeError(
                f"The job cannot regroup: its store is unreachable ({str(error).splitlines()[0][:200]}).\n"
                f"Rank {before.rank_of(self._token)} of {len(before.members)}, in step {self.step}.\n"
                "Check the process that serves the store. Then restart all ranks from the last checkpoint."
            ) from error
        finally:
            self._is_settling = False
        after = self.epoch
        if not lost and self._idle_epochs >= MAX_IDLE_EPOCHS:
            raise RuntimeError(
                f"Collectives have failed {self._idle_epochs} times in a row, although no rank is gone.\n"
                f"Step {self.step} of epoch {after.number}, {len(after.members)} ranks.\n"
                "Check that all ranks run the same operations, and the network between the hosts."
            )
        if not self._has_following_sampler():
            refuse_fixed_samplers(lost, len(after.members))
        elif lost:
            warn_of_fixed_samplers(has_following=True)
        return lost

    def _drop_step(self) -> None:
        self._hold = NOTHING
        for participant in self._present.participants:
            participant.drop_step()
        self._present.drop()

    def _reach_whole(self, before: Epoch, deadline: float, begin: float) -> tuple[int, ...]:
        """Until this process is at work in an epoch whose members all have the state.

        Returns:
            ranks of `before` that are gone.
        """
        told = before
        while True:
            if not self._reach_next(deadline):
                continue
            # One that joins has nothing that depends on the former number of ranks.
            if self._is_whole:
                self._tell_users(told, begin)
                told = self.epoch
            try:
                self._hand_over()
            except Regrouped:
                continue
            self._samplers_follow()
            return tuple(rank for rank, one in enumerate(before.members) if one.token not in self.epoch.tokens)

    def _tell_users(self, before: Epoch, begin: float) -> None:
        after, took = self.epoch, time.monotonic() - begin
        change = WorldChange(
            epoch=after.number,
            rank=after.rank_of(self._token),
            world_size=len(after.members),
            previous_rank=before.rank_of(self._token),
            previous_world_size=len(before.members),
            lost_ranks=tuple(rank for rank, one in enumerate(before.members) if one.token not in after.tokens),
            step=self.step,
            joined_ranks=tuple(rank for rank, one in enumerate(after.members) if one.token not in before.tokens),
        )
        said = [f"without {rank_list(change.lost_ranks)}"] if change.lost_ranks else []
        said += [f"with {rank_list(change.joined_ranks)}, new"] if change.joined_ranks else []
        _logger.warning(
            f"The job goes on {' and '.join(said) or 'with the same ranks'}. Epoch {after.number}: rank {change.rank}"
            f" of {change.world_size} (was {change.previous_rank} of {change.previous_world_size}), at step"
            f" {self.step}, after {took:.2f} s."
        )
        for participant in self._present.participants:
            participant.tell_users(change)

    def _hand_over(self) -> None:
        """Those that join take what users may have changed since the step, too.

        Raises:
            Regrouped: a rank was lost.
            RuntimeError: this process joins, and cannot have the state.
        """
        epoch, default = self.epoch, self._groups.default
        assert default is not None
        if epoch.newcomers:
            given = None
            if epoch.rank_of(self._token) == 0:
                given = self._rest()
                self._server_of_state.offer(None)
            given = broadcast_object(given, 0, default.get_global_communicator())
            if not self._is_whole:
                self._take_rest(given)
            self._server_of_state.offer(None)

    def _rest(self) -> bytes | str:
        """Pickled; a text: why it cannot be."""
        try:
            state = {name: one.state_dict() for name, one in self._state.items()}
            samplers = [one() for one in self._samplers]
            positions = {number: one.state_dict() for number, one in enumerate(samplers) if one is not None}
            return pickle.dumps(([one.give_rest() for one in self._present.participants], state, positions))
        except Exception as error:  # whatever a state_dict raises: that is the end of the one that joins alone
            return one_line(error, 300)

    def _take_rest(self, given: bytes | str) -> None:
        if isinstance(given, str):
            raise RuntimeError(
                f"This process cannot join: rank 0 could not give the state of the job ({given}).\n"
                "Check that what is in Regroup(state=...) can be pickled."
            )
        rests, state, self._given_samplers = pickle.loads(given)
        for participant, rest in zip(self._present.participants, rests, strict=True):
            participant.take_rest(rest)
        for name, values in state.items():
            self._state[name].load_state_dict(values)
        for number, reference in enumerate(self._samplers):
            sampler, position = reference(), self._given_samplers.pop(number, None)
            if sampler is not None and position is not None:
                sampler.load_state_dict(position)
        self._is_whole = True
        _logger.warning(
            f"This process has joined the job. Epoch {self.epoch.number}: rank {self.epoch.rank_of(self._token)} of"
            f" {len(self.epoch.members)}, at step {self.step}."
        )

    def _fetch(self, epoch: Epoch, deadline: float) -> bool:
        """Take parameters and optimizer states. False: the epoch is over, and nobody gives them any more."""
        looks = _Looks(deadline, self._timeout)
        sources = [token for token in epoch.tokens if token not in epoch.newcomers]
        put_into_place: list[Callable[[], None]] = []

        def prepare(description: bytes) -> Sequence[torch.Tensor]:
            tensors: list[torch.Tensor] = []
            put_into_place.clear()
            for participant, one in zip(self._present.participants, pickle.loads(description), strict=True):
                filled, put = participant.take_state(one)
                tensors += filled
                put_into_place.append(put)
            return tensors

        while self._fetched != epoch.step:
            doors = [StateDoor.of_json(text) for text in self._store.doors(sources)]
            fetch = Fetch(epoch.step, doors, prepare, self._has_followed)
            if fetch.run(lambda received: self._store.set_progress(self._token, f"{received} bytes")):
                for put in put_into_place:
                    put()
                if self._has_followed:
                    count = f"{fetch.differing} tensors were taken from them" if fetch.differing else "none was taken"
                    _logger.info(f"Tensors were compared with those of the other ranks: {count}.")
                self._fetched = epoch.step
            elif self._is_told:
                return False
            else:
                looks.pause_for(epoch, f"its state ({'; '.join(fetch.problems[-2:])})", LOOK_S)
        return True

    def _reach_next(self, deadline: float) -> bool:
        """Whether this process is at work in the next epoch. Otherwise that is over, too."""
        with self._lock:
            self._is_told = True
        self._groups.leave_gpu()  # if the epoch before this one was over at once, too
        self._report()
        following = self._wait_for_next(deadline)
        if self._token not in following.tokens:
            raise RuntimeError(
                "The other ranks have taken this one for lost, and go on without it.\n"
                f"This process was rank {self.epoch.rank_of(self._token)} of {len(self.epoch.members)}, in step"
                f" {self.step}.\n"
                "Check the network of its host, and start it again."
            )
        with self._lock:
            self.epoch = following
            self._is_told = self._has_reported = False
            if not self._is_whole:
                self._present.settle(following.step)
            self._guests.clear()
            feeds, self._feeds = self._feeds, []
        for feed in feeds:
            feed.end()
        self._mailbox.follow(following, self._store)
        self._watch.follow(following)
        if self._is_whole:
            if following.newcomers:
                self._server_of_state.offer(_joint_offer(self._present.participants, following.step))
        elif not self._fetch(following, deadline):
            return False
        if not self._connect(following, deadline):
            self._heed(following)
            return False
        try:
            for participant in self._present.participants:
                participant.follow_world()
            if following.is_behind:
                self._share_state(following)
        except Regrouped:
            self._heed(following)
            return False
        self._readies = self._store.readies(following)
        if self._hold == PASS and not kept(following, self._readies)[following.rank_of(self._token)]:
            self._drop_step()
        with self._lock:
            self._present.settle(following.step)
        return True

    def _heed(self, epoch: Epoch) -> None:
        """This process has not come to work in an epoch. Others may have, and have dropped the step."""
        if (
            self._hold == PASS
            and not self._store.not_ready(epoch)
            and any(one.hold == NOTHING for one in self._store.readies(epoch))
        ):
            self._drop_step()

    def _ready(self) -> Ready:
        present = self._present
        step = present.count + bool(present.made)  # with the one that counts, although it is not over
        samplers = [one() for one in self._samplers]
        positions = [None if one is None else one.position(step) for one in samplers]
        return Ready(self._hold, len(present.calls), (present.count, len(present.made)), positions)

    def _samplers_follow(self) -> None:
        said = self._readies, self.epoch.rank_of(self._token), kept(self.epoch, self._readies)
        if self._given_samplers:
            self._said_before.append(said)
        for number, reference in enumerate(self._samplers):
            sampler = reference()
            if sampler is not None:
                _follow(sampler, number, *said)

    def connect_first(self) -> BaguaProcessGroup:
        """Of the job's first epoch."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        self._mailbox.follow(self.epoch, self._store)
        self._watch.follow(self.epoch)
        if not self._connect(self.epoch, deadline):
            self._is_settling = True
            with self.within():
                while not self._reach_next(deadline):
                    pass
            self._is_settling = False
        assert self._groups.default is not None
        return self._groups.default

    def _wait_for_next(self, deadline: float) -> Epoch:
        """Until an epoch is made that follows the present one."""
        epoch, store = self.epoch, self._store
        wait = _Looks(deadline, self._timeout)
        while True:
            following = store.current()
            if following.number > epoch.number:
                return following
            lost = store.lost()
            reports = store.reports(epoch, lost)
            admitted = {token for one in reports.values() for token in one.admits}
            joiners = store.joiners(sorted(admitted))
            decision: Decision | None = decide(epoch, reports, lost, self._options.min_ranks, joiners)
            if decision is None:
                wait.pause(epoch, [one for one in epoch.members if one.token not in {*reports, *lost}], "report")
            elif decision.epoch is None:
                raise RuntimeError(
                    f"The job cannot go on: {decision.problem}.\n"
                    f"Rank {epoch.rank_of(self._token)} of {len(epoch.members)}, in step {self.step}.\n"
                    "Restart all ranks from the last checkpoint."
                )
            else:
                return store.propose(epoch, decision.epoch)

    def _connect(self, epoch: Epoch, deadline: float) -> bool:
        """Whether the groups of the epoch are made. Otherwise it is over."""
        store, rank = self._store, epoch.rank_of(self._token)
        store.set_ready(epoch, self._token, self._ready())
        wait = _Looks(deadline, self._timeout)
        patience = joining.Patience(store, self._timeout.total_seconds() / 2, self._step_s)
        while missing := store.not_ready(epoch):
            if not self._is_at_work(epoch):
                return False
            for member, how in patience.lost(missing, epoch.newcomers):
                self._on_lost(member, how)
            wait.pause(epoch, missing, "collective or step")
        if not self._is_at_work(epoch):
            return False

        def goes_on() -> bool:
            time.sleep(LOOK_S / 4)
            return self._is_at_work(epoch)

        begin = time.monotonic()
        try:
            backends = self._groups.connecting(epoch, rank).result(goes_on)
        except RuntimeError as error:
            if time.monotonic() - begin > CONNECT_TIMEOUT.total_seconds() / 2 and self._is_at_work(epoch):
                # The others were connected before. A loss would be known by now.
                for token in epoch.newcomers:
                    self._on_lost(epoch.members[epoch.rank_of(token)], "cannot be connected")
            self.tell(epoch, f"connecting failed ({str(error).splitlines()[0][:200]})")
            return False
        if backends is None:
            return False
        self._groups.install(epoch, rank, backends)
        # It may have been told while there were no groups to end.
        return not self._is_told

    def _is_at_work(self, epoch: Epoch) -> bool:
        """Whether nobody has said that the epoch is over, or has left."""
        if self._is_told:
            return False
        gone = [one for one in epoch.members if one.token in self._store.lost()]
        if gone:
            self.tell(epoch, f"{rank_list([epoch.rank_of(one.token) for one in gone])} is gone")
        return not gone

    def _share_state(self, epoch: Epoch) -> None:
        """All have the state of rank 0, or, if another rank is lost, that of before.

        Raises:
            Regrouped: another rank is lost.
        """
        communicator = self._groups.default
        assert communicator is not None
        is_source = epoch.rank_of(self._token) == 0
        present = self._present
        is_behind = (present.count, len(present.made)) != epoch.position
        participants = present.participants
        restore = [one.keep_state() for one in participants] if is_behind else []
        kept = {name: one.state_dict() for name, one in self._state.items()}
        try:
            for participant in participants:
                participant.share_state()
            given = broadcast_object(kept if is_source else None, 0, communicator.get_global_communicator())
        except BaseException:
            for put_back in restore:
                put_back()
            raise
        if is_behind:
            for name, one in self._state.items():
                one.load_state_dict(given[name])

    # --- steps -------------------------------------------------------------------------------------------------------

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is an optimizer of a wrapped model.

        Raises:
            NotImplementedError: it is another one, and steps parameters of a model.
        """
        return bool(self._present.turns_of(optimizer))

    def drops(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its last step was dropped, or the one that it is to make will be."""
        return any(turn.is_dropped for turn in self._present.turns_of(optimizer))

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._is_settling or not self._present.turns_of(optimizer):
            return
        if named.get("closure") is not None or (len(arguments) > 1 and any(one is not None for one in arguments[1:])):
            raise NotImplementedError(
                f"regroup: {type(optimizer).__name__}.step() was given a closure, in which passes would communicate.\n"
                "Call backward() before step(), and step() without a closure."
            )
        self.begin_step(optimizer)
        for feed in tuple(self._feeds):
            feed.before_step(optimizer)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step. If this process has been told that its epoch is over, the step is dropped."""
        present = self._present
        if id(optimizer) in present.ended:
            present.refuse_second_step(optimizer)
        if self._groups.nccl is not None:
            self._wait_for_pass()
        self._stepping = optimizer
        while True:
            with self._lock:
                self._is_stepping = (
                    not self._is_told
                    or self._has_gradients
                    or (bool(self._half_stepped) and self._half_stepped == present.turns_of(optimizer))
                )
            if self._is_stepping:
                return
            if not self.repeats:
                self.settle()
                return
            if not self._settle_present():
                return
            with contextlib.suppress(Regrouped), self.within():
                present.replay()

    def _wait_for_pass(self) -> None:
        """Gradients are what all ranks have made of them, or this process has been told that they are not.

        Raises:
            CollectiveError: they have not come within the timeout of the group.
        """
        nccl, default = self._groups.nccl, self._groups.default
        if nccl is None or default is None:
            return
        try:
            nccl.wait_for_pass()
        except RuntimeError as error:
            if not self._is_told:
                with failures_named(default, "waiting for the gradients of a backward pass"):
                    raise error

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is self._stepping:
            self.end_step(optimizer)

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or a GradScaler has decided that it does not. Again is harmless."""
        if optimizer is not self._stepping:
            return
        present = self._present
        turns = present.turns_of(optimizer)
        with self._lock:
            self._stepping = None
            is_made = self._is_stepping
            for turn in turns:
                is_made &= not turn.is_dropped
            is_first = is_made and not present.made
            is_over = present.end(optimizer, is_made)
            # What all ranks have given gradients for is not left half done.
            self._half_stepped = turns if is_made and not is_over and present.is_half_stepped(turns) else ()
            if self._has_gradients:
                self._has_gradients = present.is_half_stepped([one for one in present.turns if one.has_passed])
            self._is_stepping = bool(self._half_stepped) or self._has_gradients
            reports = self._is_told and not self._is_stepping
        if is_made and not self._has_trained:
            self._has_trained = True
            self._ask(lambda store: store.set_trained(self._token))
        for feed in tuple(self._feeds):
            feed.end_step(optimizer)
        if is_made and (is_first or is_over):
            for reference in self._samplers:
                sampler = reference()
                if sampler is not None:
                    sampler.end_step(is_first)
        if reports:
            self._report()

    def refuse_scaler_without_state(self, scaler: object) -> None:
        """
        Raises:
            ValueError: this GradScaler is not among what ranks take from each other.
        """
        if all(one is not scaler for one in self._state.values()):
            raise ValueError(
                "regroup: the GradScaler is not in Regroup(state=...). A rank that takes the state of another one would"
                " keep its own scale.\n"
                'Pass it: Regroup(state={"scaler": scaler}).'
            )

    # --- the end -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """This process leaves the job, in an orderly way unless it ends by an exception. Again is harmless."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
        for undo in self._undo:
            undo()
        self._watch.stop()
        self._end_feeds()
        self._server_of_state.stop()
        if not gloo_exit.is_failing():
            queued = 0 if self._groups.nccl is None else self._groups.nccl.queued
            self._ask(lambda store: store.leave(self.epoch, self._token, queued))
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._mailbox.stop(self._others_store)
        self._groups.forget()


def _joint_offer(participants: Sequence[Participant], step: int) -> Offer:
    """The state of all models."""
    offers = [one.give_state(step) for one in participants]
    return Offer(
        step,
        pickle.dumps([one.description for one in offers]),
        " ".join(one.layout for one in offers),
        [tensor for one in offers for tensor in one.tensors],
    )


def _follow(sampler: FollowingSampler, number: int, said: Sequence[Ready], rank: int, kept: Sequence[bool]) -> None:
    """`number`: of the sampler, in what the ranks have said."""
    positions: list[Position | None] = [one.samplers[number] if number < len(one.samplers) else None for one in said]
    sampler.follow(positions, rank, kept)


class _Looks:
    """Pauses between looks at the store."""

    def __init__(self, deadline: float, timeout: datetime.timedelta) -> None:
        self._begin = time.monotonic()
        self._deadline, self._timeout = deadline, timeout
        self._is_told = False

    def pause_for(self, epoch: Epoch, what: str, pause_s: float) -> None:
        """Of one that joins.

        Args:
            what: of the epoch is waited for.

        Raises:
            RuntimeError: that has not come within the timeout.
        """
        now = time.monotonic()
        if now >= self._deadline:
            raise RuntimeError(
                f"This process could not join the job within the timeout of {self._timeout.total_seconds():g} s.\n"
                f"It has waited for {what}. Epoch {epoch.number}, {len(epoch.members)} ranks.\n"
                "Check the logs of the ranks, and start it again."
            )
        if not self._is_told and now - self._begin > TELL_AFTER_S:
            self._is_told = True
            _logger.warning(f"To join the job, this process waits for {what}, at most {self._deadline - now:.0f} s.")
        time.sleep(pause_s)

    def pause(self, epoch: Epoch, missing: list[Member], what: str) -> None:
        """
        Raises:
            RuntimeError: they have not come within the timeout.
        """
        now = time.monotonic()
        who = f"{rank_list([epoch.rank_of(one.token) for one in missing])} of epoch {epoch.number}"
        if now >= self._deadline:
            raise RuntimeError(
                f"The ranks have not regrouped within the timeout of {self._timeout.total_seconds():g} s: {who}"
                " missing.\n"
                f"Other ranks were waiting for its next {what}.\n"
                "Check the log of that rank. Then restart all ranks from the last checkpoint."
            )
        if not self._is_told and now - self._begin > TELL_AFTER_S:
            self._is_told = True
            _logger.warning(f"Waiting for {who} to come to its next {what}, for at most {self._deadline - now:.0f} s.")
        time.sleep(min(max(LOOK_S, LOOK_SHARE * (now - self._begin)), MAX_LOOK_S))


_current: Regrouping | None = None
_of_parent: Regrouping | None = None  # in a forked process


def current() -> Regrouping | None:
    """Of this process. None: it was not asked to regroup."""
    return None if _current is None or _current._is_stopped else _current


def refuse(what: str, instead: str) -> None:
    """
    Args:
        what: is asked for, and does not follow when a rank is lost.
        instead: a sentence without full stop.

    Raises:
        NotImplementedError: this process was asked to regroup.
    """
    if current() is not None:
        raise NotImplementedError(
            f"regroup: {what} is not supported under regroup.\n{instead}, or leave regroup out of init_process_group()."
        )


def begin(
    options: Options,
    server: Store,
    rank: int,
    world_size: int,
    timeout: datetime.timedelta,
    device: torch.device | None,
) -> BaguaProcessGroup:
    """See `Regroup.begin`."""
    global _current
    if device is not None:
        torch_internals.leave_nccl_errors_to_others()
    server = torch_internals.PrefixStore(PREFIX, server)
    store = EpochStore(server)
    own = presence.own_presence()
    if own is None:
        raise RuntimeError(
            "regroup: this process can open no TCP port, by which the others would know whether it lives.\n"
            "Check the limits on open files and threads."
        )
    member = Member(own.door.token, place_of_this_process(), rank)
    backends = "gloo" if device is None else "gloo and NCCL"
    settings = (
        f"min_ranks={options.min_ranks}, on_loss={options.on_loss!r}, state of {sorted(options.state)}, {backends}"
    )
    if store.has_begun():
        return _begin_alone(options, server, member, settings, timeout, device)
    server.set(f"member/{rank}", Epoch(0, (member,)).to_json())
    server.set(f"settings/{rank}", settings)
    if device is not None:
        server.set(f"gpu/{rank}", torch_internals.gpu_for_nccl(device))
    wait_for_all(server, rank, world_size, timeout)
    texts = server.multi_get([f"member/{other}" for other in range(world_size)])
    _check_settings(server, settings, f"rank {rank}")
    if device is not None:
        _check_gpus(server.multi_get([f"gpu/{other}" for other in range(world_size)]), device)
    epoch = store.first([Epoch.of_json(text).members[0] for text in texts])
    if member.token not in epoch.tokens:  # a process that was started as this rank before
        return _begin_alone(options, server, member, settings, timeout, device)
    _current = Regrouping(options, server, epoch, member.token, timeout, device)
    return _current.connect_first()


def _begin_alone(
    options: Options,
    server: Store,
    member: Member,
    settings: str,
    timeout: datetime.timedelta,
    device: torch.device | None,
) -> BaguaProcessGroup:
    """The job has begun: this process is alone until it joins, when its model is wrapped."""
    global _current
    _check_settings(server, settings, "this process")
    epoch = EpochStore(server).current()
    _logger.warning(
        f"The job at this store has begun (epoch {epoch.number}, {len(epoch.members)} ranks). This process joins it"
        " when its model is wrapped. Until then it is the only rank of a group of its own."
    )
    _current = Regrouping(options, server, Epoch(ALONE, (member,)), member.token, timeout, device)
    return _current.connect_first()


def _check_gpus(gpus: Sequence[bytes], device: torch.device) -> None:
    """
    Raises:
        ValueError: two ranks have the same GPU.
    """
    for rank, gpu in enumerate(gpus):
        others = [other for other in range(rank) if gpus[other] == gpu]
        if others:
            raise ValueError(
                f"regroup: {rank_list([*others, rank])} use the same GPU, and NCCL needs one for each rank. On this"
                f" rank it is {device}, the current device.\n"
                "Call torch.cuda.set_device(bagua.get_local_rank()) before init_process_group()."
            )


def _check_settings(server: Store, settings: str, who: str) -> None:
    theirs = server.get("settings/0").decode()
    if theirs != settings:
        raise RuntimeError(
            f"regroup: {who} has {settings}, and rank 0 has {theirs}.\nPass the same Regroup() on all ranks."
        )


@gloo_exit.before_pause
def stop() -> None:
    """This process leaves the job."""
    if _current is not None:
        _current.stop()


def _forget_in_child() -> None:
    # A forked process is none of the job: its end must not tell that this one has left.
    global _current, _of_parent
    if _current is not None:
        # gloo's groups end the process that frees them, if their threads are in another one. Some may be garbage.
        gc.freeze()
        _current, _of_parent = None, _current


os.register_at_fork(after_in_child=_forget_in_child)
