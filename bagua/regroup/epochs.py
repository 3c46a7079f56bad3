"""Who is in the job: epochs, and what decides about the next one. All of it stands in the job's store.

An epoch is the ranks that communicate, in their order. The next one is made by one compare-and-set of one key, by any
rank that has seen, of each member, either its report or that it is lost. So all ranks follow the same epochs, and one
that does not reach the store makes none.

[Note: keys] Under PREFIX:
    epoch                    the present one, as JSON; what compare-and-set changes
    lost                     lines of JSON, which are only added to: {"token", "how"}. A process is lost for good
    report/<n>/<token>       what this member of epoch n says before epoch n + 1 is made: `Report`
    ready/<n>/<token>        this member of epoch n is about to connect: `Ready`
    mail/<n>/<token>         epoch n is over, says another member: why. What a member waits for in the store
    trained/<token>          this process has made a step; for the agent that starts it again if it dies
    joiner/<token>           a process that wants to join, as a member: JSON
    admit/<n>/<token>.<i>    at which step epoch n ends, so that this process joins; or CANCELLED. By rank 0 of epoch n
    door/<token>             where a process gives its state to others (bagua.regroup.transfer)
    progress/<token>         how far a process has come that joins: another text each time

A member is a process, known by the token of its presence (bagua.job.presence): a process that is started again in the
same place is another member.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bagua.job.places import Place
from bagua.job.torch_internals import Store, add_line

PREFIX = "bagua/regroup"
EPOCH = "epoch"
LOST = "lost"
LEFT = "left"  # how a process is gone that has said so
CANCELLED = "cancelled"  # in place of a step


@dataclass(frozen=True)
class Member:
    """A process of the job.

    Attributes:
        token: which no other process has.
        place: where it runs.
        first_rank: its RANK when it was started, for messages.
    """

    token: str
    place: Place
    first_rank: int


@dataclass(frozen=True)
class Epoch:
    """
    Attributes:
        number: the first of a job is 0.
        members: in rank order.
        step: steps of the job that are done, and that all members have once they have connected.
        is_behind: some members lack steps of optimizers; rank 0 has made them, and they take its state.
        newcomers: tokens of members that have no state yet; rank 0 is none of them.
        is_agreed: all were between the same two steps when they made it, so that no step is dropped.
        made: how many optimizers have made the last of these steps; 0: all. The others do not make it any more.
    """

    number: int
    members: tuple[Member, ...]
    step: int = 0
    is_behind: bool = False
    newcomers: tuple[str, ...] = ()
    is_agreed: bool = False
    made: int = 0

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(one.token for one in self.members)

    @property
    def position(self) -> tuple[int, int]:
        """Steps that were over, and optimizers that had stepped in the next one, where this epoch was made."""
        return self.step - bool(self.made), self.made

    @property
    def key(self) -> str:
        """That no other epoch has, in the store. One of a process alone, before it joins, has no number."""
        return str(self.number) if self.number >= 0 else f"alone/{self.members[0].token}"

    def rank_of(self, token: str) -> int:
        return self.tokens.index(token)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: bytes) -> Epoch:
        said = json.loads(text)
        members = []
        for one in said.pop("members"):
            place = Place.of_json(json.dumps(one.pop("place")).encode())
            members.append(Member(place=place, **one))
        newcomers = tuple(said.pop("newcomers"))
        return cls(members=tuple(members), newcomers=newcomers, **said)


@dataclass(frozen=True)
class Report:
    """What a member says before the next epoch.

    Attributes:
        step: steps of the job that are over.
        models: how many it has wrapped.
        is_whole: it has all of the state.
        admits: tokens of processes that join at this step. It is between two steps, and has nothing under way.
        made: optimizers that have stepped in the step after these.
    """

    step: int
    models: int = 0
    is_whole: bool = True
    admits: tuple[str, ...] = ()
    made: int = 0


NOTHING, START, PASS = "nothing", "start", "pass"


@dataclass(frozen=True)
class Ready:
    """What a member says when it is about to connect.

    Attributes:
        hold: what it keeps of the present step. NOTHING: it goes on with the next one, or makes this one anew. START:
            it has communicated nothing of it, and goes on. PASS: it would repeat what it has communicated, if all do.
        calls: collectives of forward passes that it has made in the step, with PASS.
        position: steps that are over, and optimizers that have stepped in the next one.
        samplers: where they are, of JSON's types.
    """

    hold: str
    calls: int
    position: tuple[int, int]
    samplers: Sequence[Any] = ()


def kept(epoch: Epoch, members: Sequence[Ready]) -> list[bool]:
    """Which members of the epoch go on with the step that they are in. Others have dropped it, or had only the end of
    one left that counts. Of a step in which an optimizer has stepped no rest is repeated: some ranks lack that one's
    pass, and others are in the next one."""
    drop = epoch.made > 0 or any(one.hold == NOTHING for one in members)
    return [one.hold == START or (one.hold == PASS and not drop and one.position == epoch.position) for one in members]


def first_call(epoch: Epoch, members: Sequence[Ready]) -> int:
    """From which collective of the forward passes on those that repeat a step do so: none of the others comes to an
    earlier one."""
    if any(one.position != epoch.position for one in members):
        return 0  # of the next step
    return min(one.calls for one in members)


@dataclass(frozen=True)
class Decision:
    """What follows from all reports and losses. Exactly one of both is given.

    Attributes:
        epoch: the next one.
        problem: why there is none, and the job ends.
    """

    epoch: Epoch | None = None
    problem: str = ""


def decide(
    epoch: Epoch,
    reports: Mapping[str, Report],
    lost: Collection[str],
    min_ranks: int | None,
    joiners: Mapping[str, Member] | None = None,
) -> Decision | None:
    """The epoch after this one. A pure function, so that all members come to the same.

    Args:
        reports: of its members so far, by token.
        lost: tokens of processes that are gone, whether they have reported or not.
        min_ranks: with how many the job may go on; None: more than half.
        joiners: those that reports admit, by token.

    Returns:
        None: a member has neither reported nor is it lost, and is waited for.
    """
    left = [one for one in epoch.members if one.token not in lost]
    if any(one.token not in reports for one in left):
        return None
    before = len(epoch.members)
    needed = before // 2 + 1 if min_ranks is None else min_ranks
    if len(left) < needed:
        rule = "more than half of them" if min_ranks is None else f"min_ranks={min_ranks}"
        return Decision(problem=f"{len(left)} of {before} ranks are left, and {needed} are needed ({rule})")
    if not any(reports[one.token].is_whole for one in left):
        return Decision(problem="all ranks are lost that had its state; those that are left were joining")
    left.sort(key=lambda one: not reports[one.token].is_whole)
    said = [reports[one.token] for one in left]
    if len({one.models for one in said}) > 1:
        return Decision(problem="a rank was lost while models were wrapped, and some ranks have wrapped one already")
    step, made = max((one.step, one.made) for one in said)
    is_behind = any((one.step, one.made) != (step, made) for one in said)
    if is_behind:
        # Who has made the last step comes first: states are broadcast from rank 0.
        source = next(rank for rank, one in enumerate(said) if (one.step, one.made) == (step, made) and one.is_whole)
        left.insert(0, left.pop(source))
    # One that has admitted nobody was told of a loss before it came to this step.
    admitted = said[0].admits if len({one.admits for one in said}) == 1 else ()
    newcomers = [one.token for one in left if not reports[one.token].is_whole]
    for token in admitted:
        if token not in lost:
            left.append((joiners or {})[token])
            newcomers.append(token)
    step += bool(made)  # what an optimizer has changed counts
    return Decision(Epoch(epoch.number + 1, tuple(left), step, is_behind, tuple(newcomers), bool(admitted), made))


@dataclass
class EpochStore:
    """The keys above. Any thread, with a client of the store of its own.

    Args:
        client: of the job's store, under the prefix of regrouping.
    """

    client: Store
    _lines: int = field(default=0, init=False)
    _lost: dict[str, str] = field(default_factory=dict, init=False)

    def first(self, members: Sequence[Member]) -> Epoch:
        """The job's first epoch, made by the first of these members that asks."""
        return Epoch.of_json(self.client.compare_set(EPOCH, "", Epoch(0, tuple(members)).to_json()))

    def has_begun(self) -> bool:
        return self.client.check([EPOCH])

    def current(self) -> Epoch:
        return Epoch.of_json(self.client.get(EPOCH))

    def propose(self, before: Epoch, after: Epoch) -> Epoch:
        """`after`, unless another member has made the epoch that follows `before`: then that one."""
        return Epoch.of_json(self.client.compare_set(EPOCH, before.to_json(), after.to_json()))

    def add_lost(self, token: str, how: str) -> None:
        add_line(self.client, LOST, json.dumps({"token": token, "how": how}))

    def leave(self, epoch: Epoch, token: str, queued: int) -> None:
        """A process of this epoch leaves in an orderly way.

        Args:
            queued: how many collectives it has queued with NCCL.
        """
        self.client.set(f"queued/{epoch.number}/{token}", str(queued))
        self.add_lost(token, LEFT)

    def left_before(self, epoch: Epoch, queued: int) -> list[Member]:
        """Who has left and will never be in the last of so many collectives with NCCL. One that has queued as many is
        in it: what it gave may still be on its way."""
        lost = self.lost()
        left = [one for one in epoch.members if lost.get(one.token) == LEFT]
        return [one for one in left if self._queued(epoch, one.token) < queued]

    def _queued(self, epoch: Epoch, token: str) -> int:
        key = f"queued/{epoch.number}/{token}"
        return int(self.client.get(key)) if self.client.check([key]) else 0

    def lost(self) -> dict[str, str]:
        """How each process is gone, by its token."""
        if self.client.check([LOST]):
            lines = self.client.get(LOST).decode().splitlines()
            for line in lines[self._lines :]:
                said: dict[str, Any] = json.loads(line)
                self._lost.setdefault(said["token"], said["how"])
            self._lines = len(lines)
        return self._lost

    def report(self, epoch: Epoch, token: str, report: Report) -> None:
        self.client.set(f"report/{epoch.number}/{token}", json.dumps(asdict(report)))

    def reports(self, epoch: Epoch, lost: Collection[str]) -> dict[str, Report]:
        """Of its members so far, by token, without those that are lost."""
        names = {f"report/{epoch.number}/{token}": token for token in epoch.tokens if token not in lost}
        keys = list(names)
        if not self.client.check(keys):
            keys = [key for key in keys if self.client.check([key])]
        texts = self.client.multi_get(keys) if keys else []
        said = {names[key]: json.loads(text) for key, text in zip(keys, texts, strict=True)}
        return {token: Report(**{**one, "admits": tuple(one["admits"])}) for token, one in said.items()}

    def add_joiner(self, member: Member) -> None:
        self.client.set(f"joiner/{member.token}", Epoch(0, (member,)).to_json())

    def joiners(self, tokens: Sequence[str]) -> dict[str, Member]:
        texts = self.client.multi_get([f"joiner/{token}" for token in tokens]) if tokens else []
        return {token: Epoch.of_json(text).members[0] for token, text in zip(tokens, texts, strict=True)}

    def admit(self, epoch: Epoch, name: str, step: int | None) -> None:
        """By rank 0: this process joins at the step; None: it does not. What was said first holds."""
        self.client.compare_set(f"admit/{epoch.number}/{name}", "", CANCELLED if step is None else str(step))

    def admission(self, epoch: Epoch, name: str) -> str | None:
        """The step, or CANCELLED, as soon as it is said."""
        key = f"admit/{epoch.number}/{name}"
        return self.client.get(key).decode() if self.client.check([key]) else None

    def set_door(self, token: str, text: str) -> None:
        self.client.set(f"door/{token}", text)

    def doors(self, tokens: Sequence[str]) -> list[str]:
        return [text.decode() for text in self.client.multi_get([f"door/{token}" for token in tokens])]

    def set_progress(self, token: str, text: str) -> None:
        self.client.set(f"progress/{token}", text)

    def progress(self, token: str) -> str:
        key = f"progress/{token}"
        return self.client.get(key).decode() if self.client.check([key]) else ""

    def set_trained(self, token: str) -> None:
        self.client.set(f"trained/{token}", "")

    def has_trained(self, token: str) -> bool:
        return self.client.check([f"trained/{token}"])

    def set_ready(self, epoch: Epoch, token: str, ready: Ready) -> None:
        self.client.set(f"ready/{epoch.number}/{token}", json.dumps(asdict(ready)))

    def readies(self, epoch: Epoch) -> list[Ready]:
        """Of its members, in rank order. All are ready."""
        texts = self.client.multi_get([f"ready/{epoch.number}/{token}" for token in epoch.tokens])
        said: list[dict[str, Any]] = [json.loads(one) for one in texts]
        return [Ready(**{**one, "position": tuple(one["position"])}) for one in said]

    def not_ready(self, epoch: Epoch) -> list[Member]:
        """Members that are not about to connect."""
        keys = [f"ready/{epoch.number}/{token}" for token in epoch.tokens]
        if self.client.check(keys):
            return []
        return [one for one, key in zip(epoch.members, keys, strict=True) if not self.client.check([key])]

    def tell(self, epoch: Epoch, why: str, tokens: Sequence[str]) -> None:
        """These members that the epoch is over."""
        for token in tokens:
            self.client.set(f"mail/{epoch.number}/{token}", why)

    def wait_for_mail(self, epoch: Epoch, token: str, timeout: datetime.timedelta) -> str | None:
        """Why the epoch is over, as soon as somebody says so; None: nobody has within the timeout."""
        key = f"mail/{epoch.number}/{token}"
        try:
            self.client.wait([key], timeout)
        except RuntimeError:
            if not self.client.check([key]):  # raises if the store is gone
                return None
        return self.client.get(key).decode()
