"""`measure optimizers`: how long an optimizer's step takes, with torch's implementations and with fuse_step, in turns.

A step is timed from call to return and, on a GPU, until the GPU has finished. `fresh` gradients are other tensors in
each step, as after zero_grad(set_to_none=True); `kept` ones are the same. How they are made is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bagua.net.bench.api import Column, Figure, figures, names_of, speedup, within
from bagua.torch_api.contrib import fuse_optimizer
from measure.runner import DAY_S, Case, Measure, Plan, Row, Tool, name_of, ratio

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-3, **options),
    "momentum": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options),
    "adam": lambda parameters, **options: torch.optim.Adam(parameters, lr=1e-3, **options),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, lr=1e-3, **options),
}
# What fuse_step is compared with, and the options of both.
_THEIRS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused=True": {"fused": True},
}
OURS = {"fuse_step" if one == "for-loop" else f"fuse_step of {one}": one for one in _THEIRS}
BACKENDS = {**_THEIRS, **{ours: _THEIRS[theirs] for ours, theirs in OURS.items()}}
COMPILED = "compiled"
_BASELINES = ("for-loop", "foreach")
_SIZES = ("optimizer", "gradients", "parameters", "elements")
_WARM_UP_STEPS = 3  # states are made, kernels compiled, kept gradients taken over


class Steps:
    """One backend: its parameters, with gradients, and its optimizer."""

    def __init__(self, backend: str, optimizer: str, count: int, elements: int, device: str) -> None:
        self.device = torch.device(device)
        self.parameters = [torch.nn.Parameter(torch.ones(elements, device=self.device)) for _ in range(count)]
        made = OPTIMIZERS[optimizer](self.parameters, **BACKENDS.get(backend, {"foreach": True}))
        self.step = fuse_optimizer(made).fuse_step if backend in OURS else made.step
        if backend == COMPILED:
            self.step = torch.compile(made.step)
        self.give_gradients()

    def give_gradients(self) -> None:
        for one in self.parameters:
            one.grad = torch.full_like(one, 1e-3)

    def turn(self, steps: int, *, fresh: bool) -> float:
        """Milliseconds a step."""
        taken = 0.0
        for _ in range(steps):
            if fresh:
                self.give_gradients()
            self._wait()
            begin = time.perf_counter()
            self.step()
            self._wait()
            taken += time.perf_counter() - begin
        return taken / steps * 1e3

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _over(row: Row, baseline: str | None) -> str:
    return "" if baseline is None or baseline == row.variant else ratio(row.over(baseline, "ms"))


class Optimizers(Tool):
    name = "optimizers"
    title = "Steps of optimizers, fused and not"
    ranks = None
    options = (
        ("optimizers", names_of("optimizer", list(OPTIMIZERS)), ("sgd", "adam"), f"of {', '.join(OPTIMIZERS)}"),
        ("gradients", names_of("kind of gradients", ("fresh", "kept")), ("fresh", "kept"), "fresh, kept"),
        ("device", ("cpu", "cuda"), "cpu", "where they are"),
        ("steps", within(int, 1, 10**9), 20_000, "in a turn, times the number of tensors, and fewer of large ones"),
        ("compile_up_to", within(int, 0, 1_000_000), 0, "tensors with torch.compile, too; 1000 take minutes"),
    )
    length = (7, DAY_S, None)
    same = ("steps",)
    columns = (
        *(Column(one, "", lambda row, one=one: str(getattr(row.case, one))) for one in _SIZES),
        Column("backend", "", lambda row: row.variant, left=True),
        Column("step", "ms", lambda row: f"{row.median('ms'):.3f}"),
        *(Column(f"than {one}", "x faster", lambda row, one=one: _over(row, one)) for one in _BASELINES),
        Column("than replaced", "x faster", lambda row: _over(row, OURS.get(row.variant))),
    )

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        for name, most, default, about in (
            ("--parameters", 1_000_000, [10, 1000, 10_000], "how many tensors (default 10 1000 10000)"),
            ("--elements", 1 << 30, [256], "of each tensor (default 256)"),
        ):
            parser.add_argument(name, type=within(int, 1, most), nargs="+", default=default, metavar="N", help=about)

    @classmethod
    def check(cls, parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
        if given.device == "cuda" and not torch.cuda.is_available():
            parser.error("--device cuda needs a GPU, this machine shows none; use --device cpu")

    def plan(self) -> Mapping[Case, Plan]:
        given, found = self.given, {}
        sizes = (given.optimizers, given.gradients, given.parameters, given.elements)
        for case in (Case(**dict(zip(_SIZES, one, strict=True))) for one in itertools.product(*sizes)):
            compiled = [COMPILED] if case.parameters <= given.compile_up_to else []
            found[case] = {case: [*BACKENDS, *compiled]}
        return found

    @contextlib.contextmanager
    def session(self, group: Case, plan: Plan) -> Iterator[Measure]:
        given, count, elements = self.given, group.parameters, group.elements
        self.learn(
            {
                "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
            }
        )
        made = {one: Steps(one, group.optimizer, count, elements, given.device) for one in plan[group]}
        steps = max(1, given.steps * 256 // (count * max(256, elements)))
        fresh = group.gradients == "fresh"
        for one in made.values():
            one.turn(_WARM_UP_STEPS, fresh=fresh)
        yield lambda _case, one, _round: {"ms": made[one].turn(steps, fresh=fresh)}

    def block(self, row: Row) -> object:
        return row.case

    def is_loud(self, row: Row) -> bool:
        replaced = row.over(OURS.get(row.variant), "ms")
        return replaced is not None and replaced.high < 1

    def figures(self, row: Row) -> list[Figure]:
        case = {**vars(row.case), "device": self.given.device}
        found = figures({**case, "backend": name_of(row.variant)}, {("step_time", "ms"): row.values("ms")})
        for baseline in dict.fromkeys((*_BASELINES, OURS.get(row.variant))):
            over = None if baseline in (None, row.variant) else row.over(baseline, "ms")
            found += [] if over is None else [speedup(case, row.variant, baseline, over)]
        return found

    def heading(self) -> str:
        facts = self.facts
        threads = f", {facts.get('threads')} threads" if facts.get("device") == "cpu" else ""
        return f"{facts.get('device')}{threads}, torch {facts.get('torch')}, float32"


main = Optimizers.main
