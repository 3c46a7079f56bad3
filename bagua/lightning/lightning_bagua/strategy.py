"""The old place of the strategy."""

from bagua.lightning import BaguaStrategy

__all__ = ["BaguaStrategy"]
