"""Sets up the default process group. Called once by the main thread of every process."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import numbers
import os
from typing import Any, Protocol

import torch
import torch.distributed as dist

from bagua import launch_environment
from bagua.collectives.process_group import (
    DEFAULT_TIMEOUT,
    BaguaProcessGroup,
    from_torch_group,
    is_initialized,
    set_default_group,
    to_bagua_process_group,
)
from bagua.env import read_text
from bagua.job import rendezvous, torch_internals
from bagua.misuse import check_integers, explains_calls, nearest, shown

_MAX_TIMEOUT_S = 10 * 365 * 86400.0  # backends count in milliseconds, some of them in 64 bits of nanoseconds
_WITH_NCCL = ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo")
_BACKEND_EXAMPLES = "'nccl', 'gloo' or 'cpu:gloo,cuda:nccl'"


@explains_calls(
    "Call init_process_group(), or init_process_group(backend='nccl', timeout=1800).",
    init_method="Leave init_method out. Processes meet at MASTER_ADDR and MASTER_PORT, or through a store.",
    device_id="Leave device_id out, and call torch.cuda.set_device(device_id) before init_process_group().",
)
def init_process_group(
    store: torch_internals.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    local_world_size: int = -1,
    *,
    timeout: datetime.timedelta | float | None = None,
    backend: str | None = None,
    regroup: KeepsGroup | None = None,
) -> None:
    """
    Makes Bagua's default group, of all processes, and torch's if there is none yet.

    What is done for a module is done on the module's GPU. What belongs to no module, such as `barrier`, uses the GPU
    that torch's group is bound to (`device_id`), or else the current one: set the CUDA device before it.

    Args:
        store: through which the processes meet. None: as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, which
            every launcher sets; a process that was started without any is alone.
        rank: of this process; only with `store`, which needs all three numbers. They are written to RANK, WORLD_SIZE,
            LOCAL_RANK and LOCAL_WORLD_SIZE.
        world_size: number of processes.
        local_world_size: number of processes on this node.
        timeout: of the rendezvous and of each collective: a timedelta or seconds, more than 0. None: 30 minutes.
        backend: "nccl", "gloo", or one for each kind of device: "cpu:gloo,cuda:nccl". None: gloo for tensors on CPUs
            and, where CUDA is available, NCCL for those on GPUs.
        regroup: a `bagua.torch_api.Regroup`: the job goes on without ranks that it loses, and others join. With gloo
            alone. The store is served by a process that is not one of the ranks.

    Raises:
        NotImplementedError: `regroup` with another backend than gloo.
        RuntimeError: ranks have not come within the timeout (torch.distributed.DistStoreError, which names them),
            Bagua is initialized already, or the backend is not available in this build of torch.
        TypeError: `store` is not a store, a number of ranks is not an integer, `timeout` is neither a timedelta nor a
            number, `backend` is not a string, or `regroup` is not a Regroup.
        ValueError: an argument or a variable is missing, out of range or contradicts torch's default group; or srun or
            mpirun started several processes without WORLD_SIZE.
    """
    if is_initialized():
        raise RuntimeError(
            "The default process group is already initialized"
            f" (rank {dist.get_rank()} of {dist.get_world_size()}, backend {dist.get_backend_config()}).\n"
            "Remove the second call of init_process_group(), or guard it with communication.is_initialized().\n"
            "To start over, call torch.distributed.destroy_process_group() first. For a group of some ranks, call"
            " communication.new_group(ranks)."
        )
    if store is not None:
        _check_store(store)
    limit = _checked_timeout(timeout)
    if backend is not None:
        _check_backend(backend)
    if store is None:
        if (rank, world_size, local_world_size) != (-1, -1, -1):
            raise ValueError(
                f"rank={rank}, world_size={world_size}, local_world_size={local_world_size} without a store. Pass a"
                " store as well, or set RANK, WORLD_SIZE and LOCAL_WORLD_SIZE and pass none of them."
            )
    else:
        _check_ranks(rank, world_size, local_world_size)
    device = None
    if regroup is not None:
        device = _checked_regroup(regroup, backend)
    if dist.is_initialized():
        _check_torch_group(store, rank, world_size, timeout, backend)
    if store is not None:
        os.environ["RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(world_size)
        os.environ["LOCAL_RANK"] = str(rank % local_world_size)
        os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    global _keeper
    _keeper = regroup
    if regroup is not None:
        rank, world_size = _own_place()
        served = _store_of_others(world_size, limit) if store is None else store
        set_default_group(regroup.begin(served, rank, world_size, limit, device))
        return
    if not dist.is_initialized():
        _init_torch(store, limit, backend)
    assert dist.group.WORLD is not None
    set_default_group(from_torch_group(dist.group.WORLD))


def destroy_process_group(group: BaguaProcessGroup | dist.ProcessGroup | None = None) -> None:
    """
    Ends a group of Bagua and of torch. All its ranks call it, after their last collective.

    Args:
        group: None: the default group, and with it all others. `init_process_group` may be called again then.

    Raises:
        RuntimeError: there is no default group.
    """
    is_default = group is None and is_initialized()
    if is_default and _keeper is not None:
        _keeper.end()
    dist.destroy_process_group(None if is_default else to_bagua_process_group(group).torch_group)


class KeepsGroup(Protocol):
    """What keeps the default group at work where ranks are lost: bagua.regroup.options.Regroup."""

    def begin(
        self,
        store: torch_internals.Store,
        rank: int,
        world_size: int,
        timeout: datetime.timedelta,
        device: torch.device | None,
    ) -> BaguaProcessGroup:
        """The default group. torch has none so far."""

    def check_launcher(self) -> None:
        """ValueError: the launcher of this process would end the ranks that are left."""

    def end(self) -> None:
        """This process leaves the job."""


_keeper: KeepsGroup | None = None


def _checked_regroup(regroup: Any, backend: str | None) -> torch.device | None:
    """
    Returns:
        the GPU of this process, if it uses NCCL.

    Raises:
        NotImplementedError: a backend that does not follow when a rank is lost.
        TypeError: `regroup` is something else.
        ValueError: torch's default group is there already, or a setting of NCCL contradicts.
    """
    if isinstance(regroup, type) or not all(hasattr(regroup, name) for name in ("begin", "end")):
        raise TypeError(f"regroup is {shown(regroup)}. Pass bagua.torch_api.Regroup(), or nothing.")
    if dist.is_initialized():
        raise ValueError(
            "regroup: torch.distributed is already initialized, and its default group cannot follow when a rank is"
            " lost.\n"
            "Call init_process_group(regroup=...) of bagua.torch_api alone, without torch's init_process_group()."
        )
    given = _default_backend() if backend is None else backend
    has_nccl = given.lower() in _WITH_NCCL
    if given.lower() not in ("gloo", "cpu:gloo") and not has_nccl:
        raise NotImplementedError(
            f"regroup: backend {given!r} is not supported under regroup; gloo and nccl are.\n"
            "Pass backend='nccl', or 'gloo' to train on CPUs, or leave regroup out."
        )
    regroup.check_launcher()
    if has_nccl and torch_internals.is_nccl_waited_for():
        raise ValueError(
            "regroup: TORCH_NCCL_BLOCKING_WAIT=1 is set, and torch would abort NCCL's communicator by itself.\n"
            "Unset it. Collectives of your program raise errors under regroup."
        )
    return torch.device("cuda", torch.cuda.current_device()) if has_nccl else None


def _check_store(store: Any) -> None:
    if isinstance(store, str):
        # The first argument of torch.distributed.init_process_group.
        raise TypeError(
            f"store is {store!r}. A backend is passed by name: init_process_group(backend={store!r}).\n"
            "The first argument is a store, through which processes meet if no launcher has set MASTER_ADDR."
        )
    if not isinstance(store, torch_internals.Store):
        raise TypeError(f"store is {store!r}. Pass a torch.distributed.Store, such as a TCPStore, or none.")


def _checked_timeout(timeout: Any) -> datetime.timedelta:
    if timeout is None:
        return DEFAULT_TIMEOUT
    if isinstance(timeout, bool) or not isinstance(timeout, datetime.timedelta | numbers.Real):
        raise TypeError(f"timeout is {timeout!r}. Pass a timedelta or a number of seconds.")
    limit = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else float(timeout)
    if not 0 < limit <= _MAX_TIMEOUT_S:
        raise ValueError(f"timeout={timeout} must be more than 0 s and at most {_MAX_TIMEOUT_S:.0f} s.")
    return datetime.timedelta(seconds=limit)


def _check_backend(backend: Any) -> None:
    # Whether each backend exists and this build of torch can use it.
    if not isinstance(backend, str):
        raise TypeError(f"backend is {backend!r}. Pass a string, such as {_BACKEND_EXAMPLES}.")
    for part in backend.lower().split(","):
        name = part.rpartition(":")[2]
        if name not in dist.Backend.backend_list or name == dist.Backend.UNDEFINED:
            hint = nearest(name, dist.Backend.backend_list)
            raise ValueError(f"backend={backend!r} names the unknown backend {name!r}.{hint} Pass {_BACKEND_EXAMPLES}.")
        if not dist.is_backend_available(name):
            raise RuntimeError(f"backend={backend!r}: this build of torch has no {name}. Pass 'gloo', or install one.")
        if name == "nccl" and not torch.cuda.is_available():
            raise RuntimeError(f"backend={backend!r}: NCCL needs a GPU, and CUDA is not available. Pass 'gloo'.")
    try:
        dist.distributed_c10d.BackendConfig(dist.Backend(backend))
    except ValueError as error:
        raise ValueError(f"backend={backend!r} is malformed ({error}). Pass {_BACKEND_EXAMPLES}.") from None


def _check_torch_group(
    store: torch_internals.Store | None, rank: int, world_size: int, timeout: object, backend: str | None
) -> None:
    # torch's default group exists: what is asked for must be what it is.
    if store is not None and (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"rank={rank} and world_size={world_size}, but torch.distributed is already initialized with"
            f" rank {dist.get_rank()} of {dist.get_world_size()}."
        )
    given = [name for name, value in (("timeout", timeout), ("backend", backend)) if value is not None]
    if given:
        raise ValueError(
            f"{' and '.join(given)} cannot be changed: torch.distributed is already initialized (backend"
            f" {dist.get_backend_config()}). Pass them to torch.distributed.init_process_group(), or do not call it."
        )


def _check_ranks(rank: int, world_size: int, local_world_size: int) -> None:
    check_integers(rank=rank, world_size=world_size, local_world_size=local_world_size)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: a store needs both, with 0 <= rank < world_size")
    if not 1 <= local_world_size <= world_size:
        raise ValueError(f"local_world_size={local_world_size} must be between 1 and world_size={world_size}")


def _default_backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _own_place() -> tuple[int, int]:
    """
    Returns:
        rank and world size, as the launcher says.

    Raises:
        ValueError: they contradict each other, or a launcher has not said them.
    """
    rank, world_size = launch_environment.rank(), launch_environment.world_size()
    launch_environment.check_not_started_alike()
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} must be between 0 and WORLD_SIZE - 1 = {world_size - 1}")
    return rank, world_size


def _store_of_others(world_size: int, timeout: datetime.timedelta) -> torch_internals.Store:
    """
    A client of the store at MASTER_ADDR and MASTER_PORT, which lives on if a rank dies.

    Raises:
        ValueError: MASTER_PORT is not set.
    """
    address, port = launch_environment.master_address(), launch_environment.master_port()
    if not port:
        raise ValueError(
            "regroup: MASTER_PORT is not set.\nStart the ranks by python -m bagua.distributed.run --regroup. Or serve a"
            " store by --regroup --store-only, and set MASTER_ADDR and MASTER_PORT in each process."
        )
    with rendezvous.told_of_rank_0(address, port):
        return torch_internals.TCPStore(address, port, world_size, False, timeout, wait_for_workers=False)


def _init_torch(store: torch_internals.Store | None, timeout: datetime.timedelta, backend: str | None) -> None:
    rank, world_size = _own_place() if store is None else (launch_environment.rank(), launch_environment.world_size())
    if store is None:
        master_port = launch_environment.master_port()
        if read_text(os.environ, "MASTER_PORT") is None:
            if world_size > 1:
                raise ValueError(
                    f"MASTER_PORT is not set, and WORLD_SIZE is {world_size}; start the program with torchrun, or set "
                    "MASTER_ADDR and MASTER_PORT to where rank 0 is to listen"
                )
            store = torch_internals.HashStore()
        else:
            os.environ.setdefault("MASTER_ADDR", launch_environment.master_address())
            store = _started_store(master_port, rank, world_size, timeout)
    if backend is None:
        backend = _default_backend()
    if world_size > 1:
        rendezvous.wait_for_all(store, rank, world_size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


# How often this process has started, and through what. They are kept: whoever starts over faster than rank 0 would find
# the old server, and lose it.
_stores: dict[tuple[str, int, int, int], tuple[torch_internals.Store, itertools.count[int]]] = {}


def _started_store(port: int, rank: int, world_size: int, timeout: datetime.timedelta) -> torch_internals.Store:
    """Of this start alone: one server may serve all attempts of torchrun and all starts of a process, and gloo would
    find the addresses of former ones."""
    attempt = launch_environment.torchrun_attempt()
    key = launch_environment.master_address(), port, rank, world_size
    if key not in _stores:
        address, *_ = key
        is_master = attempt is None and rank == 0
        told = contextlib.nullcontext() if is_master else rendezvous.told_of_rank_0(address, port)
        with told:  # the server does not wait for the others here: it does in `wait_for_all`
            _stores[key] = (
                torch_internals.TCPStore(
                    *(address, port, world_size, is_master), timeout, wait_for_workers=False, multi_tenant=True
                ),
                itertools.count(),
            )
    server, starts = _stores[key]
    server.set_timeout(timeout)
    return torch_internals.PrefixStore(f"bagua/attempt_{attempt or 0}/start_{next(starts)}", server)
