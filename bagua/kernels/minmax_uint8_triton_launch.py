"""Launches a Triton kernel again and again at little cost to the host.

Triton finds out anew at every launch which compiled kernel its arguments need: it binds and specializes them and makes
a string of that, which with its hooks takes longer than a copy of 4 MiB. A KernelLaunch has all arguments but the
addresses of its tensors from the beginning. Its first launch goes through Triton, which returns the compiled kernel;
later ones hand the addresses to the C function of that kernel.

That function is not a public interface of Triton. Where it is not the one known here, where an address is not aligned
as that of the first launch was, and while a profiler's hooks are installed, launches go through Triton as usual.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_logger = logging.getLogger("bagua")

# Triton compiles other code for addresses that are not multiples of this.
ALIGNMENT = 16
# What the C function of Triton 3.6 takes before the kernel's own arguments, in the notation of PyArg_ParseTuple: grid
# (3), stream, function, cooperative, dependent, two scratch buffers, packed metadata, metadata of hooks, two hooks.
LAUNCHER_FORMAT = "iiiKKppOOOOOO"

# Launches on a device's current stream, given the addresses; False: nothing was launched, let Triton do it.
_Direct = Callable[[int, list[int]], bool]


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; if not, a warning says so once."""
    if importlib.util.find_spec("triton"):
        return True
    warnings.warn(
        "Triton is not installed. Without it, compression on CUDA takes about ten times as long."
        " Install the triton that this torch asks for.",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


def aligned(read: Tensor) -> Tensor:
    """It, or a copy that lies at a multiple of ALIGNMENT."""
    return read if read.data_ptr() % ALIGNMENT == 0 else read.clone()


def aligned_like(written: Tensor) -> Tensor:
    """It, or memory at a multiple of ALIGNMENT, which is to be copied into it afterwards."""
    return written if written.data_ptr() % ALIGNMENT == 0 else torch.empty_like(written)


class KernelLaunch:
    """A kernel, its grid, and its arguments except for the tensors, which come first.

    Args:
        kernel: of triton.jit.
        grid: (programs,) or (programs, programs of the second dimension).
        arguments: the numbers that follow the tensors, in order.
        constants: the kernel's tl.constexpr arguments.
        options: of the compiler, e.g. num_warps.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[float, ...],
        constants: dict[str, Any],
        options: dict[str, int | None],
    ) -> None:
        self._kernel = kernel
        self._grid = grid
        self._arguments = arguments
        self._constants = constants
        self._options = options
        # By device index. None: there is no direct way.
        self._direct: dict[int, _Direct | None] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launches on the current stream of the tensors' device. Each must have the same dtype in all calls."""
        device = tensors[0].get_device()
        direct = self._direct.get(device)
        if direct is None or not direct(device, [tensor.data_ptr() for tensor in tensors]):
            self.through_triton(*tensors)

    def through_triton(self, *tensors: Tensor) -> None:
        """The same, without what earlier launches found out."""
        device = tensors[0].get_device()
        with _current(tensors[0]):
            compiled = self._kernel[self._grid](*tensors, *self._arguments, **self._constants, **self._options)
        if device not in self._direct and not functools.reduce(operator.or_, map(Tensor.data_ptr, tensors)) % ALIGNMENT:
            self._direct[device] = self._resolved(compiled, len(tensors))

    def _resolved(self, compiled: Any, tensors: int) -> _Direct | None:
        try:
            names = self._kernel.arg_names[tensors + len(self._arguments) :]
            # Constants, too, are arguments of the C function, which ignores them.
            rest = (*self._arguments, *[self._constants[name] for name in names])
            return _direct(compiled, self._grid, rest)
        except Exception as error:
            # Whatever another version of Triton lacks: only speed depends on it.
            _log_once(repr(error))
            return None


@functools.cache
def _log_once(error: str) -> None:
    _logger.debug("Triton kernels are launched through Triton's Python, which takes longer: %s", error)


def _direct(compiled: Any, grid: tuple[int, ...], rest: tuple[float, ...]) -> _Direct:
    """
    Raises:
        Exception: of any kind, where Triton is not as expected.
    """
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime.driver import driver

    launcher = compiled.run
    if type(launcher) is not nvidia.CudaLauncher or nvidia._BASE_ARGS_FORMAT != LAUNCHER_FORMAT:
        raise TypeError(f"{type(launcher)} does not take {LAUNCHER_FORMAT}")
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise ValueError("the kernel needs scratch memory")
    current_device, current_stream = driver.active.get_current_device, driver.active.get_current_stream
    enter_hooks, exit_hooks = knobs.runtime.launch_enter_hook.calls, knobs.runtime.launch_exit_hook.calls
    launch, function = launcher.launch, compiled.function
    head = (*grid, *[1] * (3 - len(grid)))
    middle = (function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata)

    def direct(device: int, addresses: list[int]) -> bool:
        if (
            functools.reduce(operator.or_, addresses) % ALIGNMENT
            or current_device() != device
            or enter_hooks
            or exit_hooks
        ):
            return False
        launch(*head, current_stream(device), *middle, None, None, None, *addresses, *rest)
        return True

    # Triton's cache may drop the compiled kernel, whose code is on the device for as long as it exists.
    direct.compiled = compiled  # type: ignore[attr-defined]
    return direct


def _current(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels start on the current device, which need not be the tensor's."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
