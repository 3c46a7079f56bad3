"""The kept path of what the autotune service and its clients send to each other."""

from bagua.legacy.autotune_messages import *  # noqa: F403
