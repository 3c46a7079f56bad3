"""The kept path of BaguaTensor."""

from bagua.legacy.tensor_methods import BaguaTensor as BaguaTensor
