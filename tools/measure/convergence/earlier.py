"""--earlier: trainings of another run, in the same table as those of this one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from measure.convergence.catalogue import CASES, TASKS
from measure.convergence.statistics import TrainingResult, software_of


@dataclass(frozen=True)
class EarlierRun:
    """facts: of its ranks, as `RankTeam.facts`."""

    trainings: list[TrainingResult]
    facts: Mapping[str, Any]


NO_RUN = EarlierRun([], {})


def read_earlier(path: Path, ranks: int) -> EarlierRun:
    """What --details wrote.

    Raises:
        ValueError: not such a file, or of another number of ranks, or of tasks or algorithms that do not exist.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        facts, its_ranks = dict(document["ranks"]), document["parameters"]["ranks"]
        trainings = [_training(one, software_of(facts)) for one in document["turns"]]
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a file of --details ({error})") from error
    if its_ranks != ranks:
        raise ValueError(f"{path} has trainings on {its_ranks} ranks, this run has {ranks}; run all on as many")
    unknown = {one.task for one in trainings} - set(TASKS) | {one.case for one in trainings} - set(CASES)
    if unknown:
        raise ValueError(
            f"{path} has tasks or algorithms that this version does not have: {', '.join(sorted(unknown))}"
        )
    return EarlierRun(trainings, facts)


def _training(values: Mapping[str, Any], software: str) -> TrainingResult:
    """Losses that are not finite are null there."""
    known = {one.name: values[one.name] for one in fields(TrainingResult) if one.name != "software"}
    for name in ("train_loss", "test_loss", "replica_test_loss", "spread"):
        known[name] = math.inf if known[name] is None else known[name]
    known["curve_loss"] = [math.inf if value is None else value for value in known["curve_loss"]]
    return TrainingResult(**known, software=software)


def still_to_train(
    plan: Mapping[str, Sequence[str]], earlier: Sequence[TrainingResult], seeds: int
) -> dict[str, list[str]]:
    """The cases of the plan of which `earlier` lacks a seed."""
    there = {(one.task, one.case, one.seed) for one in earlier}
    return {
        task: [case for case in cases if any((task, case, seed + 1) not in there for seed in range(seeds))]
        for task, cases in plan.items()
    }


def together(earlier: Sequence[TrainingResult], now: Sequence[TrainingResult]) -> list[TrainingResult]:
    """A training that both have is the later one."""
    found = {(one.task, one.case, one.seed): one for one in (*earlier, *now)}
    return list(found.values())
