"""A job on GPUs that loses a rank in the middle of an all-reduce, again and again; each time a process joins that was
started before. It says what each loss took, part by part, what a process held then, and whether the weights are the
same at the end. Not collected by pytest: a loss takes seconds.

    python tests/gpu/regroup_job.py drive p2p|shm|sock|plug          by P2P, shared memory, sockets, the plugin
    python tests/gpu/regroup_job.py drive cost-fused|cost-foreach    what the wait before each optimizer step costs

Two ranks with a GPU each for p2p, shm and cost; four that share two GPUs, as if each had a host of its own, otherwise.
Those on the second GPU are lost, the oldest first, and the first process is always rank 0: what it holds can be
compared.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import gc
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

KILLS = 10
PAIRS = 40
STEPS = 6  # between a process that has joined and the next kill
WIDTHS = {2: 1024, 4: 256}  # of the model, by ranks: sockets over loopback are slow
LIMIT_S = 110.0
TCP = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
NETWORKS: dict[str, tuple[int, dict[str, str]]] = {
    "p2p": (2, {}),
    "shm": (2, {"NCCL_P2P_DISABLE": "1"}),
    "sock": (4, TCP),
    "plug": (4, {**TCP, "ENABLE_BAGUA_NET": "1"}),
    "cost-fused": (2, {}),
    "cost-foreach": (2, {}),
}
# Methods of Regrouping and of NcclGroup, and what they are the beginning or the end of.
BEGINS = {"_note": "told", "_settle": "settling"}
ENDS = {"leave": "left", "_wait_for_next": "agreed", "_connect": "communicator"}


def drive(name: str) -> int:
    ranks, extra = NETWORKS[name]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    processes = []
    for number in range(ranks + (0 if name.startswith("cost") else KILLS)):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "RANK": str(number),
            "WORLD_SIZE": str(max(ranks, number + 1)),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(ranks),
            **({"NCCL_HOSTID": f"rank-{number}"} if ranks > 2 else {}),
            **extra,
        }
        processes.append(subprocess.Popen([sys.executable, __file__, "rank", name, str(ranks)], env=environment))
    codes = [one.wait() for one in processes]
    print(f"### {name}: exit codes {codes}", flush=True)
    return max(code for code in codes if code != -signal.SIGKILL)


class Notes:
    """Of a process: when it has come to which part of a regroup, on the clock that all processes of a host have."""

    def __init__(self) -> None:
        from bagua.regroup.coordinator import Regrouping
        from bagua.regroup.nccl_group import NcclGroup

        self.times: dict[str, float] = {}
        for method, label in {**BEGINS, **ENDS}.items():
            owner: Any = Regrouping if hasattr(Regrouping, method) else NcclGroup
            setattr(owner, method, self._noting(getattr(owner, method), label, method in BEGINS))

    def _noting(self, original: Callable[..., Any], label: str, at_begin: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def noting(*arguments: Any, **named: Any) -> Any:
            if at_begin:
                self.times.setdefault(label, time.monotonic())
            result = original(*arguments, **named)
            if not at_begin:
                self.times.setdefault(label, time.monotonic())
            return result

        return noting


def held() -> str:
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return (
        f"{descriptors} descriptors, {status['Threads'].strip()} threads, {int(status['VmRSS'].split()[0]) >> 10} MiB;"
        f" {torch.cuda.memory_reserved() >> 20} MiB reserved on its GPU"
    )


def model_on(device: torch.device, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(6)]
    return nn.Sequential(*blocks).to(device)


def lose_ranks(name: str, ranks: int) -> None:
    import bagua.torch_api as bagua
    from bagua.regroup import coordinator
    from bagua.regroup.watched_group import WatchedGroup

    number = int(os.environ["RANK"])
    begin = time.monotonic()
    device = torch.device("cuda", number % 2 if number < ranks else 1)
    torch.cuda.set_device(device)
    torch.ones(1, device=device).sum().item()
    notes = Notes()
    client = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )
    store = dist.PrefixStore("job", client)

    def say(text: str) -> None:
        print(f"[{name}, process {number}, {time.monotonic() - begin:6.2f} s] {text}", flush=True)

    def kills() -> int:
        return int(store.add("kills", 0))

    if number >= ranks:
        store.set(f"spare {number}", b"")
        store.wait([f"go {number}"])
        begin = time.monotonic()
    bagua.init_process_group(regroup=bagua.Regroup(min_ranks=1), timeout=60)
    net = model_on(device, WIDTHS[ranks])
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    model: Any = bagua.with_bagua(net, [optimizer])
    current = coordinator.current()
    assert current is not None
    if number >= ranks:
        say(f"joined as rank {dist.get_rank()} of {dist.get_world_size()}")
    else:
        store.wait([f"spare {other}" for other in range(ranks, ranks + KILLS)])

    def victim() -> int:
        return min(one.first_rank for one in current.epoch.members if one.first_rank >= ranks or one.first_rank % 2)

    def die_in_second_all_reduce() -> None:
        original: Any = WatchedGroup.allreduce
        calls = 0

        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            work = original(*arguments, **named)
            calls += 1
            if calls == 2:
                store.set("killed", str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            return work

        WatchedGroup.allreduce = counted  # type: ignore[method-assign]

    data = torch.randn(512, WIDTHS[ranks], device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(data + 0.001 * (dist.get_rank() + bagua.regroup_step())).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize(device)

    since, world = bagua.regroup_step(), dist.get_world_size()
    while not (store.check(["end"]) and bagua.regroup_step() >= int(store.get("end"))):
        notes.times.clear()
        if world == ranks and bagua.regroup_step() > since + STEPS and kills() < KILLS and victim() == number:
            die_in_second_all_reduce()
        step()
        now = dist.get_world_size()
        if now < world:
            parts = sorted(notes.times.items(), key=lambda item: item[1])
            step()
            killed, end = float(store.get("killed")), time.monotonic()
            if dist.get_rank() == 0:
                told = ", ".join(f"{label} {at - killed:.3f}" for label, at in parts)
                count = int(store.add("kills", 1))
                say(f"kill {count}: {told}, next step done {end - killed:.3f} s after it; {held()}")
                store.set(f"go {ranks + count - 1}", b"")
        elif now == ranks and kills() == KILLS and dist.get_rank() == 0 and not store.check(["end"]):
            store.set("end", str(bagua.regroup_step() + STEPS))
        if dist.get_world_size() != world:
            since, world = bagua.regroup_step(), dist.get_world_size()
    digest = hashlib.sha256(b"".join(one.detach().cpu().numpy().tobytes() for one in net.parameters())).hexdigest()
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, (digest, bagua.regroup_step()))
    if dist.get_rank() == 0:
        verdict = "EQUAL" if len(set(everybody)) == 1 else "DIFFERENT"
        say(f"end at step {bagua.regroup_step()}: weights {verdict}; {held()}")
    bagua.destroy_process_group()


def measure_cost(name: str) -> None:
    """Of the wait for the collectives of a pass, before the optimizer's step, in steps of about 50 ms."""
    import bagua.torch_api as bagua
    from bagua.regroup import coordinator

    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    bagua.init_process_group(regroup=bagua.Regroup(min_ranks=1), timeout=60)
    net = model_on(device, WIDTHS[2])
    kind = name.removeprefix("cost-")
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=kind == "fused", foreach=kind == "foreach")
    model: Any = bagua.with_bagua(net, [optimizer])
    other = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    data = torch.randn(2048, WIDTHS[2], device=device)
    wait: Any = coordinator.Regrouping._wait_for_pass

    def block(waits: bool, steps: int = 5) -> float:
        coordinator.Regrouping._wait_for_pass = wait if waits else lambda _: None  # type: ignore[method-assign]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            for _ in range(22):
                torch.mm(other, other)
            model(data).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps

    block(True)
    pairs = [(block(False), block(True)) for _ in range(PAIRS)]
    without = statistics.median(one for one, _ in pairs)
    quarter, median, three_quarters = statistics.quantiles([after - before for before, after in pairs], n=4)
    if dist.get_rank() == 0:
        print(
            f"{name}: {median * 1e6:.0f} us of {without * 1e3:.1f} ms ({median / without:.2%});"
            f" half of {PAIRS} pairs of blocks from {quarter * 1e6:.0f} to {three_quarters * 1e6:.0f} us",
            flush=True,
        )
    bagua.destroy_process_group()


def main() -> None:
    what, name = sys.argv[1:3]
    if what == "drive":
        raise SystemExit(drive(name))
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if name.startswith("cost"):
        measure_cost(name)
    else:
        lose_ranks(name, int(sys.argv[3]))


if __name__ == "__main__":
    main()
