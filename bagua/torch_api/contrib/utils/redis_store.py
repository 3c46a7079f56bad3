"""The kept path of RedisStore."""

from bagua.contrib.caching.redis_store import RedisStore as RedisStore
from bagua.contrib.caching.redis_store import start_redis_server_cli as start_redis_server_cli
