"""Sets up the default process group. Called once by the main thread of every process."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from bagua.collectives import launch_environment, torch_internals
from bagua.collectives.process_group import DEFAULT_TIMEOUT, from_torch_group, is_initialized, set_default_group
from bagua.env import read_text


def init_process_group(
    store: torch_internals.Store | None = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1
) -> None:
    """
    Makes Bagua's default group, of all processes, and torch's if there is none yet: gloo for tensors on CPUs and,
    where CUDA is available, NCCL for those on GPUs. Set the CUDA device first.

    Args:
        store: through which the processes meet. None: as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say, which
            every launcher sets; a process that was started without any is alone.
        rank, world_size, local_world_size: with a store all three; written to RANK, WORLD_SIZE, LOCAL_RANK and
            LOCAL_WORLD_SIZE. Without one, none: the environment has them.

    Raises:
        RuntimeError: it is initialized already.
        ValueError: an argument or a variable is missing, out of range or contradicts torch's default group; or srun or
            mpirun has started several processes and none knows of the others.
    """
    if is_initialized():
        raise RuntimeError("the default process group of Bagua is already initialized")
    if store is None:
        if (rank, world_size, local_world_size) != (-1, -1, -1):
            raise ValueError(
                f"rank={rank}, world_size={world_size}, local_world_size={local_world_size} without a store: give a "
                "store as well, or none of them and set RANK, WORLD_SIZE and LOCAL_WORLD_SIZE"
            )
    else:
        _check_ranks(rank, world_size, local_world_size)
        os.environ["RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(world_size)
        os.environ["LOCAL_RANK"] = str(rank % local_world_size)
        os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
    if dist.is_initialized():
        if store is not None and (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
            raise ValueError(
                f"rank={rank} and world_size={world_size}, but torch.distributed is already initialized with "
                f"rank {dist.get_rank()} of {dist.get_world_size()}"
            )
    else:
        _init_torch(store)
    assert dist.group.WORLD is not None
    set_default_group(from_torch_group(dist.group.WORLD))


def _check_ranks(rank: int, world_size: int, local_world_size: int) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} of world_size={world_size}: a store needs both, with 0 <= rank < world_size")
    if not 1 <= local_world_size <= world_size:
        raise ValueError(f"local_world_size={local_world_size} must be between 1 and world_size={world_size}")


def _init_torch(store: torch_internals.Store | None) -> None:
    rank, world_size = launch_environment.rank(), launch_environment.world_size()
    if store is None:
        launch_environment.check_not_started_alike()
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK={rank} must be between 0 and WORLD_SIZE - 1 = {world_size - 1}")
        master_port = launch_environment.master_port()
        if read_text(os.environ, "MASTER_PORT") is None:
            if world_size > 1:
                raise ValueError(
                    f"MASTER_PORT is not set, and WORLD_SIZE is {world_size}; start the program with torchrun, or set "
                    "MASTER_ADDR and MASTER_PORT to where rank 0 is to listen"
                )
            store = torch_internals.HashStore()
        elif (attempt := launch_environment.torchrun_attempt()) is not None:
            # One store may serve all attempts, and gloo would find the addresses of processes that have died.
            agent = torch_internals.TCPStore(
                launch_environment.master_address(),
                master_port,
                world_size,
                is_master=False,
                timeout=DEFAULT_TIMEOUT,
            )
            store = torch_internals.PrefixStore(f"bagua/attempt_{attempt}", agent)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if store is not None:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=DEFAULT_TIMEOUT)
        return
    os.environ.setdefault("MASTER_ADDR", launch_environment.master_address())
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=DEFAULT_TIMEOUT)
