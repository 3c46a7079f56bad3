"""The kept path of what fuses optimizers."""

from bagua.contrib.fuse.optimizer import *  # noqa: F403
