"""One rank in one turn: all-reduces of the three sizes. Its process has the settings of the turn from the start."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bagua.net.bench.rank_process import die_with_parent

_WARMUP = 3
_PROBES = 2
_MAX_ITERATIONS = 5000


@dataclass(frozen=True)
class Order:
    """
    Attributes:
        name: of the turn; the ranks meet under it.
        device: number of the GPU, for NCCL.
        timeout_s: of a single collective.
    """

    name: str
    rank: int
    ranks: int
    address: str
    port: int
    backend: str
    device: int
    sizes: tuple[int, ...]
    seconds: float
    timeout_s: float

    def as_argument(self) -> str:
        return json.dumps(asdict(self))


def measure(order: Order) -> dict[int, float]:
    """Seconds of one all-reduce of each size, of the slowest rank."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    timeout = datetime.timedelta(seconds=order.timeout_s)
    is_nccl = order.backend == "nccl"
    device = torch.device("cuda", order.device) if is_nccl else torch.device("cpu")
    if is_nccl:
        torch.cuda.set_device(device)
    store = distributed.TCPStore(order.address, order.port, is_master=False, timeout=timeout)
    distributed.init_process_group(
        order.backend,
        store=distributed.PrefixStore(order.name, store),
        rank=order.rank,
        world_size=order.ranks,
        timeout=timeout,
    )

    def synchronize() -> None:
        if is_nccl:
            torch.cuda.synchronize(device)

    def slowest(seconds: float) -> float:
        value = torch.tensor([seconds], dtype=torch.float64, device=device)
        distributed.all_reduce(value, op=distributed.ReduceOp.MAX)
        return float(value.item())

    def timed(buffer: Any, iterations: int) -> float:
        synchronize()
        began = time.perf_counter()
        for _ in range(iterations):
            distributed.all_reduce(buffer)
        synchronize()
        return slowest((time.perf_counter() - began) / iterations)

    found = {}
    for size in order.sizes:
        # Zeros stay zeros, however often they are summed.
        buffer = torch.zeros(size // 4, dtype=torch.float32, device=device)
        for _ in range(_WARMUP):
            distributed.all_reduce(buffer)
        estimate = timed(buffer, _PROBES)
        found[size] = timed(buffer, max(_PROBES, min(_MAX_ITERATIONS, int(order.seconds / estimate))))
    distributed.barrier()
    distributed.destroy_process_group()
    return found


def main(arguments: Sequence[str]) -> int:
    """Prints one JSON object as its last line."""
    die_with_parent()
    values = json.loads(arguments[0])
    order = Order(**{**values, "sizes": tuple(values["sizes"])})
    try:
        result: dict[str, object] = {"seconds": measure(order)}
    except Exception as error:  # whatever it was is shown to the user
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result), flush=True)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Threads of a collective that hangs would keep the process.
    os._exit(1 if "error" in result else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
