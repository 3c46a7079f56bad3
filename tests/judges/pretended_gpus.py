"""Lets a CPU pass for the GPUs of torch's tests: what they ask of `cuda` is done on the CPU, with gloo.

Most of torch's tests of DDP are about arguments, hooks and gradients, and use a GPU because DDP is usually trained on
one. This process has no other use afterwards. What needs a real GPU is in `torch_ddp_expectations.NEEDS_A_GPU`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_OF_GPUS = ("device_ids", "output_device")
_GPUS = 8  # some tests want four


def pretend() -> None:
    """From now on, and before torch's tests are imported."""
    from torch.testing._internal import common_distributed

    to = torch.nn.Module.to
    torch.nn.Module.cuda = lambda module, *_, **__: module  # type: ignore[method-assign]
    torch.nn.Module.to = lambda module, *places, **named: to(  # type: ignore[method-assign]
        module, *map(_place, places), **{key: _place(value) for key, value in named.items()}
    )
    for name, answer in (("set_device", None), ("synchronize", None), ("manual_seed", None), ("current_device", 0)):
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.device_count = lambda: _GPUS
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    common_distributed.skip_if_no_gpu = lambda test: test
    _Pretended().__enter__()


def without_device_ids(wrapper: Any) -> Any:
    """The class of a wrapper, which is not told of GPUs."""
    make = wrapper.__init__

    def make_on_cpu(self: Any, module: Any, *_device_ids: object, **options: Any) -> None:
        make(self, module, **{name: value for name, value in options.items() if name not in _OF_GPUS})

    wrapper.__init__ = make_on_cpu
    return wrapper


class _Pretended(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _place(kwargs["device"])
        if function is torch.Tensor.cuda:
            return args[0].clone() if args[0].is_leaf else args[0]  # a copy, as to a GPU
        if function is torch.Tensor.to:
            args = (args[0], *map(_place, args[1:]))
        return function(*args, **kwargs)


def _place(one: Any) -> Any:
    """The CPU instead of a GPU, by whatever name; anything else as it is."""
    if type(one) is int or (isinstance(one, str) and one.startswith("cuda")):
        return _CPU
    return _CPU if isinstance(one, torch.device) and one.type == "cuda" else one
