"""int4: half a byte for each element, one of the levels -7 to 7, and a scale for each 32 elements.

Byte j of a block has element j in its lower four bits and element j + 16 in its upper four, each as its level + 8. An
element's error is at most half of the scale: a 14th of the block's largest element. ZeRO++ (arXiv:2306.10209) and LoCo
(arXiv:2407.04480) train with 4 bits and block scales; LoCo with error feedback.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.codecs.block_scale import BlockScaleCodec

# From here to twice as much, fp32 has the integers and nothing between them.
_INTEGERS = 2.0**23
# Of level 0.
_ZERO = 8.0


class Int4(BlockScaleCodec):
    """15 levels with block scales."""

    name = "int4"
    alignment = 32
    payload_bytes = 16
    largest_code = 7.0
    kernels_module = "int4_triton"
    tiles_module = "bagua.codecs.int4_triton"

    def _encode(self, scaled: Tensor) -> Tensor:
        # Adding a number of this size rounds to an integer.
        levels = ((scaled + (_INTEGERS + _ZERO)) - _INTEGERS).to(torch.uint8)
        return levels[..., :16] | (levels[..., 16:] << 4)

    def _decode(self, codes: Tensor) -> Tensor:
        return torch.cat((codes & 0xF, codes >> 4), dim=-1).float() - _ZERO

    def _code_error(self, values: Tensor, scale: Tensor) -> Tensor:
        return (scale * 0.5).expand_as(values)
