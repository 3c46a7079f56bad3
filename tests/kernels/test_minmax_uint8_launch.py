"""MinMaxUInt8 launches compiled kernels directly, exactly as Triton would, and through Triton where it must.

Triton compiles for a GPU that is not there. In place of the compiled C launcher stands a function that keeps what it
was called with; Triton's own Python calls it, too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and arm64")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver as active_driver
from triton.runtime.jit import JITFunction

from bagua.kernels import minmax_uint8_triton as launcher
from bagua.kernels.minmax_uint8_layout import chunk_layout
from bagua.kernels.minmax_uint8_triton_launch import LAUNCHER_FORMAT, KernelLaunch, _log_once

# Of Tensor.get_device() on the CPU.
DEVICE = -1
STREAM = 77
# Where a launch has: packed metadata, metadata of hooks, both hooks.
PACKED, HOOKS, FIRST_ARGUMENT = 9, slice(10, 13), 13

Launch = tuple[Any, ...]


class Device:
    """In place of Triton's driver, and of the code on the device."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self) -> None:
        self.utils = self
        self.current = DEVICE
        self.launches: list[Launch] = []
        self.formats: list[str] = []
        self._functions: dict[bytes, int] = {}

    def compile_module_from_src(self, src: str, **_: object) -> object:
        found = re.search(r'PyArg_ParseTuple\(args, "(\w+)"', src)
        assert found is not None
        self.formats.append(found[1])
        return SimpleNamespace(launch=lambda *arguments: self.launches.append(arguments))

    def load_binary(self, _name: str, code: bytes, _shared: int, _device: int) -> tuple[object, int, int, int, int]:
        return object(), self._functions.setdefault(code, 1000 + len(self._functions)), 32, 0, 1024

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, _device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(active_driver, "_active", fake)
    monkeypatch.setattr(nvidia, "compile_module_from_src", fake.compile_module_from_src)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    for module in (launcher.kernels, launcher.sum_kernels):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                monkeypatch.setattr(kernel, "device_caches", type(kernel.device_caches)(kernel.create_binder))
    launcher._steps.cache_clear()
    return fake


@pytest.fixture
def through_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that Triton's Python launched."""
    names: list[str] = []
    run = JITFunction.run

    def counted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        names.append(self.__name__)
        return run(self, *arguments, **keywords)

    monkeypatch.setattr(JITFunction, "run", counted)
    return names


def aligned(count: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """`offset` elements after a multiple of 64 bytes."""
    memory = torch.zeros(count * dtype.itemsize + 128, dtype=torch.uint8)
    first = -memory.data_ptr() % 64 + offset * dtype.itemsize
    return memory[first : first + count * dtype.itemsize].view(dtype)


def without_hooks(launch: Launch) -> Launch:
    """What it does: addresses in place of tensors, and nothing that Triton keeps for profilers."""
    plain = [value.data_ptr() if isinstance(value, Tensor) else value for value in launch]
    plain[HOOKS] = [None] * 3
    return tuple(plain)


def operations(elements: int, chunks: int, block: int | None, dtype: torch.dtype) -> list[Callable[[], None]]:
    layout = chunk_layout(elements, block)
    floats = aligned(chunks * elements, dtype)
    compressed = aligned(chunks * layout.total_bytes, torch.uint8).view(chunks, -1)
    out = aligned(layout.total_bytes, torch.uint8)
    return [
        lambda: launcher.compress(floats, layout, compressed),
        lambda: launcher.decompress(compressed, floats, False, layout),
        lambda: launcher.decompress(compressed, floats, True, layout),
        lambda: launcher.decompress_reduce_compress(compressed, True, layout, out),
        lambda: launcher.decompress_reduce_compress(compressed, False, layout, out),
    ]


def one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ranges need a buffer of extremes: the same in all calls, so that launches can be compared."""
    buffer = aligned(64, torch.float32)
    monkeypatch.setattr(launcher.torch, "empty", lambda _shape, dtype, device: buffer.view(dtype))  # noqa: ARG005


# Of these, some integers are 1 or multiples of 16, which Triton compiles other code for, and some are not.
SHAPES = [(4096, 2, 1024), (1000, 3, 100), (1, 1, 1024), (9000, 2, None)]


def test_a_direct_launch_is_what_triton_launches(
    device: Device, through_triton: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_buffer(monkeypatch)
    todo = [one for shape in SHAPES for dtype in (torch.float32, torch.float16) for one in operations(*shape, dtype)]
    for operation in todo:  # resolved
        operation()
    resolved, device.launches[:] = len(device.launches), []
    through_triton.clear()
    for operation in todo:
        operation()
    direct, device.launches[:] = list(device.launches), []
    assert through_triton == []
    assert len(direct) == resolved
    with monkeypatch.context() as patch:
        patch.setattr(KernelLaunch, "__call__", KernelLaunch.through_triton)
        for operation in todo:
            operation()
    assert len(through_triton) == resolved
    assert direct == [without_hooks(launch) for launch in device.launches]
    # The functions of fp32 and fp16 are not the same, nor are those of the shapes.
    assert len({launch[4] for launch in direct}) > 2 * len(SHAPES)
    assert all(launch[3] == STREAM for launch in direct)


def test_the_c_launcher_takes_what_is_known_of_it(device: Device) -> None:
    layout = chunk_layout(4096, 1024)
    source, out = aligned(4096, torch.float32), aligned(layout.total_bytes, torch.uint8).view(1, -1)
    for _ in range(2):
        launcher.compress(source, layout, out)
    (form,) = device.formats
    direct = device.launches[-1]
    assert form.startswith(LAUNCHER_FORMAT)
    assert len(form) == len(direct)
    assert len(LAUNCHER_FORMAT) == FIRST_ARGUMENT
    assert direct[FIRST_ARGUMENT : FIRST_ARGUMENT + 2] == (source.data_ptr(), out.data_ptr())
    assert len(direct[PACKED]) == 3, "warps, programs of a cluster, bytes of shared memory"


@pytest.mark.parametrize("aligned_first", [True, False])
def test_code_for_aligned_addresses_gets_no_others(
    device: Device, through_triton: list[str], aligned_first: bool
) -> None:
    layout = chunk_layout(4096, 1024)
    out = aligned(layout.total_bytes, torch.uint8).view(1, -1)
    sources = {offset: aligned(4096, torch.float32, offset) for offset in (0, 1)}
    order = [0, 1] if aligned_first else [1, 0]
    functions: dict[int, set[int]] = {0: set(), 1: set()}
    for offset in [*order, *order, *order]:
        launcher.compress(sources[offset], layout, out)
        functions[offset].add(device.launches[-1][4])
    assert len(through_triton) == 4, "of the aligned launches, the first"
    assert len(functions[0]) == len(functions[1]) == 1
    assert functions[0] != functions[1]


def test_what_is_not_the_current_device_or_is_profiled_goes_through_triton(
    device: Device, through_triton: list[str]
) -> None:
    layout = chunk_layout(4096, 1024)
    source, out = aligned(4096, torch.float32), aligned(layout.total_bytes, torch.uint8).view(1, -1)
    launcher.compress(source, layout, out)
    through_triton.clear()
    launcher.compress(source, layout, out)
    assert through_triton == []
    device.current = 5
    launcher.compress(source, layout, out)
    assert through_triton == ["compress_ranges"]
    device.current = DEVICE

    def hook(_metadata: object) -> None: ...

    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        through_triton.clear()
        chain.add(hook)
        try:
            launcher.compress(source, layout, out)
        finally:
            chain.remove(hook)
        assert through_triton == ["compress_ranges"]
        launcher.compress(source, layout, out)
        assert through_triton == ["compress_ranges"]


@pytest.mark.parametrize(
    "other",
    [
        lambda patch: patch.setattr(nvidia, "_BASE_ARGS_FORMAT", "iiiKKppOOOO"),
        lambda patch: patch.setattr(knobs.runtime, "launch_enter_hook", None),
        lambda patch: patch.setattr(Device, "launcher_cls", type("OtherLauncher", (nvidia.CudaLauncher,), {})),
    ],
    ids=["other format", "other hooks", "other launcher"],
)
def test_another_triton_launches_by_itself(
    device: Device,
    through_triton: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    other: Callable[[pytest.MonkeyPatch], None],
) -> None:
    layout = chunk_layout(4096, 1024)
    source, out = aligned(4096, torch.float32), aligned(layout.total_bytes, torch.uint8).view(1, -1)
    other(monkeypatch)
    _log_once.cache_clear()
    with caplog.at_level(logging.DEBUG, "bagua"):
        for _ in range(3):
            launcher.compress(source, layout, out)
        launcher.decompress(out, source, False, layout)
    assert through_triton == ["compress_ranges"] * 3 + ["decompress_tiles"]
    assert len(device.launches) == 4
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "Triton kernels are launched through Triton's Python"
    ]
