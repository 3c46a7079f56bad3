"""What a launcher tells a process through its environment. Read at every call: programs change it after the import."""

from __future__ import annotations

import os

from bagua.env import EnvironmentValueError, read_text

_TORCHRUN_VARIABLES = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def read_integer(name: str, default: int) -> int:
    """Raises EnvironmentValueError for a value that is no decimal integer."""
    text = read_text(os.environ, name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise EnvironmentValueError(f"{name}={text}: must be an integer") from None


def rank() -> int:
    return read_integer("RANK", 0)


def world_size() -> int:
    return read_integer("WORLD_SIZE", 1)


def local_rank() -> int:
    return read_integer("LOCAL_RANK", 0)


def local_world_size() -> int:
    return read_integer("LOCAL_WORLD_SIZE", 1)


def master_address() -> str:
    return read_text(os.environ, "MASTER_ADDR") or "127.0.0.1"


def is_set(name: str) -> bool:
    return read_text(os.environ, name) is not None


def stated_node_rank() -> int | None:
    """The node's number if the launcher says it: GROUP_RANK as torchrun sets it, else NODE_RANK."""
    name = "GROUP_RANK" if all(map(is_set, _TORCHRUN_VARIABLES)) else "NODE_RANK"
    return read_integer(name, 0) if is_set(name) else None


def node_rank() -> int:
    return stated_node_rank() or 0
