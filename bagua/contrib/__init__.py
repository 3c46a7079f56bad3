"""What a training loop uses in addition to the wrapped module: caches, samplers, layers, optimizers and checkpoints.

Of the core they know collectives, and what the processes of a job know of each other. Users find them in
`bagua.torch_api`: contrib, checkpoint and model_parallel.
"""
