"""What the ranks tell the command: single lines of their standard output, which every launcher forwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagua.net.compare.traffic import NO_TRAFFIC, Traffic

_MARK = "bagua-net-test-record:"


def emit(kind: str, **values: object) -> None:
    """In one write, so that lines of other ranks do not get into it."""
    sys.stdout.write(f"{_MARK}{json.dumps({'kind': kind, **values})}\n")
    sys.stdout.flush()


def parse(line: str) -> dict[str, Any] | None:
    """None if the line is not a record. Launchers may put the rank before it."""
    _, mark, text = line.partition(_MARK)
    if not mark:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


@dataclass(frozen=True)
class Job:
    """
    Attributes:
        hosts: how many different ones.
        backend: of torch.distributed, "nccl" or "gloo".
        without_gpu: the names of the hosts that have no GPU.
    """

    ranks: int
    hosts: int
    backend: str
    without_gpu: tuple[str, ...] = ()

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Job:
        return cls(record["ranks"], record["hosts"], record["backend"], tuple(record["without_gpu"]))


@dataclass(frozen=True)
class Turn:
    """All ranks, once, with one setting.

    Attributes:
        setting: 0 without the plugin, 1 with it.
        seconds: of one all-reduce, by size in bytes.
        networks, transports: those that NCCL's logs name.
        traffic: of the rank whose interface carried most.
    """

    setting: int
    round: int
    seconds: Mapping[int, float]
    networks: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    wrote_nccl_log: bool = False
    traffic: Traffic = NO_TRAFFIC

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Turn:
        return cls(
            record["setting"],
            record["round"],
            {int(size): seconds for size, seconds in record["seconds"].items()},
            tuple(record["networks"]),
            tuple(record["transports"]),
            record["wrote_nccl_log"],
            Traffic(**record["traffic"]),
        )
