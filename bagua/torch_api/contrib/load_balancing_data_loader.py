"""The kept path of the samplers that balance costs."""

from bagua.contrib.load_balancing_data_loader import *  # noqa: F403
