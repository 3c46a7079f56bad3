"""`measure moe`: layers of MoE compared with dense layers of equal active size, and the share of their all-to-all.

Both compute as much per token: a dense layer is one feed-forward network, k times as wide as an expert. A step is
forward and backward of all layers, without optimizer and gradient communication; the two take turns, step by step. With
--capacity-factor above 1, experts also compute rows that stay empty.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua.net.bench.api import Column, Progress, Turns, figures, render_rows, within
from measure.options import add_length, add_ranks, add_results, check_results, choose_device, parser_of
from measure.ranks.rank_process import run_rank
from measure.ranks.renewed_team import RenewedTeam, keeping
from measure.ranks.team import on_this_host
from measure.report import Report, format_ms, ranks_text, sharing_notes
from measure.results import case_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DENSE, MOE, EXCHANGE = "dense", "moe", "all_to_all"
_WARM_UP = 3
_TIMEOUT_S = 300.0
_SIZE = ("hidden", "tokens", "local_experts", "layers", "k", "capacity_factor", "dtype")


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


class Layers:
    """On one rank: the dense layers, the mixtures and the tokens."""

    def __init__(self, device: torch.device, size: Mapping[str, Any]) -> None:
        from bagua.torch_api.model_parallel.moe import MoE, exchange

        self._exchange: Any = exchange
        self._device = device
        dtype, hidden = DTYPES[size["dtype"]], size["hidden"]
        torch.manual_seed(0)
        options = {"num_local_experts": size["local_experts"], "k": size["k"]}
        options["capacity_factor"] = size["capacity_factor"]
        dense = [feed_forward(hidden, size["k"] * 4 * hidden) for _ in range(size["layers"])]
        self._dense = nn.Sequential(*dense).to(device, dtype)
        mixtures = [MoE(hidden, feed_forward(hidden, 4 * hidden), **options) for _ in range(size["layers"])]
        self._mixtures = nn.ModuleList(mixtures).to(device, dtype)
        torch.manual_seed(dist.get_rank())
        self._tokens = torch.randn(size["tokens"], hidden, device=device, dtype=dtype, requires_grad=True)

    def _routed(self, x: Tensor) -> Tensor:
        for mixture in self._mixtures:
            x = mixture(x)[0]
        return x

    def _step(self, layer: Callable[[Tensor], Tensor]) -> None:
        layer(self._tokens).float().square().mean().backward()

    def turn(self, variant: str) -> float:
        """Milliseconds of a step; of EXCHANGE, of a step's all-to-all, which waits for peers, too."""
        dist.barrier()
        if variant != EXCHANGE:
            layer = self._dense if variant == DENSE else self._routed
            return milliseconds(lambda: self._step(layer), self._device)
        taken: list[float] = []
        plain = self._exchange._exchanged

        def timed(*arguments: object) -> Tensor:
            """Waits for the device on both sides: in steps of their own, which are in no other figure."""
            results: list[Tensor] = []
            taken.append(milliseconds(lambda: results.append(plain(*arguments)), self._device))
            return results[0]

        self._exchange._exchanged = timed
        try:
            self._step(self._routed)
        finally:
            self._exchange._exchanged = plain
        return sum(taken)


class Worker:
    def __init__(self) -> None:
        self._layers: Layers | None = None

    def turn(self, device: torch.device, command: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._layers is None:
            self._layers = Layers(device, command)
            for variant in (DENSE, MOE, EXCHANGE) * _WARM_UP:
                self._layers.turn(variant)
        return {"ms": self._layers.turn(command["variant"])}


@dataclass(frozen=True)
class Row:
    what: str
    unit: str
    values: list[float]

    def text(self, value: float) -> str:
        return format_ms(value) if self.unit == "ms" else f"{value:.3g}"


COLUMNS: tuple[Column[Row], ...] = (
    Column("", "", lambda row: row.what, left=True),
    Column("median", "", lambda row: row.text(statistics.median(row.values))),
    Column("least..most", "", lambda row: f"{row.text(min(row.values))}..{row.text(max(row.values))}"),
    Column("", "", lambda row: row.unit, left=True),
)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of("moe", "Layers of MoE compared with dense layers of equal active size.")
    add_ranks(parser)
    parser.add_argument("--hidden", type=within(int, 1, 65_536), default=512, help="size of a token (default 512)")
    parser.add_argument("--tokens", type=within(int, 8, 1 << 24), default=1024, help="of each rank (default 1024)")
    parser.add_argument("--local-experts", type=within(int, 1, 1024), default=2, help="of each rank (default 2)")
    parser.add_argument("--layers", type=within(int, 1, 1000), default=4, help="one after the other (default 4)")
    parser.add_argument("--k", type=int, choices=(1, 2), default=1, help="experts per token (default 1)")
    parser.add_argument("--capacity-factor", type=within(float, 0.01, 100), default=1.0, help="default 1")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="default fp32")
    add_length(parser, rounds=20, time_limit_s=600.0)
    add_results(parser)
    given = parser.parse_args(words)
    choose_device(parser, given)
    check_results(parser, given)
    ranks = RenewedTeam(on_this_host("measure.moe", given, _TIMEOUT_S))
    size = {name: getattr(given, name) for name in _SIZE}

    def measure(_: str, variant: str, _round: int) -> float:
        return float(ranks.ask("turn", _TIMEOUT_S, variant=variant, **size)[0]["ms"])

    turns: Turns[float] = Turns()
    with Progress(3 * given.rounds) as progress, keeping(turns, ranks):
        plan = {"feed-forward": (DENSE, MOE, EXCHANGE)}
        turns.take(plan, given.rounds, measure, time_limit_s=given.time_limit, progress=progress)
    case = case_of(given.ranks, given.device, given.sharing, model="feed-forward", k=given.k)
    rows, found = [], []
    for variant in (DENSE, MOE, EXCHANGE):
        rows.append(Row(variant, "ms", turns.of("feed-forward", variant)))
        found += figures({**case, "layer": variant}, {("step_time", "ms"): rows[-1].values})
    slowdown = [moe / dense for moe, dense in turns.pairs("feed-forward", MOE, DENSE)]
    share = [100 * part / moe for part, moe in turns.pairs("feed-forward", EXCHANGE, MOE)]
    rows += [Row("moe/dense", "x", slowdown), Row("all_to_all of moe", "%", share)]
    found += figures({**case, "layer": MOE}, {("slowdown", "x"): slowdown, ("all_to_all_share", "%"): share})
    rows = [row for row in rows if row.values]
    return Report(
        title=f"MoE compared with a dense layer, {given.ranks} ranks",
        heading=f"{ranks_text(given, ranks.facts)}; {given.layers} layers, {given.local_experts} experts each,"
        f" {given.tokens} tokens, k={given.k}",
        table=render_rows(rows, COLUMNS),
        figures=found,
        notes=[*sharing_notes(given), *turns.notes],
        errors=turns.errors,
        facts=ranks.facts,
        rows=rows,
    ).publish(given)


if __name__ == "__main__":
    sys.exit(run_rank({"turn": Worker().turn}))
