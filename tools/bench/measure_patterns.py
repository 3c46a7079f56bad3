"""How long the patterns of training's traffic take through the plugin alone, without NCCL and GPUs.

    python -m tools.netlab run --hosts 4 --rate 1G -- python tools/bench/measure_patterns.py --bytes 52M

In a turn every rank sends `--bytes` and receives as many, in messages as NCCL's of point-to-point transfers:

    ring         to the next rank, from the one before
    pairs        with one partner, always the same
    shift        with one partner, another one in each turn: `decentralized` with shift_one
    all-to-all   with all others, an equal share each: what compressed all-reduces send

Nobody waits for others between turns, as in training: who is done early begins to send to whom others still send. A
launcher starts the ranks (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Rank 0 prints what all turns of the slowest rank
took, for one turn, and the median and the longest turn of all ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

from plugin_table import Plugin

from bagua.comm_ops.peer_selection import ring_neighbours, shift_one_partner
from bagua.net.bench.argument_types import byte_size, names_of, within
from bagua.net.bench.machine import describe_machine
from bagua.net.bench.table import Column, render_rows
from bagua.net.library import library_path

CHANNELS = 2
MESSAGE_BYTES = 128 << 10
UNDER_WAY = 8
_PATIENCE_S = 60.0
_NAP_S = 0.0002  # after a look at everything that found nothing done: the plugin's threads need the processors

Partners = tuple[Sequence[int], Sequence[int]]  # to whom, from whom
PATTERNS: dict[str, Callable[[int, int, int], Partners]] = {  # of rank, ranks, turn
    "ring": lambda rank, ranks, _: ([ring_neighbours(rank, ranks)[1]], [ring_neighbours(rank, ranks)[0]]),
    "pairs": lambda rank, ranks, _: ([shift_one_partner(rank, ranks, 0)],) * 2,
    "shift": lambda rank, ranks, turn: ([shift_one_partner(rank, ranks, turn)],) * 2,
    "all-to-all": lambda rank, ranks, _: (_others(rank, ranks), _others(rank, ranks)[::-1]),
}


def _others(rank: int, ranks: int) -> list[int]:
    return [(rank + distance) % ranks for distance in range(1, ranks)]


@dataclass(frozen=True)
class Row:
    pattern: str
    seconds: Sequence[float]  # of all ranks and turns
    whole_seconds: float  # of all turns, on the slowest rank
    turns: int


class Flow:
    """Bytes in one direction of one channel."""

    def __init__(self, plugin: Plugin, comm: ctypes.c_void_p, *, sends: bool) -> None:
        self._plugin, self._comm = plugin, comm
        self._post = plugin.send if sends else plugin.receive
        self._slots = ctypes.create_string_buffer(UNDER_WAY * MESSAGE_BYTES)
        self._memory = plugin.register(comm, self._slots)
        self._requests: list[tuple[ctypes.c_void_p, int]] = []  # with the size of the message
        self._posted = self._left = 0

    def begin(self, size: int) -> None:
        self._left = size

    @property
    def is_done(self) -> bool:
        return not self._left and not self._requests

    def look(self) -> bool:
        """Whether there was anything to do."""
        progress = False
        while self._left and len(self._requests) < UNDER_WAY:
            size = min(MESSAGE_BYTES, self._left)
            slot = ctypes.addressof(self._slots) + self._posted % UNDER_WAY * MESSAGE_BYTES
            request = self._post(self._comm, slot, size, self._memory)
            if request is None:
                break
            self._requests.append((request, size))
            self._posted, self._left, progress = self._posted + 1, self._left - size, True
        if self._requests:
            request, size = self._requests[0]
            moved = self._plugin.size_if_done(request)
            if moved is not None:
                if moved != size:
                    raise RuntimeError(f"a message of {size} bytes ended with {moved}")
                del self._requests[0]
                progress = True
        return progress


class Rank:
    def __init__(self, plugin: Plugin, rank: int, ranks: int, store: dist.Store) -> None:
        self._rank, self._ranks, self._store = rank, ranks, store
        ends = [(peer, channel) for peer in range(ranks) if peer != rank for channel in range(CHANNELS)]
        listening = {}
        for peer, channel in ends:
            handle, listening[peer, channel] = plugin.listen()
            store.set(f"from {peer} to {rank}, {channel}", handle)
        handles = {
            (peer, channel): ctypes.create_string_buffer(store.get(f"from {rank} to {peer}, {channel}"))
            for peer, channel in ends
        }
        self._to: dict[tuple[int, int], Flow] = {}
        self._from: dict[tuple[int, int], Flow] = {}
        deadline = time.monotonic() + _PATIENCE_S
        while len(self._to) + len(self._from) < 2 * len(ends):
            for end in ends:
                if end not in self._to and (comm := plugin.connect(handles[end])) is not None:
                    self._to[end] = Flow(plugin, comm, sends=True)
                if end not in self._from and (comm := plugin.accept(listening[end])) is not None:
                    self._from[end] = Flow(plugin, comm, sends=False)
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} has no connection with all of {ranks} ranks after {_PATIENCE_S:g} s")
            time.sleep(_NAP_S)

    def turn(self, partners: Partners, size: int) -> float:
        """Seconds."""
        begin = time.monotonic()
        flows = []
        for ends, peers in zip((self._to, self._from), partners, strict=True):
            for peer in peers:
                for channel in range(CHANNELS):
                    ends[peer, channel].begin(size // len(peers) // CHANNELS)
                    flows.append(ends[peer, channel])
        last = begin
        while flows:
            moved = [flow.look() for flow in flows]  # all of them, whatever the first ones say
            if any(moved):
                last = time.monotonic()
            elif time.monotonic() - last > _PATIENCE_S:
                raise TimeoutError(f"rank {self._rank}: nothing has moved for {_PATIENCE_S:g} s")
            else:
                time.sleep(_NAP_S)
            flows = [flow for flow in flows if not flow.is_done]
        return time.monotonic() - begin

    def meet(self, what: str) -> None:
        """Waits for all ranks."""
        if self._store.add(what, 1) == self._ranks:
            self._store.set(f"{what}, all", "")
        self._store.wait([f"{what}, all"])

    def leave(self) -> None:
        """When all have received everything. The store's server, rank 0's, stays until nobody asks it."""
        self.meet("the end")
        left = self._store.add("left", 1)
        deadline = time.monotonic() + _PATIENCE_S
        while self._rank == 0 and left < self._ranks and time.monotonic() < deadline:
            time.sleep(_NAP_S)
            left = self._store.add("left", 0)


def main(words: Sequence[str] | None = None) -> int:
    given = _parse(words)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=_PATIENCE_S)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, rank == 0, timeout=timeout)
    here = Rank(Plugin(given.library or library_path()), rank, ranks, store)
    rows = []
    for pattern in given.patterns:
        here.meet(f"before {pattern}")
        begin = time.monotonic()
        seconds = [here.turn(PATTERNS[pattern](rank, ranks, turn), given.bytes) for turn in range(given.turns)]
        store.set(f"{pattern} of {rank}", json.dumps([time.monotonic() - begin, *seconds]))
        if rank == 0:
            found = [json.loads(store.get(f"{pattern} of {one}")) for one in range(ranks)]
            turns = [one for _, *of_rank in found for one in of_rank]
            rows.append(Row(pattern, turns, max(whole for whole, *_ in found), given.turns))
    if rank == 0:
        columns = [
            Column[Row]("pattern", "", lambda row: row.pattern, left=True),
            Column[Row]("mean", "ms", lambda row: f"{row.whole_seconds / row.turns * 1e3:.0f}"),
            Column[Row]("median", "ms", lambda row: f"{statistics.median(row.seconds) * 1e3:.0f}"),
            Column[Row]("longest", "ms", lambda row: f"{max(row.seconds) * 1e3:.0f}"),
        ]
        print(f"{ranks} ranks, {given.bytes} bytes in {given.turns} turns each; {describe_machine().caption()}")
        print(render_rows(rows, columns), end="", flush=True)
    here.leave()
    return 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="measure_patterns.py",
        description="How long the patterns of training's traffic take through the plugin alone.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--bytes", type=byte_size, default=16 << 20, help="that each rank sends in a turn (default 16M)"
    )
    parser.add_argument("--turns", type=within(int, 1, 10_000), default=20, help="of each pattern (default 20)")
    parser.add_argument(
        "--patterns",
        type=names_of("pattern", list(PATTERNS)),
        default=tuple(PATTERNS),
        metavar="LIST",
        help=f"of {', '.join(PATTERNS)} (default all)",
    )
    parser.add_argument("--library", type=Path, metavar="PATH", help="libnccl-net.so (default: the package's)")
    given = parser.parse_args(words)
    ranks = os.environ.get("WORLD_SIZE", "")
    if not ranks.isdecimal() or int(ranks) < 2:
        parser.error(f"WORLD_SIZE={ranks}: this is between two ranks or more; let a launcher start them")
    if int(ranks) % 2 and {"pairs", "shift"} & set(given.patterns):
        parser.error(f"WORLD_SIZE={ranks}: an odd number has no pairs; add --patterns ring,all-to-all")
    if given.bytes < int(ranks) * CHANNELS:
        parser.error(f"--bytes {given.bytes} is less than a byte for each of {ranks} ranks and {CHANNELS} channels")
    return given


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the plugin's comms are open, and the store's server is in this process
