"""The kept path of what Bagua 0.9 had here."""

from bagua.legacy.flattened_calls import *  # noqa: F403
from bagua.legacy.statistical_average import *  # noqa: F403
