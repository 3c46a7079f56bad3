"""What is printed and what is written of a comparison."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import figures

from bagua.net.bench.machine import MachineFacts
from ddp_comparison.losses import LossVerdict
from ddp_comparison.rounds import Rounds
from ddp_comparison.step_times import StepReport
from ddp_comparison.training_run import Training


def render(steps: StepReport, verdict: LossVerdict | None) -> str:
    titles = ["step ms", "samples/s", "over default", "first loss", "last loss", "loss diff"]
    if steps.best_tuned is not None:
        titles.insert(3, "over best")
    lines = [f"{'backend':<16}" + "".join(f"{title:>14}" for title in titles)]
    for row in steps.rows:
        difference = verdict.differences.get(row.backend) if verdict else None
        cells = [f"{row.step_ms:.2f}", f"{row.samples_per_second:.1f}", _times(row.speedup)]
        if steps.best_tuned is not None:
            cells.append(_times(row.speedup_over_best))
        cells += [f"{row.first_loss:.6f}", f"{row.last_loss:.6f}", "-" if difference is None else f"{difference:.3g}"]
        lines.append(f"{row.backend:<16}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def _times(speedup: float | None) -> str:
    return "-" if speedup is None else f"{speedup:.2f}x"


def closing_lines(steps: StepReport, verdict: LossVerdict | None, rounds: Rounds) -> list[str]:
    lines = [str(speedup) for speedup in steps.speedups]
    if verdict is not None:
        lines.append(
            f"losses: allowed difference {verdict.allowed:.3g}, NCCL default's own rounds {verdict.own_spread:.3g}"
        )
    for row in steps.rows:
        mine = [training for training in rounds.trainings if training.backend == row.backend]
        if kinds := dict.fromkeys(proof.summary() for training in mine for proof in training.proofs):
            lines.append(f"network of {row.backend}: " + "; ".join(kinds))
    lines += [f"note: {note}" for note in rounds.notes]
    return [*lines, *(f"ERROR: {error}" for error in rounds.errors)]


def write_document(
    path: Path, steps: StepReport, verdict: LossVerdict | None, rounds: Rounds, machine: MachineFacts
) -> None:
    document = {
        "machine": machine.as_dict(),
        "summary": [asdict(row) for row in steps.rows],
        **steps.as_dict(),
        "losses": None
        if verdict is None
        else {
            "allowed": verdict.allowed,
            "own_spread": verdict.own_spread,
            "differences": {name: repr(value) for name, value in verdict.differences.items()},
        },
        "notes": rounds.notes,
        "errors": rounds.errors,
        "runs": _runs(rounds.trainings),
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_result_file(
    path: Path, arguments: argparse.Namespace, steps: StepReport, rounds: Rounds, machine: MachineFacts
) -> None:
    baseline = arguments.backends[0].name
    times = {(one.backend, one.round): one.step_ms for one in rounds.trainings}
    found = []
    for row in steps.rows:
        numbers = [number for name, number in times if name == row.backend]
        ranks, backend = arguments.nproc_per_node, figures.name_of(row.backend)
        labels = {"model": arguments.model, "algorithm": "torch_ddp", "backend": backend, "ranks": ranks}
        found += figures.figures(
            {**labels, "gpus": 0 if arguments.backend == "gloo" else ranks, "rate_gbps": None, "delay_ms": 0.0},
            {
                ("step_time", "ms"): [times[row.backend, number] for number in numbers],
                ("speedup", "x"): [
                    times[baseline, number] / times[row.backend, number]
                    for number in numbers
                    if row.backend != baseline and (baseline, number) in times
                ],
                ("loss", ""): [one.losses[-1] for one in rounds.trainings if one.backend == row.backend],
            },
        )
    names = ("model", "steps", "batch_size", "image_size", "dtype", "seed", "rounds", "tuned", "tcp_only", "backend")
    figures.write(
        path,
        f"DDP training of {arguments.model} on {arguments.nproc_per_node} ranks, by network backend",
        found,
        machine=machine,
        ranks=_versions(),
        parameters={name: getattr(arguments, name) for name in names},
        notes=[*rounds.notes, *rounds.errors],
    )


def _versions() -> dict[str, object]:
    import torch  # the comparison itself does not train

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
        "device": gpu,
    }


def _runs(trainings: Sequence[Training]) -> list[dict[str, object]]:
    return [
        {
            "backend": training.backend,
            "round": training.round,
            "wall_seconds": training.wall_seconds,
            "replicas_agree": training.replicas_agree,
            "losses": training.losses,
            "step_seconds": training.step_seconds,
            "networks": [proof.as_dict() for proof in training.proofs],
        }
        for training in trainings
    ]
