"""The autotune service of Bagua 0.9, for scripts that use it by itself. Training needs none: see
docs/how-to/train/tune.md. No torch; the server needs Flask (`pip install flask`)."""

from __future__ import annotations

from bagua.service.autotune_client import AutotuneClient
from bagua.service.autotune_service import AutotuneService, make_autotune_server
from bagua.service.autotune_task_manager import AutotuneTaskManager

__all__ = ["AutotuneClient", "AutotuneService", "AutotuneTaskManager", "make_autotune_server"]
