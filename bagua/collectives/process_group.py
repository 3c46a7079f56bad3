"""Bagua's process groups: a torch group with its communicators and a CUDA stream for work beside the caller's.

A group lives as long as its user or, if it was adopted from torch, as its torch group. Any thread may use one; the
communicators that are made on first use are made under a lock, by all their members.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import operator
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from bagua.collectives import group_topology
from bagua.collectives.carrier_device import gpus_of, refuse_other_gpus
from bagua.collectives.communicator import BaguaCommunicator, CommMember, TorchGroupReference
from bagua.job import gloo_exit, places, torch_internals
from bagua.job.deadlock import EVERYWHERE, OperationOrder
from bagua.job.failure_report import explain_failure
from bagua.job.job_thread import current_job_thread, waiting_for
from bagua.job.waiting import Members
from bagua.rank_list import rank_list

# Never reset, also not when torch is shut down and set up again: a name that was used once leaves addresses in the
# store that would mislead the next group of that name.
_attempts: dict[tuple[int, ...], OperationOrder] = {}
_used_numbers = 0


def create_member_group(whole: Members, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """A torch group, created by its members alone: nobody else has to call. By one thread of each member at a time.

    torch can do that (`use_local_synchronization`), but it names the group after the members and the number of groups
    that the process has, and processes with different numbers, which is what groups of some ranks lead to, would wait
    for each other under different names. So the members first agree, through the store, on a number, the largest of
    theirs. It is above those of their earlier groups too, so that no name comes twice.

    Args:
        whole: a group that has all of these ranks, for its timeout and for messages.
        ranks: global, ascending, this process among them. Every one of them calls this, in the same order for the
            same ranks.
        backend: as torch.distributed.new_group has it; None: that of the default group.

    Raises:
        CollectiveError: a member did not call within the timeout; it says what others do.
    """
    global _used_numbers
    members = tuple(ranks)
    what = f"making a group of {rank_list(members)}"
    attempts = _attempts.get(members)
    if attempts is None:
        names = "_".join(map(str, members))
        attempts = _attempts[members] = OperationOrder(f"{EVERYWHERE}{len(members)}/{zlib.crc32(names.encode())}")
    current_job_thread().count(attempts)
    attempt = attempts.begin(what)
    store = torch_internals.PrefixStore(
        f"bagua/member_group/{'_'.join(map(str, members))}/{attempt}", torch_internals.default_store()
    )
    store.set(str(dist.get_rank()), str(max(torch_internals.registered_groups(), _used_numbers)))
    keys = [str(rank) for rank in members]
    # Not as a wait that can be ended: the one who makes a communicator holds the lock that `abort` needs.
    waiting = waiting_for(members, what, whole, attempts, attempt, is_ended_by_abort=False)
    with waiting or contextlib.nullcontext():
        try:
            store.wait(keys, whole.timeout)
        except dist.DistStoreError as error:
            failure = explain_failure(error, whole, what, members)
            raise failure from error
        number = max(map(int, store.multi_get(keys)))
        with torch_internals.no_bound_device(), torch_internals.registered_groups_raised_to(number):
            group = dist.new_group(
                list(members), timeout=whole.timeout, backend=backend, use_local_synchronization=True
            )
    _used_numbers = number + 1
    attempts.done = attempt
    assert isinstance(group, dist.ProcessGroup), "this process is a member"
    return group


DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
STREAM_PRIORITY = -1  # above the default: communication is what the next step waits for


class BaguaProcessGroup:
    """
    Ranks that communicate with each other. Made by `new_group`, `from_torch_group` or `init_process_group`.

    Attributes:
        ranks: global ranks, ascending unless the adopted torch group says otherwise; a rank of the group is a position
            in this list.
        group_name: a number that counts the Bagua groups of this process.
        timeout: of a collective on the CPU.
        bound_device: the GPU on which alone NCCL communicates, of `init_process_group(device_id=...)`; None: any.
        operations: that all members begin in the same order; see `failures_named`. The collectives of its communicators
            have orders of their own.
    """

    def __init__(
        self,
        torch_group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        stream: torch.cuda.Stream | None = None,
        timeout: datetime.timedelta | None = None,
        bound: torch.device | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self.group_name = str(next(_group_names))
        self.timeout = timeout or DEFAULT_TIMEOUT
        self._reference = TorchGroupReference(torch_group, f"Bagua group {self.group_name}") if torch_group else None
        if torch_group is not None and bound is None:
            bound = torch_internals.bound_device(torch_group)
        self.bound_device = bound
        self._stream = stream
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.RLock()  # what makes a communicator asks for the global one
        self._global: BaguaCommunicator | None = None
        self._intra_node: BaguaCommunicator | None = None
        self._inter_node: BaguaCommunicator | None = None
        self._background: BaguaCommunicator | None = None
        self._topology: group_topology.GroupTopology | None = None
        self.operations = OperationOrder(self.group_name) if torch_group is None else _order_of(torch_group, "engine")
        self._find_topology: Callable[[], group_topology.GroupTopology] | None = None
        _groups_by_name[self.group_name] = self
        if torch_group is not None:
            _order_of(torch_group, "global")  # from now on others may know that nothing has begun in it
            gloo_exit.expect_groups()
            places.publish_place(dist.get_rank())

    def follow(
        self,
        torch_group: dist.ProcessGroup,
        background: dist.ProcessGroup,
        topology: Callable[[], group_topology.GroupTopology],
    ) -> None:
        """Be a group of other ranks from now on, all of torch's default group: those that are left of a job. Whoever
        has this object communicates with these then; what is under way was ended before.

        Args:
            torch_group: the new default group of torch.
            background: another one of the same ranks, for `get_background_communicator`.
            topology: of the group; it waits for nobody.
        """
        self._find_topology = topology
        self.ranks = list(range(torch_group.size()))
        self._reference = TorchGroupReference(torch_group, f"Bagua group {self.group_name}")
        self._intra_node = self._inter_node = self._topology = None
        self.operations = _order_of(torch_group, "engine")
        for kind, group in (("global", torch_group), ("background", background)):
            held: BaguaCommunicator | None = getattr(self, f"_{kind}")
            if held is None:
                setattr(self, f"_{kind}", self._communicator(group, kind, self.ranks))
            else:
                held.follow(group, self.ranks, _order_of(group, kind))
        places.publish_place(dist.get_rank())

    @property
    def is_member(self) -> bool:
        """Whether this process is."""
        return self._reference is not None

    @property
    def is_alive(self) -> bool:
        """Whether its torch group exists, which torch destroys in `destroy_process_group`."""
        return self._reference is not None and self._reference.is_alive

    @property
    def follows(self) -> bool:
        """Whether it becomes a group of other ranks when some are lost or join, as the default group under regroup."""
        return self._find_topology is not None

    @property
    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)

    @property
    def torch_group(self) -> dist.ProcessGroup | None:
        """None for those that are no members. Raises RuntimeError if it has been destroyed."""
        return self._reference.get() if self._reference else None

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """On the GPU that the group is bound to, or else the current one of the first use. None without CUDA."""
        if self._stream is None and torch.cuda.is_available():
            with self._lock:
                if self._stream is None:
                    self._stream = torch.cuda.Stream(self.bound_device, STREAM_PRIORITY)  # type: ignore[no-untyped-call]
        return self._stream

    def stream_on(self, device: torch.device) -> torch.cuda.Stream:
        """The stream for work on tensors of this CUDA device: `stream`, if that is on it. What is queued under a stream
        of another device would run on whatever stream is current on this one."""
        found = self._streams.get(device)
        if found is None:
            with self._lock:
                if self._stream is None:
                    self._stream = torch.cuda.Stream(device, STREAM_PRIORITY)  # type: ignore[no-untyped-call]
                found = self._streams.get(device)
                if found is None:
                    is_here = self._stream.device == device
                    found = self._stream if is_here else torch.cuda.Stream(device, STREAM_PRIORITY)  # type: ignore[no-untyped-call]
                    self._streams[device] = found
        return found

    @property
    def topology(self) -> group_topology.GroupTopology:
        """Raises RuntimeError or ValueError: see `find_topology`."""
        if self._topology is None:
            find = self._find_topology
            self._topology = group_topology.find_topology(self.ranks) if find is None else find()
        return self._topology

    def get_global_communicator(self) -> BaguaCommunicator:
        """Of all members. The sentinel NON_COMM_MEMBER for other processes."""
        with self._lock:
            if self._global is None:
                self._global = self._communicator(self.torch_group, "global", self.ranks)
            return self._global

    def communicator_for(self, what: str, tensors: Iterable[torch.Tensor]) -> BaguaCommunicator:
        """The global communicator for the owner of these tensors, such as a module. What has no tensor, such as an
        object or a barrier, is carried by the GPU of the first that is on one.

        Args:
            what: owns them, for the message: a module's class.
            tensors: on any devices.

        Raises:
            ValueError: one is on another GPU than the group is bound to.
        """
        gpus = gpus_of(tensors)
        refuse_other_gpus(what, gpus, self.bound_device)
        return self.get_global_communicator().on(next(iter(gpus), None))

    def get_intra_node_communicator(self) -> BaguaCommunicator:
        """Of the members on this node. On first use all of those have to call it."""
        with self._lock:
            if self._intra_node is None:
                ranks = self.topology.node_of(dist.get_rank()) if self.is_member else ()
                self._intra_node = self._sub_communicator("intra-node", ranks)
            return self._intra_node

    def get_inter_node_communicator(self) -> BaguaCommunicator:
        """Of the first member of every node, NON_COMM_MEMBER for others. On first use all of those have to call it."""
        with self._lock:
            if self._inter_node is None:
                self._inter_node = self._sub_communicator("inter-node", self.topology.leaders if self.is_member else ())
            return self._inter_node

    def get_background_communicator(self) -> BaguaCommunicator:
        """Of all members, for a thread that communicates beside others: what it says in a group of its own does not mix
        with what is said in this one meanwhile. On first use all members have to call it."""
        with self._lock:
            if self._background is None:
                self._background = self._sub_communicator("background", self.ranks if self.is_member else ())
            return self._background

    def _sub_communicator(self, kind: str, ranks: Sequence[int]) -> BaguaCommunicator:
        if not self.is_member or dist.get_rank() not in ranks:
            return CommMember.NON_COMM_MEMBER
        whole = self.get_global_communicator()
        whole.raise_if_aborted(f"making the {kind} communicator")  # the others will not come
        # Not the global group, even where it has the same members: collectives of different kinds may be under way at
        # the same time, and each needs an order of its own.
        part = self._communicator(create_member_group(self, sorted(ranks)), kind, sorted(ranks))
        whole.add_follower(part)
        return part

    def _communicator(self, group: dist.ProcessGroup | None, kind: str, ranks: Sequence[int]) -> BaguaCommunicator:
        if group is None:
            return CommMember.NON_COMM_MEMBER
        operations = _order_of(group, kind)
        return BaguaCommunicator(
            *(group, ranks, self.group_name, kind, self._stream_for, self.timeout, self.bound_device, operations)
        )

    def _stream_for(self, gpu: torch.device | None) -> torch.cuda.Stream | None:
        return self.stream if gpu is None else self.stream_on(gpu)

    def raise_if_aborted(self, what: str) -> None:
        """
        Args:
            what: would be done, for the message.

        Raises:
            RuntimeError: `abort` of one of the group's communicators was called in this process.
        """
        for one in self._communicators():
            one.raise_if_aborted(what)

    def abort(self) -> None:
        """`BaguaCommunicator.abort` of all its communicators."""
        self.get_global_communicator().abort()

    @property
    def torch_groups(self) -> list[dist.ProcessGroup]:
        """That carry its collectives, as far as they are needed until now. None after `abort`."""
        communicators = self._communicators()
        if any(one.check_abort() for one in communicators):
            return []
        return [one.torch_group for one in communicators]

    def _communicators(self) -> list[BaguaCommunicator]:
        made = (self._global, self._intra_node, self._inter_node, self._background)
        return [one for one in made if one is not None and one is not CommMember.NON_COMM_MEMBER]

    def __repr__(self) -> str:
        return f"BaguaProcessGroup(group_name={self.group_name!r}, ranks={self.ranks})"


def _order_of(group: dist.ProcessGroup, kind: str) -> OperationOrder:
    """As long as the torch group, which several Bagua groups may be on: others compare how far this process is in it.

    Args:
        kind: of the operations: "engine", or that of a communicator.
    """
    with _orders_lock:
        by_kind = _orders.setdefault(group, {})
        if kind not in by_kind:
            by_kind[kind] = OperationOrder(f"{group.group_name}/{kind}")  # torch's name is the same on all ranks
        current_job_thread().count(by_kind[kind])
        return by_kind[kind]


_orders: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, OperationOrder]] = weakref.WeakKeyDictionary()
_orders_lock = threading.RLock()
_group_names = itertools.count()
_groups_by_name: weakref.WeakValueDictionary[str, BaguaProcessGroup] = weakref.WeakValueDictionary()
_default_group: BaguaProcessGroup | None = None
# Empties by itself: the values do not hold the keys, and torch lets go of a group when it is destroyed.
_torch_to_bagua_pg_map: weakref.WeakKeyDictionary[dist.ProcessGroup, BaguaProcessGroup] = weakref.WeakKeyDictionary()


def is_initialized() -> bool:
    """Whether `init_process_group` was called, and torch was not shut down since."""
    group = _default_group
    # Whoever holds on to the old torch group keeps it alive, so being alive is not enough.
    return group is not None and group.is_alive and group.torch_group is dist.group.WORLD


def _get_default_group() -> BaguaProcessGroup:
    if _default_group is None or not is_initialized():
        raise RuntimeError(
            "the default process group of Bagua is not initialized; call bagua.torch_api.init_process_group() first"
        )
    return _default_group


def set_default_group(group: BaguaProcessGroup) -> None:
    """By `init_process_group` alone."""
    global _default_group
    _default_group = group


def get_communicator(group_name: str, comm_name: str) -> BaguaCommunicator:
    """
    Args:
        comm_name: "global", "inter" or "intra".

    Raises:
        ValueError: there is no such group, or no such communicator of a group.
    """
    group = _groups_by_name.get(group_name)
    if group is None:
        raise ValueError(f"there is no Bagua process group named {group_name!r}; there are {sorted(_groups_by_name)}")
    getters = {
        "global": group.get_global_communicator,
        "inter": group.get_inter_node_communicator,
        "intra": group.get_intra_node_communicator,
    }
    if comm_name not in getters:
        raise ValueError(f"comm_name is {comm_name!r}, must be one of {', '.join(getters)}")
    return getters[comm_name]()


def new_group(ranks: Sequence[int] | None = None, stream: torch.cuda.Stream | None = None) -> BaguaProcessGroup:
    """
    Every process calls this, members or not, and in the same order if there are several.

    Args:
        ranks: global ranks of the members, in any order; the group's order is ascending. None: all. Of an empty list,
            a group that no process is a member of.
        stream: for work beside the caller's; None: a new one of high priority when it is needed.

    Raises:
        RuntimeError: Bagua is not initialized.
        TypeError: `ranks` is no list of integers.
        ValueError: a rank is out of range or named twice.
    """
    default = _get_default_group()
    world_size = dist.get_world_size()
    members = sorted(range(world_size) if ranks is None else _integers(ranks))
    if not members:
        return BaguaProcessGroup(None, members, stream, default.timeout)  # of which torch has none
    if members[0] < 0 or members[-1] >= world_size:
        raise ValueError(f"ranks {members} must be between 0 and {world_size - 1}, the world size is {world_size}")
    if len(set(members)) != len(members):
        raise ValueError(f"ranks {members} names a rank more than once")
    group = dist.new_group(members, timeout=default.timeout)
    is_member = dist.get_rank() in members
    return BaguaProcessGroup(group if is_member else None, members, stream, default.timeout)


def _integers(ranks: Iterable[int]) -> list[int]:
    # Numbers that are almost ranks, such as 0.5, would make a group that nobody is a member of.
    try:
        return [operator.index(rank) for rank in ranks]
    except TypeError:
        raise TypeError(f"ranks is {ranks!r}, must be a list of integers, such as [0, 1], or None for all") from None


def duplicate_group(group: BaguaProcessGroup, backend: str | None = None) -> BaguaProcessGroup:
    """Another group of the same ranks, for communication that goes on beside that of `group`: collectives of one group
    must have one order. Every member calls it, and keeps it alive. `abort` of the group's global communicator ends this
    one's work, too.

    Args:
        backend: as torch.distributed.new_group has it; None: that of the default group.

    Raises:
        CollectiveError: a member did not call within the group's timeout.
        RuntimeError: the group was aborted.
    """
    group.raise_if_aborted("making a group of the same ranks")
    ranks = sorted(group.ranks)
    made = create_member_group(group, ranks, backend)
    duplicate = BaguaProcessGroup(made, ranks, timeout=group.timeout, bound=group.bound_device)
    group.get_global_communicator().add_follower(duplicate.get_global_communicator())
    return duplicate


def from_torch_group(group: dist.ProcessGroup | int, stream: torch.cuda.Stream | None = None) -> BaguaProcessGroup:
    """
    The Bagua group on top of a torch group; always the same for the same torch group. Only the members have to call it.

    Args:
        group: what torch.distributed.new_group returned. To processes that are no members it does not tell the ranks:
            their Bagua group has none.
        stream: for work beside the caller's, if the torch group has no Bagua group yet.

    Raises:
        TypeError: `group` is no torch process group.
        ValueError: torch.distributed does not know the group, and so not its ranks.
    """
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return BaguaProcessGroup(None, [], stream)
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}, must be a torch.distributed.ProcessGroup")
    known = _torch_to_bagua_pg_map.get(group)
    if known is None:
        try:
            ranks = dist.get_process_group_ranks(group)
        except KeyError:
            raise ValueError(
                f"torch.distributed does not know this {type(group).__name__} of {group.size()} ranks: the global"
                " ranks of its members are unknown, and torch's collectives refuse it.\n"
                "Pass a group that torch.distributed.new_group() has made, or None for all ranks."
            ) from None
        known = BaguaProcessGroup(group, ranks, stream, torch_internals.backend_timeout(group))
        _torch_to_bagua_pg_map[group] = known
    return known


def adopt(
    known: BaguaProcessGroup | None,
    torch_group: dist.ProcessGroup,
    background: dist.ProcessGroup,
    timeout: datetime.timedelta,
    topology: Callable[[], group_topology.GroupTopology],
) -> BaguaProcessGroup:
    """The Bagua group on top of torch's default group, of which another one carries what runs beside its collectives.

    Args:
        known: the one that was on top of the last default group, and follows this one; None: a new one.
        topology: as of `BaguaProcessGroup.follow`.
    """
    if known is None:
        known = BaguaProcessGroup(torch_group, range(torch_group.size()), timeout=timeout)
    known.follow(torch_group, background, topology)
    _torch_to_bagua_pg_map[torch_group] = known
    return known


def to_bagua_process_group(process_group: BaguaProcessGroup | dist.ProcessGroup | None = None) -> BaguaProcessGroup:
    """
    The Bagua group that is meant.

    Args:
        process_group: a Bagua group is returned as it is, a torch group is adopted. None: Bagua's default group or, if
            only torch is initialized, torch's.

    Raises:
        RuntimeError: None is given and neither is initialized.
        TypeError: anything else is given.
    """
    if isinstance(process_group, BaguaProcessGroup):
        return process_group
    if process_group is None:
        if not is_initialized() and dist.is_initialized():
            assert dist.group.WORLD is not None
            return from_torch_group(dist.group.WORLD)
        return _get_default_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"process_group is {process_group!r}, must be a Bagua or torch process group or None")
    return from_torch_group(process_group)


_made: weakref.WeakKeyDictionary[BaguaProcessGroup, dict[str, BaguaProcessGroup]] = weakref.WeakKeyDictionary()


def group_for(purpose: str, group: BaguaProcessGroup, backend: str | None = None) -> BaguaProcessGroup:
    """The duplicate of a group that serves this purpose; for a group of one rank, itself. Collective, the first time.

    Args:
        purpose: a name that is always used with the same backend.
        backend: as in `duplicate_group`, whose errors these are, too.

    Raises:
        NotImplementedError: the group follows when ranks are lost, and its duplicate would not.
    """
    if group.follows:
        raise NotImplementedError(
            f"regroup: {purpose} cannot be exchanged between {group.size} ranks under regroup: that needs a group of"
            " its own, which would not follow when a rank is lost.\n"
            "Leave out the layer or sampler that exchanges them, or leave regroup out of init_process_group()."
        )
    if group.size == 1:
        return group
    by_purpose = _made.setdefault(group, {})
    own = by_purpose.get(purpose)
    if own is None or not own.is_alive:  # torch was shut down since
        own = by_purpose[purpose] = duplicate_group(group, backend)
    return own
