"""Optimizers that step on a few flat tensors instead of one tensor per parameter."""

from bagua.contrib.fuse.optimizer import (
    calculate_mutual_groups,
    fuse_optimizer,
    fuse_step,
    fused_parameters,
    is_fused_optimizer,
)

__all__ = ["calculate_mutual_groups", "fuse_optimizer", "fuse_step", "fused_parameters", "is_fused_optimizer"]
