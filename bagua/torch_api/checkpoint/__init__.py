"""Checkpoints of training: written so that a crash never damages the latest, read alike by all ranks."""

from __future__ import annotations

from bagua.torch_api.checkpoint.loading import load_checkpoint
from bagua.torch_api.checkpoint.saving import PendingCheckpoint, async_save_checkpoint, save_checkpoint

__all__ = ["PendingCheckpoint", "async_save_checkpoint", "load_checkpoint", "save_checkpoint"]
