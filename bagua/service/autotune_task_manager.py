"""The kept path of what the autotune service knows of a model."""

from bagua.legacy.autotune_task_manager import AutotuneTaskManager as AutotuneTaskManager
