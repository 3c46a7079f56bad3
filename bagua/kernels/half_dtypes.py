"""The dtypes of half precision: sums and squares of these are computed in float32."""

from __future__ import annotations

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)
