"""The elements of a tensor as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def elements_of(tensor: Tensor) -> bytes:
    """Of a strided tensor, in the order of its indices, whatever its strides, flags and device are."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element is contiguous with any strides, but not every stride can be viewed as bytes.
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    data: bytes = flat.numpy().tobytes()
    return data
