"""Mixtures of experts whose experts are spread over the ranks."""

from bagua.contrib.moe.layer import MoE

__all__ = ["MoE"]
