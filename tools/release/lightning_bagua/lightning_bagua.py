"""Bagua's strategy for Lightning, by its old name. Importing this registers `Trainer(strategy="bagua")`."""

from bagua.lightning import BaguaStrategy

__all__ = ["BaguaStrategy"]
