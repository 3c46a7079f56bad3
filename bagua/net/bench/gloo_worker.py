"""torch.distributed's gloo all_reduce behind the driver's protocol (see endpoint.py). One process is one rank.

Started by bagua-net-bench as `python -m bagua.net.bench.gloo_worker`; the only module here that imports torch.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
# Position- and rank-dependent, and small enough that float32 sums of 1,000 ranks stay exact.
_PATTERN_MODULUS = 251
# Expected values are made in parts that stay in the cache, always in the same memory: new memory for each part would be
# cleared by the kernel again and again, which took a minute for 256 MiB where page faults are slow.
_CHECK_ELEMENTS = 1 << 15


def _emit(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def die_with_parent() -> None:
    """The kernel ends this process when its parent ends."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


class GlooRank:
    """The process group of one rank."""

    def __init__(self, rank: int, ranks: int, address: str, timeout_ms: int) -> None:
        # Any: torch.distributed exports its names in no way that a type checker sees.
        self._torch: Any = importlib.import_module("torch")
        distributed: Any = importlib.import_module("torch.distributed")
        self._distributed = distributed
        self._rank = rank
        self._ranks = ranks
        self._timeout = datetime.timedelta(milliseconds=timeout_ms)
        self._store: Any = None
        handle = "other"
        if rank == 0:
            self._store = distributed.TCPStore(
                address, 0, ranks, is_master=True, timeout=self._timeout, wait_for_workers=False
            )
            handle = f"{address}|{self._store.port}"
        _emit("listening", handles=[handle], transport="gloo", torch=self._torch.__version__, pid=os.getpid())

    def connect(self, handle: str) -> None:
        if self._store is None:
            host, _, port = handle.rpartition("|")
            self._store = self._distributed.TCPStore(host, int(port), self._ranks, timeout=self._timeout)
        self._distributed.init_process_group(
            "gloo", store=self._store, rank=self._rank, world_size=self._ranks, timeout=self._timeout
        )
        # Opens every pair's connection, which gloo does lazily.
        self._distributed.barrier()
        _emit("connected")

    def _elements(self, size_bytes: int) -> tuple[int, Any]:
        if size_bytes % 4:
            return size_bytes, self._torch.uint8
        return size_bytes // 4, self._torch.float32

    def run(self, size_bytes: int, iterations: int, warmup: int) -> None:
        count, dtype = self._elements(size_bytes)
        # Zeros stay zeros however often they are summed.
        buffer = self._torch.zeros(count, dtype=dtype)
        for _ in range(warmup):
            self._distributed.all_reduce(buffer)
        seconds = []
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(iterations):
            began = time.perf_counter()
            self._distributed.all_reduce(buffer)
            seconds.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_SELF)
        _emit(
            "result",
            bytes=size_bytes,
            iterations=iterations,
            seconds=seconds,
            cpu_user_s=after.ru_utime - before.ru_utime,
            cpu_system_s=after.ru_stime - before.ru_stime,
            voluntary_switches=after.ru_nvcsw - before.ru_nvcsw,
            involuntary_switches=after.ru_nivcsw - before.ru_nivcsw,
        )

    def verify(self, size_bytes: int) -> None:
        torch = self._torch
        count, dtype = self._elements(size_bytes)
        buffer = torch.empty(count, dtype=dtype)
        pattern, total = (torch.empty(_CHECK_ELEMENTS, dtype=torch.int64) for _ in range(2))
        expected = torch.empty(_CHECK_ELEMENTS, dtype=dtype)
        for begin in range(0, count, _CHECK_ELEMENTS):
            part = buffer[begin : begin + _CHECK_ELEMENTS]
            part.copy_(self._pattern(self._rank, begin, pattern[: len(part)]))
        self._distributed.all_reduce(buffer)
        wrong_elements, first_wrong = 0, None
        for begin in range(0, count, _CHECK_ELEMENTS):
            part = buffer[begin : begin + _CHECK_ELEMENTS]
            length = len(part)
            total.zero_()
            for rank in range(self._ranks):
                total[:length].add_(self._pattern(rank, begin, pattern[:length]))
            expected[:length].copy_(total[:length])
            if torch.equal(part, expected[:length]):
                continue
            wrong = torch.nonzero(part != expected[:length]).flatten()
            wrong_elements += len(wrong)
            if first_wrong is None:
                first_wrong = begin + int(wrong[0])
        _emit("verified", bytes=size_bytes, wrong_elements=wrong_elements, first_wrong=first_wrong)

    def _pattern(self, rank: int, begin: int, out: Any) -> Any:
        """Fills `out` and returns it. Depends on the rank and on the position in the whole buffer. int64: no position
        overflows."""
        self._torch.arange(begin, begin + len(out), out=out)
        return out.mul_(rank + 1).add_(rank).remainder_(_PATTERN_MODULUS)

    def serve(self) -> None:
        for line in sys.stdin:
            words = line.split()
            if words[0] == "connect":
                self.connect(words[1])
            elif words[0] == "run":
                self.run(int(words[1]), int(words[2]), int(words[3]))
            elif words[0] == "verify":
                self.verify(int(words[1]))
            elif words[0] == "quit":
                break
            else:
                raise ValueError(f"unknown command {words[0]!r}; known: connect, run, verify, quit")
        if self._distributed.is_initialized():
            self._distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bagua.net.bench.gloo_worker")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--nranks", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--timeout-ms", type=int, default=60000)
    options = parser.parse_args(arguments)
    die_with_parent()
    try:
        GlooRank(options.rank, options.nranks, options.address, options.timeout_ms).serve()
    except Exception as error:  # the front-end shows whatever it was
        _emit("error", message=" ".join(f"{type(error).__name__}: {error}".split()))
        return 1
    _emit("bye")
    return 0


if __name__ == "__main__":
    sys.exit(main())
