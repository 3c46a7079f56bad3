"""Where the ranks of a job run.

Every process publishes its place in the job's store when it makes its first Bagua group. Any thread may call this.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bagua import launch_environment
from bagua.job import torch_internals
from bagua.job.presence import NO_DOOR, Door, own_presence

PLACE_KEY = "bagua/place/{}"


@dataclass(frozen=True)
class Place:
    """Where one rank runs, as its launcher says."""

    host: str
    node: int | None  # the node's number
    local_rank: int | None
    local_world_size: int | None
    pid: int = 0
    pid_namespace: str = ""  # of `pid`: only processes in the same namespace of the same host can look it up
    door: Door = NO_DOOR

    @classmethod
    def of_json(cls, text: bytes) -> Place:
        said = json.loads(text)
        addresses, port, token = said.pop("door")
        return cls(**said, door=Door(tuple(addresses), port, token))

    def exit_status(self) -> int | None:
        """As wait() tells it; 0 also if it is unknown, because the parent has reaped the process. None: the process
        runs, or that cannot be known here."""
        if not self.pid_namespace or (self.host, self.pid_namespace) != (socket.gethostname(), _pid_namespace()):
            return None
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return 0
        state, *numbers = stat.rpartition(")")[2].split()  # after the name, which may contain brackets
        return int(numbers[-1]) if state in ("Z", "X") else None


def place_of_this_process() -> Place:
    """Raises EnvironmentValueError if a variable is no integer."""

    def stated(name: str) -> int | None:
        return launch_environment.read_integer(name, 0) if launch_environment.is_set(name) else None

    return Place(
        host=socket.gethostname(),
        node=launch_environment.stated_node_rank(),
        local_rank=stated("LOCAL_RANK"),
        local_world_size=stated("LOCAL_WORLD_SIZE"),
        pid=os.getpid(),
        pid_namespace=_pid_namespace(),
        door=presence.door if (presence := own_presence()) is not None else NO_DOOR,
    )


def _pid_namespace() -> str:
    """Empty where it is unknown. With the time of boot, since two hosts may have the same name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - not a path
    except OSError:
        return ""


def publish_place(rank: int) -> None:
    """Lets the others know where this global rank, which is this process, runs."""
    torch_internals.default_store().set(PLACE_KEY.format(rank), json.dumps(asdict(place_of_this_process())))


def places_of(store: torch_internals.Store, ranks: Sequence[int]) -> dict[int, Place]:
    """Of those global ranks that have published theirs. Two requests if all have."""
    if not store.check([PLACE_KEY.format(rank) for rank in ranks]):
        ranks = [rank for rank in ranks if store.check([PLACE_KEY.format(rank)])]
    texts = store.multi_get([PLACE_KEY.format(rank) for rank in ranks])
    return {rank: Place.of_json(text) for rank, text in zip(ranks, texts, strict=True)}


def exited_ranks(places: Mapping[int, Place]) -> tuple[int, ...]:
    """Those of the ranks on this host whose process has ended; where some ended otherwise, without those that SIGTERM
    has ended, as launchers do. Ranks on other hosts are not in it."""
    ended = {rank: status for rank, place in places.items() if (status := place.exit_status()) is not None}
    otherwise = tuple(rank for rank, status in ended.items() if status != signal.SIGTERM)
    return otherwise or tuple(ended)
