"""What is shown of a comparison: a table, the verdict, and the same as JSON."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bagua.net.bench.machine import MachineFacts
from bagua.net.compare.rounds import Rounds, RunFigure
from bagua.net.compare.setting import Setting
from bagua.net.compare.step_sources import TrafficTime, WallTime
from bagua.net.compare.verdict import Verdict, networks_of
from bagua.net.stats.quantities import bytes_text

_MAX_DIFFERENCE = 1.1


@dataclass(frozen=True)
class Report:
    command: Sequence[str]
    settings: Sequence[Setting]
    rounds: Rounds
    verdict: Verdict
    machine: MachineFacts

    def table(self) -> list[tuple[str, ...]]:
        """The first row is the head."""
        of = "ms" if isinstance(self.rounds.source, TrafficTime | WallTime) else "step ms"
        rows: list[tuple[str, ...]] = [("", of, "each run", "network")]
        for setting in self.settings:
            pairs = self.rounds.of(setting)
            each = [figure.ms_text() for _, figure in pairs]
            median = RunFigure(statistics.median(f.seconds for _, f in pairs), 1).ms_text() if pairs else "-"
            network = ", ".join(networks_of([run for run, _ in pairs])) or "-"
            rows.append((setting.name, median, " ".join(each) or "-", network))
        return rows

    def notes(self) -> list[str]:
        source = self.rounds.source
        notes = [] if source is None else [f"Times: {source.name}.", *([source.caveat] if source.caveat else [])]
        moved = [run.job_bytes for run in self.rounds.runs]
        if isinstance(source, TrafficTime) and max(moved) > _MAX_DIFFERENCE * min(moved):
            notes.append(
                f"The runs moved {bytes_text(min(moved))} to {bytes_text(max(moved))}: the times are of equal work only"
                " if the same steps take more bytes with one setting than with the other."
            )
        if self.rounds.interrupted:
            notes.append("Interrupted: this is of the runs that had ended.")
        return notes + self.rounds.notes

    def as_json(self) -> dict[str, Any]:
        ratio = self.verdict.ratio
        return {
            "schema": 1,
            "command": shlex.join(self.command),
            "verdict": self.verdict.outcome.value,
            "headline": self.verdict.headline,
            "reasons": list(self.verdict.reasons),
            "speedup": None if ratio is None else asdict(ratio),
            "times": None if self.rounds.source is None else self.rounds.source.name,
            "notes": self.notes(),
            "error": self.rounds.error or None,
            "interrupted": self.rounds.interrupted,
            "settings": [
                {
                    "name": setting.name,
                    "runs": [
                        {
                            "round": run.round,
                            "step_seconds": figure.seconds,
                            "steps": figure.steps,
                            "warmup_steps": figure.dropped,
                            "wall_seconds": run.wall_s,
                            "networks": networks_of([run]),
                            "traffic": asdict(run.traffic),
                            "job_bytes": run.job_bytes,
                        }
                        for run, figure in self.rounds.of(setting)
                    ],
                }
                for setting in self.settings
            ],
            "machine": asdict(self.machine),
        }
