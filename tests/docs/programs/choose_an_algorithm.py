# ranks: 1
"""An algorithm is chosen by name."""

from support.page_programs import run_blocks

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

run_blocks("docs/how-to/train/choose-an-algorithm.md", 1)


assert isinstance(algorithm, GradientAllReduceAlgorithm)
assert algorithm.hierarchical
assert "gradient_allreduce" in GlobalAlgorithmRegistry
