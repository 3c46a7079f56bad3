"""Measure layers of MoE compared with dense layers of equal active size, and the share of their all-to-all.

    torchrun --nproc-per-node 2 tools/train/measure_moe.py
    torchrun --nproc-per-node 2 tools/train/measure_moe.py --hidden 4096 --tokens 8192 --dtype bf16 --json moe.json

Both compute as much per token: a dense layer is one feed-forward network, k times as wide as an expert. A step is
forward and backward of all layers, without optimizer and gradient communication; the two take turns, step by step. With
--capacity-factor above 1, experts also compute rows that stay empty.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Python itself adds the script's folder, but not with PYTHONSAFEPATH. At the end: nothing there may hide a package.
sys.path.append(str(Path(__file__).resolve().parent))

import figures
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.net.bench.argument_types import within
from bagua.net.bench.export import check_writable
from bagua.net.bench.figures import figures as figures_of
from bagua.net.bench.machine import describe_machine
from bagua.torch_api.model_parallel.moe import MoE, exchange

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_WARM_UP = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="measure_moe.py", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hidden", type=within(int, 1, 65_536), default=512, help="size of a token (default 512)")
    parser.add_argument("--tokens", type=within(int, 8, 1 << 24), default=1024, help="of each rank (default 1024)")
    parser.add_argument("--local-experts", type=within(int, 1, 1024), default=2, help="of each rank (default 2)")
    parser.add_argument("--layers", type=within(int, 1, 1000), default=4, help="one after the other (default 4)")
    parser.add_argument("--k", type=int, choices=(1, 2), default=1, help="experts per token (default 1)")
    parser.add_argument("--capacity-factor", type=within(float, 0.01, 100), default=1.0, help="default 1")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="default fp32")
    parser.add_argument("--steps", type=within(int, 3, 100_000), default=20, help="that are measured (default 20)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="result file")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 tools/train/measure_moe.py")
    if given.json is not None:
        try:
            check_writable("--json", given.json)
        except ValueError as error:
            parser.error(str(error))
    return given


def feed_forward(hidden: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(hidden, width), nn.GELU(), nn.Linear(width, hidden))


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """Until the device has done it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    function()
    wait()
    return (time.perf_counter() - began) * 1e3


def measure(given: argparse.Namespace, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds by step: of the dense layer, of MoE, and of its all-to-all alone, which waits for peers, too."""
    dtype = DTYPES[given.dtype]
    torch.manual_seed(0)
    width = 4 * given.hidden
    options = {"num_local_experts": given.local_experts, "k": given.k, "capacity_factor": given.capacity_factor}
    dense = nn.Sequential(*[feed_forward(given.hidden, given.k * width) for _ in range(given.layers)])
    mixtures = nn.ModuleList(
        [MoE(given.hidden, feed_forward(given.hidden, width), **options) for _ in range(given.layers)]
    )
    dense.to(device, dtype)
    mixtures.to(device, dtype)
    torch.manual_seed(dist.get_rank())
    tokens = torch.randn(given.tokens, given.hidden, device=device, dtype=dtype, requires_grad=True)
    exchanges: list[float] = []
    plain = exchange._exchanged

    def timed(*arguments: object) -> Tensor:
        """Waits for the device on both sides: in steps of their own, which are in no other figure."""
        results: list[Tensor] = []
        exchanges.append(milliseconds(lambda: results.append(plain(*arguments)), device))  # type: ignore[arg-type]
        return results[0]

    def step(layer: Callable[[Tensor], Tensor]) -> None:
        layer(tokens).float().square().mean().backward()

    def routed(x: Tensor) -> Tensor:
        for mixture in mixtures:
            x = mixture(x)[0]
        return x

    found: dict[str, list[float]] = {"dense": [], "moe": [], "all_to_all": []}
    for number in range(given.steps + _WARM_UP):
        dist.barrier()
        times = {"dense": milliseconds(lambda: step(dense), device)}
        dist.barrier()
        times["moe"] = milliseconds(lambda: step(routed), device)
        exchanges.clear()
        exchange._exchanged = timed
        dist.barrier()
        step(routed)
        exchange._exchanged = plain
        times["all_to_all"] = sum(exchanges)
        if number >= _WARM_UP:
            for name, value in times.items():
                found[name].append(value)
    return found


def main() -> int:
    given = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    bagua.init_process_group()
    ranks = dist.get_world_size()
    found = measure(given, device)
    if dist.get_rank() == 0:
        ratio = [moe / dense for moe, dense in zip(found["moe"], found["dense"], strict=True)]
        share = [100 * part / moe for part, moe in zip(found["all_to_all"], found["moe"], strict=True)]
        print(
            f"{ranks} ranks on {device.type}, {given.layers} layers, {given.local_experts} experts each, "
            f"{given.tokens} tokens, k={given.k}"
        )
        for name, values, unit in (*((name, ms, "ms") for name, ms in found.items()), ("moe/dense", ratio, "x")):
            print(f"{name:>12}  {statistics.median(values):8.3f} {unit}  ({min(values):.3f} to {max(values):.3f})")
        print(f"all-to-all takes {statistics.median(share):.0f}% of a step of MoE")
        if given.json is not None:
            case = figures.case_of(ranks, device.type, None, model="feed-forward", k=given.k)
            rows = [
                figure
                for name, ms in found.items()
                for figure in figures_of({**case, "layer": name}, {("step_time", "ms"): ms})
            ]
            rows += figures_of({**case, "layer": "moe"}, {("slowdown", "x"): ratio, ("all_to_all_share", "%"): share})
            gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            facts = {"torch": torch.__version__, "device": gpu}
            figures.write(
                given.json,
                f"MoE compared with a dense layer, {ranks} ranks",
                rows,
                machine=describe_machine(),
                ranks=facts,
                parameters=vars(given),
            )
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
