# ranks: 1

from support.page_programs import run_blocks

run_blocks("docs/how-to/train/choose-an-algorithm.md", 1)

from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

assert isinstance(algorithm, GradientAllReduceAlgorithm)
assert algorithm.hierarchical
assert "gradient_allreduce" in GlobalAlgorithmRegistry
