"""Mixtures of experts whose experts are spread over the ranks."""

from __future__ import annotations

from bagua.torch_api.model_parallel.moe.layer import MoE

__all__ = ["MoE"]
