"""Programs of training steps: plain data, carried out by every rank of a pool (support.rank_pool).

A program is a list of calls, each a name of the methods of `Trainer` with its arguments, the same on all ranks; a rank
among the arguments says who makes the call alone, or does not make it.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.algorithm_cases import Case
from support.branching import HEADS
from support.checked_training import Trainer
from support.parts_in_turn import Turns

Call = tuple[Any, ...]


def carry_out(case: Case, options: dict[str, Any], program: Sequence[Call]) -> str:
    """In a rank. Returns what went wrong, and at which call; nothing if nothing did."""
    number = -1
    try:
        trainer = (Trainer if case.name in ("gradient_allreduce", "bytegrad") else ExchangingTrainer)(case, options)
        for number, (name, *arguments) in enumerate(program):  # noqa: B007
            getattr(trainer, name)(*arguments)
        number = len(program)
        trainer.finish()
    except Exception:
        return f"call {number}\n{traceback.format_exc()}"
    return ""


def carry_out_turns(case: tuple[str, dict[str, Any]], program: Sequence[Call]) -> str:
    """As `carry_out`, of a model whose parts take turns, beside the algorithm written out as a loop."""
    number = -1
    try:
        turns = Turns(case)
        for number, (name, *arguments) in enumerate(program):  # noqa: B007
            getattr(turns, name)(*arguments)
        number = len(program)
        turns.finish()
    except Exception:
        return f"call {number}\n{traceback.format_exc()}"
    return ""


class ExchangingTrainer(Trainer):
    """Of weights: ranks differ, and one may skip a step. Nothing hangs, and all is finite."""

    # What is documented to be refused, once.
    REFUSALS = (
        *("Parameters were changed between", "before optimizer.step", "before the next forward", "at the beg"),
        # torch's: other buckets are other memory for the weights of a graph.
        "one of the variables needed for gradient computation has been modified",
    )

    def end_step(self, attempt: Callable[[], Any]) -> bool:
        try:
            attempt()
        except RuntimeError as error:
            if not str(error).startswith(self.REFUSALS):
                raise
            return False
        return True

    def evaluate(self, alone: int | None, with_gradients: bool, in_training: bool) -> None:
        # Where gradients are communicated, one rank alone must not be told that a pass raised.
        may_be_told = self.case.name == "qadam" or "warmup_steps" in self.case.options
        super().evaluate(alone, with_gradients and not (alone is not None and may_be_told), in_training)

    def backward(self, is_quiet: bool = False, keeps: bool = False, raises: str = "") -> None:
        if not self.losses:
            return
        loss = (self.losses[0] if keeps else self.losses.pop(0))[0]
        if not loss.requires_grad:
            return
        with self.quiet(is_quiet), contextlib.suppress(MemoryError):
            self.end_step(lambda: loss.backward(retain_graph=keeps))

    def step(self, skips: int | None = None) -> None:
        self.losses.clear()
        # QAdam counts steps, so that all ranks have to skip the same ones.
        is_skipped = skips is not None if self.case.name == "qadam" else skips == self.rank
        if not is_skipped:
            self.end_step(self.optimizer.step)

    def compare(self) -> None:
        for name, parameter in self.net.named_parameters():
            assert parameter.isfinite().all(), name

    def finish(self) -> None:
        super().finish()
        self.net.bagua_ddp.bagua_algorithm.finish(self.net.bagua_ddp)
        self.compare()


# --- programs that failed --------------------------------------------------------------------------------------------

BOTH, LEFT, RIGHT = HEADS
TRAIN, STEP, PASS = ("train", BOTH), ("step",), (("forward", BOTH, False), ("backward", False, False))
_INTERRUPTED = (TRAIN, ("raising", BOTH, "middle", False), ("zero", True))
_SKIPPED = ("train", BOTH, 1)  # by rank 1
GRADIENTS, RING = Case("gradient_allreduce"), Case("low_precision_decentralized")


@dataclass(frozen=True)
class Found:
    """A program, with the bytes of a bucket, or None for one bucket; `how` as in Case.wrap."""

    case: Case
    calls: tuple[Call, ...]
    size: int | None = 4
    how: str = "with_bagua"

    @property
    def options(self) -> dict[str, Any]:
        return {"zeroes": False, "how": self.how, "bytes": self.size}


FOUND = {
    "the second loss does not reach the first bucket": Found(GRADIENTS, (TRAIN, ("two_losses", BOTH, LEFT), STEP)),
    "buckets change in an incomplete step": Found(
        GRADIENTS,
        (
            *(("freeze", "trunk", True), TRAIN, ("forward", LEFT, True), ("backward", True, False)),
            *(("forward", RIGHT, False), ("backward", False, False), ("resize", 80, False), STEP),
        ),
    ),
    "buckets change after a pass that raised": Found(
        GRADIENTS, (*_INTERRUPTED, ("resize", 80, False), *PASS, STEP), how="with_bagua unflattened"
    ),
    "wrapped again after a pass that raised": Found(
        GRADIENTS, (*_INTERRUPTED, ("wrap",), *PASS, STEP), how="with_bagua unflattened"
    ),
    "saved when one rank owes an exchange": Found(RING, (TRAIN, _SKIPPED, ("save",), TRAIN, ("load",), TRAIN), None),
    "wrapped again when one rank owes an exchange": Found(RING, (TRAIN, _SKIPPED, ("wrap",), TRAIN), None),
    "loaded when one rank owes an exchange": Found(RING, (TRAIN, ("save",), TRAIN, _SKIPPED, ("load",), TRAIN), None),
}
