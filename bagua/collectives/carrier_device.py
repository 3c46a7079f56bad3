"""Which device carries what the ranks tell each other without a tensor of the caller's: objects, barriers, copies of
tensors on a device that the group has no backend for. The only place that decides it. Any thread.

[Note: the device of a communicator] In this order:

1. the CPU, if the group has a backend for it
2. the GPU of the module that the communicator is for (`BaguaProcessGroup.communicator_for`)
3. the GPU that the group is bound to (`init_process_group(device_id=...)` of torch.distributed)
4. the current GPU of the calling thread, as in torch.distributed

What has a tensor is done on the tensor's device. The current device says nothing about a module: a script need not set
it, and each thread has one of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch


def gpus_of(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The GPUs that they are on, each once, in the order of the tensors."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type == "cuda"))


def refuse_other_gpus(what: str, gpus: Sequence[torch.device], bound: torch.device | None) -> None:
    """
    Args:
        what: is on the GPUs, for the message: a module's class.
        gpus: of a module; none for one on the CPU.
        bound: the only GPU on which NCCL communicates in the module's group; None: it is not bound.

    Raises:
        ValueError: one of `gpus` is another one.
    """
    other = next((gpu for gpu in gpus if gpu != bound), None)
    if bound is None or other is None:
        return
    raise ValueError(
        f"{what} is on {other}, and its process group is bound to {bound}, on which alone NCCL communicates.\n"
        f"The group was made by init_process_group(device_id=torch.device({str(bound)!r})).\n"
        f"Move it to {bound}, pass device_id=torch.device({str(other)!r}), or leave device_id out."
    )


def carrier(served: Sequence[str], gpu: torch.device | None, bound: torch.device | None) -> torch.device:
    """[Note: the device of a communicator]

    Args:
        served: the kinds of device that the group has a backend for: "cpu", "cuda".
        gpu: of the module that it is for.
        bound: the GPU that the group is bound to.
    """
    if "cpu" in served or not served:
        return torch.device("cpu")
    return gpu_for(gpu, bound) if "cuda" in served else torch.device(served[0])


def gpu_for(gpu: torch.device | None, bound: torch.device | None) -> torch.device:
    """As `carrier`, where it must be a GPU."""
    return gpu or bound or torch.device("cuda", torch.cuda.current_device())


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """torch.cuda.stream alone, at its end, makes the GPU that was current before so again in a way that takes memory of
    it, also where this process uses another one."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
