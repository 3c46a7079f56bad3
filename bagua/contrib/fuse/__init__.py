"""Optimizers that step on a few flat tensors instead of one tensor per parameter."""
