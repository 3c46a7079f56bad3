"""The kept path of BaguaBucket."""

from __future__ import annotations

from bagua.comm_ops.public_bucket import BaguaBucket

__all__ = ["BaguaBucket"]
