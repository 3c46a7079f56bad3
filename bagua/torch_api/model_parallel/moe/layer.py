"""The kept path of MoE."""

from bagua.contrib.moe.layer import MoE as MoE
