"""Algorithms, and their names: `Algorithm.init("gradient_allreduce", hierarchical=True)`."""

from __future__ import annotations

from bagua.torch_api.algorithms import (
    async_model_average,
    base,
    bytegrad,
    decentralized,
    gradient_allreduce,
    local_steps,
    low_precision_decentralized,
    powersgd,
    q_adam,
)
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, UnknownAlgorithmError

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "UnknownAlgorithmError",
    "async_model_average",
    "base",
    "bytegrad",
    "decentralized",
    "gradient_allreduce",
    "local_steps",
    "low_precision_decentralized",
    "powersgd",
    "q_adam",
]

GlobalAlgorithmRegistry.register(
    "gradient_allreduce", gradient_allreduce.GradientAllReduceAlgorithm, "the mean of all ranks' gradients"
)
GlobalAlgorithmRegistry.register(
    "bytegrad", bytegrad.ByteGradAlgorithm, "the mean of all ranks' gradients, sent as a byte per element"
)
GlobalAlgorithmRegistry.register(
    "powersgd", powersgd.PowerSGDAlgorithm, "the mean of all ranks' gradients, sent as two factors of low rank"
)
GlobalAlgorithmRegistry.register(
    "qadam", q_adam.QAdamAlgorithm, "Adam; after warm-up its momentum is averaged, sent as a byte per element"
)
GlobalAlgorithmRegistry.register(
    "decentralized",
    decentralized.DecentralizedAlgorithm,
    "each rank steps with its own gradient, from the mean of all ranks' or of two ranks' weights",
)
GlobalAlgorithmRegistry.register(
    "low_precision_decentralized",
    low_precision_decentralized.LowPrecisionDecentralizedAlgorithm,
    "each rank steps with its own gradient, and mixes weights with two neighbors, sent as a byte per element",
)
GlobalAlgorithmRegistry.register(
    "async",
    async_model_average.AsyncModelAverageAlgorithm,
    "each rank trains by itself, and a thread averages the weights of all ranks now and then",
)
GlobalAlgorithmRegistry.register(
    "local_sgd", local_steps.LocalSGDAlgorithm, "each rank trains by itself, and weights are averaged every H steps"
)
GlobalAlgorithmRegistry.register(
    "diloco",
    local_steps.DiLoCoAlgorithm,
    "each rank trains by itself, and every H steps an outer optimizer steps on what the ranks have moved",
)
GlobalAlgorithmRegistry.register(
    "streaming_diloco",
    local_steps.StreamingDiLoCoAlgorithm,
    "as diloco, a fragment of the model at a time, while training goes on",
)
