"""What the engine's objects are asked for by algorithms that were written for the old core."""

from __future__ import annotations

from typing import Any

from bagua.engine.bucket import Bucket
from bagua.engine.comm_scheduler import CommScheduler


class BucketMembers:
    """Never constructed: these are members of Bucket."""

    @property
    def backend_bucket(self: Any) -> Bucket:
        """This bucket: what operations are handed."""
        bucket: Bucket = self
        return bucket


class FacadeMembers:
    """Never constructed: these are members of AlgorithmFacade."""

    @property
    def _bagua_backend(self: Any) -> CommScheduler:
        """The scheduler."""
        scheduler: CommScheduler = self.scheduler
        return scheduler
