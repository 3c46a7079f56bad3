"""MinMaxUInt8 for tensors on the CPU: hands their addresses to the compiled module (bagua/kernels/csrc).

It runs in the caller's thread and as many others as torch.get_num_threads() allows, and lets other Python threads run
meanwhile. The arguments were checked by bagua.kernels.minmax_uint8. Importing this fails where the module is not built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.kernels import _minmax_uint8
from bagua.kernels.minmax_uint8_layout import ChunkLayout

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def compress(source: Tensor, layout: ChunkLayout, out: Tensor, instructions: str = "") -> None:
    """As minmax_uint8_reference.compress; `instructions` other than the processor's best are for tests."""
    _minmax_uint8.compress(
        source.data_ptr(),
        _TYPES[source.dtype],
        out.shape[0],
        layout.elements,
        layout.block,
        layout.total_bytes,
        out.data_ptr(),
        torch.get_num_threads(),
        instructions,
    )


def decompress(
    compressed: Tensor, target: Tensor, accumulate: bool, layout: ChunkLayout, instructions: str = ""
) -> None:
    """As minmax_uint8_reference.decompress."""
    _minmax_uint8.decompress(
        compressed.data_ptr(),
        target.data_ptr(),
        _TYPES[target.dtype],
        accumulate,
        compressed.shape[0],
        layout.elements,
        layout.block,
        layout.total_bytes,
        torch.get_num_threads(),
        instructions,
    )


def decompress_reduce_compress(
    received: Tensor, average: bool, layout: ChunkLayout, out: Tensor, instructions: str = ""
) -> None:
    """As minmax_uint8_reference.decompress_reduce_compress."""
    _minmax_uint8.decompress_reduce_compress(
        received.data_ptr(),
        average,
        received.shape[0],
        layout.elements,
        layout.block,
        layout.total_bytes,
        out.data_ptr(),
        torch.get_num_threads(),
        instructions,
    )
