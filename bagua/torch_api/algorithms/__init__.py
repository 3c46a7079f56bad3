"""Algorithms, and their names: `Algorithm.init("gradient_allreduce", hierarchical=True)`."""

from __future__ import annotations

from bagua.torch_api.algorithms import base, gradient_allreduce
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry

__all__ = ["Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry", "base", "gradient_allreduce"]

GlobalAlgorithmRegistry.register(
    "gradient_allreduce", gradient_allreduce.GradientAllReduceAlgorithm, "the mean of all ranks' gradients"
)
