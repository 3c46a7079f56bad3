"""A real Redis server for a test."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="needs redis-server (Debian: apt-get install redis-server)"
)


@contextlib.contextmanager
def redis_server(capacity_bytes: int = 64 << 20) -> Iterator[Any]:
    """A RedisServer of this process."""
    from bagua.contrib.caching.redis_store import RedisServer

    server = RedisServer("127.0.0.1", capacity_bytes)
    try:
        yield server
    finally:
        server.stop()
