"""Mixtures of experts whose experts are spread over the ranks."""

from __future__ import annotations

import sys

from bagua.contrib.moe.layer import MoE

__all__ = ["MoE"]

sys.modules[f"{__name__}.layer"] = sys.modules["bagua.contrib.moe.layer"]
