"""Compiles Triton kernels for a GPU, which need not be there, with the arguments that a launcher gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

H100 = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int32: "*i32"
}  # fmt: skip

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Recorder:
    """In a kernel's place: keeps with what it is launched, and launches nothing."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel = kernel
        self._launches = launches

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        def launch(*arguments: object, **keywords: object) -> None:
            self._launches.append((self._kernel, arguments, keywords))

        return launch


def ptx_of(launch: Launch, target: GPUTarget = H100) -> str:
    """Compiled as Triton's launcher would: 1 is a constant, and what is a multiple of 16 is known as such."""
    kernel, arguments, keywords = launch
    signature, constants, attributes = {}, {}, {}
    options = {name: value for name, value in keywords.items() if name not in kernel.arg_names}
    values = {**dict(zip(kernel.arg_names, arguments, strict=False)), **keywords}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            multiple = value.data_ptr() % 16 == 0
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize and isinstance(value, int)):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            multiple = False
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            multiple = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if multiple:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return str(triton.compile(source, target=target, options=options).asm["ptx"])
