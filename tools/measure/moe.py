"""`measure moe`: layers of MoE compared with dense layers of equal active size, and the share of their all-to-all.

Both compute as much per token: a dense layer is one feed-forward network, k times as wide as an expert. A step is
forward and backward of all layers, without optimizer and gradient communication; the two take turns, step by step. With
--capacity-factor above 1, experts also compute rows that stay empty.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua.net.bench.api import Label, within
from measure.rank import join_bagua
from measure.runner import Case, Plan, Row, Tool, ranks_text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DENSE, MOE, EXCHANGE = "dense", "moe", "all_to_all"
_WARM_UP = 3


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
        from bagua.contrib.moe import exchange
        from bagua.torch_api.model_parallel.moe import MoE

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


def prepare(_: torch.device) -> None:
    join_bagua()


@functools.cache
def _warmed_up(device: torch.device, **size: Any) -> Layers:
    layers = Layers(device, size)
    for variant in (DENSE, MOE, EXCHANGE) * _WARM_UP:
        layers.turn(variant)
    return layers


def measure(device: torch.device, variant: str, **fields: Any) -> dict[str, float]:
    """On a rank."""
    size = {name: value for name, value in fields.items() if name not in ("number", "model")}
    return {"ms": _warmed_up(device, **size).turn(variant)}


def _of(row: Row, variant: str, other: str) -> list[float]:
    """By round."""
    return [one["ms"] / whole["ms"] for one, whole in row.turns.pairs(row.case, variant, other)]


class Mixtures(Tool):
    name = "moe"
    title = "MoE compared with a dense layer, {ranks} ranks"
    options = (
        ("hidden", within(int, 1, 65_536), 512, "size of a token"),
        ("tokens", within(int, 8, 1 << 24), 1024, "of each rank"),
        ("local_experts", within(int, 1, 1024), 2, "of each rank"),
        ("layers", within(int, 1, 1000), 4, "one after the other"),
        ("k", within(int, 1, 2), 1, "experts per token"),
        ("capacity_factor", within(float, 0.01, 100.0), 1.0, "room of an expert, of an equal share"),
        ("dtype", tuple(DTYPES), "fp32", "of parameters and tokens"),
    )
    length = (20, 600.0, None)
    same = tuple(one[0] for one in options)
    metrics = (
        ("step_time", "ms", lambda row: row.values("ms")),
        ("slowdown", "x", lambda row: _of(row, MOE, DENSE) if row.variant == MOE else []),
        (
            "all_to_all_share",
            "%",
            lambda row: [100 * one for one in _of(row, EXCHANGE, MOE)] if row.variant == MOE else [],
        ),
    )

    def cases(self) -> Plan:
        return {Case(model="feed-forward"): (DENSE, MOE, EXCHANGE)}

    def labels(self, row: Row) -> dict[str, Label]:
        return {"model": row.case.model, "k": self.given.k, **self.where, "layer": row.variant}

    def heading(self) -> str:
        given = self.given
        size = f"{given.layers} layers, {given.local_experts} experts each, {given.tokens} tokens, k={given.k}"
        return f"{ranks_text(given, self.facts)}; {size}"


main = Mixtures.main
