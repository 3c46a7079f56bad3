"""The package `lightning_bagua` of the wheel: Bagua's strategy for Lightning, by its old name."""

from bagua.lightning import BaguaStrategy

__all__ = ["BaguaStrategy"]
