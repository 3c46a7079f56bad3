"""The parts of torch.distributed that have no public name, or another one in another version.

For torch 2.5 and later, tested with 2.13 and 2.14. Each function says what it stands on.
"""

from __future__ import annotations

import datetime
import functools
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch.distributed has these as well, but does not declare them to type checkers.
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed import c10d_logger, distributed_c10d

# Flat tensors in, flat tensors out. The newer names come first: the older ones warn since torch 2.13.
all_gather_flat: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_flat: Callable[..., dist.Work | None] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

_NEVER_SENT = 0x6262  # a tag
_FIRST_SIZES = (1, 1 << 20)  # of all-reduces: NCCL has other algorithms for large ones


def default_store() -> Store:
    """The key-value store through which the default group met; torch's own subsystems ask for it the same way."""
    return distributed_c10d._get_default_store()


def hide_from_compiler(function: Any, reason: str | None = None) -> bool:
    """
    torch.compile neither compiles this Python function, nor what it calls. As torch.compiler.disable, which makes each
    call take a microsecond longer.

    Args:
        function: not to be compiled.
        reason: for the error where torch.compile is told to compile all.

    Returns:
        False: without effect, because torch has not what that stands on (2.7 and later have).
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    names = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
    if not all(hasattr(frames, name) for name in names):
        return False
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return True


def forget_code_without_hooks() -> None:
    """
    A module gets its first hooks. torch.compile does not ask whether a module has any before it runs code that it made
    of another one of the same class, and that has none: so all that is compiled is compiled again.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and getattr(dynamo.config, "skip_nnmodule_hook_guards", True):
        dynamo.reset()


def call_with_gradient(tensor: Any, hook: Callable[[Tensor], None]) -> None:
    """
    As `tensor.register_hook(hook)`, of a tensor that a graph has made, without a handle to remove the hook: making that
    takes longer than the rest. Twice the same hook is called once.
    """
    is_plain = type(tensor) is Tensor
    if not is_plain:
        tensor.register_hook(hook)
    elif tensor._backward_hooks is None:
        tensor._backward_hooks = OrderedDict(((hook, hook),))
        tensor.grad_fn._register_hook_dict(tensor)
    else:
        tensor._backward_hooks[hook] = hook


def is_in_backward() -> bool:
    """Whether this thread is in a backward pass. A forward pass there is one that activation checkpointing repeats."""
    running: int = torch._C._current_graph_task_id()
    return running != -1


# What torch.compile calls the module in its wrapper.
COMPILED = "_orig_mod"
_WRAPPERS = (COMPILED, "_checkpoint_wrapped_module")


def without_wrappers(name: str) -> str:
    """The name of a module or a parameter without what torch.compile and checkpoint_wrapper put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_autograd_compiled() -> bool:
    """
    Whether the running backward pass is one of compiled autograd, which drops the callbacks that hooks queue for the
    end of the pass.
    """
    return bool(getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False))


def add_line(store: Store, key: str, line: str) -> None:
    """To the text under a key, at once, whoever else does so. Not declared to type checkers."""
    store.append(key, line + "\n")  # type: ignore[attr-defined]


def is_nccl_waited_for() -> bool:
    """
    Whether the wait for a collective of NCCL blocks the host, and raises its error. If so, torch's watchdog leaves the
    collectives alone that nobody waits for: a synchronous call of a rank whose peer is gone never ends.
    """
    return os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"


# Beyond the number of any group that torch counts itself.
_FIRST_NUMBER = 1 << 40


def registered_groups() -> int:
    """
    How many groups this process has registered. torch derives the name of a group that only its members create
    (`use_local_synchronization`) from the members and this number; from 2.14 on, from the members and the number of
    groups that this process has taken part in making.
    """
    return len(distributed_c10d._world.pg_names)


@contextmanager
def registered_groups_raised_to(number: int) -> Iterator[None]:
    """Lets it look as if this process had at least so many groups, while one is created and named. Those that torch
    counts are as many as before afterwards: it names the groups that all ranks create by them."""
    world = distributed_c10d._world
    names: dict[Any, Any] = world.pg_names
    fillers = [object() for _ in range(number - len(names))]
    names.update((filler, f"filler {position}") for position, filler in enumerate(fillers))
    counted, world.group_count = world.group_count, _FIRST_NUMBER + number
    try:
        yield
    finally:
        world.group_count = counted
        for filler in fillers:
            del names[filler]


def backend_error(group: dist.ProcessGroup) -> RuntimeError | None:
    """What a collective of NCCL in this group failed with, as soon as torch's watchdog has found out. Asks nothing of
    CUDA. None with torch 2.6 and older, which cannot tell."""
    for device_type in device_types(group):
        backend = group._get_backend(torch.device(device_type))
        what = nccl_error(backend) if backend.name() == "nccl" else None
        if what is not None:
            return RuntimeError(f"NCCL ended a collective: {what}. Its own message is above in this log.")
    return None


def nccl_error(backend: Any) -> str | None:
    """The same of NCCL's backend, as a part of a sentence."""
    ask = getattr(backend, "get_error", None)
    if ask is None or (error := ask().name) == "SUCCESS":
        return None
    return "it timed out" if error == "TIMEOUT" else "a rank exited or the network failed"


def backend_timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """The timeout of the group's first backend, if it says one."""
    for device_type in device_types(group):
        options = getattr(group._get_backend(torch.device(device_type)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, datetime.timedelta):
            return timeout
    return None


def device_types(group: dist.ProcessGroup) -> tuple[str, ...]:
    """The kinds of device that the group has a backend for: "cpu", "cuda"."""
    return tuple(device.type for device in group._device_types)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """ "gloo" or "nccl", or what another backend calls itself. RuntimeError if the group has none for the device."""
    return group._get_backend(device).name()


def bound_device(group: dist.ProcessGroup) -> torch.device | None:
    """The GPU on which alone NCCL communicates in the group, as `init_process_group(device_id=...)` says. None: NCCL
    takes tensors of every GPU, or the group has no NCCL; other backends are not bound."""
    device: torch.device | None = getattr(group, "bound_device_id", None)
    if device is None or device.type != "cuda" or "cuda" not in device_types(group):
        return None
    return device if backend_name(group, torch.device("cuda")) == "nccl" else None


def raw_stream_of(device: torch.device) -> Callable[[], int]:
    """What tells the stream that is current on a CUDA device, as a number, at a tenth of the cost of
    torch.cuda.current_stream."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


@contextmanager
def no_bound_device() -> Iterator[None]:
    """
    While a group of some ranks is created. If the default group is bound to a device, which is an option of its
    `init_process_group`, torch splits its NCCL communicator instead of making a new one, and for that it needs every
    rank of the default group, those outside the new group too.
    """
    group = distributed_c10d._get_default_group()
    device = group.bound_device_id
    if device is None:
        yield
        return
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def second_client(store: Store) -> Store:
    """Another connection to the same store. Raises NotImplementedError before torch 2.8."""
    clone = getattr(store, "clone", None)
    if clone is None:
        raise NotImplementedError(
            f"torch {torch.__version__} cannot connect to a store again; torch 2.8 and later can."
        )
    client: Store = clone()
    return client


def connected_gloo(
    store: Store, rank: int, world_size: int, connect_timeout: datetime.timedelta, timeout: datetime.timedelta
) -> Any:
    """
    gloo's backend among processes that meet under this store's prefix. Returns when all are connected.

    Args:
        store: of which nobody else uses the client meanwhile.
        connect_timeout: after which it raises.
    """
    backend = dist.ProcessGroupGloo(store, rank, world_size, timeout=connect_timeout)
    backend._set_default_timeout(timeout)
    backend._set_sequence_number_for_group()
    return backend


def gpu_for_nccl(device: torch.device) -> str:
    """What NCCL knows this GPU by: no two ranks of a group may have the same."""
    return f"{torch.cuda.get_device_properties(device).uuid} {os.environ.get('NCCL_HOSTID', '')}"


def unconnected_nccl(store: Store, rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
    """
    NCCL's backend among processes that meet under this store's prefix. It can be aborted while it connects: NCCL does
    not block then.

    Args:
        store: of which nobody else uses the client meanwhile.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0
    backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
    backend._set_sequence_number_for_group()
    return backend


def leave_nccl_errors_to_others() -> None:
    """torch's watchdog ends no process, and aborts no communicator: of groups that are made from now on."""
    os.environ.pop("NCCL_ASYNC_ERROR_HANDLING", None)  # the former name
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")  # an error would have all ranks write files
    # After an error, its thread sleeps four times as long as these files may take: by default a minute. Whoever frees
    # the backend waits for it.
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1"


def connect_nccl(backend: Any, device: torch.device) -> list[dist.Work]:
    """Begins to make the communicator that its collectives use on this GPU, and uses it: NCCL makes connections when an
    algorithm is used first, and one of these waits for all processes.

    Returns:
        what is done when they have connected.
    """
    with torch.cuda.device(device):
        backend.eager_connect_single_device(device)
        return [backend.allreduce([torch.zeros(size, device=device)]) for size in _FIRST_SIZES]


def register_group(
    group: dist.ProcessGroup, gloo: Any, nccl: Any | None, name: str, store: Store, is_default: bool
) -> None:
    """
    Makes a group of all ranks known to torch.distributed, as `init_process_group` and `new_group` do, but without their
    communication: this never waits.

    Args:
        group: without a backend so far.
        gloo: its backend for CPUs, connected.
        nccl: its backend for GPUs, connected, if it has one.
        name: that no other group of this process has.
        is_default: it becomes the default group. There is none.
    """
    _give_backends(group, gloo, nccl)
    group_name: Any = name
    group._set_group_name(group_name)
    group._set_group_desc("default_pg" if is_default else "undefined")
    world: Any = distributed_c10d._world
    backends = "cpu:gloo" if nccl is None else "cpu:gloo,cuda:nccl"
    world.pg_map[group] = "gloo" if nccl is None else backends, store
    world.pg_names[group] = name
    distributed_c10d._register_process_group(group_name, group)  # type: ignore[attr-defined]
    world.pg_backend_config[group] = backends
    tag = "" if is_default else f"ptd:{name}"
    world.pg_to_tag[group] = tag
    for one in {"", tag}:
        world.tags_to_pg.setdefault(one, []).append(group)
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    if is_default:
        distributed_c10d._update_default_pg(group)


def _give_backends(group: dist.ProcessGroup, gloo: Any, nccl: Any | None) -> None:
    kinds = dist.ProcessGroup.BackendType
    group._set_default_backend(kinds.GLOO if nccl is None else kinds.NCCL)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if nccl is not None:
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)


def plain_group(gloo: Any, nccl: Any | None) -> dist.ProcessGroup:
    """A group of torch's class with these backends, which torch.distributed does not know. It has collectives that
    backends have in C++ alone. The arguments are those of `register_group`."""
    group = dist.ProcessGroup(gloo.rank(), gloo.size())  # type: ignore[call-arg]  # declared for other arguments
    _give_backends(group, gloo, nccl)
    return group


def refuse_new_groups(message: str) -> Callable[[], None]:
    """From now on `torch.distributed.new_group`, and what is built on it, such as meshes, raise NotImplementedError.

    Returns:
        what allows them again.
    """

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(message)

    names = [name for name in ("_new_group_with_tag", "split_group") if hasattr(distributed_c10d, name)]
    originals = {name: getattr(distributed_c10d, name) for name in names}

    def allow() -> None:
        for name, original in originals.items():
            setattr(distributed_c10d, name, original)

    for name in names:
        setattr(distributed_c10d, name, refuse)
    return allow


def let_former_groups_fail() -> Callable[[], None]:
    """torch describes the group of a function that raises, for a log, and raises something else about one that is not
    registered any more. From now on it describes such a one as none.

    Returns:
        what ends that.
    """
    original = getattr(c10d_logger, "_get_msg_dict", None)
    if original is None:
        return lambda: None

    def describe(func_name: str, *arguments: Any, **named: Any) -> dict[str, Any]:
        try:
            described: dict[str, Any] = original(func_name, *arguments, **named)
        except (KeyError, ValueError):
            return {"func_name": func_name}
        return described

    def undo() -> None:
        c10d_logger._get_msg_dict = original

    c10d_logger._get_msg_dict = describe
    return undo


def abort_group(group: dist.ProcessGroup) -> None:
    """Ends the collectives and messages under way, and closes the connections, as far as the backend can."""
    # That of torch's class ends nothing with gloo. A class of Bagua's own knows better.
    if type(group) is not dist.ProcessGroup and "abort" in vars(type(group)):
        group.abort()
        return
    for device_type in device_types(group):
        abort_backend(group._get_backend(torch.device(device_type)))


def abort_backend(backend: Any) -> None:
    """The same of one backend."""
    if backend.name() == "gloo":
        _close_connections(backend)
    elif backend.name() == "nccl":
        for name in ("abort", "_abort", "_shutdown"):  # newest first
            method = getattr(backend, name, None)
            if method is not None:
                method()
                break


def _close_connections(gloo: Any) -> None:
    """gloo has no abort. But when a message does not come in time it closes all connections of the group, which ends
    whatever waits for any of them (UnboundBuffer::waitRecv). So we wait for one that nobody sends. A peer that is gone
    ends that at once, and closes no other connection: then we wait for one of the next peer."""
    for distance in range(1, gloo.size()):
        peer = (gloo.rank() + distance) % gloo.size()
        try:
            unused = torch.empty(1, dtype=torch.uint8, device="cpu")
            gloo.recv([unused], peer, _NEVER_SENT).wait(datetime.timedelta(milliseconds=1))
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                return
