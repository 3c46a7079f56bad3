"""fp8_e4m3: a byte for each element, a float with 4 bits of exponent and 3 of mantissa, and a scale for each 128.

Micikevicius et al., "FP8 formats for deep learning" (arXiv:2209.05433). The format is that of torch.float8_e4m3fn. An
element's error is at most 1/16 of it or, for those below a 28672nd of the block's largest, 1/2^10 of the scale:
unlike int8, the error of small elements does not depend on large ones next to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagua.codecs.block_scale import BlockScaleCodec


class Fp8E4M3(BlockScaleCodec):
    """fp8 with block scales."""

    name = "fp8_e4m3"
    alignment = 128
    payload_bytes = 128
    largest_code = 448.0
    has_fp8_codes = True
    kernels_module = "fp8_e4m3_triton"
    tiles_module = "bagua.codecs.fp8_e4m3_triton"

    def _encode(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def _decode(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()

    def _code_error(self, values: Tensor, scale: Tensor) -> Tensor:
        return values.abs() * 2.0**-4 + scale * 2.0**-10
