"""The kept path of the autotune service."""

from bagua.legacy.autotune_service import *  # noqa: F403
from bagua.legacy.autotune_task_manager import AutotuneTaskManager as AutotuneTaskManager
